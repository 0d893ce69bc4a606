"""Jagged data movement in plain PyTorch: the CPU path and the oracle of the GPU kernels.

A packed batch is ``values [T, ...]`` with int64 ``offsets [B + 1]``: sequence b owns the rows
``offsets[b] .. offsets[b + 1] - 1``; ``offsets[0]`` is 0 and ``offsets[B]`` is T. Any sequence, and the batch, may be
empty. Works in any dtype and with any trailing dims; sums of 16 bits are made in float32 and rounded once. Results are
contiguous, whatever the strides of the inputs.

Legend: T rows, B sequences, L padded length, N gathered rows or sequences, C choices of a row, R source rows or
sequences.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def sequence_ids(offsets: Tensor, total: int) -> Tensor:
    """The number of the sequence that owns each row, int64 ``[T]``; ``total`` is T."""
    lengths = offsets.diff()
    ids = torch.arange(lengths.numel(), device=offsets.device)
    return torch.repeat_interleave(ids, lengths, output_size=total)


def to_padded(values: Tensor, offsets: Tensor, max_length: int, padding: float, right: bool) -> Tensor:
    """``[T, ...]`` to ``[B, L, ...]``; of a longer sequence the first L rows are kept, ``right`` aligned the last L."""
    position = torch.arange(max_length, device=offsets.device)
    if right:
        index = offsets[1:, None] - max_length + position
        valid = index >= offsets[:-1, None]
    else:
        index = offsets[:-1, None] + position
        valid = index < offsets[1:, None]
    if values.shape[0] == 0:
        return values.new_full((*index.shape, *values.shape[1:]), padding)
    padded = values.index_select(0, torch.where(valid, index, 0).flatten()).view(*index.shape, *values.shape[1:])
    return padded.masked_fill_(_unsqueeze_to(~valid, padded.dim()), padding)


def last_k(values: Tensor, offsets: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The last k rows of each sequence, right aligned, ``[B, k, ...]``, and ``last_mask``."""
    return to_padded(values, offsets, k, 0.0, True), last_mask(offsets, k)


def last_mask(offsets: Tensor, k: int) -> Tensor:
    """Which of the last k places of each sequence it fills: bool ``[B, k]``."""
    return torch.arange(k, 0, -1, device=offsets.device) <= offsets.diff()[:, None]


def from_padded(padded: Tensor, offsets: Tensor, total: int, right: bool) -> Tensor:
    """``[B, L, ...]`` to ``[T, ...]``; rows of a sequence that have no place among L are zero."""
    batch, length = padded.shape[:2]
    if batch * length == 0:
        return padded.new_zeros((total, *padded.shape[2:]))
    owner = sequence_ids(offsets, total)
    row = torch.arange(total, device=offsets.device)
    position = row - offsets.index_select(0, owner + 1) + length if right else row - offsets.index_select(0, owner)
    inside = (position >= 0) & (position < length)
    rows = padded.flatten(0, 1).index_select(0, torch.where(inside, owner * length + position, 0))
    return rows.masked_fill_(_unsqueeze_to(~inside, rows.dim()), 0)


def gather_rows(values: Tensor, index: Tensor) -> Tensor:
    """Rows ``index`` int64 ``[N]`` of ``values [R, ...]``, or the sums of C rows for ``[N, C]``: ``[N, ...]``."""
    rows = values.index_select(0, index.flatten())
    if index.dim() == 1:
        return rows
    return rows.view(*index.shape, *values.shape[1:]).sum(1, dtype=_summed_in(values)).to(values.dtype)


def scatter_sum(values: Tensor, index: Tensor, rows: int, rising: bool) -> Tensor:
    """``out[r]`` = sum of the rows of ``values [N, ...]`` for which r is in ``index [N]`` or ``[N, C]``."""
    wide = values.to(_summed_in(values))
    if index.dim() == 2:
        wide = wide.repeat_interleave(index.shape[1], dim=0)
    out = wide.new_zeros((rows, *values.shape[1:]))
    if out.is_cuda:  # where index_add_ adds with atomics, in another order in every run, and this sorts
        return out.index_put_((index.flatten().long(),), wide, accumulate=True).to(values.dtype)
    return out.index_add_(0, index.flatten(), wide).to(values.dtype)


def table_sum(values: Tensor, index: Tensor, sizes: Sequence[int]) -> Tensor:
    """``scatter_sum`` into tables of these sizes, one under the other; column c of index names rows of table c."""
    return scatter_sum(values, index, sum(sizes), False)


def embedding_add(values: Tensor, table: Tensor, index: Tensor) -> Tensor:
    """``values[t]`` plus the rows of ``table`` that ``index[t]`` names."""
    wide = _summed_in(values)
    return (values.to(wide) + gather_rows(table.to(wide), index)).to(values.dtype).contiguous()


