"""What the benchmarks time computes what their baselines do."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from kernels.benchmarks import jagged


def test_jagged_movement() -> None:
    for one in jagged.passes("small", 16, 40, 4, "s=.5", device="cpu"):
        results = [(x,) if isinstance(x, Tensor) else x for x in (one.eager(), one.baselines["torch"]())]
        for got, want in zip(*results, strict=True):  # type: ignore[call-overload]
            torch.testing.assert_close(got, want, rtol=0.02, atol=0.02, msg=one.name)
