"""Backward kernels of attention over long sequences, scheduled by hand for Hopper: softmax or an activation.

The products are those of ``attention_backward``, seven in two kernels that each write every gradient once:
``backward_long_q`` has tiles of 128 queries and streams K and V past them, and ``backward_long_kv`` tiles of 128 keys
and streams queries and the gradient. Warps work as in ``forward_long``: two groups of four compute, each for half of
the tile, one warp loads and one looks for tiles. For softmax ``backward_long_q`` runs first and leaves delta.

Streamed blocks have 64 rows. Rows beyond a sequence are read, get no weight and are made zero. ``KEPT`` is the number
of halves of tiles in shared memory: with 4, a tile loads while the one before it is worked on, and 3 leave room for one
more block.

Names and layouts as in ``attention_backward``; strides are numbers. Head widths 64 and 128, the same for values; as
many key heads as query heads in ``backward_long_kv``.
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
from kernels.common.attention_forward import LOG2E, VARYING
from kernels.common.long_tiles import (
    ROWS,
    SLOTS,
    barriers,
    end_of,
    free_block,
    let_go,
    own_place,
    put_rows,
    schedule,
    seen_by,
    skip,
    told,
    wait_for_place,
    zero_beyond,
)


@gluon.jit
def _load(
    own_rows, own_more, other_rows, other_more, own_tiles, own_tiles2, blocks, blocks2, own_full, own_free,
    full, free, full2, free2, places, place_full, place_free, WINDOW: gl.constexpr, KEPT: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """The loading warp: two tensors of the tile's own side, then blocks of two of the other."""
    item = 0
    block = 0
    row, left, first, _, low, high, _, _, keep = told(places, place_full, place_free, item, 1)
    there = left * 0
    while left > 0:
        for w in gl.static_range(2):
            at, bar, _ = own_place(item, w, KEPT)
            wait_for_place(own_free, item, w, KEPT)
            mbarrier.expect(own_full.index(bar), own_rows.block_type.nbytes + own_more.block_type.nbytes)
            tma.async_copy_global_to_shared(own_rows, [row + w * ROWS, 0], own_full.index(bar), own_tiles.index(at))
            tma.async_copy_global_to_shared(own_more, [row + w * ROWS, 0], own_full.index(bar), own_tiles2.index(at))
        begin = low
        if WINDOW:
            begin += there
        for j in range(begin, high, ROWS):
            slot = block % STAGES
            phase = (block // STAGES + 1) & 1
            mbarrier.wait(free.index(slot), phase)
            mbarrier.expect(full.index(slot), other_rows.block_type.nbytes)
            tma.async_copy_global_to_shared(other_rows, [first + j, 0], full.index(slot), blocks.index(slot))
            mbarrier.wait(free2.index(slot), phase)
            mbarrier.expect(full2.index(slot), other_more.block_type.nbytes)
            tma.async_copy_global_to_shared(other_more, [first + j, 0], full2.index(slot), blocks2.index(slot))
            block += 1
        if WINDOW:
            there = end_of(low, high, ROWS) - keep
        item += 1
        row, left, first, _, low, high, _, _, keep = told(places, place_full, place_free, item, 1)


@gluon.jit
def _slopes(
    s, dp, lse, delta, edge, query, key, index, limit, window, s_in, factor,
    ACT: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, SCALED: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """``P / scale`` and, short of the factor unless ``EARLY``, dS; as ``attention_backward._elements``.

    Where ``edge``, only what has ``index < limit`` counts, and keys that the query, by its place among them, sees.
    """
    if ACT == "softmax":
        if edge:
            seen = _visible(query, key, window, index < limit, CAUSAL, WINDOW)
            s = gl.where(seen, s, float("-inf"))
            dp = gl.where(seen, dp, 0.0)
        p = gl.exp2(s * (s_in * LOG2E) - lse)
        ds = p * (dp - delta)
    else:
        if edge:
            seen = _visible(query, key, window, index < limit, CAUSAL, WINDOW)
            s = gl.where(seen, s, 0.0)
            dp = gl.where(seen, dp, 0.0)
        if SCALED:
            s = s * s_in
        p, slope = activate_with_slope(s, ACT, True)
        ds = dp * slope
    if EARLY:
        ds = ds * factor
    return p, ds


@gluon.jit
def _visible(query, key, window, seen, CAUSAL: gl.constexpr, WINDOW: gl.constexpr):
    """Whether a key counts for the query that stands at ``query`` among the keys."""
    if CAUSAL:
        seen = seen & (key <= query)
    if WINDOW:
        seen = seen & (key - query <= window) & (query - key <= window)
    return seen


@gluon.jit
def _at_edge(query, key, window, CAUSAL: gl.constexpr, WINDOW: gl.constexpr):
    """Whether some of ``ROWS`` queries do not see some of ``ROWS`` keys."""
    edge = query < query
    if CAUSAL:
        edge = edge | (key + ROWS - 1 > query)
    if WINDOW:
        edge = edge | (query + ROWS - 1 - key > window) | (key + ROWS - 1 - query > window)
    return edge


@gluon.jit
def _rows_of_out(base, stride, row, left, D: gl.constexpr, LAYOUT: gl.constexpr):
    """A group's rows of the output, of which ``left`` are of the sequence."""
    r = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    c = gl.arange(0, D, layout=gl.SliceLayout(0, LAYOUT))
    where = base + (row + r)[:, None].to(gl.int64) * stride + c[None, :]
    return gl.load(where, mask=(r < left)[:, None], other=0.0)


@gluon.jit
def _of_queries(
    MINE: gl.constexpr, dq_rows, q_tiles, do_tiles, k_blocks, v_blocks, own_full, own_free, k_full, k_free, v_full,
    v_free, places, place_full, place_free, o_base, dq_base, st, l_base, d_base, heads, window, s_in, s_out,
    ACT: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, SCALED: gl.constexpr, KEPT: gl.constexpr,
    STAGES: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """One of two computing groups of ``backward_long_q``: half of the queries of every tile."""
    dtype: gl.constexpr = q_tiles.dtype
    SOFTMAX: gl.constexpr = ACT == "softmax"
    EARLY: gl.constexpr = dtype == gl.float16
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, VALUES, 2)
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (D // 8), D // 8], [4, 1], [1, 0])
    none = gl.zeros([ROWS, ROWS], gl.float32, LOGITS)
    column = gl.arange(0, ROWS, layout=gl.SliceLayout(0, LOGITS))[None, :]
    r = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LOGITS))
    factor = s_in * s_out
    item = 0
    block = 0
    row, left, _, kv, low, high, place, _, keep = told(places, place_full, place_free, item, 4)
    held = left * 0 - 1
    while left > 0:
        row += MINE * ROWS
        left -= MINE * ROWS
        place += MINE * ROWS
        at, bar, turn = own_place(item, MINE, KEPT)
        at_low = block
        q = q_tiles.index(at)
        do = do_tiles.index(at)
        if SOFTMAX and WINDOW:  # on its way while the tile is: a tile is little work
            out = _rows_of_out(o_base, st, row, left, D, WIDE)
        mbarrier.wait(own_full.index(bar), turn & 1)
        lse, delta = 0.0, 0.0
        if SOFTMAX:
            if not WINDOW:
                out = _rows_of_out(o_base, st, row, left, D, WIDE)
            out = out.to(gl.float32)
            own = gl.convert_layout(gl.sum(out * do.load(WIDE).to(gl.float32), 1), gl.SliceLayout(1, LOGITS))
            index = (row + r).to(gl.int64) * heads
            gl.store(d_base + index, own, mask=r < left)
            lse = gl.load(l_base + index, mask=r < left, other=0.0)[:, None] * LOG2E
            delta = own[:, None]
        acc = gl.zeros([ROWS, D], gl.float32, VALUES)
        begin, end = seen_by(low, high, place, 0, window, CAUSAL, WINDOW, ROWS, False)
        if left <= 0:
            end = begin
        block = skip(low, begin, keep, block, k_full, k_free, v_full, v_free, WINDOW, ROWS, STAGES)
        if WINDOW:
            block = at_low + (begin - low) // ROWS
        rest = begin
        if begin < end:
            slot = block % STAGES
            phase = (block // STAGES) & 1
            k = k_blocks.index(slot).permute((1, 0))
            v = v_blocks.index(slot).permute((1, 0))
            mbarrier.wait(k_full.index(slot), phase)
            s = warpgroup_mma(q, k, none, use_acc=False, is_async=True)
            mbarrier.wait(v_full.index(slot), phase)
            dp = warpgroup_mma(do, v, none, use_acc=False, is_async=True)
            s, dp = warpgroup_mma_wait(num_outstanding=0, deps=[s, dp])
            free_block(v_free.index(slot), begin, keep, WINDOW)
            edge = (begin + ROWS > kv) | _at_edge(place, begin, window, CAUSAL, WINDOW)
            key = begin + column
            _p, ds = _slopes(
                s, dp, lse, delta, edge, (place + r)[:, None], key, key, kv, window, s_in, factor,
                ACT, CAUSAL, WINDOW, SCALED, EARLY,
            )  # fmt: skip
            ds = gl.convert_layout(ds.to(dtype), LEFT)
            if KEPT >= 4:
                let_go(own_free, held)
            for j in range(begin + ROWS, end, ROWS):
                slot = block % STAGES
                block += 1
                after = block % STAGES
                phase = (block // STAGES) & 1
                k = k_blocks.index(after).permute((1, 0))
                v = v_blocks.index(after).permute((1, 0))
                mbarrier.wait(k_full.index(after), phase)
                mbarrier.wait(v_full.index(after), phase)
                s = warpgroup_mma(q, k, none, use_acc=False, is_async=True)
                dp = warpgroup_mma(do, v, none, use_acc=False, is_async=True)
                sums = warpgroup_mma(ds, k_blocks.index(slot), acc, is_async=True)
                s, dp = warpgroup_mma_wait(num_outstanding=1, deps=[s, dp])
                free_block(v_free.index(after), j, keep, WINDOW)
                edge = (j + ROWS > kv) | _at_edge(place, j, window, CAUSAL, WINDOW)
                key = j + column
                _p, ds_after = _slopes(
                    s, dp, lse, delta, edge, (place + r)[:, None], key, key, kv, window, s_in, factor,
                    ACT, CAUSAL, WINDOW, SCALED, EARLY,
                )  # fmt: skip
                ds_after = gl.convert_layout(ds_after.to(dtype), LEFT)
                # It is full. But across a wait the assembler does not move that for the sums to before the slopes.
                mbarrier.wait(k_full.index(after), phase)
                acc, ds, ds_after = warpgroup_mma_wait(num_outstanding=0, deps=[sums, ds, ds_after])
                free_block(k_free.index(slot), j - ROWS, keep, WINDOW)
                ds = ds_after
            slot = block % STAGES
            rest = begin + (end - begin - 1) // ROWS * ROWS
            zero_beyond(k_blocks.index(slot), kv - rest, ROWS, D)
            rest += ROWS
            sums = warpgroup_mma(ds, k_blocks.index(slot), acc, is_async=True)
            acc, ds = warpgroup_mma_wait(num_outstanding=0, deps=[sums, ds])
            free_block(k_free.index(slot), rest - ROWS, keep, WINDOW)
            block += 1
        elif KEPT >= 4:
            let_go(own_free, held)
        block = skip(rest, high, keep, block, k_full, k_free, v_full, v_free, WINDOW, ROWS, STAGES)
        if WINDOW:
            block = at_low + (keep - low) // ROWS
        if not EARLY:
            acc = acc * factor
        put_rows(acc.to(dtype), q, dq_rows, dq_base, st, row, left, D)
        held = bar
        if KEPT < 4:  # the next half needs this one's place
            let_go(own_free, held)
        item += 1
        row, left, _, kv, low, high, place, _, keep = told(places, place_full, place_free, item, 4)
    tma.store_wait(0)


@gluon.jit
def _of_keys(
    MINE: gl.constexpr, dk_rows, dv_rows, k_tiles, v_tiles, q_blocks, do_blocks, own_full, own_free, q_full, q_free,
    do_full, do_free, places, place_full, place_free, stats, dk_base, dv_base, st, l_base, d_base, heads, window, s_in,
    s_out,
    ACT: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, SCALED: gl.constexpr, KEPT: gl.constexpr,
    STAGES: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """One of two computing groups of ``backward_long_kv``: half of the keys of every tile."""
    dtype: gl.constexpr = k_tiles.dtype
    SOFTMAX: gl.constexpr = ACT == "softmax"
    EARLY: gl.constexpr = dtype == gl.float16
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, VALUES, 2)
    none = gl.zeros([ROWS, ROWS], gl.float32, LOGITS)
    c = gl.arange(0, ROWS, layout=gl.SliceLayout(0, LOGITS))
    own = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LOGITS))[:, None]
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    COLUMNS: gl.constexpr = gl.SliceLayout(0, LOGITS)
    i = gl.arange(0, ROWS, layout=LINE)
    factor = s_in * s_out
    item = 0
    block = 0
    row, left, first, length, low, high, place, shift, keep = told(places, place_full, place_free, item, 4)
    while left > 0:
        row += MINE * ROWS
        left -= MINE * ROWS
        place += MINE * ROWS
        at, bar, turn = own_place(item, MINE, KEPT)
        k = k_tiles.index(at)
        v = v_tiles.index(at)
        if not WINDOW:
            mbarrier.wait(own_full.index(bar), turn & 1)
        dk = gl.zeros([ROWS, D], gl.float32, VALUES)
        dv = gl.zeros([ROWS, D], gl.float32, VALUES)
        begin, end = low, high
        at_low = block
        if CAUSAL or WINDOW:
            begin, end = seen_by(low, high, place, shift, window, CAUSAL, WINDOW, ROWS, True)
            block = skip(low, begin, keep, block, q_full, q_free, do_full, do_free, WINDOW, ROWS, STAGES)
            if WINDOW:
                block = at_low + (begin - low) // ROWS
        if left <= 0:
            block = skip(begin, high, keep, block, q_full, q_free, do_full, do_free, WINDOW, ROWS, STAGES)
            end = begin
            high = begin
        lse_next = gl.zeros([ROWS], gl.float32, LINE)
        delta_next = lse_next
        if SOFTMAX:
            where = (first + begin + i).to(gl.int64) * heads
            lse_next = gl.load(l_base + where, mask=begin + i < length, other=0.0) * LOG2E
            delta_next = gl.load(d_base + where, mask=begin + i < length, other=0.0)
        if WINDOW:  # what was just asked for is on its way meanwhile
            mbarrier.wait(own_full.index(bar), turn & 1)
        for j in range(begin, end, ROWS):
            slot = block % STAGES
            phase = (block // STAGES) & 1
            q = q_blocks.index(slot)
            do = do_blocks.index(slot)
            # The same as before, which the compiler does not know: it else keeps descriptors of all parts, and spills.
            own_at = at + (block >> 31)
            k = k_tiles.index(own_at)
            v = v_tiles.index(own_at)
            if SOFTMAX:  # of this block into shared memory, of the next on its way
                stats.index(2 * MINE).store(lse_next)
                stats.index(2 * MINE + 1).store(delta_next)
                where = (first + j + ROWS + i).to(gl.int64) * heads
                lse_next = gl.load(l_base + where, mask=j + ROWS + i < length, other=0.0) * LOG2E
                delta_next = gl.load(d_base + where, mask=j + ROWS + i < length, other=0.0)
            mbarrier.wait(q_full.index(slot), phase)
            mbarrier.wait(do_full.index(slot), phase)
            zero_beyond(q, length - j, ROWS, D)
            zero_beyond(do, length - j, ROWS, D)
            s = warpgroup_mma(k, q.permute((1, 0)), none, use_acc=False, is_async=True)
            dp = warpgroup_mma(v, do.permute((1, 0)), none, use_acc=False, is_async=True)
            s, dp = warpgroup_mma_wait(num_outstanding=0, deps=[s, dp])
            lse, delta = 0.0, 0.0
            if SOFTMAX:
                lse = stats.index(2 * MINE).load(COLUMNS)[None, :]
                delta = stats.index(2 * MINE + 1).load(COLUMNS)[None, :]
            edge = (j + ROWS > length) | _at_edge(j + shift, place, window, CAUSAL, WINDOW)
            index = (j + c)[None, :]
            p, ds = _slopes(
                s, dp, lse, delta, edge, index + shift, place + own, index, length, window, s_in, factor,
                ACT, CAUSAL, WINDOW, SCALED, EARLY,
            )  # fmt: skip
            p = gl.convert_layout(p.to(dtype), LEFT)
            ds = gl.convert_layout(ds.to(dtype), LEFT)
            dv = warpgroup_mma(p, do, dv, is_async=True)
            dk = warpgroup_mma(ds, q, dk, is_async=True)
            dv, dk, p, ds = warpgroup_mma_wait(num_outstanding=0, deps=[dv, dk, p, ds])
            free_block(q_free.index(slot), j, keep, WINDOW)
            free_block(do_free.index(slot), j, keep, WINDOW)
            block += 1
        if CAUSAL or WINDOW:
            rest = begin + gl.maximum(end - begin + ROWS - 1, 0) // ROWS * ROWS
            block = skip(rest, high, keep, block, q_full, q_free, do_full, do_free, WINDOW, ROWS, STAGES)
            if WINDOW:
                block = at_low + (keep - low) // ROWS
        if not EARLY:
            dk = dk * factor
        put_rows(dk.to(dtype), k, dk_rows, dk_base, st, row, left, D)
        put_rows((dv * s_out).to(dtype), v, dv_rows, dv_base, st, row, left, D)
        tma.store_wait(0)
        tl.debug_barrier()
        mbarrier.arrive(own_free.index(bar))
        item += 1
        row, left, first, length, low, high, place, shift, keep = told(places, place_full, place_free, item, 4)


@gluon.jit(do_not_specialize=(*VARYING, "total", "keys"))
def backward_long_q(
    Q, K, V, DO, OUT, DQ, LSE, DELTA, QO, KO, COUNTER,
    B, total, keys, window, s_in, s_out, HEADS, stq, shq, stk, shk, stv, shv,
    GROUP: gl.constexpr, D: gl.constexpr, ACT: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
    ROUNDS: gl.constexpr, SCALED: gl.constexpr, KEPT: gl.constexpr, STAGES: gl.constexpr, TMA: gl.constexpr,
):  # fmt: skip
    """Gradient of the queries; programs and ``COUNTER`` as in ``forward_long``."""
    dtype: gl.constexpr = Q.dtype.element_ty
    h = gl.program_id(0) % HEADS
    part = gl.program_id(0) // HEADS
    parts = gl.num_programs(0) // HEADS
    hk = h // GROUP
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, D], dtype)
    st = HEADS * D
    q_rows = tma.make_tensor_descriptor(Q + h * shq, [total, D], [stq, 1], [ROWS, D], TILE)
    do_rows = tma.make_tensor_descriptor(DO + h * D, [total, D], [st, 1], [ROWS, D], TILE)
    dq_rows = tma.make_tensor_descriptor(DQ + h * D, [total, D], [st, 1], [ROWS, D], TILE)
    k_rows = tma.make_tensor_descriptor(K + hk * shk, [keys, D], [stk, 1], [ROWS, D], TILE)
    v_rows = tma.make_tensor_descriptor(V + hk * shv, [keys, D], [stv, 1], [ROWS, D], TILE)
    q_tiles = gl.allocate_shared_memory(dtype, [KEPT, ROWS, D], TILE)
    do_tiles = gl.allocate_shared_memory(dtype, [KEPT, ROWS, D], TILE)
    k_blocks = gl.allocate_shared_memory(dtype, [STAGES, ROWS, D], TILE)
    v_blocks = gl.allocate_shared_memory(dtype, [STAGES, ROWS, D], TILE)
    places = gl.allocate_shared_memory(gl.int32, [SLOTS, 16 if WINDOW else 8], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    own_full, own_free = barriers(KEPT + KEPT % 2, 1), barriers(KEPT + KEPT % 2, 1)
    k_full, k_free = barriers(STAGES, 1), barriers(STAGES, 2)
    v_full, v_free = barriers(STAGES, 1), barriers(STAGES, 2)
    place_full, place_free = barriers(SLOTS, 1), barriers(SLOTS, 3)
    fence_async_shared()
    o_base, l_base, d_base = DQ + h * D, DQ + h * D, DQ + h * D
    if ACT == "softmax":
        o_base, l_base, d_base = OUT + h * D, LSE + h, DELTA + h
    gl.warp_specialize(
        [
            (_of_queries, (
                0, dq_rows, q_tiles, do_tiles, k_blocks, v_blocks, own_full, own_free, k_full, k_free, v_full,
                v_free, places, place_full, place_free, o_base, DQ + h * D, st, l_base, d_base, HEADS, window, s_in,
                s_out, ACT, CAUSAL, WINDOW, SCALED, KEPT, STAGES, D,
            )),
            (_of_queries, (
                1, dq_rows, q_tiles, do_tiles, k_blocks, v_blocks, own_full, own_free, k_full, k_free, v_full,
                v_free, places, place_full, place_free, o_base, DQ + h * D, st, l_base, d_base, HEADS, window, s_in,
                s_out, ACT, CAUSAL, WINDOW, SCALED, KEPT, STAGES, D,
            )),
            (_load, (
                q_rows, do_rows, k_rows, v_rows, q_tiles, do_tiles, k_blocks, v_blocks, own_full, own_free, k_full,
                k_free, v_full, v_free, places, place_full, place_free, WINDOW, KEPT, STAGES,
            )),
            (schedule, (
                places, place_full, place_free, QO, KO, COUNTER + h, B, total // (2 * ROWS) + B, part, parts, window, 0,
                ACT == "softmax", CAUSAL, WINDOW, ROUNDS, False, False, ROWS, STAGES,
            )),
        ],
        [4, 1, 1],
        [240, 24, 24],
    )  # fmt: skip


@gluon.jit(do_not_specialize=(*VARYING, "total", "keys"))
def backward_long_kv(
    Q, K, V, DO, DK, DV, LSE, DELTA, QO, KO, COUNTER,
    B, total, keys, window, s_in, s_out, HEADS, stq, shq, stk, shk, stv, shv,
    D: gl.constexpr, ACT: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
    ROUNDS: gl.constexpr, SCALED: gl.constexpr, KEPT: gl.constexpr, STAGES: gl.constexpr, TMA: gl.constexpr,
):  # fmt: skip
    """Gradients of keys and values; programs and ``COUNTER`` as in ``forward_long``, but tiles are of keys."""
    dtype: gl.constexpr = Q.dtype.element_ty
    h = gl.program_id(0) % HEADS
    part = gl.program_id(0) // HEADS
    parts = gl.num_programs(0) // HEADS
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, D], dtype)
    st = HEADS * D
    q_rows = tma.make_tensor_descriptor(Q + h * shq, [total, D], [stq, 1], [ROWS, D], TILE)
    do_rows = tma.make_tensor_descriptor(DO + h * D, [total, D], [st, 1], [ROWS, D], TILE)
    k_rows = tma.make_tensor_descriptor(K + h * shk, [keys, D], [stk, 1], [ROWS, D], TILE)
    v_rows = tma.make_tensor_descriptor(V + h * shv, [keys, D], [stv, 1], [ROWS, D], TILE)
    dk_rows = tma.make_tensor_descriptor(DK + h * D, [keys, D], [st, 1], [ROWS, D], TILE)
    dv_rows = tma.make_tensor_descriptor(DV + h * D, [keys, D], [st, 1], [ROWS, D], TILE)
    k_tiles = gl.allocate_shared_memory(dtype, [KEPT, ROWS, D], TILE)
    v_tiles = gl.allocate_shared_memory(dtype, [KEPT, ROWS, D], TILE)
    q_blocks = gl.allocate_shared_memory(dtype, [STAGES, ROWS, D], TILE)
    do_blocks = gl.allocate_shared_memory(dtype, [STAGES, ROWS, D], TILE)
    places = gl.allocate_shared_memory(gl.int32, [SLOTS, 16 if WINDOW else 8], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    stats = gl.allocate_shared_memory(gl.float32, [4, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    own_full, own_free = barriers(KEPT + KEPT % 2, 1), barriers(KEPT + KEPT % 2, 1)
    q_full, q_free = barriers(STAGES, 1), barriers(STAGES, 2)
    do_full, do_free = barriers(STAGES, 1), barriers(STAGES, 2)
    place_full, place_free = barriers(SLOTS, 1), barriers(SLOTS, 3)
    fence_async_shared()
    l_base, d_base = DK + h * D, DK + h * D
    if ACT == "softmax":
        l_base, d_base = LSE + h, DELTA + h
    gl.warp_specialize(
        [
            (_of_keys, (
                0, dk_rows, dv_rows, k_tiles, v_tiles, q_blocks, do_blocks, own_full, own_free, q_full, q_free,
                do_full, do_free, places, place_full, place_free, stats, DK + h * D, DV + h * D, st, l_base, d_base,
                HEADS, window, s_in, s_out, ACT, CAUSAL, WINDOW, SCALED, KEPT, STAGES, D,
            )),
            (_of_keys, (
                1, dk_rows, dv_rows, k_tiles, v_tiles, q_blocks, do_blocks, own_full, own_free, q_full, q_free,
                do_full, do_free, places, place_full, place_free, stats, DK + h * D, DV + h * D, st, l_base, d_base,
                HEADS, window, s_in, s_out, ACT, CAUSAL, WINDOW, SCALED, KEPT, STAGES, D,
            )),
            (_load, (
                k_rows, v_rows, q_rows, do_rows, k_tiles, v_tiles, q_blocks, do_blocks, own_full, own_free, q_full,
                q_free, do_full, do_free, places, place_full, place_free, WINDOW, KEPT, STAGES,
            )),
            (schedule, (
                places, place_full, place_free, KO, QO, COUNTER + h, B, keys // (2 * ROWS) + B, part, parts, window, 0,
                ACT == "softmax", CAUSAL, WINDOW, ROUNDS, True, False, ROWS, STAGES,
            )),
        ],
        [4, 1, 1],
        [240, 24, 24],
    )  # fmt: skip
