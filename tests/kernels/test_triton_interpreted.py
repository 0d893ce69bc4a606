"""The Triton kernels in Triton's interpreter, against the references in float64."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("part", ["activations", "short", "general", "dense", "softmax", "empty", "leaks"])
def test_kernels_equal_the_references(part: str) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.interpreted", part],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.endswith("checked\n")
