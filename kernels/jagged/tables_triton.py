"""Gradients of two embedding tables from one pass over the rows that took from both, on the GPU.

``out[p]`` = sum of the rows that took p from the large table, and the same for the small one, of at most ``SMALL``
rows. Rows are grouped by 64 neighbours of the large table; a tile of a group, times the 0/1 matrices of who took what,
gives the sums of those 64 and of all of the small table on the tensor cores: 16-bit values times 1, summed in float32.
All programs have as many tiles and write what they have at the end of a group, and at their end for the small table;
that is added up in a fixed order, so the result has the same bits in every run. A value that is not finite makes the
sums of all that its program has NaN.

Grouping is a counting sort: rows of each group in a chunk of rows are counted, each chunk then adds up the counts of
all and knows where its rows go. A group has room for whole tiles; what is left of its last tile is marked as no row.
All but the last step is also scheduled by hand for Hopper, in ``tables_hopper.py``.

Shapes: X ``[T, W]``, BIG, LITTLE: int64, the choices of a row with the strides ``sti``; KEYS int32 ``[T]``, the choice
of the large table plus 2^16 times the other; TOTALS int32 ``[chunks, groups]``; ENDS int32 ``[groups]``, in tiles.
TAKEN int64 ``[tiles, TILE]``, rows in groups: the row, or -1, in the low half, then ``MARK`` plus the place within
the 64 of the large table, then ``MARK`` plus the choice of the other. PARTIAL float32 ``[programs + groups - 1, 64,
W]``: what program p has of group g stands at p + g, which is another place for each pair that occurs, since one of the
two goes up by one from pair to pair; LEAST float32 ``[programs, 64, W]``, the same for the small table.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.common import memory_tuning
from kernels.common.launcher import Launch
from kernels.jagged import tables_hopper
from kernels.jagged.tables_hopper import MARK as _MARK

SMALL = 64
LARGE = 2**14

MARK = tl.constexpr(_MARK.value)

CHUNKS = 512
"""The most chunks of rows, which a program each groups; a power of two."""

AT_ONCE = 512
"""Rows that such a program has in its registers."""

WARPS, PARTS = 4, 8
"""Of such a program in ``tables_hopper.py``, which has as many times 32 rows in each warp's registers."""

DEFAULT = {"PROGRAMS": 2, "TILE": 64, "BLOCK": 128, "STAGES": 3, "num_warps": 4}
"""``PROGRAMS``: for each multiprocessor, of all parts of the columns together. ``STAY`` in their place: kernels of
``tables_hopper.py``, with these for what they do not take under ``plain``."""


