"""`kill -9` at any moment, in the middle of a save too: the run goes on as if nothing had happened."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from foundation.data.dataset import Dataset
from tests.foundation.parallel.ranks import in_processes
from tests.foundation.training import kill_driver, small_run


def drive(_: int, *arguments: Any) -> None:
    kill_driver.main(*arguments)


@pytest.mark.parametrize(
    ("kills", "requests", "epochs"),
    [
        pytest.param(3, 45, 2, id="3"),
        pytest.param(20, 120, 6, id="20", marks=[pytest.mark.slow, pytest.mark.timeout(1800)]),
    ],
)
def test_killed_runs_equal_one_that_was_left_alone(tmp_path: Path, kills: int, requests: int, epochs: int) -> None:
    in_processes(drive, 1, tmp_path / "driver", tmp_path, kills, requests, epochs, 7)
    whole, *attempts = json.loads((tmp_path / "result.json").read_text())
    expected = dict(whole["steps"])
    losses, weights = small_run.lines(tmp_path / "whole"), small_run.tensors(tmp_path / "whole")
    rows = sorted(row for ids in expected.values() for row in ids)
    assert rows == sorted(list(range(Dataset.open(tmp_path / "data").split("train").rows)) * epochs)

    assert sum(entry["ended"] != 0 for entry in attempts) == kills
    assert any(entry["unfinished"] for entry in attempts), "no kill hit a save"
    latest: dict[str, str | None] = {}
    seen: dict[str, dict[int, list[int]]] = {}
    for entry in attempts:
        out = entry["out"]
        # It went on from the checkpoint that was whole before it, and from the step after that.
        assert entry["loaded"] == latest.get(out) or (entry["loaded"] is None and not entry["steps"])
        first = int(entry["loaded"].removeprefix("step-")) + 1 if entry["loaded"] else 1
        assert [step for step, _ in entry["steps"]] == list(range(first, first + len(entry["steps"])))
        for step, ids in entry["steps"]:
            assert ids == expected[step]
            seen.setdefault(out, {})[step] = ids
        latest[out] = entry["latest"]
    for out, steps in seen.items():
        assert steps == expected
        assert small_run.lines(tmp_path / out) == losses
        small_run.assert_same_tensors(small_run.tensors(tmp_path / out), weights)
        small_run.assert_same_tensors(
            small_run.tensors(tmp_path / out, "best"), small_run.tensors(tmp_path / "whole", "best")
        )
        assert not list((tmp_path / out / "checkpoints").glob("*.tmp"))
