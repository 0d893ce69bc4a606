"""Packed rows of different lengths, in numpy: positions and padding."""

from __future__ import annotations

import numpy as np


def pad(values: np.ndarray, lengths: np.ndarray, width: int) -> np.ndarray:
    """Packed ``[sum(lengths)]`` to ``[rows, width]``, left aligned, zeros behind."""
    out = np.zeros((len(lengths), width), dtype=values.dtype)
    out[np.arange(width) < lengths[:, None]] = values
    return out


def jagged_index(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Positions ``starts[i] .. starts[i] + lengths[i] - 1`` of all rows, one after another; int64."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total, dtype=np.int64) + np.repeat(starts - (ends - lengths), lengths)
