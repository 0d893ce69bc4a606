"""Backward kernel of attention with an activation and few keys, scheduled by hand for Hopper.

As ``attention_backward.backward_kv``: a program keeps up to 128 keys and values and streams queries past them, five
products for every gradient. The next tile of queries and gradients is asked for before the products of this one, where
Triton does so behind them, and so waits for all of it: registers leave room for two programs of four warps on a
multiprocessor, or one of eight, too few to hide its way. The activation overlaps with the product for its slopes. The
query gradient of a tile is written during the product for the keys.

More keys are taken 128 after 128. What the first gave for the query gradient waits in device memory, in its type; the
next go over the queries the other way, so that the last tiles of one turn, the first of the next, still are in the L2
cache. With 256 keys, as measured: 2.28 and 2.13 ms without and with that, before the rest of this was done; 2.08 and
1.89 with that part in float32 and in bf16; 2.17 and 2.08 without and with hints for the cache, in float32.

Slower, measured: two tiles ahead, which leaves room for one program only; the query gradient of a tile written during
the next one; the activation in parts that overlap with the product for the slopes; the next tile's logits early; a
program on each multiprocessor that goes on to other sequences, whose keys come early (``docs/benchmarks.md``).

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

from kernels.common.activations import activate_with_slope, activate_with_slope_in_less
from kernels.common.async_rows import copy_rows, write_rows
from kernels.common.attention_forward import VARYING
from kernels.common.sequences import sequence_rows


@gluon.jit
def _places(BLOCK: gl.constexpr, D: gl.constexpr, layout: gl.constexpr):
    """Where a tile's query gradient is kept between two blocks of keys: what a warp writes at once lies together."""
    r = gl.arange(0, BLOCK, layout=gl.SliceLayout(1, layout))
    c = gl.arange(0, D, layout=gl.SliceLayout(0, layout))
    return (r // 8 * (8 * D) + r % 8 * 8)[:, None] + (c // 8 * 64 + c % 8)[None, :]


@gluon.jit(do_not_specialize=VARYING)
def backward_few(
    Q, K, V, DO, DQ, PART, DK, DV, QO, KO,
    B, q_length, kv_length, window, s_in, s_out,
    KV_HEADS: gl.constexpr, STQ: gl.constexpr, SHQ: gl.constexpr,
    STK: gl.constexpr, SHK: gl.constexpr, STV: gl.constexpr, SHV: gl.constexpr,
    GROUP: gl.constexpr, D: gl.constexpr, ACT: gl.constexpr, BROADCAST: gl.constexpr, DENSE: gl.constexpr,
    SCALED: gl.constexpr, BLOCK_Q: gl.constexpr, KEYS: gl.constexpr, SEVERAL: gl.constexpr,
):  # fmt: skip
    """A program has one sequence and one key head, ``KEYS`` keys at a time. There is no window.

    PART: with ``SEVERAL`` blocks of keys, what those before summed up of the query gradient, in tiles of ``BLOCK_Q``
    rows of one head, numbered as in ``sequences.py``. A thread reads what it wrote.
    """
    dtype: gl.constexpr = Q.dtype.element_ty
    EARLY: gl.constexpr = dtype == gl.float16  # the factor before slopes are rounded, which could leave its range
    SPILLS: gl.constexpr = ACT == "gelu" or (ACT == "hardswish" and SEVERAL)
    OVERLAP: gl.constexpr = (D > 64 or KEYS > 64) and not SPILLS
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
    q_all, g_all = Q + q_first * STQ + hk * GROUP * SHQ, DO + (q0 * step + hk * GROUP) * D
    copy_rows(k_block.index(0), K + k0 * STK + hk * SHK, STK, 0, kv)
    copy_rows(v_block.index(0), V + k0 * STV + hk * SHV, STV, 0, kv)
    copy_rows(q_tiles.index(0), q_all, STQ, 0, rows)
    copy_rows(do_tiles.index(0), g_all, step * D, 0, rows)
    async_copy.commit_group()
    no_logits = gl.zeros([KEYS, BLOCK_Q], gl.float32, LOGITS)
    no_queries = gl.zeros([BLOCK_Q, D], gl.float32, QUERIES)
    turn = 0
    keys = KEYS
    if SEVERAL:
        keys = gl.maximum(kv, 1)
    for begin in range(0, keys, KEYS):
        first, move = rows * 0, rows * 0 + BLOCK_Q
        if SEVERAL:
            last = gl.maximum(rows - 1, 0) // BLOCK_Q * BLOCK_Q
            if begin // KEYS % 2 == 1:  # back again, from the tiles that are in the L2 cache
                first, move = last, -move
        dk = gl.zeros([KEYS, D], gl.float32, VALUES)
        dv = gl.zeros([KEYS, D], gl.float32, VALUES)
        for g in range(GROUP):
            h = hk * GROUP + g
            q_base, g_base = Q + q_first * STQ + h * SHQ, DO + (q0 * step + h) * D
            dq_base = DQ + (q0 * step + h) * D
            if SEVERAL:
                kept_base = PART + ((q0 // BLOCK_Q + b) * step + h) * (BLOCK_Q * D)
            at, slot = first, 0
            for done in range(0, rows, BLOCK_Q):
                q, do = q_tiles.index(slot), do_tiles.index(slot)
                q_after, do_after = q_tiles.index(1 - slot), do_tiles.index(1 - slot)
                # As before, which the compiler does not know: it else keeps descriptors of all parts, and spills.
                k, v = k_block.index(turn >> 31), v_block.index(turn >> 31)
                turn += 1
                after = at + move
                if SEVERAL and done + BLOCK_Q >= rows:
                    after = rows
                async_copy.wait_group(0)
                fence_async_shared()
                tl.debug_barrier()  # the tile is there for all warps, and none works on the one before it any more
                copy_rows(q_after, q_base, STQ, after, rows)
                copy_rows(do_after, g_base, step * D, after, rows)
                async_copy.commit_group()
                s = warpgroup_mma(k, q.permute((1, 0)), no_logits, use_acc=False, is_async=True)
                dp = warpgroup_mma(v, do.permute((1, 0)), no_logits, use_acc=False, is_async=True)
                s = warpgroup_mma_wait(num_outstanding=1, deps=[s])
                if SCALED:
                    s = s * s_in
                if OVERLAP:
                    p, slope = activate_with_slope_in_less(s, ACT)
                    p = gl.convert_layout(p.to(dtype), LEFT)
                    # Before the wait for dp, which the compiler else puts before the activation.
                    sums = warpgroup_mma(p, do, dv, is_async=True)
                    dp = warpgroup_mma_wait(num_outstanding=1, deps=[dp])
                else:
                    p, slope = activate_with_slope(s, ACT, True)
                    p = gl.convert_layout(p.to(dtype), LEFT)
                    dp = warpgroup_mma_wait(num_outstanding=0, deps=[dp])
                    sums = warpgroup_mma(p, do, dv, is_async=True)
                ds = dp * slope
                if EARLY:
                    ds = ds * factor
                ds = ds.to(dtype)
                if SEVERAL:
                    kept = kept_base + at.to(gl.int64) * (step * D) + _places(BLOCK_Q, D, QUERIES)
                    found = gl.full([BLOCK_Q, D], begin, gl.int32, QUERIES) > 0
                    known = gl.load(kept, mask=found, other=0.0, eviction_policy="evict_first")
                slopes = gl.allocate_shared_memory(dtype, [KEYS, BLOCK_Q], SLOPES, ds)
                fence_async_shared()
                tl.debug_barrier()  # the slopes of all warps are there
                if SEVERAL:
                    dq = warpgroup_mma(slopes.permute((1, 0)), k, known.to(gl.float32), is_async=True)
                else:
                    dq = warpgroup_mma(slopes.permute((1, 0)), k, no_queries, use_acc=False, is_async=True)
                left = gl.convert_layout(ds, LEFT)
                more = warpgroup_mma(left, q, dk, is_async=True)
                dq, dv, p = warpgroup_mma_wait(num_outstanding=1, deps=[dq, sums, p])
                if SEVERAL and begin + KEYS < kv:
                    gl.store(kept, dq.to(PART.dtype.element_ty), eviction_policy="evict_last")
                else:
                    if not EARLY:
                        dq = dq * factor
                    write_rows(dq_base, dq, step * D, at, rows, ".cs")  # while the last product goes on
                dk, left, slopes = warpgroup_mma_wait(num_outstanding=0, deps=[more, left, slopes])
                slot = 1 - slot
                at += move
            async_copy.wait_group(0)
            tl.debug_barrier()  # before the tiles of the next head come
            if GROUP > 1 and g < GROUP - 1:
                copy_rows(q_tiles.index(0), q_base + SHQ, STQ, first, rows)
                copy_rows(do_tiles.index(0), g_base + D, step * D, first, rows)
                async_copy.commit_group()
        if SEVERAL:
            next_keys = begin + KEYS
            if next_keys < kv:  # they come while the gradients of these are written
                copy_rows(k_block.index(0), K + (k0 + next_keys) * STK + hk * SHK, STK, 0, kv - next_keys)
                copy_rows(v_block.index(0), V + (k0 + next_keys) * STV + hk * SHV, STV, 0, kv - next_keys)
                copy_rows(q_tiles.index(0), q_all, STQ, last - first, rows)
                copy_rows(do_tiles.index(0), g_all, step * D, last - first, rows)
                async_copy.commit_group()
        if not EARLY:
            dk = dk * factor
        place = ((k0 + begin) * KV_HEADS + hk) * D
        write_rows(DK + place, dk, KV_HEADS * D, 0, kv - begin, ".cs")
        write_rows(DV + place, dv * s_out, KV_HEADS * D, 0, kv - begin, ".cs")
    async_copy.wait_group(0)
