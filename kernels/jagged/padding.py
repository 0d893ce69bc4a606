"""Padded groups: how the references compute on packed sequences with batched matrix products.

Sequences of like length are padded to one length and worked on together, so that one long sequence does not set
the size of all, and in parts that fit a core's cache. A padded row repeats the last row of its own sequence: it
costs no extra pass, and whatever a sequence holds (infinities, NaN) stays in that sequence. What is computed for
padded rows is dropped.

Legend: T packed rows, B sequences, b sequences of a group, L padded length, H heads, d row width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

GROUP_ELEMENTS = 1 << 20
"""Score elements (``b * H * Lq * Lk``) of a group: a few MB."""

_SMALLEST_BUCKET = 32


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """What a reference computes in: float64 for float64, float32 for everything else."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def nothing(queries: Tensor, values: Tensor) -> bool:
    """Whether no sum has a term, so that results and gradients are zeros: no query, key, head or element of values."""
    return not queries.numel() or not values.numel()


class Group(NamedTuple):
    """Sequences ``rows`` int64 ``[b]``, padded to these lengths."""

    rows: Tensor
    q_length: int
    kv_length: int


def padded_groups(q_lengths: Tensor, kv_lengths: Tensor, heads: int) -> list[Group]:
    """Groups the sequences by the powers of two that hold their lengths.

    Args:
        q_lengths, kv_lengths: int64 ``[B]``. A sequence where either is 0 is in no group.
        heads: a group is cut so that its scores stay near ``GROUP_ELEMENTS``.
    """
    kinds = _bucket(q_lengths) * 64 + _bucket(kv_lengths)
    kinds = torch.where((q_lengths > 0) & (kv_lengths > 0), kinds, -1)
    groups = []
    for kind in torch.unique(kinds).tolist():
        if kind < 0:
            continue
        rows = (kinds == kind).nonzero().squeeze(1)
        q_length = int(q_lengths[rows].max())
        kv_length = int(kv_lengths[rows].max())
        step = max(1, GROUP_ELEMENTS // (q_length * kv_length * heads))
        groups += [Group(part, q_length, kv_length) for part in rows.split(step)]
    return groups


def spread_heads(x: Tensor, heads: int) -> Tensor:
    """Rows of G key heads ``[b, G, L, d]`` to a copy for each of H = ``heads`` query heads; head h has ``h G // H``."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def join_heads(x: Tensor, heads: int, batch: int) -> Tensor:
    """Rows of H query heads ``[b or 1, H, L, w]`` as the rows of ``heads`` key heads ``[b, heads, L H / heads, w]``.

    A product over these rows so sums over the query heads that share a key head.
    """
    return x.expand(batch, -1, -1, -1).reshape(batch, heads, -1, x.shape[3])


def _bucket(lengths: Tensor) -> Tensor:
    return lengths.clamp(min=_SMALLEST_BUCKET).to(torch.float64).log2().ceil().long()


class PackedSide:
    """Queries or keys ``[T, H, d]`` of a packed batch, seen as padded groups ``[b, H, L, d]``.

    Args:
        offsets: int64 ``[B + 1]``.
        total: T.
        rows: the sequences of each group. lengths: L of each group.
        heads: H.
    """

    def __init__(self, offsets: Tensor, total: int, rows: list[Tensor], lengths: list[int], heads: int) -> None:
        self.offsets, self.total, self.rows, self.lengths, self.heads = offsets, total, rows, lengths, heads
        self._indexes: dict[int, tuple[Tensor, Tensor]] = {}
        self._first: list[int] = []
        slots = 0
        for part, length in zip(rows, lengths, strict=True):
            self._first.append(slots)
            slots += part.shape[0] * length * heads
        self._slots = slots

    def take(self, values: Tensor, group: int, dtype: torch.dtype) -> Tensor:
        """Rows of ``values [T, H, d]`` as ``[b, H, L, d]`` in ``dtype``, a copy."""
        index, _ = self._index(group)
        if self.heads > 1:
            heads = torch.arange(self.heads, device=index.device)[:, None]
            index = index[:, None, :] * self.heads + heads
        else:
            index = index[:, None, :]
        taken = values.reshape(-1, values.shape[2]).index_select(0, index.flatten())
        return taken.view(*index.shape, values.shape[2]).to(dtype)

    def real(self, group: int) -> Tensor:
        """Which slots of a group are not padding: bool ``[b, L]``."""
        return self._index(group)[1]

    def _index(self, group: int) -> tuple[Tensor, Tensor]:
        if group not in self._indexes:
            self._indexes = {group: self._make_index(group)}  # groups are worked on one after another
        return self._indexes[group]

    def _make_index(self, group: int) -> tuple[Tensor, Tensor]:
        rows = self.rows[group]
        position = torch.arange(self.lengths[group], device=rows.device)
        last = self.offsets.index_select(0, rows + 1)[:, None] - 1
        index = self.offsets.index_select(0, rows)[:, None] + position
        return index.minimum(last), index <= last

    def buffer(self, width: int, dtype: torch.dtype) -> Tensor:
        """Room for the results of all groups, and a row of zeros for sequences that are in none."""
        buffer = torch.empty((self._slots + 1, width), dtype=dtype, device=self.offsets.device)
        buffer[-1].zero_()
        return buffer

    def put_product(self, buffer: Tensor, group: int, a: Tensor, b: Tensor) -> None:
        """Stores ``a @ b``, the result ``[b, H, L, width]`` of a group."""
        count, length = self.rows[group].shape[0], self.lengths[group]
        part = buffer[self._first[group] :][: count * self.heads * length]
        out = part.view(count * self.heads, length, buffer.shape[1])
        torch.bmm(a.flatten(0, 1), b.flatten(0, 1), out=out)

    def put(self, buffer: Tensor, group: int, padded: Tensor) -> None:
        """Stores the result ``[b, H, L, width]`` of a group."""
        buffer[self._first[group] :][: padded.shape[:3].numel()].view(padded.shape).copy_(padded)

    def result(self, buffer: Tensor, dtype: torch.dtype) -> Tensor:
        """What the groups stored, in packed order: ``[T, H, width]``."""
        place = self._places().flatten()
        return buffer.index_select(0, place).view(self.total, self.heads, buffer.shape[1]).to(dtype)

    def _places(self) -> Tensor:
        """The buffer row of each packed row and head: int64 ``[T, H]``."""
        start = torch.full_like(self.offsets[1:], self._slots)
        stride = torch.zeros_like(start)
        for rows, length, first in zip(self.rows, self.lengths, self._first, strict=True):
            step = length * self.heads
            start[rows] = torch.arange(first, first + rows.shape[0] * step, step, device=start.device)
            stride[rows] = length
        each = torch.arange(start.shape[0], device=start.device)
        owner = torch.repeat_interleave(each, self.offsets.diff(), output_size=self.total)
        grouped = start < self._slots
        start = torch.where(grouped, start - self.offsets[:-1], start)  # to be added to the packed row number
        number = torch.arange(self.total, device=start.device)
        if not bool(grouped.all()):
            number = torch.where(grouped.index_select(0, owner), number, 0)
        heads = torch.arange(self.heads, device=start.device) * stride.index_select(0, owner)[:, None]
        return (number + start.index_select(0, owner))[:, None] + heads


class DenseSide:
    """Keys ``[B, M, H, d]`` with the same number for every sequence; the interface of ``PackedSide``."""

    def __init__(self, like: Tensor, rows: list[Tensor]) -> None:
        self.shape, self.device, self.rows = like.shape, like.device, rows

    def take(self, values: Tensor, group: int, dtype: torch.dtype) -> Tensor:
        """Rows of ``values [B, M, H, d]`` as ``[b, H, M, d]`` in ``dtype``, a copy."""
        return values.index_select(0, self.rows[group]).transpose(1, 2).to(dtype)

    def real(self, group: int) -> Tensor:
        """Bool ``[b, M]``, all true."""
        rows = self.rows[group]
        return torch.ones((rows.shape[0], self.shape[1]), dtype=torch.bool, device=rows.device)

    def buffer(self, width: int, dtype: torch.dtype) -> Tensor:
        """Room for the results of all groups; zero for sequences that are in none."""
        return torch.zeros((*self.shape[:3], width), dtype=dtype, device=self.device)

    def put_product(self, buffer: Tensor, group: int, a: Tensor, b: Tensor) -> None:
        """Stores ``a @ b``, the result ``[b, H, M, width]`` of a group."""
        buffer.index_copy_(0, self.rows[group], (a @ b).transpose(1, 2))

    def result(self, buffer: Tensor, dtype: torch.dtype) -> Tensor:
        """What the groups stored: ``[B, M, H, width]``."""
        return buffer.to(dtype)
