"""Jagged data movement in plain PyTorch: the CPU path and the oracle of the GPU kernels.

A packed batch is ``values [T, ...]`` with int64 ``offsets [B + 1]``: sequence b owns the rows
``offsets[b] .. offsets[b + 1] - 1``; ``offsets[0]`` is 0 and ``offsets[B]`` is T. Any sequence, and the batch, may be
empty. Works in any dtype and with any trailing dims.

Legend: T rows, B sequences, L padded length, N gathered rows, R source rows.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sequence_ids(offsets: Tensor, total: int) -> Tensor:
    """The number of the sequence that owns each row, int64 ``[T]``; ``total`` is T."""
    lengths = offsets.diff()
    ids = torch.arange(lengths.numel(), device=offsets.device)
    return torch.repeat_interleave(ids, lengths, output_size=total)


def to_padded(values: Tensor, offsets: Tensor, max_length: int, padding: float) -> Tensor:
    """``[T, ...]`` to ``[B, L, ...]``, left aligned; what a sequence has beyond L rows is cut off."""
    index, valid = _padded_index(offsets, max_length)
    if values.shape[0] == 0:
        return values.new_full((*index.shape, *values.shape[1:]), padding)
    padded = values.index_select(0, index.flatten()).view(*index.shape, *values.shape[1:])
    return padded.masked_fill_(_unsqueeze_to(~valid, padded.dim()), padding)


def from_padded(padded: Tensor, offsets: Tensor, total: int) -> Tensor:
    """``[B, L, ...]`` to ``[T, ...]``; rows of a sequence beyond L are zero."""
    batch, length = padded.shape[:2]
    owner = sequence_ids(offsets, total)
    position = torch.arange(total, device=offsets.device) - offsets.index_select(0, owner)
    if batch * length == 0:
        return padded.new_zeros((total, *padded.shape[2:]))
    inside = position < length
    rows = padded.flatten(0, 1).index_select(0, torch.where(inside, owner * length + position, 0))
    return rows.masked_fill_(_unsqueeze_to(~inside, rows.dim()), 0)


def gather_rows(values: Tensor, index: Tensor) -> Tensor:
    """Rows ``index`` int64 ``[N]`` of ``values [R, ...]``: ``[N, ...]``."""
    return values.index_select(0, index)


def scatter_sum(values: Tensor, index: Tensor, rows: int) -> Tensor:
    """``out[r]`` = sum of the rows i of ``values [N, ...]`` with ``index[i] == r``: ``[rows, ...]``."""
    return values.new_zeros((rows, *values.shape[1:])).index_add_(0, index, values)


def segment_sum(values: Tensor, offsets: Tensor) -> Tensor:
    """Sum over each sequence: ``[T, ...]`` to ``[B, ...]``; zero for an empty one."""
    return scatter_sum(values, sequence_ids(offsets, values.shape[0]), offsets.numel() - 1)


def _padded_index(offsets: Tensor, max_length: int) -> tuple[Tensor, Tensor]:
    """Row numbers int64 ``[B, L]`` (0 where padded) and the mask of real rows."""
    position = torch.arange(max_length, device=offsets.device)
    valid = position < offsets.diff()[:, None]
    return torch.where(valid, offsets[:-1, None] + position, 0), valid


def _unsqueeze_to(mask: Tensor, dims: int) -> Tensor:
    return mask.view(*mask.shape, *([1] * (dims - mask.dim())))
