"""Gradients of two embedding tables from one pass over the rows that took from both, on the GPU.

``out[p]`` = sum of the rows that took p from the large table, and the same for the small one, of at most ``SMALL``
rows. Rows are grouped by 64 neighbours of the large table; a tile of a group, times the 0/1 matrix of who took what,
gives the sums of those 64 and of all of the small table on the tensor cores: 16-bit values times 1, summed in float32.
A program has ``CHUNK`` rows of a group, and what the programs have is added up in a fixed order, so the result has the
same bits in every run. A value that is not finite makes the sums of all that its program has NaN.

Grouping is a counting sort: rows of each group in a block of rows are counted, the counts are added up group by group,
and each block, sorted on its own, then knows where its rows go.

Shapes: X ``[T, W]``, BIG, LITTLE: int64, the choices of a row with the strides ``sti``; all else int32: KEYS ``[T]``,
the choice of the large table plus 2^16 times the other; COUNTS, TOTALS ``[groups, blocks]``, the latter running sums;
BEFORE ``[blocks, groups]``, rows of the groups before in the same block; ORDER ``[T]``, and TAKEN, the keys in that
order. PARTIAL float32 ``[programs, 128, W]``.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.common import memory_tuning

SMALL = 64
LARGE = 2**14

BLOCK_ROWS = 512
"""Rows that are grouped at a time."""

DEFAULT = {"CHUNK": 4096, "ROWS": 64, "BLOCK": 128, "STAGES": 3, "num_warps": 4}


@triton.jit(do_not_specialize=["rows", "blocks", "big_first", "small_first"])
def count_kernel(
    BIG, LITTLE, KEYS, COUNTS, BEFORE, rows, blocks, sti, big_first, small_first, GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Keys of a block of rows, and how many of them are of each group."""
    block = tl.program_id(0)
    r = block * ROWS + tl.arange(0, ROWS)
    live = r < rows
    big = (tl.load(BIG + r.to(tl.int64) * sti, mask=live, other=0) - big_first).to(tl.int32)
    small = (tl.load(LITTLE + r.to(tl.int64) * sti, mask=live, other=0) - small_first).to(tl.int32)
    tl.store(KEYS + r, big + 65536 * small, mask=live)
    counts = tl.histogram(tl.where(live, big // 64, 0), GROUPS, mask=live)
    g = tl.arange(0, GROUPS)
    tl.store(COUNTS + g * blocks + block, counts)
    tl.store(BEFORE + block * GROUPS + g, tl.cumsum(counts, 0) - counts)


@triton.jit(do_not_specialize=["rows", "blocks"])
def order_kernel(KEYS, COUNTS, TOTALS, BEFORE, ORDER, TAKEN, rows, blocks, GROUPS: tl.constexpr, ROWS: tl.constexpr):
    """Writes the rows of a block and their keys to their places."""
    block = tl.program_id(0)
    lane = tl.arange(0, ROWS)
    live = block * ROWS + lane < rows
    group = (tl.load(KEYS + block * ROWS + lane, mask=live, other=0) % 65536) // 64
    ordered = tl.sort(tl.where(live, group, GROUPS) * ROWS + lane)
    group = ordered // ROWS
    live = group < GROUPS
    at = group * blocks + block
    place = tl.load(TOTALS + at, mask=live, other=0) - tl.load(COUNTS + at, mask=live, other=0) + lane
    place -= tl.load(BEFORE + block * GROUPS + group, mask=live, other=0)
    row = block * ROWS + ordered % ROWS
    tl.store(ORDER + place, row, mask=live)
    tl.store(TAKEN + place, tl.load(KEYS + row, mask=live, other=0), mask=live)


@triton.jit
def _chunks(TOTALS, blocks, GROUPS: tl.constexpr, CHUNK: tl.constexpr):
    """Of each group: its bounds in ORDER, how many chunks it has, and the number of the last one plus 1."""
    g = tl.arange(0, GROUPS)
    end = tl.load(TOTALS + (g + 1) * blocks - 1)
    begin = tl.load(TOTALS + g * blocks - 1, mask=g > 0, other=0)
    chunks = (end - begin + CHUNK - 1) // CHUNK
    return g, begin, end, chunks, tl.cumsum(chunks, 0)


@triton.jit(do_not_specialize=["blocks"])
def sum_kernel(
    X, ORDER, TAKEN, TOTALS, PARTIAL, blocks, stx, GROUPS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    CHUNK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A program has one chunk of a group and ``BLOCK`` columns."""
    PARTS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    chunk = tl.program_id(0) // PARTS
    c = (tl.program_id(0) % PARTS) * BLOCK + tl.arange(0, BLOCK)
    g, begin, end, chunks, last = _chunks(TOTALS, blocks, GROUPS, CHUNK)
    group = tl.sum((last <= chunk).to(tl.int32), 0)
    if group >= GROUPS:
        return
    start = tl.sum(tl.where(g == group, begin, 0), 0)
    stop = tl.sum(tl.where(g == group, end, 0), 0)
    parts = tl.sum(tl.where(g == group, chunks, 0), 0)
    share = ((stop - start + parts - 1) // parts + ROWS - 1) // ROWS * ROWS  # as many rows for each
    start += (chunk - tl.sum(tl.where(g == group - 1, last, 0), 0)) * share
    stop = tl.minimum(stop, start + share)
    place = tl.arange(0, 128)[:, None]
    acc = tl.zeros([128, BLOCK], tl.float32)
    for i in tl.range(start, stop, ROWS, num_stages=STAGES):
        lane = i + tl.arange(0, ROWS)
        r = tl.load(ORDER + lane, mask=lane < stop, other=0)
        key = tl.load(TAKEN + lane, mask=lane < stop, other=0)[None, :]
        mask = (lane < stop)[:, None] & (c < WIDTH)[None, :]
        x = tl.load(X + r.to(tl.int64)[:, None] * stx + c[None, :], mask=mask, other=0)
        who = tl.where(place < 64, key % 64, 64 + key // 65536) == place
        acc = tl.dot(who.to(x.dtype), x, acc)
    at = (chunk.to(tl.int64) * 128 + place) * WIDTH + c[None, :]
    tl.store(PARTIAL + at, acc, mask=(place < 128) & (c < WIDTH)[None, :])


@triton.jit(do_not_specialize=["blocks", "big_first", "small_first"])
def finish_kernel(
    OUT, PARTIAL, TOTALS, blocks, big_first, small_first, BIG: tl.constexpr, GROUPS: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """A program has one row of a table, the large one of ``BIG`` rows first, and ``BLOCK`` columns."""
    PARTS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    row = tl.program_id(0) // PARTS
    c = (tl.program_id(0) % PARTS) * BLOCK + tl.arange(0, BLOCK)
    g, _, _, _, last = _chunks(TOTALS, blocks, GROUPS, CHUNK)
    group = row // 64
    first = tl.sum(tl.where(g == group - 1, last, 0), 0)
    stop = tl.sum(tl.where(g == group, last, 0), 0)
    place, out = row % 64, big_first + row
    if row >= BIG:
        first, stop = 0, tl.max(last, 0)
        place, out = 64 + row - BIG, small_first + row - BIG
    acc = tl.zeros([ROWS, BLOCK], tl.float32)
    for i in range(first, stop, ROWS):
        chunk = i + tl.arange(0, ROWS)
        at = (chunk.to(tl.int64) * 128 + place)[:, None] * WIDTH + c[None, :]
        acc += tl.load(PARTIAL + at, mask=(chunk < stop)[:, None] & (c < WIDTH)[None, :], other=0.0)
    total = tl.sum(acc, 0).to(OUT.dtype.element_ty)
    tl.store(OUT + out.to(tl.int64) * WIDTH + c, total, mask=c < WIDTH)


def supports(values: Tensor, sizes: Sequence[int]) -> bool:
    """Whether the kernels take these: 16-bit, two tables, one small."""
    fits = len(sizes) == 2 and 0 < min(sizes) <= SMALL and max(sizes) <= LARGE
    return fits and values.dtype in (torch.bfloat16, torch.float16) and values.numel() > 0


def table_sum(values: Tensor, index: Tensor, sizes: Sequence[int]) -> Tensor:
    """``reference.table_sum`` of ``values [T, W]`` whose last dim is contiguous."""
    config = memory_tuning.find("tables", values.device, values.dtype, values.shape[1], 1) or DEFAULT
    (rows, width), big = values.shape, int(sizes[1] > sizes[0])
    firsts, groups = (0, sizes[0]), max(16, triton.next_power_of_2(triton.cdiv(sizes[big], 64)))
    blocks = triton.cdiv(rows, BLOCK_ROWS)
    sides = (rows, rows, rows, blocks * groups, blocks * groups)
    keys, order, taken, counts, before = (values.new_empty(side, dtype=torch.int32) for side in sides)
    count_kernel[(blocks,)](
        index[:, big], index[:, 1 - big], keys, counts, before, rows, blocks, index.stride(0), firsts[big],
        firsts[1 - big], GROUPS=groups, ROWS=BLOCK_ROWS,
    )  # fmt: skip
    totals = counts.cumsum(0, dtype=torch.int32)
    order_kernel[(blocks,)](keys, counts, totals, before, order, taken, rows, blocks, GROUPS=groups, ROWS=BLOCK_ROWS)
    chunks, block = rows // config["CHUNK"] + groups, min(config["BLOCK"], max(64, triton.next_power_of_2(width)))
    partial = values.new_empty((chunks, 128, width), dtype=torch.float32)
    out = values.new_empty(sum(sizes), width)
    shape = {"GROUPS": groups, "WIDTH": width, "BLOCK": block, "CHUNK": config["CHUNK"]}
    parts = triton.cdiv(width, block)
    sum_kernel[(chunks * parts,)](
        values, order, taken, totals, partial, blocks, values.stride(0), **shape, ROWS=config["ROWS"],
        STAGES=config["STAGES"], num_warps=config["num_warps"],
    )  # fmt: skip
    finish_kernel[(sum(sizes) * parts,)](
        out, partial, totals, blocks, firsts[big], firsts[1 - big], BIG=sizes[big], **shape, ROWS=32
    )
    return out
