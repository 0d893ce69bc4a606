"""Makes memory show that nothing has written, or that no one may read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def apart(x: Tensor) -> Tensor:
    """The same values, no two of them side by side: between them is what no kernel may read."""
    between = torch.nan if x.is_floating_point() else 2**30
    return torch.stack([x, torch.full_like(x, between)], dim=-1)[..., 0]


@contextmanager
def unwritten_is_nan() -> Iterator[None]:
    """New tensors without values hold NaN, or the largest integer: who reads them before they are written is found.

    PyTorch fills them so where its own operators are told to be deterministic; not for tests of equal bits, therefore.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
