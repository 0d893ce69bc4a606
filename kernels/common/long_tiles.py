"""Tiles of long sequences for kernels scheduled by hand: who takes which, and what lies beyond a sequence's end.

A tile has ``2 ROWS`` rows of one sequence, half of them for each of two groups of four warps. Tiles are numbered as in
``kernels/common/sequences.py``; one warp of a program takes numbers from a counter and tells the others where each is.

With a window, tiles of a sequence that follow each other see much of the same. A program then takes tiles that do, and
blocks of the other side that the next one sees as well stay where they are in shared memory: of a tile's blocks, those
before ``keep`` are let go, and the next tile begins with the others. They must fit: else all are let go.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from kernels.common.sequence_search import find_sequence

ROWS = gl.constexpr(64)
"""Rows of a group; a tile has twice as many."""
SLOTS = gl.constexpr(4)
"""Places of tiles that are known ahead."""


@gluon.jit
def barriers(number: gl.constexpr, count: gl.constexpr):
    """So many barriers in shared memory, each for ``count`` arrivals."""
    bars = gl.allocate_shared_memory(gl.int64, [number, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(number):
        mbarrier.init(bars.index(i), count=count)
    return bars


@gluon.jit
def tell(places, place_full, place_free, item, row, left, first, length, low, high, place, shift, keep):
    """Leaves what ``told`` gives, for the tile ``item`` of this program; by one warp."""
    WIDE: gl.constexpr = places.shape[1]
    SAME: gl.constexpr = gl.BlockedLayout([WIDE], [32], [1], [0])
    slot = item % SLOTS
    mbarrier.wait(place_free.index(slot), (item // SLOTS + 1) & 1)
    i = gl.arange(0, WIDE, layout=SAME)
    x = gl.where(i == 0, row, gl.where(i == 1, left, gl.where(i == 2, first, length)))
    if WIDE > 8:
        shift = gl.where(i == 7, shift, keep)
    y = gl.where(i == 4, low, gl.where(i == 5, high, gl.where(i == 6, place, shift)))
    places.index(slot).store(gl.where(i < 4, x, y))
    tl.debug_barrier()
    mbarrier.arrive(place_full.index(slot))


@gluon.jit
def told(places, place_full, place_free, item, WARPS: gl.constexpr):
    """What ``schedule`` left for the tile ``item`` of this program.

    Returns:
        its first row; rows from there to the end of its sequence, 0 where there are no more tiles; first row and
        length of the other side, and the range there that counts; place of the first row in its sequence, of a query
        among the keys; how much further query i stands among the keys; with a window, up to where blocks are let go.
    """
    WIDE: gl.constexpr = places.shape[1]
    SAME: gl.constexpr = gl.BlockedLayout([WIDE], [32], [WARPS], [0])
    slot = item % SLOTS
    mbarrier.wait(place_full.index(slot), (item // SLOTS) & 1)
    x = places.index(slot).load(SAME)
    i = gl.arange(0, WIDE, layout=SAME)
    row = gl.sum(gl.where(i == 0, x, 0), 0)
    left = gl.sum(gl.where(i == 1, x, 0), 0)
    first = gl.sum(gl.where(i == 2, x, 0), 0)
    length = gl.sum(gl.where(i == 3, x, 0), 0)
    low = gl.sum(gl.where(i == 4, x, 0), 0)
    high = gl.sum(gl.where(i == 5, x, 0), 0)
    place = gl.sum(gl.where(i == 6, x, 0), 0)
    shift = gl.sum(gl.where(i == 7, x, 0), 0)
    keep = high
    if WIDE > 8:
        keep = gl.sum(gl.where(i == 8, x, 0), 0)
    tl.debug_barrier()
    mbarrier.arrive(place_free.index(slot))
    return row, left, first, length, low, high, place, shift, keep


@gluon.jit
def own_place(item, half: gl.constexpr, KEPT: gl.constexpr):
    """Where half a tile lies in shared memory, of ``KEPT`` halves that do, its barriers and the turn of these.

    Halves of three that lie in one place after another are of either group, which may not wait for a barrier of the
    other's: a phase that has not ended yet looks to it like the one behind that.
    """
    if KEPT % 2 == 0:
        TILES: gl.constexpr = KEPT // 2
        at = (item % TILES) * 2 + half
        return at, at, item // TILES
    else:
        return (item * 2 + half) % KEPT, (item % 2) * 2 + half, item // 2


@gluon.jit
def wait_for_place(own_free, item, half: gl.constexpr, KEPT: gl.constexpr):
    """Waits until the half is let go that lies where this one will."""
    if KEPT % 2 == 0:
        _, bar, turn = own_place(item, half, KEPT)
        mbarrier.wait(own_free.index(bar), (turn + 1) & 1)
    else:
        number = gl.maximum(item * 2 + half - KEPT, 0)
        mbarrier.wait(own_free.index(number % 4), (number // 4) & 1, pred=item * 2 + half >= KEPT)


@gluon.jit
def end_of(low, high, BLOCK: gl.constexpr):
    """Where the last block ends of those from ``low`` on that hold the range up to ``high``."""
    return low + (gl.maximum(high - low, 0) + BLOCK - 1) // BLOCK * BLOCK


@gluon.jit
def _near(
    across, window, high, more, CAUSAL: gl.constexpr, OF_KEYS: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr
):
    """Where the first block begins that a tile sees through a window, and up to where blocks are let go behind it.

    Blocks are counted from the start of the sequence, so that those of the next tile are the same.

    Args:
        across: place of the tile's first row among the rows of the other side.
        more: whether this program takes the next tile of the sequence next.
    """
    far = across
    if not (OF_KEYS and CAUSAL):
        far -= window
    low = gl.maximum(far, 0) // BLOCK * BLOCK
    keep = end_of(low, high, BLOCK)
    after = gl.maximum(far + 2 * ROWS, 0) // BLOCK * BLOCK
    if more & (keep - after <= BLOCK * STAGES):
        keep = gl.minimum(after, keep)
    return low, keep


@gluon.jit
def schedule(
    places, place_full, place_free, Own, Other, Counter, B, tiles, part, parts, window, kv_length,
    SOFTMAX: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, ROUNDS: gl.constexpr, OF_KEYS: gl.constexpr,
    DENSE: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The warp that looks for tiles: of queries, or of keys where ``OF_KEYS``; Own and Other are the offsets.

    Where ``DENSE``, the other side has ``kv_length`` rows in every sequence. With a window, of which a tile and the
    next share what fits ``STAGES`` blocks, each program has a row of tiles; with a wider one, programs share what they
    load in the L2 cache.
    """
    tile, item = part, part * 0
    if WINDOW:
        near = 2 * window <= BLOCK * STAGES
        step = parts
        if near:
            step = part * 0 + 1
            each = tiles // parts
            odd = tiles - each * parts
            tile = part * each + gl.minimum(part, odd)
            tiles = tile + each
            if part < odd:
                tiles += 1
    while tile < tiles:
        b = find_sequence(Own, B, tile, 2 * ROWS, 1, ROUNDS)
        row = gl.load(Own + b).to(gl.int32)
        rows = gl.load(Own + b + 1).to(gl.int32) - row
        if DENSE:
            first, length = b * kv_length, kv_length
        else:
            first = gl.load(Other + b).to(gl.int32)
            length = gl.load(Other + b + 1).to(gl.int32) - first
        start = (tile - b - row // (2 * ROWS)) * (2 * ROWS)
        if start < rows:
            shift = start * 0
            if SOFTMAX:
                shift = length - rows
            low, high = start * 0, length
            if OF_KEYS:
                shift = -shift
                place = start
                if CAUSAL:
                    low = gl.minimum(gl.maximum(start - shift, 0), length)
                if WINDOW:
                    high = gl.minimum(start + 2 * ROWS - shift + window, length)
            else:
                place = start + shift
                if WINDOW:
                    high = gl.minimum(place + 2 * ROWS + window, length)
                if CAUSAL:
                    high = gl.minimum(place + 2 * ROWS, high)
            keep = high
            if WINDOW:
                across = place
                if OF_KEYS:
                    across = start - shift
                more = near & (start + 2 * ROWS < rows) & (tile + 1 < tiles)
                low, keep = _near(across, window, high, more, CAUSAL, OF_KEYS, BLOCK, STAGES)
            row, left = row + start, rows - start
            tell(places, place_full, place_free, item, row, left, first, length, low, high, place, shift, keep)
            item += 1
        if WINDOW:  # all tiles have as much to do, and little: less than the counter takes
            tile += step
        else:
            tile = parts + gl.atomic_add(Counter, 1)
    zero = part * 0
    tell(places, place_full, place_free, item, zero, zero, zero, zero, zero, zero, zero, zero, zero)


@gluon.jit
def zero_beyond(x, rows, BLOCK: gl.constexpr, D: gl.constexpr):
    """Zeros in a block in shared memory from row ``rows`` on, where another sequence was read, by a group.

    Groups that share a block write the same.
    """
    PART: gl.constexpr = 16
    ZEROS: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (D // 8), D // 8], [4, 1], [1, 0])
    if rows < BLOCK:
        for i in gl.static_range(BLOCK // PART):
            part = x.slice(i * PART, PART)
            if rows <= i * PART:
                part.store(gl.zeros([PART, D], x.dtype, ZEROS))
            elif rows < (i + 1) * PART:
                at = i * PART + gl.arange(0, PART, layout=gl.SliceLayout(1, ZEROS))
                part.store(gl.where((at < rows)[:, None], part.load(ZEROS), 0.0).to(x.dtype))
        fence_async_shared()
        tl.debug_barrier()


@gluon.jit
def put_rows(out, tile, rows, base, stride, row, left, D: gl.constexpr):
    """Writes a group's rows from ``tile`` in shared memory, of which ``left`` are of the sequence; ends by itself."""
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (D // 8), D // 8], [4, 1], [1, 0])
    if left > 0:
        tile.store(out)
        fence_async_shared()
        tl.debug_barrier()
        if left >= ROWS:
            tma.async_copy_shared_to_global(rows, [row, 0], tile)
        else:
            own = gl.arange(0, ROWS, layout=gl.SliceLayout(1, WIDE))
            column = gl.arange(0, D, layout=gl.SliceLayout(0, WIDE))
            where = base + (row + own)[:, None].to(gl.int64) * stride + column[None, :]
            gl.store(where, tile.load(WIDE), mask=(own < left)[:, None])


@gluon.jit
def let_go(free, held):
    """Lets the next tile load into the place ``held``, whose rows ``put_rows`` wrote, once they are read; -1: none.

    A tile later, so that nothing waits for it.
    """
    tma.store_wait(0)
    tl.debug_barrier()
    if held >= 0:
        mbarrier.arrive(free.index(held))


@gluon.jit
def seen_by(
    low, high, place, shift, window, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, BLOCK: gl.constexpr,
    OF_KEYS: gl.constexpr,
):  # fmt: skip
    """The part of a tile's range that one group's rows, at ``place``, meet: from a block of it on, and to where."""
    first, last = low, high
    if OF_KEYS:
        if CAUSAL:
            first = gl.maximum(place - shift, first)
        if WINDOW:
            first = gl.maximum(place - shift - window, first)
            last = gl.minimum(place + ROWS - shift + window, last)
    else:
        if WINDOW:
            first = gl.maximum(place - window, first)
            last = gl.minimum(place + ROWS + window, last)
        if CAUSAL:
            last = gl.minimum(place + ROWS, last)
    first = low + (first - low) // BLOCK * BLOCK
    return gl.minimum(first, gl.maximum(high, low)), last


@gluon.jit
def free_block(free, j, keep, WINDOW: gl.constexpr):
    """Lets another block take the place of block j, unless that stays for the next tile."""
    if WINDOW:
        mbarrier.arrive(free, pred=j < keep)
    else:
        mbarrier.arrive(free)


@gluon.jit
def skip(
    low, high, keep, block, full, free, full2, free2, WINDOW: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    """Lets the blocks of a tile pass of which a group has no rows; returns the number of the next block to be let go.

    Blocks that stay for the next tile it leaves alone and does not count.
    """
    if WINDOW:
        high = gl.minimum(high, keep)
    for _ in range(low, high, BLOCK):
        slot = block % STAGES
        phase = (block // STAGES) & 1
        mbarrier.wait(full.index(slot), phase)
        mbarrier.arrive(free.index(slot))
        mbarrier.wait(full2.index(slot), phase)
        mbarrier.arrive(free2.index(slot))
        block += 1
    return block
