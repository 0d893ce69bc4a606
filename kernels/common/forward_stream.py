"""Forward kernel of attention with an activation and few keys, scheduled by hand for Hopper.

As ``attention_forward.forward_short``: a program keeps K and V and streams queries past them. Here one warp loads
through TMA, ahead of two groups of four warps that compute, each on its own tiles of 64 queries: while one group's
products run the other's activation does. A program per multiprocessor takes an equal run of all query rows of a head,
so that programs end together whatever the lengths.

Tiles are read without regard to where a sequence ends. Queries beyond it are not stored; keys beyond it get no weight
and zero values.

Names and layouts as in ``attention_forward``, but strides are numbers: as constants they cost registers that spill.
Here are only head widths 64 and 128, ``BLOCKS`` blocks of ``BLOCK_KV`` keys.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.common.activations import activate
from kernels.common.attention_forward import VARYING

ROWS = gl.constexpr(64)
"""Query rows of a tile."""


@gluon.jit
def _keys(KO, b, kv_length, DENSE: gl.constexpr):
    """First row and number of keys of sequence b."""
    if DENSE:
        return b * kv_length, kv_length
    else:
        first = gl.load(KO + b)
        return first.to(gl.int32), (gl.load(KO + b + 1) - first).to(gl.int32)


@gluon.jit
def _load(
    q_rows, k_rows, v_rows, q_tiles, k_blocks, v_blocks, q_full, q_free, kv_full, kv_free, QO, KO,
    first, begin, end, kv_length,
    DENSE: gl.constexpr, BLOCKS: gl.constexpr, BLOCK_KV: gl.constexpr, BUFFERS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The loading warp: K and V of each sequence, then its queries."""
    b, row, tile, item = first, begin, begin * 0, begin * 0
    while row < end:
        last = gl.minimum(gl.load(QO + b + 1).to(gl.int32), end)
        if last > row:
            k0, _ = _keys(KO, b, kv_length, DENSE)
            buffer = item % BUFFERS
            mbarrier.wait(kv_free.index(buffer), (item // BUFFERS + 1) & 1)
            for c in gl.static_range(BLOCKS):
                slot = buffer * BLOCKS + c
                mbarrier.expect(kv_full.index(slot), k_rows.block_type.nbytes + v_rows.block_type.nbytes)
                tma.async_copy_global_to_shared(
                    k_rows, [k0 + c * BLOCK_KV, 0], kv_full.index(slot), k_blocks.index(slot)
                )
                tma.async_copy_global_to_shared(
                    v_rows, [k0 + c * BLOCK_KV, 0], kv_full.index(slot), v_blocks.index(slot)
                )
            item += 1
            while row < last:
                stage = tile % STAGES
                mbarrier.wait(q_free.index(stage), (tile // STAGES + 1) & 1)
                mbarrier.expect(q_full.index(stage), q_rows.block_type.nbytes)
                tma.async_copy_global_to_shared(q_rows, [row, 0], q_full.index(stage), q_tiles.index(stage))
                tile += 1
                row += ROWS
            row = last
        b += 1


@gluon.jit
def _weights(
    s, kv, c, s_in, LOGITS: gl.constexpr, VALUES: gl.constexpr, ACT: gl.constexpr, SCALED: gl.constexpr,
    BLOCK_KV: gl.constexpr, dtype: gl.constexpr,
):  # fmt: skip
    """The activation of a block of logits, as the left operand of the product with its values."""
    if kv < (c + 1) * BLOCK_KV:
        column = c * BLOCK_KV + gl.arange(0, BLOCK_KV, layout=gl.SliceLayout(0, LOGITS))
        s = gl.where((column < kv)[None, :], s, 0.0)
    if SCALED:
        s = s * s_in
    p = activate(s, ACT, True).to(dtype)
    return gl.convert_layout(p, gl.DotOperandLayout(0, VALUES, 2))


@gluon.jit
def _compute(
    MINE: gl.constexpr, o_rows, q_tiles, k_blocks, v_blocks, q_full, q_free, kv_full, kv_free, QO, KO, o_base, sto,
    first, begin, end, kv_length, s_in, s_out,
    ACT: gl.constexpr, SCALED: gl.constexpr, DENSE: gl.constexpr, BLOCKS: gl.constexpr, BLOCK_KV: gl.constexpr,
    BUFFERS: gl.constexpr, STAGES: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """One of two computing groups: every other tile."""
    dtype: gl.constexpr = q_tiles.dtype
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_KV, 16])
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    ZEROS: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (D // 8), D // 8], [4, 1], [1, 0])
    no_logits = gl.zeros([ROWS, BLOCK_KV], gl.float32, LOGITS)
    no_values = gl.zeros([ROWS, D], gl.float32, VALUES)
    b, row, tile, item = first, begin, begin * 0, begin * 0
    held = begin * 0 - 1  # the stage whose rows are still being written
    while row < end:
        last = gl.minimum(gl.load(QO + b + 1).to(gl.int32), end)
        if last > row:
            _, kv = _keys(KO, b, kv_length, DENSE)
            buffer = item % BUFFERS
            for c in gl.static_range(BLOCKS):
                slot = buffer * BLOCKS + c
                mbarrier.wait(kv_full.index(slot), (item // BUFFERS) & 1)
                if kv < (c + 1) * BLOCK_KV:  # both groups write the same: zeros where the next sequence was read
                    v = v_blocks.index(slot).load(ZEROS)
                    at = c * BLOCK_KV + gl.arange(0, BLOCK_KV, layout=gl.SliceLayout(1, ZEROS))
                    v_blocks.index(slot).store(gl.where((at < kv)[:, None], v, 0.0).to(dtype))
                    fence_async_shared()
                    tl.debug_barrier()
            while row < last:
                if tile % 2 == MINE:
                    stage = tile % STAGES
                    mbarrier.wait(q_full.index(stage), (tile // STAGES) & 1)
                    q = q_tiles.index(stage)
                    k = k_blocks.index(buffer * BLOCKS)
                    s = warpgroup_mma(q, k.permute((1, 0)), no_logits, use_acc=False, is_async=True)
                    s = warpgroup_mma_wait(num_outstanding=0, deps=[s])
                    if BLOCKS == 2:
                        k = k_blocks.index(buffer * BLOCKS + 1)
                        s2 = warpgroup_mma(q, k.permute((1, 0)), no_logits, use_acc=False, is_async=True)
                        p = _weights(s, kv, 0, s_in, LOGITS, VALUES, ACT, SCALED, BLOCK_KV, dtype)
                        v = v_blocks.index(buffer * BLOCKS)
                        o = warpgroup_mma(p, v, no_values, use_acc=False, is_async=True)
                        s2 = warpgroup_mma_wait(num_outstanding=1, deps=[s2])
                        p2 = _weights(s2, kv, 1, s_in, LOGITS, VALUES, ACT, SCALED, BLOCK_KV, dtype)
                        v = v_blocks.index(buffer * BLOCKS + 1)
                        o = warpgroup_mma(p2, v, o, is_async=True)
                        o, p, p2 = warpgroup_mma_wait(num_outstanding=0, deps=[o, p, p2])
                    else:
                        p = _weights(s, kv, 0, s_in, LOGITS, VALUES, ACT, SCALED, BLOCK_KV, dtype)
                        v = v_blocks.index(buffer * BLOCKS)
                        o = warpgroup_mma(p, v, no_values, use_acc=False, is_async=True)
                        o, p = warpgroup_mma_wait(num_outstanding=0, deps=[o, p])
                    out = (o * s_out).to(dtype)
                    if row + ROWS <= last:
                        q.store(out)  # the queries are used up: their place takes the results
                        fence_async_shared()
                        tl.debug_barrier()
                        tma.async_copy_shared_to_global(o_rows, [row, 0], q)
                        tma.store_wait(1)
                        if held >= 0:
                            mbarrier.arrive(q_free.index(held))
                        held = stage
                    else:
                        if held >= 0:
                            tma.store_wait(0)
                            mbarrier.arrive(q_free.index(held))
                            held = held * 0 - 1
                        r = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, VALUES))
                        column = gl.arange(0, D, layout=gl.SliceLayout(0, VALUES))
                        where = o_base + r[:, None].to(gl.int64) * sto + column[None, :]
                        gl.store(where, out, mask=(r < last)[:, None])
                        tl.debug_barrier()
                        mbarrier.arrive(q_free.index(stage))
                tile += 1
                row += ROWS
            row = last
            tl.debug_barrier()  # all warps of the group
            mbarrier.arrive(kv_free.index(buffer))
            item += 1
        b += 1
    tma.store_wait(0)


@gluon.jit(do_not_specialize=(*VARYING, "total", "keys"))
def forward_stream(
    Q, K, V, OUT, QO, KO, B, total, keys, kv_length, window, s_in, s_out, HEADS, stq, shq, stk, shk, stv, shv,
    GROUP: gl.constexpr, D: gl.constexpr, ACT: gl.constexpr, DENSE: gl.constexpr, SCALED: gl.constexpr,
    BLOCKS: gl.constexpr, BLOCK_KV: gl.constexpr, BUFFERS: gl.constexpr, STAGES: gl.constexpr, TMA: gl.constexpr,
):  # fmt: skip
    """Program i has head ``i % HEADS`` and an equal run of its ``total`` query rows; ``keys`` are all key rows, and
    there is no window."""
    dtype: gl.constexpr = Q.dtype.element_ty
    h = gl.program_id(0) % HEADS
    parts = gl.num_programs(0) // HEADS
    per = gl.cdiv(total, parts)
    begin = gl.minimum((gl.program_id(0) // HEADS) * per, total)
    end = gl.minimum(begin + per, total)
    low, high = begin * 0, B  # the last sequence that starts at ``begin`` or before
    while high - low > 1:
        middle = (low + high) // 2
        if gl.load(QO + middle).to(gl.int32) <= begin:
            low = middle
        else:
            high = middle
    hk = h // GROUP
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, D], dtype)
    BLOCK: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_KV, D], dtype)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    o_base = OUT + h * D
    sto = HEADS * D
    q_rows = tma.make_tensor_descriptor(Q + h * shq, [total, D], [stq, 1], [ROWS, D], TILE)
    o_rows = tma.make_tensor_descriptor(o_base, [total, D], [sto, 1], [ROWS, D], TILE)
    k_rows = tma.make_tensor_descriptor(K + hk * shk, [keys, D], [stk, 1], [BLOCK_KV, D], BLOCK)
    v_rows = tma.make_tensor_descriptor(V + hk * shv, [keys, D], [stv, 1], [BLOCK_KV, D], BLOCK)
    q_tiles = gl.allocate_shared_memory(dtype, [STAGES, ROWS, D], TILE)
    k_blocks = gl.allocate_shared_memory(dtype, [BUFFERS * BLOCKS, BLOCK_KV, D], BLOCK)
    v_blocks = gl.allocate_shared_memory(dtype, [BUFFERS * BLOCKS, BLOCK_KV, D], BLOCK)
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    q_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    kv_full = gl.allocate_shared_memory(gl.int64, [BUFFERS * BLOCKS, 1], BARRIER)
    kv_free = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], BARRIER)
    for i in gl.static_range(STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_free.index(i), count=1)
    for i in gl.static_range(BUFFERS * BLOCKS):
        mbarrier.init(kv_full.index(i), count=1)
    for i in gl.static_range(BUFFERS):
        mbarrier.init(kv_free.index(i), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_compute, (
                0, o_rows, q_tiles, k_blocks, v_blocks, q_full, q_free, kv_full, kv_free, QO, KO, o_base, sto,
                low, begin, end, kv_length, s_in, s_out, ACT, SCALED, DENSE, BLOCKS, BLOCK_KV, BUFFERS, STAGES, D,
            )),
            (_compute, (
                1, o_rows, q_tiles, k_blocks, v_blocks, q_full, q_free, kv_full, kv_free, QO, KO, o_base, sto,
                low, begin, end, kv_length, s_in, s_out, ACT, SCALED, DENSE, BLOCKS, BLOCK_KV, BUFFERS, STAGES, D,
            )),
            (_load, (
                q_rows, k_rows, v_rows, q_tiles, k_blocks, v_blocks, q_full, q_free, kv_full, kv_free, QO, KO,
                low, begin, end, kv_length, DENSE, BLOCKS, BLOCK_KV, BUFFERS, STAGES,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
