"""Kernels of ``tables_triton.py`` scheduled by hand, for Hopper and tables of at most 2,048 rows; names as there.

Grouping: each warp has a run of rows, 32 at a time. A lane counts the rows of one of the 32 groups, and votes of the
warp say which rows are of the same. On an H200, ordering takes 10 and 27 us so (rows of 256 elements, rows of 64), 5
and 18 of them for writes of 8 bytes here and there; prefix sums of zeros and ones for each group made it 21 and 67.

The pass: rows come to shared memory by ``cp.async`` several tiles ahead, and which rows these are as many tiles before
that. Read from global memory for the next tile only, these were waited for twice a tile: 98 and 109 us in place of 80.
The 0/1 matrices are made in registers, two elements an instruction, and the sums of the small table stay to a
program's end. No faster: programs of 256 columns, tiles of 32 or 128 rows, more of them ahead, rows that leave the L2
cache first.

Shapes: COUNTS int32 ``[programs, warps, 32]``.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

MARK = gl.constexpr(0x4300)
"""Added to 0 .. 127: patterns that are numbers, and different ones, of both 16-bit types."""

GROUPS = gl.constexpr(32)
"""As many as a warp has lanes."""


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _votes(bit):
    """The bits of a warp's lanes."""
    text: gl.constexpr = "{ .reg .pred p; setp.ne.s32 p, $1, 0; vote.sync.ballot.b32 $0, p, 0xffffffff; }"
    return gl.inline_asm_elementwise(text, "=r,r", [bit], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _bits(x):
    """How many bits are set."""
    return gl.inline_asm_elementwise("popc.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _equal(group, live, lane):
    """The lanes whose group is this lane's, and those whose group is the number of this lane."""
    same = _votes(live)
    own = same
    for i in gl.static_range(5):
        bit = group >> i & 1
        votes = _votes(bit)
        same = same & (votes ^ (bit - 1))
        own = own & (votes ^ ((lane >> i & 1) - 1))
    return same, own


@gluon.jit
def _places(first, run, PARTS: gl.constexpr, RUNS: gl.constexpr):
    """The first rows of each warp of a program, ``PARTS`` times 32, and the lanes."""
    warp = gl.arange(0, gl.num_warps(), layout=gl.SliceLayout(1, gl.SliceLayout(2, RUNS)))[:, None][:, :, None]
    part = gl.arange(0, PARTS, layout=gl.SliceLayout(0, gl.SliceLayout(2, RUNS)))[None, :][:, :, None]
    lane = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(1, RUNS)))[None, :][:, None, :]
    return first + warp * run + part * 32 + lane, lane


@gluon.jit
def _matrix(ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    """Rows and columns of a matrix of 32 columns."""
    r = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))[:, None]
    return r, gl.arange(0, 32, layout=gl.SliceLayout(0, LAYOUT))[None, :]


@gluon.jit(do_not_specialize=["rows", "chunk", "big_first", "small_first"])
def count_kernel(
    BIG, LITTLE, KEYS, TOTALS, COUNTS, rows, chunk, big_first, small_first, sti, PARTS: gl.constexpr
):  # fmt: skip
    """Keys of a chunk of rows, and how many of them are of each group, in all and for each warp."""
    WARPS: gl.constexpr = gl.num_warps()
    RUNS: gl.constexpr = gl.BlockedLayout([1, PARTS, 1], [1, 1, 32], [WARPS, 1, 1], [2, 1, 0])
    MATRIX: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [WARPS, 1], [1, 0])
    program, run = gl.program_id(0), chunk // WARPS
    r, lane = _places(program * chunk, run, PARTS, RUNS)
    counts = gl.zeros([WARPS, 32], gl.int32, gl.SliceLayout(1, RUNS))
    for _ in range(0, run, 32 * PARTS):
        live = r < rows
        big = (gl.load(BIG + r.to(gl.int64) * sti, mask=live, other=0) - big_first).to(gl.int32)
        small = (gl.load(LITTLE + r.to(gl.int64) * sti, mask=live, other=0) - small_first).to(gl.int32)
        gl.store(KEYS + r, big + 65536 * small, mask=live)
        _, own = _equal(big >> 6, live.to(gl.int32), lane)
        counts += gl.sum(_bits(own), 1)
        r += 32 * PARTS
    counts = gl.convert_layout(counts, MATRIX)
    warp, group = _matrix(WARPS, MATRIX)
    gl.store(COUNTS + (program * WARPS + warp) * 32 + group, counts)
    group = gl.arange(0, 32, layout=gl.SliceLayout(0, MATRIX))
    gl.store(TOTALS + program * 32 + group, gl.sum(counts, 0))


