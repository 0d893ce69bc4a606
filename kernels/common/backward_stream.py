"""Backward kernel of attention with an activation and few keys, scheduled by hand for Hopper.

As ``attention_backward.backward_kv`` with all keys of a sequence: K and V stay, queries and the gradient stream past
them, and five products make every gradient. One warp loads through TMA, ahead of those that compute, and takes
sequences from a counter, so that programs end together whatever the lengths.

``WARPS`` warps hold ``16 WARPS`` keys. Four, for up to 64 keys: a program has two such groups, each with a loading warp
and sequences of its own; while one computes slopes the other's products run. Eight, for up to 128: no second group
fits the registers, so the group starts the logits of the next queries before it waits for the sums, and computes the
slopes of those while the product for the gradient of the last queries runs.

The slopes reach that product through shared memory, where eight warps share them. Tiles are read without regard to
where a sequence ends; rows beyond it are made zero and so add nothing.

Names and layouts as in ``attention_backward``; strides are numbers. Head widths 64 and 128, the same for values; as
many key heads as query heads.
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

from kernels.common.activations import activate_with_slope
from kernels.common.attention_forward import VARYING
from kernels.common.long_tiles import ROWS, SLOTS, barriers, put_rows, tell, told, zero_beyond


@gluon.jit
def _where(QO, KO, b, kv_length, DENSE: gl.constexpr):
    """First row and number of queries and of keys of sequence b."""
    row = gl.load(QO + b).to(gl.int32)
    rows = gl.load(QO + b + 1).to(gl.int32) - row
    if DENSE:
        return row, rows, b * kv_length, kv_length
    else:
        first = gl.load(KO + b).to(gl.int32)
        return row, rows, first, gl.load(KO + b + 1).to(gl.int32) - first


@gluon.jit
def _load(
    MINE: gl.constexpr, q_rows, do_rows, k_rows, v_rows, q_tiles, do_tiles, k_tiles, v_tiles, full, free, own_full,
    own_free, places, place_full, place_free, QO, KO, Counter, B, part, parts, kv_length,
    DENSE: gl.constexpr, BUFFERS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The loading warp of a group: K and V of each sequence, then its queries and their gradient."""
    b, item, tile = part, part * 0, part * 0
    row, rows, first, kv = _where(QO, KO, gl.minimum(b, B - 1), kv_length, DENSE)
    after = parts + gl.atomic_add(Counter, 1)
    while b < B:
        # Of the sequence after this one, whose place so is known when this one is done.
        row2, rows2, first2, kv2 = _where(QO, KO, gl.minimum(after, B - 1), kv_length, DENSE)
        if rows + kv > 0:
            tell(places, place_full, place_free, item, row, rows, first, kv, rows, rows, rows, rows)
            at = MINE * BUFFERS + item % BUFFERS
            mbarrier.wait(own_free.index(at), (item // BUFFERS + 1) & 1)
            mbarrier.expect(own_full.index(at), k_rows.block_type.nbytes + v_rows.block_type.nbytes)
            tma.async_copy_global_to_shared(k_rows, [first, 0], own_full.index(at), k_tiles.index(at))
            tma.async_copy_global_to_shared(v_rows, [first, 0], own_full.index(at), v_tiles.index(at))
            for j in range(0, rows, ROWS):
                at = MINE * STAGES + tile % STAGES
                mbarrier.wait(free.index(at), (tile // STAGES + 1) & 1)
                mbarrier.expect(full.index(at), q_rows.block_type.nbytes + do_rows.block_type.nbytes)
                tma.async_copy_global_to_shared(q_rows, [row + j, 0], full.index(at), q_tiles.index(at))
                tma.async_copy_global_to_shared(do_rows, [row + j, 0], full.index(at), do_tiles.index(at))
                tile += 1
            item += 1
        b = after
        row, rows, first, kv = row2, rows2, first2, kv2
        after = parts + gl.atomic_add(Counter, 1)
    end = part * 0 - 1
    tell(places, place_full, place_free, item, end, end, end, end, end, end, end, end)


@gluon.jit
def _weights(
    s, dp, do, dv, s_in, factor,
    ACT: gl.constexpr, SCALED: gl.constexpr, EARLY: gl.constexpr, WARPS: gl.constexpr, dtype: gl.constexpr,
    LEFT: gl.constexpr,
):  # fmt: skip
    """The value gradient with the weights of logits s added, and the slopes; s and dp are on their way."""
    if WARPS == 8:  # weights while dp is made, slopes while dv is
        s = warpgroup_mma_wait(num_outstanding=1, deps=[s])
    else:
        s, dp = warpgroup_mma_wait(num_outstanding=0, deps=[s, dp])
    if SCALED:
        s = s * s_in
    p, slope = activate_with_slope(s, ACT, True)
    if WARPS == 4:
        slope = dp * slope
    p = gl.convert_layout(p.to(dtype), LEFT)
    dv = warpgroup_mma(p, do, dv, is_async=True)
    if WARPS == 8:
        dp = warpgroup_mma_wait(num_outstanding=1, deps=[dp])
        slope = dp * slope
    ds = slope
    if EARLY:
        ds = ds * factor
    ds = ds.to(dtype)
    dv, p = warpgroup_mma_wait(num_outstanding=0, deps=[dv, p])
    return dv, ds


@gluon.jit
def _compute(
    MINE: gl.constexpr, dk_rows, dv_rows, q_tiles, do_tiles, k_tiles, v_tiles, ds_tiles, full, free, own_full,
    own_free, places, place_full, place_free, dq_base, dk_base, dv_base, st, s_in, s_out,
    ACT: gl.constexpr, SCALED: gl.constexpr, WARPS: gl.constexpr, BUFFERS: gl.constexpr, STAGES: gl.constexpr,
    D: gl.constexpr,
):  # fmt: skip
    """A computing group."""
    dtype: gl.constexpr = k_tiles.dtype
    EARLY: gl.constexpr = dtype == gl.float16
    KEYS: gl.constexpr = 16 * WARPS
    ACROSS: gl.constexpr = WARPS // 4
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, ROWS, 16])
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, D, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, VALUES, 2)
    QUERIES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, ACROSS], [16, D // ACROSS, 16])
    none = gl.zeros([KEYS, ROWS], gl.float32, LOGITS)
    no_sums = gl.zeros([ROWS, D], gl.float32, QUERIES)
    r = gl.arange(0, ROWS, layout=gl.SliceLayout(1, QUERIES))
    column = gl.arange(0, D, layout=gl.SliceLayout(0, QUERIES))
    factor = s_in * s_out
    behind = factor
    if EARLY:
        behind = 1.0
    item = 0
    tile = 0
    row, left, first, kv, _, _, _, _ = told(places, place_full, place_free, item, WARPS)
    while kv >= 0:
        own = MINE * BUFFERS + item % BUFFERS
        k = k_tiles.index(own)
        v = v_tiles.index(own)
        mbarrier.wait(own_full.index(own), (item // BUFFERS) & 1)
        zero_beyond(k, kv, KEYS, D, WARPS)
        zero_beyond(v, kv, KEYS, D, WARPS)
        dk = gl.zeros([KEYS, D], gl.float32, VALUES)
        dv = gl.zeros([KEYS, D], gl.float32, VALUES)
        if left > 0:
            at = MINE * STAGES + tile % STAGES
            q = q_tiles.index(at)
            do = do_tiles.index(at)
            mbarrier.wait(full.index(at), (tile // STAGES) & 1)
            zero_beyond(q, left, ROWS, D, WARPS)
            zero_beyond(do, left, ROWS, D, WARPS)
            s = warpgroup_mma(k, q.permute((1, 0)), none, use_acc=False, is_async=True)
            dp = warpgroup_mma(v, do.permute((1, 0)), none, use_acc=False, is_async=True)
            dv, ds = _weights(s, dp, do, dv, s_in, factor, ACT, SCALED, EARLY, WARPS, dtype, LEFT)
            for j in range(ROWS, left, ROWS):
                # As before, which the compiler does not know: it else keeps descriptors of all parts, and spills.
                own = MINE * BUFFERS + item % BUFFERS + (tile >> 31)
                k = k_tiles.index(own)
                v = v_tiles.index(own)
                at = MINE * STAGES + tile % STAGES
                shared = ds_tiles.index(MINE * 2 + tile % 2)
                shared.store(ds)
                fence_async_shared()
                ds = gl.convert_layout(ds, LEFT)
                dk = warpgroup_mma(ds, q_tiles.index(at), dk, is_async=True)
                tl.debug_barrier()  # the slopes of all warps are there
                sums = warpgroup_mma(shared.permute((1, 0)), k, no_sums, use_acc=False, is_async=True)
                tile += 1
                after = MINE * STAGES + tile % STAGES
                q = q_tiles.index(after)
                do = do_tiles.index(after)
                if WARPS == 4:
                    dk, ds, sums = warpgroup_mma_wait(num_outstanding=0, deps=[dk, ds, sums])
                    mbarrier.arrive(free.index(at))
                    where = dq_base + (row + j - ROWS + r)[:, None].to(gl.int64) * st + column[None, :]
                    gl.store(where, (sums * behind).to(dtype))
                mbarrier.wait(full.index(after), (tile // STAGES) & 1)
                zero_beyond(q, left - j, ROWS, D, WARPS)
                zero_beyond(do, left - j, ROWS, D, WARPS)
                s = warpgroup_mma(k, q.permute((1, 0)), none, use_acc=False, is_async=True)
                if WARPS == 8:
                    dk, ds, sums = warpgroup_mma_wait(num_outstanding=1, deps=[dk, ds, sums])
                    tl.debug_barrier()  # no warp needs the queries any more
                    mbarrier.arrive(free.index(at))
                    where = dq_base + (row + j - ROWS + r)[:, None].to(gl.int64) * st + column[None, :]
                    gl.store(where, (sums * behind).to(dtype))
                dp = warpgroup_mma(v, do.permute((1, 0)), none, use_acc=False, is_async=True)
                dv, ds = _weights(s, dp, do, dv, s_in, factor, ACT, SCALED, EARLY, WARPS, dtype, LEFT)
            at = MINE * STAGES + tile % STAGES
            shared = ds_tiles.index(MINE * 2 + tile % 2)
            shared.store(ds)
            fence_async_shared()
            ds = gl.convert_layout(ds, LEFT)
            dk = warpgroup_mma(ds, q_tiles.index(at), dk, is_async=True)
            tl.debug_barrier()
            sums = warpgroup_mma(shared.permute((1, 0)), k, no_sums, use_acc=False, is_async=True)
            dk, ds, sums = warpgroup_mma_wait(num_outstanding=0, deps=[dk, ds, sums])
            tl.debug_barrier()
            mbarrier.arrive(free.index(at))
            last = (left - 1) // ROWS * ROWS
            where = dq_base + (row + last + r)[:, None].to(gl.int64) * st + column[None, :]
            gl.store(where, (sums * behind).to(dtype), mask=(last + r < left)[:, None])
            tile += 1
        tl.debug_barrier()  # no warp needs the keys any more: their place takes the results
        put_rows((dk * behind).to(dtype), k, dk_rows, dk_base, st, first, kv, D, KEYS, WARPS)
        put_rows((dv * s_out).to(dtype), v, dv_rows, dv_base, st, first, kv, D, KEYS, WARPS)
        tma.store_wait(0)
        tl.debug_barrier()
        mbarrier.arrive(own_free.index(own))
        item += 1
        row, left, first, kv, _, _, _, _ = told(places, place_full, place_free, item, WARPS)


@gluon.jit(do_not_specialize=(*VARYING, "total", "keys"))
def backward_stream(
    Q, K, V, DO, DQ, DK, DV, QO, KO, COUNTER,
    B, total, keys, kv_length, s_in, s_out, HEADS, stq, shq, stk, shk, stv, shv,
    D: gl.constexpr, ACT: gl.constexpr, DENSE: gl.constexpr, SCALED: gl.constexpr,
    WARPS: gl.constexpr, BUFFERS: gl.constexpr, STAGES: gl.constexpr, TMA: gl.constexpr,
):  # fmt: skip
    """Program i has head ``i % HEADS``; ``COUNTER`` has a zero for each head, ``total`` and ``keys`` are all rows."""
    dtype: gl.constexpr = Q.dtype.element_ty
    KEYS: gl.constexpr = 16 * WARPS
    GROUPS: gl.constexpr = 8 // WARPS
    h = gl.program_id(0) % HEADS
    part = gl.program_id(0) // HEADS * GROUPS
    parts = gl.num_programs(0) // HEADS * GROUPS
    st = HEADS * D
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, D], dtype)
    OWN: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, D], dtype)
    SLOPES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, ROWS], dtype)
    q_rows = tma.make_tensor_descriptor(Q + h * shq, [total, D], [stq, 1], [ROWS, D], TILE)
    do_rows = tma.make_tensor_descriptor(DO + h * D, [total, D], [st, 1], [ROWS, D], TILE)
    k_rows = tma.make_tensor_descriptor(K + h * shk, [keys, D], [stk, 1], [KEYS, D], OWN)
    v_rows = tma.make_tensor_descriptor(V + h * shv, [keys, D], [stv, 1], [KEYS, D], OWN)
    dk_rows = tma.make_tensor_descriptor(DK + h * D, [keys, D], [st, 1], [KEYS, D], OWN)
    dv_rows = tma.make_tensor_descriptor(DV + h * D, [keys, D], [st, 1], [KEYS, D], OWN)
    q_tiles = gl.allocate_shared_memory(dtype, [GROUPS * STAGES, ROWS, D], TILE)
    do_tiles = gl.allocate_shared_memory(dtype, [GROUPS * STAGES, ROWS, D], TILE)
    k_tiles = gl.allocate_shared_memory(dtype, [GROUPS * BUFFERS, KEYS, D], OWN)
    v_tiles = gl.allocate_shared_memory(dtype, [GROUPS * BUFFERS, KEYS, D], OWN)
    ds_tiles = gl.allocate_shared_memory(dtype, [GROUPS * 2, KEYS, ROWS], SLOPES)
    full, free = barriers(GROUPS * STAGES, 1), barriers(GROUPS * STAGES, 1)
    own_full, own_free = barriers(GROUPS * BUFFERS, 1), barriers(GROUPS * BUFFERS, 1)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    places = gl.allocate_shared_memory(gl.int32, [SLOTS, 8], FLAT)
    place_full, place_free = barriers(SLOTS, 1), barriers(SLOTS, 1)
    dq_base, dk_base, dv_base = DQ + h * D, DK + h * D, DV + h * D
    if GROUPS == 2:
        places2 = gl.allocate_shared_memory(gl.int32, [SLOTS, 8], FLAT)
        place_full2, place_free2 = barriers(SLOTS, 1), barriers(SLOTS, 1)
        fence_async_shared()
        gl.warp_specialize(
            [
                (_compute, (
                    0, dk_rows, dv_rows, q_tiles, do_tiles, k_tiles, v_tiles, ds_tiles, full, free, own_full, own_free,
                    places, place_full, place_free, dq_base, dk_base, dv_base, st, s_in, s_out,
                    ACT, SCALED, WARPS, BUFFERS, STAGES, D,
                )),
                (_compute, (
                    1, dk_rows, dv_rows, q_tiles, do_tiles, k_tiles, v_tiles, ds_tiles, full, free, own_full, own_free,
                    places2, place_full2, place_free2, dq_base, dk_base, dv_base, st, s_in, s_out,
                    ACT, SCALED, WARPS, BUFFERS, STAGES, D,
                )),
                (_load, (
                    0, q_rows, do_rows, k_rows, v_rows, q_tiles, do_tiles, k_tiles, v_tiles, full, free, own_full,
                    own_free, places, place_full, place_free, QO, KO, COUNTER + h, B, part, parts, kv_length,
                    DENSE, BUFFERS, STAGES,
                )),
                (_load, (
                    1, q_rows, do_rows, k_rows, v_rows, q_tiles, do_tiles, k_tiles, v_tiles, full, free, own_full,
                    own_free, places2, place_full2, place_free2, QO, KO, COUNTER + h, B, part + 1, parts, kv_length,
                    DENSE, BUFFERS, STAGES,
                )),
            ],
            [4, 1, 1],
            [240, 24, 24],
        )  # fmt: skip
    else:
        fence_async_shared()
        gl.warp_specialize(
            [
                (_compute, (
                    0, dk_rows, dv_rows, q_tiles, do_tiles, k_tiles, v_tiles, ds_tiles, full, free, own_full, own_free,
                    places, place_full, place_free, dq_base, dk_base, dv_base, st, s_in, s_out,
                    ACT, SCALED, WARPS, BUFFERS, STAGES, D,
                )),
                (_load, (
                    0, q_rows, do_rows, k_rows, v_rows, q_tiles, do_tiles, k_tiles, v_tiles, full, free, own_full,
                    own_free, places, place_full, place_free, QO, KO, COUNTER + h, B, part, parts, kv_length,
                    DENSE, BUFFERS, STAGES,
                )),
            ],
            [1],
            [24],
        )  # fmt: skip
