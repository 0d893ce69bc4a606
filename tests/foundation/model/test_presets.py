"""Presets: their sizes are those that their comments state, and they run."""

from __future__ import annotations

from pathlib import Path

import pytest

from foundation.data.schema import Schema
from foundation.model.benchmarks.sharing import SharingConfig, build, heavy_tailed, measure
from foundation.model.benchmarks.size import SizeConfig, size

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
