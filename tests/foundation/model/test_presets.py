"""Presets: their sizes are those that their comments state, and they run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from foundation.data.batch import Batch
from foundation.data.schema import Schema
from foundation.model.benchmarks.batches import random_batch
from foundation.model.benchmarks.presets import model_config, table_rows
from foundation.model.benchmarks.sharing import SharingConfig, build, heavy_tailed, measure
from foundation.model.benchmarks.size import SizeConfig, size
from foundation.model.flops import Load, forward_flops, op_formulas
from foundation.model.gem import GEM

ROOT = Path(__file__).resolve().parents[3]
KUAIRAND = {"schema": "configs/datasets/kuairand.yaml", "events": 50, "impressions": 1}
SIZES = {
    "tiny": (750_000, {}),
    "kuairand": (1_410_000, KUAIRAND),
    "small": (22_010_000, {}),
    "base": (322_060_000, {}),
    "large": (1_057_240_000, {}),
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes_are_those_of_the_comments(name: str) -> None:
    about, options = SIZES[name]
    options = {**options, "schema": str(ROOT / options.get("schema", "configs/datasets/streams.yaml"))}
    counted = size(SizeConfig(preset=f"foundation/{name}", **options))
    assert abs(counted.dense - about) < 10_000
    text = (ROOT / f"configs/foundation/{name}.yaml").read_text()
    forward = sum(counted.flops.values()) / 1e9
    assert f"# {counted.dense / 1e6:,.2f} M dense parameters, {forward:.4f} GFLOP forward per impression" in text
    if name == "large":
        assert 30e9 < counted.tables * 4 < 60e9


class _Unwritten(TorchFunctionMode):
    """Puts what parameters are made of on the meta device; buffers, which models compute, stay on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        on_meta = {"device": "meta"} if func in (torch.empty, torch.randn, torch.ones) else {}
        return func(*args, **{**(kwargs or {}), **on_meta})


def unwritten(preset: str, schema: Schema, rows: Mapping[str, int]) -> GEM:
    """A model with parameters that nobody has written: they take no memory, as all their pages are one page of zeros.

    What it computes is of no use, but it computes it with all the operations of a trained model.
    """
    with _Unwritten():
        model = GEM(model_config(preset), schema, rows)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(torch.empty(parameter.shape), requires_grad=False))
    assert not any(x.is_meta for x in model.buffers())
    return model.eval()


@pytest.mark.parametrize("name", SIZES)
def test_the_count_is_that_of_the_flop_counter(name: str) -> None:
    """Of the presets as they are, all widths and layers, on small tables: a look-up is no product."""
    schema = Schema.load(ROOT / SIZES[name][1].get("schema", "configs/datasets/streams.yaml"))
    rows = table_rows(schema, 20)
    model = unwritten(f"foundation/{name}", schema, rows)
    dense = sum(p.numel() for p in model.dense_parameters())
    assert abs(dense - SIZES[name][0]) < 10_000
    batch = Batch.from_encoded(random_batch(schema, [2, 0], rows, histories=[6, 2]), schema)
    with torch.no_grad(), FlopCounterMode(display=False, custom_mapping=op_formulas()) as counter:
        model(batch)
    match = counter.get_flop_counts().get("GEM.match", {})  # not counted, as they have no parameters
    assert sum(forward_flops(model, Load.of(batch)).values()) == counter.get_total_flops() - sum(match.values())


def test_the_sharing_benchmark_finds_a_saving() -> None:
    config = SharingConfig(
        preset="foundation/small",
        schema=str(ROOT / "configs/datasets/streams.yaml"),
        impressions=4,
        per_request=(4,),
        events=20,
        repeats=1,
    )
    (line,) = measure(config, build(config))
    assert line.shared_tflop < 0.7 * line.apart_tflop
    assert line.shared_s > 0
    with pytest.raises(ValueError, match="per_request"):
        SharingConfig(impressions=6, per_request=(4,))


def test_histories_have_the_mean_that_was_asked_for() -> None:
    schema = Schema.load(ROOT / "configs/datasets/streams.yaml")
    lengths = heavy_tailed(schema, 4000, 512, 1.0)
    assert abs(sum(map(sum, lengths.values())) / 4000 - 512) < 30
