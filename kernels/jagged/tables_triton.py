"""Gradients of two embedding tables from one pass over the rows that took from both, on the GPU.

``out[p]`` = sum of the rows that took p from the large table, and the same for the small one, of at most ``SMALL``
rows. Rows are grouped by 64 neighbours of the large table; a tile of a group, times the 0/1 matrix of who took what,
gives the sums of those 64 and of all of the small table on the tensor cores: 16-bit values times 1, summed in float32.
All programs have as many rows and write what they have at the end of a group; that is added up in a fixed order, so the
result has the same bits in every run. A value that is not finite makes the sums of all that its program has NaN.

Grouping is a counting sort: rows of each group in a block of rows are counted, the counts are added up group by group,
and each block, sorted on its own, then knows where its rows go.

Shapes: X ``[T, W]``, BIG, LITTLE: int64, the choices of a row with the strides ``sti``; all else int32: KEYS ``[T]``,
the choice of the large table plus 2^16 times the other; COUNTS, TOTALS ``[groups, blocks]``, the latter running sums;
BEFORE ``[blocks, groups]``, rows of the groups before in the same block; ORDER ``[T]``, and TAKEN, the keys in that
order. PARTIAL float32 ``[programs + groups - 1, 128, W]``: what program p has of group g stands at p + g, which is
another place for each pair that occurs, since one of the two goes up by one from pair to pair.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.common import memory_tuning
from kernels.common.launcher import Launch

SMALL = 64
LARGE = 2**14

BLOCK_ROWS = 512
"""Rows that are grouped at a time."""

DEFAULT = {"PROGRAMS": 2, "ROWS": 64, "BLOCK": 128, "STAGES": 3, "num_warps": 4}
"""``PROGRAMS``: for each multiprocessor, of all parts of the columns together."""


@triton.jit(do_not_specialize=["rows", "blocks", "big_first", "small_first"])
def count_kernel(
    BIG, LITTLE, KEYS, COUNTS, BEFORE, rows, blocks, big_first, small_first, sti, GROUPS: tl.constexpr,
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
def _first_group(TOTALS, blocks, row, GROUPS: tl.constexpr):
    """The group that a row of ORDER is in; the last one from the end on."""
    ends = tl.load(TOTALS + (tl.arange(0, GROUPS) + 1) * blocks - 1)
    return tl.minimum(tl.sum((ends <= row).to(tl.int32), 0), GROUPS - 1)


@triton.jit
def _bounds(TOTALS, blocks, group):
    """Where a group begins and ends in ORDER."""
    begin = tl.load(TOTALS + group * blocks - 1, mask=group > 0, other=0)
    return begin, tl.load(TOTALS + (group + 1) * blocks - 1)


@triton.jit(do_not_specialize=["blocks", "rows", "share"])
def sum_kernel(
    X, ORDER, TAKEN, TOTALS, PARTIAL, blocks, rows, share, stx, GROUPS: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A program has ``share`` rows of ORDER and ``BLOCK`` columns."""
    PARTS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    program = tl.program_id(0) // PARTS
    c = (tl.program_id(0) % PARTS) * BLOCK + tl.arange(0, BLOCK)
    place = tl.arange(0, 128)[:, None]
    first, stop = program * share, tl.minimum((program + 1) * share, rows)
    # From the first group to the last, with or without rows: all that PARTIAL has is read for the small table.
    since = tl.where(program == 0, 0, _first_group(TOTALS, blocks, first, GROUPS))
    last = _first_group(TOTALS, blocks, (program + 1) * share, GROUPS)
    if program == tl.num_programs(0) // PARTS - 1:
        last = GROUPS - 1
    for group in range(since, last + 1):
        begin, end = _bounds(TOTALS, blocks, group)
        begin, end = tl.maximum(begin, first), tl.minimum(end, stop)
        acc = tl.zeros([128, BLOCK], tl.float32)
        for i in tl.range(begin, end, ROWS, num_stages=STAGES):
            lane = i + tl.arange(0, ROWS)
            r = tl.load(ORDER + lane, mask=lane < end, other=0)
            key = tl.load(TAKEN + lane, mask=lane < end, other=0)[None, :]
            mask = (lane < end)[:, None] & (c < WIDTH)[None, :]
            x = tl.load(X + r.to(tl.int64)[:, None] * stx + c[None, :], mask=mask, other=0)
            who = tl.where(place < 64, key % 64, 64 + key // 65536) == place
            acc = tl.dot(who.to(x.dtype), x, acc)
        at = ((program + group).to(tl.int64) * 128 + place) * WIDTH + c[None, :]
        tl.store(PARTIAL + at, acc, mask=(place < 128) & (c < WIDTH)[None, :])


@triton.jit
def _finish(PARTIAL, first, stop, place, c, WIDTH: tl.constexpr, AT_ONCE: tl.constexpr):
    """Sums of places ``first .. stop`` of PARTIAL, for row ``place`` and column c of each."""
    acc = tl.zeros([AT_ONCE, c.shape[0]], tl.float32)
    for i in range(first, stop, AT_ONCE):
        slot = i + tl.arange(0, AT_ONCE)[:, None]
        at = (slot.to(tl.int64) * 128 + place[None, :]) * WIDTH + c[None, :]
        acc += tl.load(PARTIAL + at, mask=(slot < stop) & (c < WIDTH)[None, :], other=0.0)
    return tl.sum(acc, 0)


@triton.jit(do_not_specialize=["blocks", "share", "slots", "big_first", "small_first"])
def finish_kernel(
    OUT, PARTIAL, TOTALS, blocks, share, slots, big_first, small_first, BIG: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A program has four rows of the large table, of ``BIG`` rows, or one of the other, and ``BLOCK`` columns."""
    PARTS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    tile = tl.program_id(0) // PARTS
    column = (tl.program_id(0) % PARTS) * BLOCK
    if tile < (BIG + 3) // 4:
        row = tile * 4 + tl.arange(0, 4 * BLOCK) // BLOCK
        c = column + tl.arange(0, 4 * BLOCK) % BLOCK
        group = tile // 16
        begin, end = _bounds(TOTALS, blocks, group)
        stop = tl.where(end > begin, (end - 1) // share + group + 1, 0)
        total = _finish(PARTIAL, begin // share + group, stop, row % 64, c, WIDTH, 8)
        at = OUT + (big_first + row).to(tl.int64) * WIDTH + c
        tl.store(at, total.to(OUT.dtype.element_ty), mask=(row < BIG) & (c < WIDTH))
    else:
        small = tile - (BIG + 3) // 4
        columns = column + tl.arange(0, BLOCK)
        sums = _finish(PARTIAL, 0, slots, tl.zeros_like(columns) + small + 64, columns, WIDTH, 64)
        place = OUT + (small_first + small).to(tl.int64) * WIDTH + columns
        tl.store(place, sums.to(OUT.dtype.element_ty), mask=columns < WIDTH)


def supports(values: Tensor, sizes: Sequence[int]) -> bool:
    """Whether the kernels take these: 16-bit, two tables, one small."""
    fits = len(sizes) == 2 and 0 < min(sizes) <= SMALL and max(sizes) <= LARGE
    return fits and values.dtype in (torch.bfloat16, torch.float16) and values.numel() > 0


def table_sum(values: Tensor, index: Tensor, sizes: Sequence[int]) -> Tensor:
    """``reference.table_sum`` of ``values [T, W]`` whose last dim is contiguous."""
    (rows, width), big = values.shape, int(sizes[1] > sizes[0])
    firsts, groups = (0, sizes[0]), max(16, triton.next_power_of_2(triton.cdiv(sizes[big], 64)))
    count, order, total, finish, most = _launches(values.device, values.dtype, width, groups, sizes[big])
    blocks = triton.cdiv(rows, BLOCK_ROWS)
    sides = (rows, rows, rows, blocks * groups, blocks * groups)
    keys, ordered, taken, counts, before = (values.new_empty(side, dtype=torch.int32) for side in sides)
    tensors, numbers = (index[:, big], index[:, 1 - big], keys, counts, before), (rows, blocks)
    count.start(blocks, tensors, (*numbers, firsts[big], firsts[1 - big]), (index.stride(0),))
    totals = counts.cumsum(0, dtype=torch.int32)
    order.start(blocks, (keys, counts, totals, before, ordered, taken), numbers)
    parts = triton.cdiv(width, total.constants["BLOCK"])
    programs = max(1, min(most // parts, triton.cdiv(rows, 256)))
    share = triton.cdiv(triton.cdiv(rows, programs), total.constants["ROWS"]) * total.constants["ROWS"]
    slots = programs + groups - 1
    partial = values.new_empty(slots, 128, width, dtype=torch.float32)
    out = values.new_empty(sum(sizes), width)
    rest = (values.stride(0),)
    total.start(programs * parts, (values, ordered, taken, totals, partial), (blocks, rows, share), rest)
    after = (triton.cdiv(sizes[big], 4) + sizes[1 - big]) * parts
    finish.start(after, (out, partial, totals), (blocks, share, slots, firsts[big], firsts[1 - big]))
    return out


@memory_tuning.plan
def _launches(
    device: torch.device, dtype: torch.dtype, width: int, groups: int, big: int
) -> tuple[Launch, Launch, Launch, Launch, int]:
    """The four kernels, and the most programs of the third, of all parts of the columns together."""
    tuned = 64 if width <= 64 else 256  # a tile has 64 columns or 128, however wide the rows are
    config = memory_tuning.find("tables", device, dtype, tuned, 1) or DEFAULT
    grouping = {"GROUPS": groups, "ROWS": BLOCK_ROWS}
    sums = {"WIDTH": width, "BLOCK": min(config["BLOCK"], max(64, triton.next_power_of_2(width)))}
    own = {"GROUPS": groups, **{name: config[name] for name in ("ROWS", "STAGES", "num_warps")}}
    return (
        Launch(count_kernel, grouping),
        Launch(order_kernel, grouping),
        Launch(sum_kernel, {**sums, **own}),
        Launch(finish_kernel, {**sums, "BIG": big}),
        config["PROGRAMS"] * _processors(device),
    )


@cache
def _processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 3 in the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3
