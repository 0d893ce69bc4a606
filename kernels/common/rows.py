"""Packed rows in tiles that may span several sequences, and their owners."""

# mypy: allow-untyped-defs
from __future__ import annotations

import math
from functools import cache

import triton
import triton.language as tl
from torch import Tensor

from kernels.common.sequences import find_sequence


@triton.jit
def row_owners(Offsets, B, start, rows, ROWS: tl.constexpr, ROUNDS: tl.constexpr):
    """The sequence that each of ``ROWS`` packed rows from ``start`` on belongs to; rows from ``rows`` on: any.

    The first row's owner is searched for, the others count the sequences that begin after it, 32 at a time.
    """
    r = start + tl.arange(0, ROWS)
    base = find_sequence(Offsets, B, start, 1, 0, ROUNDS)
    owner = tl.zeros([ROWS], tl.int32) + base
    lane = tl.arange(0, 32)
    last = tl.minimum(start + ROWS, rows) - 1
    more = tl.load(Offsets + base + 1) <= last
    while more:
        index = base + 1 + lane
        begin = tl.load(Offsets + index, mask=index < B, other=9223372036854775807)
        owner += tl.sum((begin[None, :] <= r[:, None]).to(tl.int32), 1)
        base += 32
        more = (base + 1 < B) & (tl.load(Offsets + tl.minimum(base + 1, B)) <= last)
    return owner


@cache
def rounds(batch: int) -> int:
    """Rounds that ``find_sequence`` needs for so many sequences."""
    found, reach = 1, 32
    while reach < batch:
        found, reach = found + 1, reach * 32
    return found


def matrix(x: Tensor) -> tuple[Tensor, int]:
    """``[T, ...]`` as ``[T, W]`` with contiguous rows, and their stride; a copy only where it has to be."""
    if x.dim() != 2:
        x = x.reshape(x.shape[0], math.prod(x.shape[1:]))
    row, element = x.stride()
    if element == 1:
        return x, row
    x = x.contiguous()
    return x, x.stride(0)


def head_rows(x: Tensor) -> tuple[Tensor, tuple[int, int]]:
    """The tensor, copied if its heads do not lie within its rows, and its strides of rows and heads.

    Kernels are compiled for the strides, which so must not depend on the number of rows.
    """
    row, head, element = x.stride()
    if element == 1 and (head <= row or row == 0):
        return x, (row, head)
    if element == 1 and x.shape[1] == 1:
        return x, (row, 0)
    x = x.contiguous()
    return x, (x.stride(0), x.stride(1))
