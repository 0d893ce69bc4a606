"""Block attention scheduled by hand for Hopper: the kernels of ``triton.py`` for heads of 256 and 128.

There, blocks of 32 KB, three forward and four backward, leave room for two programs and one on a multiprocessor, and a
program that computes or writes asks for nothing. Here programs stay and go from block to block: as soon as a product
has read a block's place in shared memory, they ask for the next one's rows there. Backward, queries and keys are read
to the last, and have a second place each where there is room.

Programs take equal runs of all blocks, a block's heads one after another. Slower, measured on an H200: neighbours that
take a block's heads at the same time, with rotary (.246 ms in place of .214, backward of heads of 256); heads of 128
forward (.097 in place of .090 with a program for each block).

Queries and keys lie in two halves, which rotary turns where they are. Names as in ``triton.py``. Rows are copied 16
bytes at a time: addresses are multiples of that, and strides of 16 elements.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from kernels.block_attention.reference import BLOCK as _BLOCK
from kernels.common.async_rows import copy_rows, write_rows
from kernels.common.sequence_search import find_sequence

BLOCK = gl.constexpr(_BLOCK)
LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def _place(left, tile, b, first, end):
    """Where a block starts in its sequence, and the rows of that; none where no block is ``left``."""
    start = (tile - b - (first // BLOCK).to(gl.int32)) * BLOCK
    rows = (end - first).to(gl.int32)
    if left <= 0:
        rows = rows * 0
    return start, rows


@gluon.jit
def _next(OFFSETS, left, h, tile, b, first, end, HEADS: gl.constexpr):
    """The next head, or the next tile and its sequence, which is the same or the one behind it."""
    left -= 1
    h += 1
    if h == HEADS:
        h = h * 0
        tile += 1
    if left > 0:  # noqa: SIM102
        if (end // BLOCK).to(gl.int32) + b + 1 <= tile:
            b += 1
            first = end
            end = gl.load(OFFSETS + b + 1)
    return left, h, tile, b, first, end


@gluon.jit
def _real(OFFSETS, left, h, tile, b, first, end, HEADS: gl.constexpr):
    """This tile or the next one that has rows: tiles are numbered with room between sequences."""
    start, rows = _place(left, tile, b, first, end)
    while (left > 0) & (start >= rows):
        left, h, tile, b, first, end = _next(OFFSETS, left, h, tile, b, first, end, HEADS)
        start, rows = _place(left, tile, b, first, end)
    return left, h, tile, b, first, end


@gluon.jit
def _begin(OFFSETS, B, blocks, HEADS: gl.constexpr, ROUNDS: gl.constexpr):
    """What a program begins with: how many heads of blocks it has, and the first of them."""
    program, programs = gl.program_id(0).to(gl.int64), gl.num_programs(0)
    low = (program * blocks * HEADS // programs).to(gl.int32)
    left = ((program + 1) * blocks * HEADS // programs).to(gl.int32) - low
    h = low % HEADS
    tile = low // HEADS
    b = find_sequence(OFFSETS, B, tile, BLOCK, gl.num_warps(), ROUNDS)
    first = gl.load(OFFSETS + b)
    end = gl.load(OFFSETS + b + 1)
    return _real(OFFSETS, left, h, tile, b, first, end, HEADS)


@gluon.jit
def _weights(s, logit, keys, LOGITS: gl.constexpr):
    """Softmax of the logits; keys beyond the sequence count 0."""
    column = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, LOGITS))
    s = gl.where((column < keys)[None, :], s * logit, float("-inf"))
    p = gl.exp2(s - gl.max(s, 1)[:, None])
    return p * (1.0 / gl.sum(p, 1))[:, None]


@gluon.jit
def _angles(POSITIONS, FREQUENCIES, start, rows, SIDE: gl.constexpr, COLUMNS: gl.constexpr, HALVES: gl.constexpr):
    """Cosine and sine of each row's angles, ``[BLOCK, SIDE]``, as ``triton.py`` has them."""
    r = start + gl.arange(0, BLOCK, layout=gl.SliceLayout(1, HALVES))
    i = gl.arange(0, SIDE, layout=gl.SliceLayout(0, HALVES))
    frequency = gl.load(FREQUENCIES + i)[None, :]
    at = POSITIONS + start * COLUMNS
    place = gl.load(POSITIONS + r * COLUMNS, mask=r < rows, other=0.0) - gl.load(at)
    angle = place[:, None] * frequency
    if COLUMNS == 2:
        place = gl.load(POSITIONS + r * 2 + 1, mask=r < rows, other=0.0) - gl.load(at + 1)
        angle = gl.where((i < SIDE // 2)[None, :], angle, place[:, None] * frequency)
    return _cos(angle), _sin(angle)


@gluon.jit
def _cos(x):
    return gl.inline_asm_elementwise("cos.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _sin(x):
    return gl.inline_asm_elementwise("sin.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _copy_halves(tiles, slot, base, stride, start, rows):
    """Both halves of rows."""
    copy_rows(tiles.index(2 * slot), base, stride, start, rows)
    copy_rows(tiles.index(2 * slot + 1), base + tiles.shape[2], stride, start, rows)


@gluon.jit
def _turn(first, second, cos, sin, HALVES: gl.constexpr):
    """Rotates both halves of rows where they are."""
    a = first.load(HALVES).to(gl.float32)
    b = second.load(HALVES).to(gl.float32)
    first.store((a * cos - b * sin).to(first.dtype))
    second.store((b * cos + a * sin).to(first.dtype))


@gluon.jit
def _logits(q, q2, k, k2, none):
    """``q k^T`` of two halves each."""
    s = warpgroup_mma(q, k.permute((1, 0)), none, use_acc=False, is_async=True)
    return warpgroup_mma(q2, k2.permute((1, 0)), s, is_async=True)


@gluon.jit
def _put_halves(base, a, b, cos, sin, stride, start, rows, COLUMNS: gl.constexpr):
    """Writes both halves of a gradient, turned back."""
    first, second = a, b
    if COLUMNS:
        first = a * cos + b * sin
        second = b * cos - a * sin
    write_rows(base, first, stride, start, rows, "")
    write_rows(base + a.shape[1], second, stride, start, rows, "")


@gluon.jit(do_not_specialize=["B", "blocks"])
def forward_kernel(
    Q, K, V, OUT, OFFSETS, POSITIONS, FREQUENCIES, B, blocks, scale, stq, shq, stk, shk, stv, shv,
    HEADS: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, COLUMNS: gl.constexpr, ROUNDS: gl.constexpr,
):  # fmt: skip
    """A program has a run of the ``blocks`` of each of the heads."""
    dtype: gl.constexpr = Q.dtype.element_ty
    WARPS: gl.constexpr = gl.num_warps()
    SIDE: gl.constexpr = D // 2
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, WARPS // 4], [16, BLOCK * 4 // WARPS, 16])
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, WARPS // 4], [16, D * 4 // WARPS, 16])
    HALVES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, WARPS // 4], [16, SIDE * 4 // WARPS, 16])
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK, D], dtype)
    HALF: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK, SIDE], dtype)
    left, h, tile, b, first, end = _begin(OFFSETS, B, blocks, HEADS, ROUNDS)
    if left <= 0:
        return
    q_tiles = gl.allocate_shared_memory(dtype, [2, BLOCK, SIDE], HALF)
    k_tiles = gl.allocate_shared_memory(dtype, [2, BLOCK, SIDE], HALF)
    v = gl.allocate_shared_memory(dtype, [1, BLOCK, D], TILE).index(0)
    q, q2, k, k2 = q_tiles.index(0), q_tiles.index(1), k_tiles.index(0), k_tiles.index(1)
    no_logits = gl.zeros([BLOCK, BLOCK], gl.float32, LOGITS)
    no_values = gl.zeros([BLOCK, D], gl.float32, VALUES)
    start, rows = _place(left, tile, b, first, end)
    _copy_halves(q_tiles, 0, Q + first * stq + h * shq, stq, start, rows)
    _copy_halves(k_tiles, 0, K + first * stk + h // GROUP * shk, stk, start, rows)
    async_copy.commit_group()
    copy_rows(v, V + first * stv + h // GROUP * shv, stv, start, rows)
    async_copy.commit_group()
    while left > 0:
        base, here, keys = OUT + (first * HEADS + h) * D, start, rows - start
        if COLUMNS:
            cos, sin = _angles(POSITIONS + first * COLUMNS, FREQUENCIES, start, rows, SIDE, COLUMNS, HALVES)
        left, h, tile, b, first, end = _next(OFFSETS, left, h, tile, b, first, end, HEADS)
        left, h, tile, b, first, end = _real(OFFSETS, left, h, tile, b, first, end, HEADS)
        start, rows = _place(left, tile, b, first, end)
        async_copy.wait_group(1)
        if COLUMNS:
            tl.debug_barrier()
            _turn(q, q2, cos, sin, HALVES)
            _turn(k, k2, cos, sin, HALVES)
        fence_async_shared()
        tl.debug_barrier()  # queries and keys are there for all warps
        s = warpgroup_mma_wait(num_outstanding=0, deps=[_logits(q, q2, k, k2, no_logits)])
        tl.debug_barrier()  # no warp reads them any more
        _copy_halves(q_tiles, 0, Q + first * stq + h * shq, stq, start, rows)
        _copy_halves(k_tiles, 0, K + first * stk + h // GROUP * shk, stk, start, rows)
        async_copy.commit_group()
        p = _weights(s, scale * LOG2E, keys, LOGITS)
        p = gl.convert_layout(p.to(dtype), gl.DotOperandLayout(0, VALUES, 2))
        async_copy.wait_group(1)
        fence_async_shared()
        tl.debug_barrier()  # values are there
        out = warpgroup_mma(p, v, no_values, use_acc=False, is_async=True)
        out, p = warpgroup_mma_wait(num_outstanding=0, deps=[out, p])
        tl.debug_barrier()
        copy_rows(v, V + first * stv + h // GROUP * shv, stv, start, rows)
        async_copy.commit_group()
        write_rows(base, out, HEADS * D, here, here + keys, "")
    async_copy.wait_group(0)


@gluon.jit(do_not_specialize=["B", "blocks"])
def backward_kernel(
    Q, K, V, DO, DQ, DK, DV, OFFSETS, POSITIONS, FREQUENCIES, B, blocks, scale, stq, shq, stk, shk, stv, shv, std, shd,
    HEADS: gl.constexpr, D: gl.constexpr, COLUMNS: gl.constexpr, ROUNDS: gl.constexpr,
    PLACES: gl.constexpr,
):  # fmt: skip
    """As ``forward_kernel``, for as many key heads as query heads; ``PLACES``: for queries and for keys, two or one."""
    dtype: gl.constexpr = Q.dtype.element_ty
    WARPS: gl.constexpr = gl.num_warps()
    SIDE: gl.constexpr = D // 2
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, WARPS // 4], [16, BLOCK * 4 // WARPS, 16])
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, WARPS // 4], [16, D * 4 // WARPS, 16])
    HALVES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, WARPS // 4], [16, SIDE * 4 // WARPS, 16])
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK, D], dtype)
    HALF: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK, SIDE], dtype)
    SQUARE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK, BLOCK], dtype)
    left, h, tile, b, first, end = _begin(OFFSETS, B, blocks, HEADS, ROUNDS)
    if left <= 0:
        return
    q_tiles = gl.allocate_shared_memory(dtype, [2 * PLACES, BLOCK, SIDE], HALF)
    k_tiles = gl.allocate_shared_memory(dtype, [2 * PLACES, BLOCK, SIDE], HALF)
    tiles = gl.allocate_shared_memory(dtype, [2, BLOCK, D], TILE)
    squares = gl.allocate_shared_memory(dtype, [2, BLOCK, BLOCK], SQUARE)
    v, do, p_tile, ds_tile = tiles.index(0), tiles.index(1), squares.index(0), squares.index(1)
    no_logits = gl.zeros([BLOCK, BLOCK], gl.float32, LOGITS)
    no_values = gl.zeros([BLOCK, D], gl.float32, VALUES)
    no_half = gl.zeros([BLOCK, SIDE], gl.float32, HALVES)
    start, rows = _place(left, tile, b, first, end)
    _copy_halves(q_tiles, 0, Q + first * stq + h * shq, stq, start, rows)
    _copy_halves(k_tiles, 0, K + first * stk + h * shk, stk, start, rows)
    copy_rows(v, V + first * stv + h * shv, stv, start, rows)
    copy_rows(do, DO + first * std + h * shd, std, start, rows)
    async_copy.commit_group()
    slot = 0
    while left > 0:
        at, here, keys = (first * HEADS + h) * D, start, rows - start
        cos, sin = 0.0, 0.0
        if COLUMNS:
            cos, sin = _angles(POSITIONS + first * COLUMNS, FREQUENCIES, start, rows, SIDE, COLUMNS, HALVES)
        left, h, tile, b, first, end = _next(OFFSETS, left, h, tile, b, first, end, HEADS)
        left, h, tile, b, first, end = _real(OFFSETS, left, h, tile, b, first, end, HEADS)
        start, rows = _place(left, tile, b, first, end)
        q, q2 = q_tiles.index(2 * slot), q_tiles.index(2 * slot + 1)
        k, k2 = k_tiles.index(2 * slot), k_tiles.index(2 * slot + 1)
        slot = PLACES - 1 - slot
        async_copy.wait_group(0)
        if COLUMNS:
            tl.debug_barrier()
            _turn(q, q2, cos, sin, HALVES)
            _turn(k, k2, cos, sin, HALVES)
        fence_async_shared()
        tl.debug_barrier()  # the block is there for all warps, and none works on the one before it any more
        if PLACES == 2:
            _copy_halves(q_tiles, slot, Q + first * stq + h * shq, stq, start, rows)
            _copy_halves(k_tiles, slot, K + first * stk + h * shk, stk, start, rows)
            async_copy.commit_group()
        s = _logits(q, q2, k, k2, no_logits)
        dp = warpgroup_mma(do, v.permute((1, 0)), no_logits, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(num_outstanding=1, deps=[s])
        p = _weights(s, scale * LOG2E, keys, LOGITS)
        p_tile.store(p.to(dtype))
        dp = warpgroup_mma_wait(num_outstanding=0, deps=[dp])
        ds = p * (dp - gl.sum(p * dp, 1)[:, None]) * scale
        ds_tile.store(ds.to(dtype))
        fence_async_shared()
        tl.debug_barrier()  # weights and slopes of all warps are there, and none reads the values any more
        copy_rows(v, V + first * stv + h * shv, stv, start, rows)
        async_copy.commit_group()
        dv = warpgroup_mma(p_tile.permute((1, 0)), do, no_values, use_acc=False, is_async=True)
        dk = warpgroup_mma(ds_tile.permute((1, 0)), q, no_half, use_acc=False, is_async=True)
        dk2 = warpgroup_mma(ds_tile.permute((1, 0)), q2, no_half, use_acc=False, is_async=True)
        dv = warpgroup_mma_wait(num_outstanding=2, deps=[dv])
        tl.debug_barrier()  # no warp reads the gradient any more
        copy_rows(do, DO + first * std + h * shd, std, start, rows)
        async_copy.commit_group()
        write_rows(DV + at, dv, HEADS * D, here, here + keys, "")
        dq = warpgroup_mma(ds_tile, k, no_half, use_acc=False, is_async=True)
        dq2 = warpgroup_mma(ds_tile, k2, no_half, use_acc=False, is_async=True)
        if PLACES == 1:
            dk, dk2, dq, dq2 = warpgroup_mma_wait(num_outstanding=0, deps=[dk, dk2, dq, dq2])
            tl.debug_barrier()  # no warp reads queries and keys any more
            _copy_halves(q_tiles, slot, Q + first * stq + h * shq, stq, start, rows)
            _copy_halves(k_tiles, slot, K + first * stk + h * shk, stk, start, rows)
            async_copy.commit_group()
            _put_halves(DK + at, dk, dk2, cos, sin, HEADS * D, here, here + keys, COLUMNS)
        else:
            dk, dk2 = warpgroup_mma_wait(num_outstanding=2, deps=[dk, dk2])
            _put_halves(DK + at, dk, dk2, cos, sin, HEADS * D, here, here + keys, COLUMNS)
            dq, dq2 = warpgroup_mma_wait(num_outstanding=0, deps=[dq, dq2])
        _put_halves(DQ + at, dq, dq2, cos, sin, HEADS * D, here, here + keys, COLUMNS)
    async_copy.wait_group(0)
