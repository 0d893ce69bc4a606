"""Gradients of two embedding tables from one pass over the rows that took from both, on the GPU.

``out[p]`` = sum of the rows that took p from the large table, and the same for the small one, of at most ``SMALL``
rows. Rows are grouped by 64 neighbours of the large table; a tile of a group, times the 0/1 matrix of who took what,
gives the sums of those 64 and of all of the small table on the tensor cores: 16-bit values times 1, summed in float32.
A program has ``CHUNK`` rows of a group, and what the programs have is added up in a fixed order, so the result has the
same bits in every run. A value that is not finite makes the sums of all that its program has NaN.

Shapes: X ``[T, W]``, BIG, LITTLE: int64, the choices of a row with the strides ``sti``; GROUPS ``[T]`` uint8, PLACES
``[T]`` int16: the place in its group and, times 64, the row of the small table; ORDER ``[T]``, ENDS ``[groups]``;
PARTIAL float32 ``[programs, 128, W]``.
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

DEFAULT = {"CHUNK": 4096, "ROWS": 64, "BLOCK": 128, "STAGES": 4, "num_warps": 8}


@triton.jit(do_not_specialize=["rows"])
def keys_kernel(BIG, LITTLE, GROUPS, PLACES, rows, sti, big_first, small_first, ROWS: tl.constexpr):
    """Group and place of each row."""
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    big = (tl.load(BIG + r.to(tl.int64) * sti, mask=r < rows, other=0) - big_first).to(tl.int32)
    small = (tl.load(LITTLE + r.to(tl.int64) * sti, mask=r < rows, other=0) - small_first).to(tl.int32)
    tl.store(GROUPS + r, (big // 64).to(GROUPS.dtype.element_ty), mask=r < rows)
    tl.store(PLACES + r, (big % 64 + 64 * small).to(tl.int16), mask=r < rows)


@triton.jit
def _chunks(ENDS, COUNT: tl.constexpr, GROUPS: tl.constexpr, CHUNK: tl.constexpr):
    """Of each group: its rows' bounds, and the number of its last chunk plus 1."""
    g = tl.arange(0, GROUPS)
    end = tl.load(ENDS + g, mask=g < COUNT, other=0).to(tl.int32)
    begin = tl.load(ENDS + g - 1, mask=(g > 0) & (g < COUNT), other=0).to(tl.int32)
    return g, begin, end, tl.cumsum((end - begin + CHUNK - 1) // CHUNK, 0)


@triton.jit
def sum_kernel(
    X, ORDER, PLACES, ENDS, PARTIAL, stx, COUNT: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A program has one chunk of a group and ``BLOCK`` columns."""
    PARTS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    chunk = tl.program_id(0) // PARTS
    c = (tl.program_id(0) % PARTS) * BLOCK + tl.arange(0, BLOCK)
    g, begin, end, last = _chunks(ENDS, COUNT, GROUPS, CHUNK)
    group = tl.sum((last <= chunk).to(tl.int32), 0)
    if group >= COUNT:
        return
    own = g == group
    start = tl.sum(tl.where(own, begin, 0), 0)
    stop = tl.sum(tl.where(own, end, 0), 0)
    start += (chunk - tl.sum(tl.where(g == group - 1, last, 0), 0)) * CHUNK
    stop = tl.minimum(stop, start + CHUNK)
    taken = tl.arange(0, 128)[:, None]
    acc = tl.zeros([128, BLOCK], tl.float32)
    for i in tl.range(start, stop, ROWS, num_stages=STAGES):
        lane = i + tl.arange(0, ROWS)
        r = tl.load(ORDER + lane, mask=lane < stop, other=0)
        place = tl.load(PLACES + r, mask=lane < stop, other=0).to(tl.int32)
        x = tl.load(
            X + r.to(tl.int64)[:, None] * stx + c[None, :], mask=(lane < stop)[:, None] & (c < WIDTH)[None, :], other=0
        )
        who = tl.where(taken < 64, place[None, :] % 64, 64 + place[None, :] // 64) == taken
        acc = tl.dot(who.to(x.dtype), x, acc)
    at = (chunk.to(tl.int64) * 128 + taken) * WIDTH + c[None, :]
    tl.store(PARTIAL + at, acc, mask=(taken < 128) & (c < WIDTH)[None, :])


@triton.jit
def finish_kernel(
    OUT, PARTIAL, ENDS, big_first, small_first, BIG: tl.constexpr, COUNT: tl.constexpr, GROUPS: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """A program has one row of a table, the large one of ``BIG`` rows first, and ``BLOCK`` columns."""
    PARTS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    row = tl.program_id(0) // PARTS
    c = (tl.program_id(0) % PARTS) * BLOCK + tl.arange(0, BLOCK)
    g, _, _, last = _chunks(ENDS, COUNT, GROUPS, CHUNK)
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
    few, many = min(sizes), max(sizes)
    return (
        len(sizes) == 2
        and 0 < few <= SMALL
        and many <= 64 * 256
        and values.dtype in (torch.bfloat16, torch.float16)
        and values.numel() > 0
    )


def table_sum(values: Tensor, index: Tensor, sizes: Sequence[int]) -> Tensor:
    """``reference.table_sum`` of ``values [T, W]`` whose last dim is contiguous."""
    config = memory_tuning.find("tables", values.device, values.dtype, values.shape[1], 1) or DEFAULT
    (rows, width), big, device = values.shape, int(sizes[1] > sizes[0]), values.device
    firsts = (0, sizes[0])
    groups = torch.empty(rows, dtype=torch.uint8, device=device)
    places = torch.empty(rows, dtype=torch.int16, device=device)
    columns = (index[:, big], index[:, 1 - big])
    keys_kernel[(triton.cdiv(rows, 1024),)](
        *columns, groups, places, rows, index.stride(0), firsts[big], firsts[1 - big], ROWS=1024
    )
    ordered, order = torch.sort(groups, stable=True)
    count = triton.cdiv(sizes[big], 64)
    ends = torch.searchsorted(ordered, torch.arange(count, dtype=torch.uint8, device=device), right=True)
    chunks, block = rows // config["CHUNK"] + count, min(config["BLOCK"], max(64, triton.next_power_of_2(width)))
    partial = torch.empty(chunks, 128, width, dtype=torch.float32, device=device)
    out = values.new_empty(sum(sizes), width)
    shape = {"COUNT": count, "GROUPS": max(16, triton.next_power_of_2(count)), "WIDTH": width}
    shape, parts = {**shape, "BLOCK": block, "CHUNK": config["CHUNK"]}, triton.cdiv(width, block)
    sum_kernel[(chunks * parts,)](
        values, order, places, ends, partial, values.stride(0), **shape, ROWS=config["ROWS"], STAGES=config["STAGES"],
        num_warps=config["num_warps"],
    )  # fmt: skip
    finish_kernel[(sum(sizes) * parts,)](
        out, partial, ends, firsts[big], firsts[1 - big], BIG=sizes[big], **shape, ROWS=16
    )
    return out
