"""Makes memory that nothing has written show."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


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