@triton.jit(do_not_specialize=["rows", "chunk", "big_first", "small_first"])
def count_kernel(
    BIG, LITTLE, KEYS, TOTALS, rows, chunk, big_first, small_first, sti, GROUPS: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Keys of a chunk of rows, and how many of them are of each group."""
    first = tl.program_id(0) * chunk
    counts = tl.zeros([GROUPS], tl.int32)
    for start in range(first, tl.minimum(first + chunk, rows), ROWS):
        r = start + tl.arange(0, ROWS)
        live = r < rows
        big = (tl.load(BIG + r.to(tl.int64) * sti, mask=live, other=0) - big_first).to(tl.int32)
        small = (tl.load(LITTLE + r.to(tl.int64) * sti, mask=live, other=0) - small_first).to(tl.int32)
        tl.store(KEYS + r, big + 65536 * small, mask=live)
        counts += tl.histogram(tl.where(live, big // 64, 0), GROUPS, mask=live)
    tl.store(TOTALS + tl.program_id(0) * GROUPS + tl.arange(0, GROUPS), counts)


@triton.jit(do_not_specialize=["rows", "chunk"])
def order_kernel(
    KEYS, TOTALS, ENDS, TAKEN, rows, chunk, GROUPS: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Writes the rows of a chunk and what they took to their places, and what fills the tiles of some groups."""
    COUNTED: tl.constexpr = 8192 // GROUPS
    program, programs = tl.program_id(0), tl.num_programs(0)
    g, lane = tl.arange(0, GROUPS), tl.arange(0, ROWS)
    total, before = tl.zeros([GROUPS], tl.int32), tl.zeros([GROUPS], tl.int32)
    for i in range(0, programs, COUNTED):
        other = i + tl.arange(0, COUNTED)[:, None]
        totals = tl.load(TOTALS + other * GROUPS + g[None, :], mask=other < programs, other=0)
        total += tl.sum(totals, 0)
        before += tl.sum(tl.where(other < program, totals, 0), 0)
    room = (total + TILE - 1) // TILE * TILE
    ends = tl.cumsum(room, 0)
    if program == 0:
        tl.store(ENDS + g, ends // TILE)
    for filled in range(program, GROUPS, programs):
        end = tl.sum(tl.where(g == filled, ends, 0), 0)
        no_row = end - tl.sum(tl.where(g == filled, room - total, 0), 0) + tl.arange(0, TILE)
        tl.store(TAKEN + no_row, tl.full([TILE], 4294967295, tl.int64), mask=no_row < end)
    before += ends - room
    for start in range(program * chunk, tl.minimum((program + 1) * chunk, rows), ROWS):
        live = start + lane < rows
        group = tl.load(KEYS + start + lane, mask=live, other=0) % 65536 // 64
        counts = tl.histogram(group, GROUPS, mask=live)
        ordered = tl.sort(tl.where(live, group, GROUPS) * ROWS + lane)
        live = ordered < GROUPS * ROWS
        group = tl.where(live, ordered // ROWS, 0)
        place = tl.gather(before + counts - tl.cumsum(counts, 0), group, 0) + lane
        before += counts
        r = start + ordered % ROWS
        key = tl.load(KEYS + r, mask=live, other=0)
        took = (key % 64 + MARK).to(tl.int64) << 32 | (key // 65536 + MARK).to(tl.int64) << 48
        tl.store(TAKEN + place, took | r.to(tl.int64), mask=live)


@triton.jit
def _share(ENDS, programs, GROUPS: tl.constexpr):
    """Tiles that there are, and of each program."""
    tiles = tl.load(ENDS + GROUPS - 1)
    return tiles, (tiles + programs - 1) // programs


@triton.jit
def _bounds(ENDS, group):
    """Where the tiles of a group begin and end."""
    return tl.load(ENDS + group - 1, mask=group > 0, other=0), tl.load(ENDS + group)


@triton.jit(do_not_specialize=["programs"])
def sum_kernel(
    X, TAKEN, ENDS, PARTIAL, LEAST, programs, stx, GROUPS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    TILE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A program has equally many tiles and ``BLOCK`` columns."""
    PARTS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    program = tl.program_id(0) // PARTS
    tiles, share = _share(ENDS, programs, GROUPS)
    first, stop = program * share, tl.minimum((program + 1) * share, tiles)
    if first >= stop:
        return
    c = (tl.program_id(0) % PARTS) * BLOCK + tl.arange(0, BLOCK)
    inside = (c < WIDTH)[None, :]
    place = tl.arange(0, 128)[:, None]
    to = place % 64 * WIDTH + c[None, :]
    acc = tl.zeros([128, BLOCK], tl.float32)
    ends = tl.load(ENDS + tl.arange(0, GROUPS))
    for group in range(tl.sum((ends <= first).to(tl.int32), 0), tl.sum((ends < stop).to(tl.int32), 0) + 1):
        begin, end = _bounds(ENDS, group)
        begin, end = tl.maximum(begin, first), tl.minimum(end, stop)
        for i in tl.range(begin * TILE, end * TILE, TILE, num_stages=STAGES):
            taken = tl.load(TAKEN + i + tl.arange(0, TILE))
            r = taken.to(tl.int32)
            x = tl.load(X + r.to(tl.int64)[:, None] * stx + c[None, :], mask=(r >= 0)[:, None] & inside, other=0)
            big, small = (taken >> 32).to(tl.int32) & 65535, (taken >> 48).to(tl.int32) + 64
            who = tl.where(place < 64, big[None, :], small[None, :]) == place + MARK
            acc = tl.dot(who.to(x.dtype), x, acc)
        tl.store(PARTIAL + (program + group).to(tl.int64) * (64 * WIDTH) + to, acc, mask=(place < 64) & inside)
        acc = tl.where(place < 64, 0.0, acc)
    tl.store(LEAST + program.to(tl.int64) * (64 * WIDTH) + to, acc, mask=(place >= 64) & inside)


@triton.jit
def _finish(PARTS, first, stop, place, c, WIDTH: tl.constexpr, SLOTS: tl.constexpr):
    """Sums of places ``first .. stop`` of PARTIAL or LEAST, for row ``place`` and column c of each."""
    acc = tl.zeros([SLOTS, c.shape[0]], tl.float32)
    for i in range(first, stop, SLOTS):
        slot = i + tl.arange(0, SLOTS)[:, None]
        at = (slot.to(tl.int64) * 64 + place[None, :]) * WIDTH + c[None, :]
        acc += tl.load(PARTS + at, mask=(slot < stop) & (c < WIDTH)[None, :], other=0.0)
    return tl.sum(acc, 0)


@triton.jit(do_not_specialize=["programs", "big_first", "small_first"])
def finish_kernel(
    OUT, PARTIAL, LEAST, ENDS, programs, big_first, small_first, BIG: tl.constexpr, GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """A program has 16 rows of the large table, of ``BIG`` rows, or one of the other, and 32 columns."""
    PARTS: tl.constexpr = (WIDTH + 31) // 32
    tile = tl.program_id(0) // PARTS
    column = (tl.program_id(0) % PARTS) * 32
    tiles, share = _share(ENDS, programs, GROUPS)
    if tile < (BIG + 15) // 16:
        row = tile * 16 + tl.arange(0, 512) // 32
        c = column + tl.arange(0, 512) % 32
        group = tile // 4
        begin, end = _bounds(ENDS, group)
        stop = tl.where(end > begin, (end - 1) // share + group + 1, 0)
        total = _finish(PARTIAL, begin // share + group, stop, row % 64, c, WIDTH, 8)
        at = OUT + (big_first + row).to(tl.int64) * WIDTH + c
        tl.store(at, total.to(OUT.dtype.element_ty), mask=(row < BIG) & (c < WIDTH))
    else:
        small = tile - (BIG + 15) // 16
        columns = column + tl.arange(0, 32)
        used = (tiles + share - 1) // share
        sums = _finish(LEAST, 0, used, tl.zeros_like(columns) + small, columns, WIDTH, 256)
        to = OUT + (small_first + small).to(tl.int64) * WIDTH + columns
        tl.store(to, sums.to(OUT.dtype.element_ty), mask=columns < WIDTH)


def supports(values: Tensor, sizes: Sequence[int]) -> bool:
    """Whether the kernels take these: 16-bit, two tables, one small."""
    fits = len(sizes) == 2 and 0 < min(sizes) <= SMALL and max(sizes) <= LARGE
    return fits and values.dtype in (torch.bfloat16, torch.float16) and values.numel() > 0


def table_sum(values: Tensor, index: Tensor, sizes: Sequence[int]) -> Tensor:
    """``reference.table_sum`` of ``values [T, W]`` whose last dim is contiguous."""
    (rows, width), big = values.shape, int(sizes[1] > sizes[0])
    firsts, groups = (0, sizes[0]), max(32, triton.next_power_of_2(triton.cdiv(sizes[big], 64)))
    wide = (values.data_ptr() | 2 * width | 2 * values.stride(0)) & 31 == 0
    launches, step, most = _launches(values.device, values.dtype, width, groups, sizes[big], wide)
    count, order, total, finish = launches
    chunk = triton.cdiv(rows, CHUNKS * step) * step
    chunks, tile = triton.cdiv(rows, chunk), total.constants["TILE"]
    programs = max(1, min(most, triton.cdiv(rows, 256)))
    keys, totals, ends = (values.new_empty(n, dtype=torch.int32) for n in (rows, chunks * groups, groups))
    taken = values.new_empty((triton.cdiv(rows, tile) + groups) * tile, dtype=torch.int64)
    partial, least = (values.new_empty(n, 64, width, dtype=torch.float32) for n in (programs + groups - 1, programs))
    out = values.new_empty(sum(sizes), width)
    counted: tuple[Tensor, ...] = (keys, totals)
    if "PARTS" in count.constants:
        counted = (keys, totals, values.new_empty(chunks * WARPS * groups, dtype=torch.int32))
    places = (firsts[big], firsts[1 - big])
    tensors, strides = (index[:, big], index[:, 1 - big], *counted), (index.stride(0),)
    count.start(chunks, tensors, (rows, chunk, *places), strides)
    order.start(chunks, (*counted, ends, taken), (rows, chunk))
    parts = triton.cdiv(width, total.constants["BLOCK"])
    total.start(programs * parts, (values, taken, ends, partial, least), (programs,), (values.stride(0),))
    after = (triton.cdiv(sizes[big], 16) + sizes[1 - big]) * triton.cdiv(width, 32)
    finish.start(after, (out, partial, least, ends), (programs, *places))
    return out


@memory_tuning.plan
def _launches(
    device: torch.device, dtype: torch.dtype, width: int, groups: int, big: int, wide: bool
) -> tuple[tuple[Launch, Launch, Launch, Launch], int, int]:
    """The four kernels, rows that a program groups at a time, and the most programs for each part of the columns.

    ``wide``: whether rows begin at multiples of 32 bytes, by which the compiler knows that 16 can be copied at a time.
    """
    tuned = 64 if width <= 64 else 256  # a tile has 64 columns or more, however wide the rows are
    config: dict[str, Any] = dict(memory_tuning.find("tables", device, dtype, tuned, 1) or DEFAULT)
    plain = config.pop("plain", DEFAULT)
    if "STAY" in config and not (wide and groups == tables_hopper.GROUPS.value):
        config = dict(plain)
    config["BLOCK"] = min(config["BLOCK"], max(64, triton.next_power_of_2(width)))
    config["WIDTH"] = width
    stay = config.pop("STAY", 0)
    most = (stay or config.pop("PROGRAMS")) * _processors(device) // triton.cdiv(width, config["BLOCK"])
    finish = Launch(finish_kernel, {"GROUPS": groups, "WIDTH": width, "BIG": big})
    if stay:
        grouping = {"PARTS": PARTS, "num_warps": WARPS}
        count = Launch(tables_hopper.count_kernel, grouping)
        rest = {"TILE": config["TILE"], "COUNTED": CHUNKS, "maxnreg": 168}  # room for three programs
        order = Launch(tables_hopper.order_kernel, {**grouping, **rest})
        return (count, order, Launch(tables_hopper.sum_kernel, config), finish), 32 * PARTS * WARPS, most
    config["GROUPS"] = groups
    grouping = {"GROUPS": groups, "ROWS": AT_ONCE, "num_warps": 8}
    count, order = Launch(count_kernel, grouping), Launch(order_kernel, {**grouping, "TILE": config["TILE"]})
    return (count, order, Launch(sum_kernel, config), finish), AT_ONCE, most


@cache
def _processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 3 in the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3
