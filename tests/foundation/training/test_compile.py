"""Compiled regions: the same numbers, whole graphs, and none compiled anew for new lengths."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.fx.experimental import _config as shape_config

from foundation.data.batch import Batch
from foundation.model.cross import CrossConfig
from foundation.model.gem import GEM, GEMConfig
from foundation.model.interaction import InteractionConfig
from foundation.model.layer import LayerConfig
from foundation.model.sequence import SequenceConfig
from foundation.training.activations import recompute, regions
from foundation.training.compile import Compile, compile_regions
from tests.foundation.model.batches import TABLE_ROWS, make_batch, model_schema

SCHEMA = model_schema()
PLAIN = GEMConfig(width=8, layers=2)
SHARED = replace(PLAIN, user_layers=1, joint="shared")
LIKE_LARGE = replace(
    SHARED,
    layer=LayerConfig(
        bias=False,
        cross=CrossConfig(pooling="hsp", seeds=5, target_aware=False),
        interaction=InteractionConfig(experts=3, partition="split", fm_rank=3, hidden=(16,)),
        sequence=SequenceConfig(attention="block", rotary="both", qk_norm=True),
    ),
)
"""The parts of the preset `large`."""


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    with shape_config.patch(use_duck_shape=True), torch._dynamo.config.patch(recompile_limit=8):
        yield
    torch._dynamo.reset()


def build(config: GEMConfig) -> GEM:
    torch.manual_seed(0)
    return GEM(config, SCHEMA, TABLE_ROWS)


def batches(count: int) -> list[Batch]:
    """Of several requests, with two or more events in each stream: PyTorch makes graphs of their own for 0 and 1."""
    made = (make_batch(SCHEMA, [2 + (i + j) % 3 for j in range(2 + i % 4)], seed=i) for i in range(10 * count))
    usual = [batch for batch in made if all(offsets[-1] > 1 for offsets in batch.sequence_offsets.values())]
    return usual[:count]


def gradients(model: GEM, batch: Batch) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model.loss(model(batch), batch).total.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.slow
@pytest.mark.parametrize("what", ["parts", "dense"])
@pytest.mark.parametrize("config", [PLAIN, SHARED, LIKE_LARGE], ids=["copies", "shared", "like large"])
def test_new_lengths_compile_nothing_and_numbers_stay(config: GEMConfig, what: Compile) -> None:
    plain, compiled = build(config), build(config)
    counter = CompileCounterWithBackend("eager")
    assert compile_regions(compiled, what, backend=counter) > config.layers
    first, *others = batches(10)
    gradients(compiled, first)
    graphs = counter.frame_count
    with torch._dynamo.config.patch(error_on_recompile=True):
        for batch in others:
            ours, theirs = gradients(compiled, batch), gradients(plain, batch)
            assert ours.keys() == theirs.keys()
            for name, gradient in theirs.items():
                torch.testing.assert_close(ours[name], gradient, rtol=1e-4, atol=1e-6)
    assert counter.frame_count == graphs


@pytest.mark.slow
def test_parts_of_one_shape_share_a_graph() -> None:
    graphs = []
    for layers in (4, 6):
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("eager")
        model = build(replace(LIKE_LARGE, layers=layers, user_layers=2))
        regions_of_model = compile_regions(model, "parts", backend=counter)
        gradients(model, batches(1)[0])
        graphs.append(counter.frame_count)
        assert graphs[-1] < regions_of_model / 2
    assert graphs[0] == graphs[1]  # two more layers like the last one


@pytest.mark.slow
def test_regions_that_compute_again_compile_too() -> None:
    plain, compiled = build(PLAIN), build(PLAIN)
    recompute(compiled, regions(compiled))
    compile_regions(compiled, "layers", backend="aot_eager")
    batch = batches(1)[0]
    ours, theirs = gradients(compiled, batch), gradients(plain, batch)
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-4, atol=1e-6)


def test_names_of_parameters_stay_and_other_words_are_refused() -> None:
    model = build(PLAIN)
    names = list(model.state_dict())
    assert compile_regions(model, "none") == 0
    assert compile_regions(model, "layers") == 2
    assert list(model.state_dict()) == names
    with pytest.raises(ValueError, match="compile: must be none, parts, layers or dense"):
        compile_regions(model, "all")  # type: ignore[arg-type]
