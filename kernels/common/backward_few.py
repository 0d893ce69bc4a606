"""Backward kernel of attention with an activation and few keys, scheduled by hand for Hopper.

As ``attention_backward.backward_kv`` with all keys of a sequence in one block: a program keeps K and V and streams
queries past them, five products for every gradient. The next tile of queries and gradients is asked for before the
products of this one, where Triton does so behind them, and so waits for all of it: registers leave room for two
programs of four warps on a multiprocessor, or one of eight, too few to hide its way. The query gradient of a tile is
written during the product for the keys.

Slower, measured: two tiles ahead, which leaves room for one program only; the query gradient of a tile written during
the next one; the activation in parts that overlap with the product for the slopes; the next tile's logits early.

Names and layouts as in ``attention_backward``. Head widths 64 and 128, the same for values. Rows are copied 16 bytes at
a time: addresses and strides are multiples of that.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from kernels.common.activations import activate_with_slope
from kernels.common.async_rows import copy_rows, write_rows
from kernels.common.attention_forward import VARYING
from kernels.common.sequences import sequence_rows


@gluon.jit(do_not_specialize=VARYING)
def backward_few(
    Q, K, V, DO, DQ, DK, DV, QO, KO,
    B, q_length, kv_length, window, s_in, s_out,
    KV_HEADS: gl.constexpr, STQ: gl.constexpr, SHQ: gl.constexpr,
    STK: gl.constexpr, SHK: gl.constexpr, STV: gl.constexpr, SHV: gl.constexpr,
    GROUP: gl.constexpr, D: gl.constexpr, ACT: gl.constexpr, BROADCAST: gl.constexpr, DENSE: gl.constexpr,
    SCALED: gl.constexpr, BLOCK_Q: gl.constexpr, KEYS: gl.constexpr,
):  # fmt: skip
    """A program has one sequence, of at most ``KEYS`` keys, and one key head. There is no window."""
    dtype: gl.constexpr = Q.dtype.element_ty
    EARLY: gl.constexpr = dtype == gl.float16  # the factor before slopes are rounded, which could leave its range
    WARPS: gl.constexpr = gl.num_warps()
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_Q, 16])
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, D, 16])
    QUERIES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, WARPS // 4], [16, D * 4 // WARPS, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, VALUES, 2)
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_Q, D], dtype)
    BLOCK: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, D], dtype)
    SLOPES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, BLOCK_Q], dtype)
    hk = gl.program_id(0) % KV_HEADS
    b = gl.program_id(0) // KV_HEADS
    k0, kv = sequence_rows(KO, b, kv_length, DENSE)
    q0, rows = sequence_rows(QO, b, q_length, BROADCAST)
    q_first = q0
    if BROADCAST:
        q_first = q0 * 0
    factor = s_in * s_out
    step: gl.constexpr = KV_HEADS * GROUP
    q_tiles = gl.allocate_shared_memory(dtype, [2, BLOCK_Q, D], TILE)
    do_tiles = gl.allocate_shared_memory(dtype, [2, BLOCK_Q, D], TILE)
    k_block = gl.allocate_shared_memory(dtype, [1, KEYS, D], BLOCK)
    v_block = gl.allocate_shared_memory(dtype, [1, KEYS, D], BLOCK)
    copy_rows(k_block.index(0), K + k0 * STK + hk * SHK, STK, 0, kv)
    copy_rows(v_block.index(0), V + k0 * STV + hk * SHV, STV, 0, kv)
    no_logits = gl.zeros([KEYS, BLOCK_Q], gl.float32, LOGITS)
    no_queries = gl.zeros([BLOCK_Q, D], gl.float32, QUERIES)
    dk = gl.zeros([KEYS, D], gl.float32, VALUES)
    dv = gl.zeros([KEYS, D], gl.float32, VALUES)
    turn = 0
    for g in range(GROUP):
        h = hk * GROUP + g
        q_base, g_base = Q + q_first * STQ + h * SHQ, DO + (q0 * step + h) * D
        dq_base = DQ + (q0 * step + h) * D
        copy_rows(q_tiles.index(0), q_base, STQ, 0, rows)
        copy_rows(do_tiles.index(0), g_base, step * D, 0, rows)
        async_copy.commit_group()
        slot = 0
        for start in range(0, rows, BLOCK_Q):
            q, do = q_tiles.index(slot), do_tiles.index(slot)
            q_after, do_after = q_tiles.index(1 - slot), do_tiles.index(1 - slot)
            # The same as before, which the compiler does not know: it else keeps descriptors of all parts, and spills.
            k, v = k_block.index(turn >> 31), v_block.index(turn >> 31)
            turn += 1
            async_copy.wait_group(0)
            fence_async_shared()
            tl.debug_barrier()  # the tile is there for all warps, and none works on the one before it any more
            copy_rows(q_after, q_base, STQ, start + BLOCK_Q, rows)
            copy_rows(do_after, g_base, step * D, start + BLOCK_Q, rows)
            async_copy.commit_group()
            s = warpgroup_mma(k, q.permute((1, 0)), no_logits, use_acc=False, is_async=True)
            dp = warpgroup_mma(v, do.permute((1, 0)), no_logits, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(num_outstanding=1, deps=[s])
            if SCALED:
                s = s * s_in
            p, slope = activate_with_slope(s, ACT, True)
            p = gl.convert_layout(p.to(dtype), LEFT)
            dp = warpgroup_mma_wait(num_outstanding=0, deps=[dp])
            sums = warpgroup_mma(p, do, dv, is_async=True)
            ds = dp * slope
            if EARLY:
                ds = ds * factor
            ds = ds.to(dtype)
            slopes = gl.allocate_shared_memory(dtype, [KEYS, BLOCK_Q], SLOPES, ds)
            fence_async_shared()
            tl.debug_barrier()  # the slopes of all warps are there
            dq = warpgroup_mma(slopes.permute((1, 0)), k, no_queries, use_acc=False, is_async=True)
            left = gl.convert_layout(ds, LEFT)
            more = warpgroup_mma(left, q, dk, is_async=True)
            dq, dv, p = warpgroup_mma_wait(num_outstanding=1, deps=[dq, sums, p])
            if not EARLY:
                dq = dq * factor
            write_rows(dq_base, dq, step * D, start, rows)  # while the last product goes on
            dk, left, slopes = warpgroup_mma_wait(num_outstanding=0, deps=[more, left, slopes])
            slot = 1 - slot
        async_copy.wait_group(0)
        tl.debug_barrier()  # before the tiles of the next head come
    if not EARLY:
        dk = dk * factor
    write_rows(DK + (k0 * KV_HEADS + hk) * D, dk, KV_HEADS * D, 0, kv)
    write_rows(DV + (k0 * KV_HEADS + hk) * D, dv * s_out, KV_HEADS * D, 0, kv)
