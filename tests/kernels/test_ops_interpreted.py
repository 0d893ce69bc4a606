"""The Triton kernels of block attention, jagged movement and norms in Triton's interpreter, against float64."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "parts", ["block_attention block_attention_leaks", "movement", "gathers chunks tables empty_movement", "norms"]
)
def test_kernels_equal_the_references(parts: str) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.interpreted_ops", *parts.split()],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.endswith("checked\n")
