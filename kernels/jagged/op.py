"""Jagged data movement as PyTorch operators (``opengem::to_padded`` and others) with autograd.

Five operators move data; each one's backward is another of them. The rest is index arithmetic on top. The layout
is that of ``kernels/jagged/reference.py``; all indexes and offsets are int64.

Legend: T rows, B sequences, L padded length, N gathered rows, R source rows.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from kernels.jagged import reference
from kernels.jagged.reference import sequence_ids

__all__ = ["sequence_ids"]


def _backend(values: Tensor) -> ModuleType:
    """The implementation for the device of ``values``; each has the functions of ``reference``."""
    return reference


def offsets_from_lengths(lengths: Tensor) -> Tensor:
    """Lengths ``[B]`` to int64 offsets ``[B + 1]``."""
    return torch.cat([lengths.new_zeros(1, dtype=torch.int64), lengths.cumsum(0, dtype=torch.int64)])


def lengths_from_offsets(offsets: Tensor) -> Tensor:
    """Offsets ``[B + 1]`` to lengths ``[B]``."""
    return offsets.diff()


@torch.library.custom_op("opengem::to_padded", mutates_args=())
def _to_padded(values: Tensor, offsets: Tensor, max_length: int, padding: float) -> Tensor:
    return _backend(values).to_padded(values, offsets, max_length, padding)


@_to_padded.register_fake
def _(values: Tensor, offsets: Tensor, max_length: int, padding: float) -> Tensor:
    return values.new_empty((offsets.shape[0] - 1, max_length, *values.shape[1:]))


@torch.library.custom_op("opengem::from_padded", mutates_args=())
def _from_padded(padded: Tensor, offsets: Tensor, total: int) -> Tensor:
    return _backend(padded).from_padded(padded, offsets, total)


@_from_padded.register_fake
def _(padded: Tensor, offsets: Tensor, total: int) -> Tensor:
    return padded.new_empty((total, *padded.shape[2:]))


@torch.library.custom_op("opengem::gather_rows", mutates_args=())
def _gather_rows(values: Tensor, index: Tensor) -> Tensor:
    return _backend(values).gather_rows(values, index)


@_gather_rows.register_fake
def _(values: Tensor, index: Tensor) -> Tensor:
    return values.new_empty((index.shape[0], *values.shape[1:]))


@torch.library.custom_op("opengem::scatter_sum", mutates_args=())
def _scatter_sum(values: Tensor, index: Tensor, rows: int) -> Tensor:
    return _backend(values).scatter_sum(values, index, rows)


@_scatter_sum.register_fake
def _(values: Tensor, index: Tensor, rows: int) -> Tensor:
    return values.new_empty((rows, *values.shape[1:]))


@torch.library.custom_op("opengem::segment_sum", mutates_args=())
def _segment_sum(values: Tensor, offsets: Tensor) -> Tensor:
    return _backend(values).segment_sum(values, offsets)


@_segment_sum.register_fake
def _(values: Tensor, offsets: Tensor) -> Tensor:
    return values.new_empty((offsets.shape[0] - 1, *values.shape[1:]))


def _save_offsets(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])
    ctx.shape = inputs[0].shape


def _to_padded_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (offsets,) = ctx.saved_tensors
    return _from_padded(grad.contiguous(), offsets, ctx.shape[0]), None, None, None


def _from_padded_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (offsets,) = ctx.saved_tensors
    return _to_padded(grad.contiguous(), offsets, ctx.shape[1], 0.0), None, None


def _gather_rows_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (index,) = ctx.saved_tensors
    return _scatter_sum(grad.contiguous(), index, ctx.shape[0]), None


def _scatter_sum_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (index,) = ctx.saved_tensors
    return _gather_rows(grad.contiguous(), index), None, None


def _segment_sum_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (offsets,) = ctx.saved_tensors
    return _gather_rows(grad.contiguous(), sequence_ids(offsets, ctx.shape[0])), None


_to_padded.register_autograd(_to_padded_backward, setup_context=_save_offsets)
_from_padded.register_autograd(_from_padded_backward, setup_context=_save_offsets)
_gather_rows.register_autograd(_gather_rows_backward, setup_context=_save_offsets)
_scatter_sum.register_autograd(_scatter_sum_backward, setup_context=_save_offsets)
_segment_sum.register_autograd(_segment_sum_backward, setup_context=_save_offsets)


def to_padded(values: Tensor, offsets: Tensor, max_length: int, padding: float = 0.0) -> Tensor:
    """``values [T, ...]`` to ``[B, L, ...]``, left aligned; what a sequence has beyond L rows is cut off."""
    return _to_padded(values, offsets, max_length, padding)


def from_padded(padded: Tensor, offsets: Tensor, total: int) -> Tensor:
    """``padded [B, L, ...]`` to ``[T, ...]`` with T = ``total``; rows of a sequence beyond L are zero."""
    return _from_padded(padded, offsets, total)


def gather_rows(values: Tensor, index: Tensor) -> Tensor:
    """Rows ``index [N]`` of ``values [R, ...]``; the backward sums the gradients of a row taken more than once."""
    return _gather_rows(values, index)


def scatter_sum(values: Tensor, index: Tensor, rows: int) -> Tensor:
    """``out[r]`` = sum of the rows i of ``values [N, ...]`` with ``index[i] == r``: ``[rows, ...]``."""
    return _scatter_sum(values, index, rows)


def segment_sum(values: Tensor, offsets: Tensor) -> Tensor:
    """Sum over each sequence: ``[T, ...]`` to ``[B, ...]``; zero for an empty one."""
    return _segment_sum(values, offsets)


def segment_mean(values: Tensor, offsets: Tensor) -> Tensor:
    """Mean over each sequence: ``[T, ...]`` to ``[B, ...]``; zero for an empty one."""
    count = offsets.diff().clamp(min=1).to(values.dtype)
    return _segment_sum(values, offsets) / count.view(-1, *([1] * (values.dim() - 1)))


def gather_sequences(values: Tensor, offsets: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """Whole sequences ``index [N]`` of a packed batch of R, again packed.

    Returns:
        values ``[T', ...]`` and offsets ``[N + 1]``; the backward sums over the copies of a sequence.
    """
    rows, new_offsets = sequence_rows(offsets, index)
    return _gather_rows(values, rows), new_offsets


def sequence_rows(offsets: Tensor, index: Tensor, total: int | None = None) -> tuple[Tensor, Tensor]:
    """Row numbers ``[T']`` of the sequences ``index [N]``, and their new offsets ``[N + 1]``.

    Args:
        total: T', where the caller knows it; otherwise the host waits for the device to learn it.
    """
    new_offsets = offsets_from_lengths(offsets.diff().index_select(0, index))
    if total is None:
        total = int(new_offsets[-1])
    shift = offsets[:-1].index_select(0, index) - new_offsets[:-1]
    owner = sequence_ids(new_offsets, total)
    return torch.arange(total, device=offsets.device) + shift.index_select(0, owner), new_offsets


def concat(a: Tensor, a_offsets: Tensor, b: Tensor, b_offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Joins two packed batches sequence by sequence, the rows of ``a`` first.

    Returns:
        values ``[Ta + Tb, ...]`` and offsets ``[B + 1]``.
    """
    a_owner = sequence_ids(a_offsets, a.shape[0])
    b_owner = sequence_ids(b_offsets, b.shape[0])
    a_place = torch.arange(a.shape[0], device=a.device) + b_offsets.index_select(0, a_owner)
    b_place = torch.arange(b.shape[0], device=b.device) + a_offsets.index_select(0, b_owner + 1)
    order = torch.empty(a.shape[0] + b.shape[0], dtype=torch.int64, device=a.device)
    order[torch.cat([a_place, b_place])] = torch.arange(order.shape[0], device=a.device)
    return _gather_rows(torch.cat([a, b]), order), a_offsets + b_offsets


def last_k(values: Tensor, offsets: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The last k rows of each sequence, right aligned: ``[B, k, ...]``, zeros where a sequence is shorter.

    Returns:
        the rows, and a bool mask ``[B, k]`` of the real ones.
    """
    index = offsets[1:, None] + torch.arange(-k, 0, device=offsets.device)
    valid = index >= offsets[:-1, None]
    shape = (*index.shape, *values.shape[1:])
    if values.shape[0] == 0:
        return values.new_zeros(shape) + values.sum(), valid
    rows = _gather_rows(values, torch.where(valid, index, 0).flatten()).view(shape)
    return rows.masked_fill(~valid.view(*valid.shape, *([1] * (values.dim() - 1))), 0), valid


def broadcast_add(values: Tensor, offsets: Tensor, dense: Tensor) -> Tensor:
    """Adds row b of ``dense [B, ...]`` to every row of sequence b of ``values [T, ...]``."""
    return values + _gather_rows(dense, sequence_ids(offsets, values.shape[0]))