@gluon.jit(do_not_specialize=["rows", "chunk"])
def order_kernel(
    KEYS, TOTALS, COUNTS, ENDS, TAKEN, rows, chunk, TILE: gl.constexpr, COUNTED: gl.constexpr, PARTS: gl.constexpr
):  # fmt: skip
    """Writes rows and what they took to their places, and what fills the tiles of some groups.

    There are at most ``COUNTED`` programs.
    """
    WARPS: gl.constexpr = gl.num_warps()
    RUNS: gl.constexpr = gl.BlockedLayout([1, PARTS, 1], [1, 1, 32], [WARPS, 1, 1], [2, 1, 0])
    MATRIX: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [WARPS, 1], [1, 0])
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    program, programs, run = gl.program_id(0), gl.num_programs(0), chunk // WARPS
    r, lane = _places(program * chunk, run, PARTS, RUNS)
    keys = gl.load(KEYS + r, mask=r < rows, other=0)
    other, column = _matrix(COUNTED, MATRIX)
    totals = gl.load(TOTALS + other * 32 + column, mask=other < programs, other=0)
    warp, column = _matrix(WARPS, MATRIX)
    own = gl.load(COUNTS + (program * WARPS + warp) * 32 + column)
    total = gl.convert_layout(gl.sum(totals, 0), LINE)
    earlier = gl.sum(gl.where(other < program, totals, 0), 0)
    room = (total + TILE - 1) // TILE * TILE
    ends = gl.associative_scan(room, 0, _add)
    g = gl.arange(0, 32, layout=LINE)
    if program == 0:
        gl.store(ENDS + g, ends // TILE)
    for filled in range(program, GROUPS, programs):
        end = gl.sum(gl.where(g == filled, ends, 0), 0)
        no_row = end - gl.sum(gl.where(g == filled, room - total, 0), 0) + gl.arange(0, TILE, layout=LINE)
        gl.store(TAKEN + no_row, (no_row * 0 - 1).to(gl.int64) & 4294967295, mask=no_row < end)
    begin = gl.convert_layout(ends - room, gl.SliceLayout(0, MATRIX)) + earlier
    before = begin[None, :] + gl.associative_scan(own, 0, _add) - own
    before = gl.convert_layout(before, gl.SliceLayout(1, RUNS))
    for _ in range(0, run, 32 * PARTS):
        key = keys
        after = r + 32 * PARTS
        keys = gl.load(KEYS + after, mask=after < rows, other=0)
        group = (key & 65535) >> 6
        same, counted = _equal(group, (r < rows).to(gl.int32), lane)
        counts = _bits(counted)
        starts = before[:, None, :] + gl.associative_scan(counts, 1, _add) - counts
        place = gl.gather(starts, group, 2) + _bits(same & ((1 << lane) - 1))
        before += gl.sum(counts, 1)
        took = ((key & 63) + MARK).to(gl.int64) << 32 | ((key >> 16) + MARK).to(gl.int64) << 48
        gl.store(TAKEN + place, took | r.to(gl.int64), mask=r < rows)
        r = after


@gluon.jit
def _copy(slot, X, rows, there, stx, first, WIDTH: gl.constexpr, WIDE: gl.constexpr):
    """Asks for the rows of a tile that is ``there``; zeros for what is no row."""
    r = rows.load(gl.SliceLayout(1, WIDE)).to(gl.int32)[:, None]
    c = first + gl.arange(0, slot.shape[1], layout=gl.SliceLayout(0, WIDE))
    mask = (r >= 0) & there & (c < WIDTH)[None, :]
    async_copy.async_copy_global_to_shared(slot, X + r.to(gl.int64) * stx + c[None, :], mask=mask)


@gluon.jit
def _copy_taken(rows, TAKEN, tile, stop, LINE: gl.constexpr):
    """Asks for what a tile has of TAKEN."""
    lane = gl.arange(0, rows.shape[0], layout=LINE)
    async_copy.async_copy_global_to_shared(rows, TAKEN + tile * rows.shape[0] + lane, mask=lane * 0 + tile < stop)


@gluon.jit
def _same(took, place, dtype: gl.constexpr):
    """1 where a row took the place, else 0."""
    took, place = gl.broadcast(took.to(gl.int16)[None, :], place[:, None])
    kind: gl.constexpr = "bf16x2" if dtype == gl.bfloat16 else "f16x2"
    text: gl.constexpr = "set.eq." + kind + "." + kind + " $0, $1, $2;"
    same = gl.inline_asm_elementwise(text, "=r,r,r", [took, place], dtype=gl.int16, is_pure=False, pack=2)
    return same.to(dtype, bitcast=True)


@gluon.jit
def _put(base, value, WIDTH: gl.constexpr, first, SUMS: gl.constexpr):
    """Writes sums of 64 places."""
    place = gl.arange(0, 64, layout=gl.SliceLayout(1, SUMS))
    c = first + gl.arange(0, value.shape[1], layout=gl.SliceLayout(0, SUMS))
    mask = (place < 64)[:, None] & (c < WIDTH)[None, :]
    gl.store(base + place[:, None] * WIDTH + c[None, :], value, mask=mask)


@gluon.jit(do_not_specialize=["programs"])
def sum_kernel(
    X, TAKEN, ENDS, PARTIAL, LEAST, programs, stx, WIDTH: gl.constexpr, BLOCK: gl.constexpr, TILE: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """A program has equally many tiles and ``BLOCK`` columns."""
    dtype: gl.constexpr = X.dtype.element_ty
    WARPS: gl.constexpr = gl.num_warps()
    PARTS: gl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    KEPT: gl.constexpr = 2 * STAGES  # of which two more than are in use at a time
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, WARPS // 4], [16, BLOCK * 4 // WARPS, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    TOOK: gl.constexpr = gl.SliceLayout(0, LEFT)
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK, BLOCK // 8], [WARPS, 1], [1, 0])
    TILES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE, BLOCK], dtype)
    LINES: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    LINE: gl.constexpr = gl.BlockedLayout([2], [32], [WARPS], [0])
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    program = gl.program_id(0) // PARTS
    column = gl.program_id(0) % PARTS * BLOCK
    tiles = gl.load(ENDS + (GROUPS - 1))
    share = (tiles + programs - 1) // programs
    first = program * share
    stop = gl.minimum(first + share, tiles)
    if first >= stop:
        return
    ends = gl.load(ENDS + gl.arange(0, GROUPS, layout=LANES))
    group = gl.sum((ends <= first).to(gl.int32), 0)
    end = gl.load(ENDS + group)
    slots = gl.allocate_shared_memory(dtype, [STAGES, TILE, BLOCK], TILES)
    taken = gl.allocate_shared_memory(gl.int64, [KEPT, TILE], LINES)
    for ahead in gl.static_range(STAGES - 1):
        _copy_taken(taken.index(ahead), TAKEN, first + ahead, stop, LINE)
    async_copy.commit_group()
    async_copy.wait_group(0)
    tl.debug_barrier()
    for ahead in gl.static_range(STAGES - 1):
        _copy(slots.index(ahead), X, taken.index(ahead), first + ahead < stop, stx, column, WIDTH, WIDE)
        _copy_taken(taken.index(ahead + (STAGES - 1)), TAKEN, first + ahead + (STAGES - 1), stop, LINE)
        async_copy.commit_group()
    place = (gl.arange(0, 64, layout=gl.SliceLayout(1, LEFT)) + MARK).to(gl.int16)
    took = taken.index(0).load(TOOK)
    who_big, who_small = _same(took >> 32, place, dtype), _same(took >> 48, place, dtype)
    big = gl.zeros([64, BLOCK], gl.float32, SUMS)
    small = gl.zeros([64, BLOCK], gl.float32, SUMS)
    for i in range(0, stop - first):
        async_copy.wait_group(STAGES - 2)
        fence_async_shared()
        tl.debug_barrier()  # the tile is there for all warps, and none works on the one before it any more
        x = slots.index(i % STAGES)
        more_big = warpgroup_mma(who_big, x, big, is_async=True)
        more_small = warpgroup_mma(who_small, x, small, is_async=True)
        after = i + (STAGES - 1)
        took = taken.index((i + 1) % KEPT).load(TOOK)
        rows = taken.index(after % KEPT)
        _copy(slots.index(after % STAGES), X, rows, first + after < stop, stx, column, WIDTH, WIDE)
        after += STAGES - 1
        _copy_taken(taken.index(after % KEPT), TAKEN, first + after, stop, LINE)
        async_copy.commit_group()
        next_big, next_small = _same(took >> 32, place, dtype), _same(took >> 48, place, dtype)
        big, small, who_big, who_small = warpgroup_mma_wait(
            num_outstanding=0, deps=[more_big, more_small, who_big, who_small]
        )
        who_big, who_small = next_big, next_small
        tile = first + i + 1
        if (tile == end) | (tile == stop):
            _put(PARTIAL + (program + group).to(gl.int64) * (64 * WIDTH), big, WIDTH, column, SUMS)
            big = gl.zeros([64, BLOCK], gl.float32, SUMS)
            while (end <= tile) & (tile < stop):
                group += 1
                end = gl.load(ENDS + group)
    _put(LEAST + program.to(gl.int64) * (64 * WIDTH), small, WIDTH, column, SUMS)
    async_copy.wait_group(0)
