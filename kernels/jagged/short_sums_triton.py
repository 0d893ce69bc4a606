"""Sums of many short sequences, and where the entries of a rising index begin, on the GPU.

Where most sequences have a few rows, a program for each spends its time on starting. Here a program has several, and
sums up to ``LIMIT`` rows of each side by side; those of longer sequences it sums one sequence after another. In a fixed
order, so the same bits in every run.

Shapes: X and OUT are matrices of rows of ``WIDTH`` elements, ``stx`` the stride of X's; OFFSETS, STARTS: int64.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.common import memory_tuning
from kernels.common.launcher import Launch

SHORT = 16
"""Most rows of a mean sequence for these sums."""

LIMIT = 64

ENTRIES = 1024
"""Of an index, for one program."""

_STARTS = {"ENTRIES": ENTRIES, "STEPS": ENTRIES.bit_length(), "AT_ONCE": 256, "num_warps": 4}


@triton.jit(do_not_specialize=["N", "rows"])
def starts_kernel(INDEX, STARTS, N, rows, ENTRIES: tl.constexpr, STEPS: tl.constexpr, AT_ONCE: tl.constexpr):
    """How many entries of a rising index are below s, for s up to ``rows``.

    A program has ``ENTRIES`` entries, 2^(STEPS - 1), and writes for each s from behind the entry before them up to the
    last of them, so that it need look at no others.
    """
    first = tl.program_id(0) * ENTRIES
    count = tl.minimum(ENTRIES, N - first)
    low = tl.load(INDEX + first - 1, mask=first > 0, other=-1).to(tl.int32) + 1
    high = tl.load(INDEX + first + count - 1).to(tl.int32)
    high = tl.where(first + count == N, rows, high)
    for start in range(low, high + 1, AT_ONCE):
        s = start + tl.arange(0, AT_ONCE)
        below = tl.zeros([AT_ONCE], tl.int32)
        for step in tl.static_range(STEPS):
            more = below + (ENTRIES >> step)
            entry = tl.load(INDEX + first + more - 1, mask=more <= count, other=2147483647)
            below = tl.where(entry.to(tl.int32) < s, more, below)
        tl.store(STARTS + s, (first + below).to(tl.int64), mask=s <= high)


@triton.jit(do_not_specialize=["B"])
def short_sum_kernel(
    X, OUT, OFFSETS, B, stx, MEAN: tl.constexpr, WIDTH: tl.constexpr, LIMIT: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``segment_sum``; a program has ``GROUP`` sequences and ``BLOCK`` columns."""
    PARTS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    c = (tl.program_id(0) % PARTS) * BLOCK + tl.arange(0, BLOCK)
    inside = c < WIDTH
    group = (tl.program_id(0) // PARTS) * GROUP
    b = group + tl.arange(0, GROUP)
    begin = tl.load(OFFSETS + b, mask=b < B, other=0)
    rows = (tl.load(OFFSETS + b + 1, mask=b < B, other=0) - begin).to(tl.int32)
    few = tl.where(rows <= LIMIT, rows, 0)
    acc = tl.zeros([GROUP, ROWS, BLOCK], tl.float32)
    for i in range(0, tl.max(few, 0), ROWS):
        lane = i + tl.arange(0, ROWS)
        r = begin[:, None] + lane[None, :]
        mask = (lane[None, :] < few[:, None])[:, :, None] & inside[None, None, :]
        acc += tl.load(X + r[:, :, None] * stx + c[None, None, :], mask=mask, other=0).to(tl.float32)
    total = tl.sum(acc, 1)
    if MEAN:
        total = total / tl.maximum(rows, 1).to(tl.float32)[:, None]
    mask = ((b < B) & (rows <= LIMIT))[:, None] & inside[None, :]
    tl.store(OUT + b.to(tl.int64)[:, None] * WIDTH + c[None, :], total.to(OUT.dtype.element_ty), mask=mask)
    if tl.max(rows, 0) > LIMIT:
        for g in range(0, GROUP):
            one = group + g
            first = tl.load(OFFSETS + tl.minimum(one, B))
            length = (tl.load(OFFSETS + tl.minimum(one + 1, B)) - first).to(tl.int32)
            if length > LIMIT:
                sums = tl.zeros([GROUP * ROWS, BLOCK], tl.float32)
                for i in range(0, length, GROUP * ROWS):
                    lane = i + tl.arange(0, GROUP * ROWS)
                    at = X + (first + lane)[:, None] * stx + c[None, :]
                    sums += tl.load(at, mask=(lane < length)[:, None] & inside[None, :], other=0).to(tl.float32)
                whole = tl.sum(sums, 0)
                if MEAN:
                    whole = whole / length.to(tl.float32)
                at = OUT + one.to(tl.int64) * WIDTH + c
                tl.store(at, whole.to(OUT.dtype.element_ty), mask=inside)


def sort(index: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """The index in rising order and where its entries stood, equal ones in order; short keys sort faster."""
    key = index.to(torch.int16 if rows < 2**15 else torch.int32)
    ordered, order = torch.sort(key, stable=True)
    return ordered.to(torch.int32), order


def starts(ordered: Tensor, rows: int) -> Tensor:
    """Where the entries of each of ``rows`` values begin in a rising index: int64 ``[rows + 1]``."""
    out = ordered.new_empty(rows + 1, dtype=torch.int64)
    count = ordered.shape[0]
    if count == 0:
        return out.zero_()
    _starts_launch(ordered.device).start(-(-count // ENTRIES), (ordered.contiguous(), out), (count, rows))
    return out


def short_sum(x: Tensor, stride: int, offsets: Tensor, mean: bool, out: Tensor) -> Tensor:
    """``reference.segment_sum`` of ``x [T, W]``, of that stride, into ``out``."""
    batch = offsets.shape[0] - 1
    launch, parts = _sum_launch(x.device, x.dtype, x.shape[1], mean)
    launch.start(-(-batch // launch.constants["GROUP"]) * parts, (x, out, offsets), (batch,), (stride,))
    return out


@cache
def _starts_launch(device: torch.device) -> Launch:
    return Launch(starts_kernel, _STARTS)


@memory_tuning.plan
def _sum_launch(device: torch.device, dtype: torch.dtype, width: int, mean: bool) -> tuple[Launch, int]:
    """The kernel with its constants, and how many tiles a row has."""
    config = memory_tuning.find("short_sum", device, dtype, width, 1) or default(width)
    block = min(triton.next_power_of_2(width), 512)
    constants = {"MEAN": mean, "WIDTH": width, "LIMIT": LIMIT, "BLOCK": block, **config}
    return Launch(short_sum_kernel, constants), -(-width // block)


def default(width: int) -> dict[str, int]:
    """8,192 elements a tile."""
    block = min(triton.next_power_of_2(width), 512)
    return {"GROUP": min(64, 2048 // block), "ROWS": 4, "num_warps": 4}
