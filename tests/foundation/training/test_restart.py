"""A rank that is killed under torchrun: all ranks start again from the last checkpoint, by themselves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.foundation.training import small_run

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.slow  # two ranks, each started twice
@pytest.mark.distributed
@pytest.mark.timeout(900)
def test_torchrun_restarts_a_killed_rank_from_the_last_checkpoint(tmp_path: Path) -> None:
    small_run.dataset(tmp_path / "data")
    driver = ["--module", "tests.foundation.training.restart_driver", str(tmp_path)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--max-restarts=1"]
    done = subprocess.run([*torchrun, *driver], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "resumed from step 4 of 6" in " ".join(done.stderr.split())
    assert small_run.lines(tmp_path / "killed") == small_run.lines(tmp_path / "whole")
    small_run.assert_same_tensors(small_run.tensors(tmp_path / "killed"), small_run.tensors(tmp_path / "whole"))
