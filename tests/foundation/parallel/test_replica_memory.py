"""Two GPUs: what fully sharded replicas let go of is free on the device, and they train as whole ones."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]
MODULE = "foundation.parallel.benchmarks.fully_sharded"


@pytest.mark.gpu
@pytest.mark.distributed
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_rows_that_replicas_let_go_are_free_on_the_device(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command = [*torchrun, "-m", MODULE, "--preset", "tiny", "--out", str(tmp_path / "found.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "found.json").read_text())["tiny"]
    whole, parts = found["whole"], found["fully sharded"]
    assert parts["rows"] == whole["rows"] == 128_000_320
    for key in ("forward", "between"):
        assert whole[key] - parts[key] == pytest.approx(whole["rows"] / 2, rel=0.05)
