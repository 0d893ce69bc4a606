"""Offsets, lengths and owners of the rows of a packed batch.

Legend: T rows, B sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.common.eager import readable
from kernels.common.inputs import require_length, require_offsets, require_packed, require_span
from kernels.jagged import reference


def offsets_from_lengths(lengths: Tensor) -> Tensor:
    """Lengths ``[B]``, of any integer type, to int64 offsets ``[B + 1]``.

    Raises:
        ValueError: not integers, or not one dim, or (on the CPU) a negative one.
    """
    if not isinstance(lengths, Tensor):
        raise ValueError(
            f"offsets_from_lengths: lengths must be a tensor of integers [B], are {type(lengths).__name__}"
        )
    if lengths.dim() != 1 or lengths.is_floating_point() or lengths.is_complex():
        raise ValueError(
            f"offsets_from_lengths: lengths must be integers [B], are {lengths.dtype} {list(lengths.shape)}"
        )
    if readable(lengths) and lengths.numel() and (least := int(lengths.to(torch.int64).min())) < 0:
        raise ValueError(f"offsets_from_lengths: lengths must not be negative, one is {least}")
    return reference.offsets_from_lengths(lengths)


def lengths_from_offsets(offsets: Tensor) -> Tensor:
    """Offsets ``[B + 1]`` to lengths ``[B]``."""
    require_offsets("lengths_from_offsets", "offsets", offsets, offsets)
    require_span("lengths_from_offsets", "offsets", offsets, None)
    return offsets.diff()


def sequence_ids(offsets: Tensor, total: int) -> Tensor:
    """The number of the sequence that owns each row, int64 ``[T]``; ``total`` is T."""
    require_length("sequence_ids", "total", total)
    require_packed("sequence_ids", "offsets", offsets, offsets, total, end="total")
    return reference.sequence_ids(offsets, total)
