"""The command that measures several GPUs: what it measures, and what it makes of the results."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from foundation.parallel.benchmarks.cluster import launches, summary
from foundation.parallel.benchmarks.cluster_bench import Options, ways
from foundation.parallel.benchmarks.launcher import LIMITS, Launcher
from foundation.parallel.topology import Topology, layout

TINY = "--preset foundation/tiny --requests 8 --impressions 2 --mean 16 --longest 32 --most_rows 100 --warm 1 --steps 4"


def launcher(out: Path) -> Launcher:
    return Launcher(
        Options(
            out=out,
            preset="foundation/tiny",
            schema="configs/datasets/streams.yaml",
            requests=8,
            impressions=2,
            mean=16,
            longest=32,
            sigma=1.0,
            most_rows=100,
            warm=1,
            steps=4,
            compile="parts",
            pause=0.0,
        ),
        limit=60.0,
    )


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_every_way_that_fits_is_measured(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    every = ways(ranks)
    for way in every.values():
        assert layout(way.parallel, Topology(gpus_per_host=ranks)).world == ranks
        assert not (way.compiled and way.parallel.dense.expert > 1)
    parts = [part for groups in launches(ranks, True) for own in groups for part in own]
    measured = {part.partition(":")[2] for part in parts if part.startswith("weak:")}
    graphs_of_their_own = {"shard compiled"} & set(every)
    assert measured == set(every) - graphs_of_their_own
    assert {part.partition(":")[0] for part in parts} <= set(LIMITS)


def test_a_profiler_runs_after_everything_else_of_its_processes() -> None:
    for ranks in (1, 2):
        for own in (own for groups in launches(ranks, True) for own in groups):
            assert all(not part.startswith("trace:") for part in own[:-1])


def measured(rate: float, gb: float = 0.0) -> dict[str, Any]:
    return {"samples_per_second": rate, "mfu": rate / 1000, "memory_gb": gb}


def test_ratios_are_to_one_rank_that_is_compiled_or_not_alike(tmp_path: Path) -> None:
    lines = [
        {"launch": 1, "ranks": 1, "measured": "weak:replica", "found": measured(100.0)},
        {"launch": 2, "ranks": 1, "measured": "weak:replica compiled", "found": measured(200.0, 50.0)},
        {"launch": 3, "ranks": 2, "measured": "weak:bf16", "found": measured(190.0)},
        {"launch": 4, "ranks": 2, "measured": "weak:bf16 compiled", "found": measured(360.0, 50.0)},
        {"launch": 4, "ranks": 2, "measured": "strong:bf16 compiled", "found": measured(300.0, 50.0)},
        {"planned": "bf16", "on": 2, "gb": 45.0},
        {"planned": "replica", "on": 1, "gb": 55.0},
    ]
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = summary(launcher(tmp_path), 2)["found"]
    assert "scaling" not in found["weak:replica on 1"]
    assert found["weak:bf16 on 2"]["scaling"] == pytest.approx(0.95)
    assert found["weak:bf16 compiled on 2"]["scaling"] == pytest.approx(0.9)
    assert found["strong:bf16 compiled on 2"]["scaling"] == pytest.approx(0.75)
    assert found["weak:bf16 compiled on 2"]["planned_over_measured"] == pytest.approx(0.9)
    assert found["weak:replica compiled on 1"]["planned_over_measured"] == pytest.approx(1.1)
    assert "planned_gb" not in found["strong:bf16 compiled on 2"]  # planned is the whole batch


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(600)
def test_the_command_on_two_ranks(tmp_path: Path) -> None:
    parts = ["weak:replica", "weak:bf16 capped", "strong:bf16", "save", "resume"]
    command = [sys.executable, "-m", "foundation.parallel.benchmarks.cluster", "--ranks", "2", *TINY.split()]
    done = subprocess.run([*command, "--out", tmp_path / "out", "--only", *parts], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    weak, strong = found["found"]["weak:replica on 2"], found["found"]["strong:bf16 on 2"]
    impressions = {
        name: line["samples_per_second"] * line["step_ms"] / 1e3
        for name, line in found["found"].items()
        if "step_ms" in line
    }
    assert impressions["weak:replica on 1"] == pytest.approx(8 * 2) == impressions["strong:bf16 on 2"]
    assert impressions["weak:replica on 2"] == pytest.approx(2 * 8 * 2)
    # That the bound holds is tested where batches are drawn; so few requests rarely make one batch more.
    assert 0 < round(impressions["weak:bf16 capped on 2"], 6) <= 2 * 8 * 2
    assert weak["scaling"] > 0 and strong["scaling"] > 0
    assert [line["largest difference of a loss"] < 2e-5 for line in found["more"] if "resumed on" in line] == [True]
    assert not [line for line in found["more"] if "failed" in line]
    refused = subprocess.run(
        [*command, "--out", tmp_path / "out", "--only", "weak:nothing"], capture_output=True, text=True
    )
    assert refused.returncode != 0 and "there is no part weak:nothing" in refused.stderr
