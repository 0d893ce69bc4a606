"""Starts checks of kernels in a process of their own, in which Triton's interpreter runs them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def check_in_interpreter(*arguments: str) -> None:
    """Runs ``python ARGUMENTS`` from the root of the project; it has to end well and with ``checked``."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.endswith("checked\n")