def segment_sum(values: Tensor, offsets: Tensor, mean: bool) -> Tensor:
    """Sum or mean over each sequence: ``[T, ...]`` to ``[B, ...]``; zero for an empty one."""
    wide = values.to(_summed_in(values))
    total = scatter_sum(wide, sequence_ids(offsets, values.shape[0]), offsets.numel() - 1, True)
    return (total / _counts(offsets, total) if mean else total).to(values.dtype)


def spread(rows: Tensor, offsets: Tensor, total: int, mean: bool) -> Tensor:
    """Row b of ``rows [B, ...]``, or that by the length, for every row of sequence b: ``[T, ...]``, T = ``total``."""
    if mean:
        wide = rows.to(_summed_in(rows))
        rows = (wide / _counts(offsets, wide)).to(rows.dtype)
    return rows.index_select(0, sequence_ids(offsets, total))


def broadcast_add(values: Tensor, offsets: Tensor, dense: Tensor) -> Tensor:
    """Row b of ``dense [B, ...]`` added to every row of sequence b of ``values [T, ...]``."""
    return (values + spread(dense, offsets, values.shape[0], False)).contiguous()


def concat(a: Tensor, b: Tensor, a_offsets: Tensor, offsets: Tensor) -> Tensor:
    """Sequences of ``a [Ta, ...]``, each followed by that of ``b [Tb, ...]``: ``[Ta + Tb, ...]`` with ``offsets``."""
    out = a.new_empty((a.shape[0] + b.shape[0], *a.shape[1:]))
    a_place, b_place = _places(a_offsets, offsets - a_offsets, a.shape[0], b.shape[0])
    out[a_place], out[b_place] = a, b
    return out


def split(values: Tensor, a_offsets: Tensor, offsets: Tensor, a_rows: int) -> tuple[Tensor, Tensor]:
    """Undoes ``concat``: ``[Ta, ...]``, of which there are ``a_rows``, and ``[Tb, ...]``."""
    a_place, b_place = _places(a_offsets, offsets - a_offsets, a_rows, values.shape[0] - a_rows)
    return values.index_select(0, a_place), values.index_select(0, b_place)


def gathered_offsets(offsets: Tensor, index: Tensor) -> Tensor:
    """Offsets ``[N + 1]`` of the sequences ``index [N]`` of a batch of R, packed one after another."""
    return offsets_from_lengths(offsets.diff().index_select(0, index))


def offsets_from_lengths(lengths: Tensor) -> Tensor:
    """Lengths ``[B]`` to int64 offsets ``[B + 1]``."""
    return torch.cat([lengths.new_zeros(1, dtype=torch.int64), lengths.cumsum(0, dtype=torch.int64)])


def gather_sequences(values: Tensor, offsets: Tensor, index: Tensor, new_offsets: Tensor, total: int) -> Tensor:
    """Sequences ``index [N]`` of a batch of R, packed with ``new_offsets [N + 1]`` into ``total`` rows."""
    return values.index_select(0, sequence_rows(offsets, index, new_offsets, total))


def sum_sequences(
    grad: Tensor, offsets: Tensor, index: Tensor, new_offsets: Tensor, total: int, rising: bool
) -> Tensor:
    """Sums over the copies that ``gather_sequences`` made: ``[T', ...]`` to ``[total, ...]``."""
    return scatter_sum(grad, sequence_rows(offsets, index, new_offsets, grad.shape[0]), total, False)


def sequence_rows(offsets: Tensor, index: Tensor, new_offsets: Tensor, total: int) -> Tensor:
    """Row numbers of the sequences ``index [N]``, one sequence after another."""
    shift = offsets[:-1].index_select(0, index) - new_offsets[:-1]
    owner = sequence_ids(new_offsets, total)
    return torch.arange(total, device=offsets.device) + shift.index_select(0, owner)


def _places(a_offsets: Tensor, b_offsets: Tensor, a_rows: int, b_rows: int) -> tuple[Tensor, Tensor]:
    """Where the rows of two batches stand when joined."""
    a_owner, b_owner = sequence_ids(a_offsets, a_rows), sequence_ids(b_offsets, b_rows)
    device = a_offsets.device
    a_place = torch.arange(a_rows, device=device) + b_offsets.index_select(0, a_owner)
    return a_place, torch.arange(b_rows, device=device) + a_offsets.index_select(0, b_owner + 1)


def _summed_in(values: Tensor) -> torch.dtype:
    """float32 for 16 bits, in which a sum or a count of 70,000 rows may be infinite; else the dtype itself."""
    return torch.float32 if values.dtype in (torch.bfloat16, torch.float16) else values.dtype


def _counts(offsets: Tensor, like: Tensor) -> Tensor:
    """Lengths, at least 1, to divide ``like [B, ...]`` by."""
    return _unsqueeze_to(offsets.diff().clamp(min=1), like.dim()).to(like.dtype)


def _unsqueeze_to(mask: Tensor, dims: int) -> Tensor:
    return mask.view(*mask.shape, *([1] * (dims - mask.dim())))
