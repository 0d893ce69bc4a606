"""Forward kernel of attention over long sequences, scheduled by hand for Hopper: softmax or an activation.

As ``attention_forward.forward_general``: a tile of queries stays and K and V stream past it. Here a tile has 128
queries, half of them for each of two groups of four warps; one warp loads through TMA, ahead of both, and one looks
for the tiles. While one group's products run, the other computes weights. Where ``OVERLAP``, a group also starts the
logits of the next block of keys before it waits for what it has.

A program per multiprocessor takes tile after tile of one head from a counter, so that all end together whatever the
lengths, and the next tile loads while the last one is finished. Tiles near each other run at the same time, which
keeps their keys in the L2 cache.

Tiles are read without regard to where a sequence ends. Queries beyond it are not stored; keys beyond it get no weight
and zero values.

Names and layouts as in ``attention_forward``; strides are numbers. Head widths 64 and 128, the same for values.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

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
from kernels.common.attention_forward import LOG2E, LOWEST, VARYING
from kernels.common.long_tiles import (
    ROWS,
    SLOTS,
    end_of,
    free_block,
    let_go,
    put_rows,
    schedule,
    seen_by,
    skip,
    told,
    zero_beyond,
)

QUERIES = gl.constexpr(2)
"""Tiles of queries in shared memory."""


@gluon.jit
def _load(
    q_rows, k_rows, v_rows, q_tiles, k_blocks, v_blocks, q_full, q_free, k_full, k_free, v_full, v_free,
    places, place_full, place_free, WINDOW: gl.constexpr, BLOCK_KV: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The loading warp."""
    item = 0
    block = 0
    row, left, k0, _, low, high, _, _, keep = told(places, place_full, place_free, item, 1)
    there = left * 0
    while left > 0:
        for w in gl.static_range(2):
            stage = (item % QUERIES) * 2 + w
            mbarrier.wait(q_free.index(stage), (item // QUERIES + 1) & 1)
            mbarrier.expect(q_full.index(stage), q_rows.block_type.nbytes)
            tma.async_copy_global_to_shared(q_rows, [row + w * ROWS, 0], q_full.index(stage), q_tiles.index(stage))
        begin = low
        if WINDOW:
            begin += there
        for j in range(begin, high, BLOCK_KV):
            slot = block % STAGES
            phase = (block // STAGES + 1) & 1
            mbarrier.wait(k_free.index(slot), phase)
            mbarrier.expect(k_full.index(slot), k_rows.block_type.nbytes)
            tma.async_copy_global_to_shared(k_rows, [k0 + j, 0], k_full.index(slot), k_blocks.index(slot))
            mbarrier.wait(v_free.index(slot), phase)
            mbarrier.expect(v_full.index(slot), v_rows.block_type.nbytes)
            tma.async_copy_global_to_shared(v_rows, [k0 + j, 0], v_full.index(slot), v_blocks.index(slot))
            block += 1
        if WINDOW:
            there = end_of(low, high, BLOCK_KV) - keep
        item += 1
        row, left, k0, _, low, high, _, _, keep = told(places, place_full, place_free, item, 1)


@gluon.jit
def _masked(
    s, j, kv, place, window, ACT: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, BLOCK_KV: gl.constexpr,
    LOGITS: gl.constexpr,
):  # fmt: skip
    """Logits of keys from j on; those that a query does not see become what gives no weight."""
    edge = j + BLOCK_KV > kv
    if CAUSAL:
        edge = edge | (j + BLOCK_KV - 1 > place)
    if WINDOW:
        edge = edge | (place + ROWS - 1 - j > window) | (j + BLOCK_KV - 1 - place > window)
    if edge:
        column = j + gl.arange(0, BLOCK_KV, layout=gl.SliceLayout(0, LOGITS))[None, :]
        seen = column < kv
        if CAUSAL or WINDOW:
            at = place + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LOGITS))[:, None]
            if CAUSAL:
                seen = seen & (column <= at)
            if WINDOW:
                seen = seen & (column - at <= window) & (at - column <= window)
        hidden: gl.constexpr = float("-inf") if ACT == "softmax" else 0.0
        s = gl.where(seen, s, hidden)
    return s


@gluon.jit
def _weights(
    s, top, total, logit, ACT: gl.constexpr, SCALED: gl.constexpr, dtype: gl.constexpr, VALUES: gl.constexpr
):  # fmt: skip
    """The weights of a block as the left operand of the product with its values, and what softmax keeps."""
    shrink = top
    if ACT == "softmax":
        new_top = gl.maximum(top, gl.max(s, 1))
        p = gl.exp2(s * logit - (new_top * logit)[:, None])
        shrink = gl.exp2((top - new_top) * logit)
        total = total * shrink + gl.sum(p, 1)
        top = new_top
    else:
        if SCALED:
            s = s * logit
        p = activate(s, ACT, True)
    return gl.convert_layout(p.to(dtype), gl.DotOperandLayout(0, VALUES, 2)), top, total, shrink


@gluon.jit
def _compute(
    MINE: gl.constexpr, o_rows, q_tiles, k_blocks, v_blocks, q_full, q_free, k_full, k_free, v_full, v_free,
    places, place_full, place_free, o_base, sto, l_base, stl, window, s_in, s_out,
    ACT: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, SCALED: gl.constexpr, BLOCK_KV: gl.constexpr,
    STAGES: gl.constexpr, OVERLAP: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """One of two computing groups: half of the queries of every tile."""
    dtype: gl.constexpr = q_tiles.dtype
    SOFTMAX: gl.constexpr = ACT == "softmax"
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_KV, 16])
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, VALUES)
    no_logits = gl.zeros([ROWS, BLOCK_KV], gl.float32, LOGITS)
    logit = s_in
    if SOFTMAX:
        logit = s_in * LOG2E
    item = 0
    block = 0
    row, left, _, kv, low, high, place, _, keep = told(places, place_full, place_free, item, 4)
    held = left * 0 - 1
    while left > 0:
        row += MINE * ROWS
        left -= MINE * ROWS
        place += MINE * ROWS
        stage = (item % QUERIES) * 2 + MINE
        at_low = block
        q = q_tiles.index(stage)
        acc = gl.zeros([ROWS, D], gl.float32, VALUES)
        top = gl.full([ROWS], LOWEST, gl.float32, gl.SliceLayout(1, LOGITS))
        total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, LOGITS))
        mbarrier.wait(q_full.index(stage), (item // QUERIES) & 1)
        if OVERLAP:
            begin, end = seen_by(low, high, place, 0, window, CAUSAL, WINDOW, BLOCK_KV, False)
            if left <= 0:
                end = begin
            block = skip(low, begin, keep, block, k_full, k_free, v_full, v_free, WINDOW, BLOCK_KV, STAGES)
            if WINDOW:
                block = at_low + (begin - low) // BLOCK_KV
            rest = begin
            if begin < end:
                slot = block % STAGES
                mbarrier.wait(k_full.index(slot), (block // STAGES) & 1)
                s = warpgroup_mma(q, k_blocks.index(slot).permute((1, 0)), no_logits, use_acc=False, is_async=True)
                s = warpgroup_mma_wait(num_outstanding=0, deps=[s])
                free_block(k_free.index(slot), begin, keep, WINDOW)
                s = _masked(s, begin, kv, place, window, ACT, CAUSAL, WINDOW, BLOCK_KV, LOGITS)
                p, top, total, shrink = _weights(s, top, total, logit, ACT, SCALED, dtype, VALUES)
                let_go(q_free, held)
                mbarrier.wait(v_full.index(slot), (block // STAGES) & 1)
                for j in range(begin + BLOCK_KV, end, BLOCK_KV):
                    slot = block % STAGES
                    block += 1
                    after = block % STAGES
                    phase = (block // STAGES) & 1
                    mbarrier.wait(k_full.index(after), phase)
                    k = k_blocks.index(after)
                    s = warpgroup_mma(q, k.permute((1, 0)), no_logits, use_acc=False, is_async=True)
                    sums = warpgroup_mma(p, v_blocks.index(slot), acc, is_async=True)
                    s = warpgroup_mma_wait(num_outstanding=1, deps=[s])
                    free_block(k_free.index(after), j, keep, WINDOW)
                    s = _masked(s, j, kv, place, window, ACT, CAUSAL, WINDOW, BLOCK_KV, LOGITS)
                    p_after, top, total, shrink = _weights(s, top, total, logit, ACT, SCALED, dtype, VALUES)
                    # Here, since the assembler else moves the wait for the sums to before the weights.
                    mbarrier.wait(v_full.index(after), phase)
                    acc, p, p_after = warpgroup_mma_wait(num_outstanding=0, deps=[sums, p, p_after])
                    free_block(v_free.index(slot), j - BLOCK_KV, keep, WINDOW)
                    if SOFTMAX:
                        acc = acc * gl.convert_layout(shrink, OF_ROWS)[:, None]
                    p = p_after
                slot = block % STAGES
                v = v_blocks.index(slot)
                rest = begin + (end - begin - 1) // BLOCK_KV * BLOCK_KV
                zero_beyond(v, kv - rest, BLOCK_KV, D)
                rest += BLOCK_KV
                sums = warpgroup_mma(p, v, acc, is_async=True)
                acc, p = warpgroup_mma_wait(num_outstanding=0, deps=[sums, p])
                free_block(v_free.index(slot), rest - BLOCK_KV, keep, WINDOW)
                block += 1
            else:
                let_go(q_free, held)
            block = skip(rest, high, keep, block, k_full, k_free, v_full, v_free, WINDOW, BLOCK_KV, STAGES)
        else:
            let_go(q_free, held)
            for j in range(low, high, BLOCK_KV):
                slot = block % STAGES
                phase = (block // STAGES) & 1
                mbarrier.wait(k_full.index(slot), phase)
                needed = left > 0
                if CAUSAL:
                    needed = needed & (j < place + ROWS)
                if WINDOW:
                    needed = needed & (j < place + ROWS + window) & (j + BLOCK_KV > place - window)
                if needed:
                    k = k_blocks.index(slot)
                    s = warpgroup_mma(q, k.permute((1, 0)), no_logits, use_acc=False, is_async=True)
                    s = warpgroup_mma_wait(num_outstanding=0, deps=[s])
                    free_block(k_free.index(slot), j, keep, WINDOW)
                    s = _masked(s, j, kv, place, window, ACT, CAUSAL, WINDOW, BLOCK_KV, LOGITS)
                    p, top, total, shrink = _weights(s, top, total, logit, ACT, SCALED, dtype, VALUES)
                    if SOFTMAX:
                        acc = acc * gl.convert_layout(shrink, OF_ROWS)[:, None]
                    mbarrier.wait(v_full.index(slot), phase)
                    v = v_blocks.index(slot)
                    zero_beyond(v, kv - j, BLOCK_KV, D)
                    acc = warpgroup_mma(p, v, acc, is_async=True)
                    acc, p = warpgroup_mma_wait(num_outstanding=0, deps=[acc, p])
                    free_block(v_free.index(slot), j, keep, WINDOW)
                else:
                    free_block(k_free.index(slot), j, keep, WINDOW)
                    mbarrier.wait(v_full.index(slot), phase)
                    free_block(v_free.index(slot), j, keep, WINDOW)
                block += 1
        if WINDOW:
            block = at_low + (keep - low) // BLOCK_KV
        r = row + gl.arange(0, ROWS, layout=OF_ROWS)
        live = gl.arange(0, ROWS, layout=OF_ROWS) < left
        if SOFTMAX:
            some = total > 0
            lse = gl.where(some, top * s_in + gl.log(gl.where(some, total, 1.0)), 0.0)
            gl.store(l_base + r.to(gl.int64) * stl, gl.convert_layout(lse, OF_ROWS), mask=live)
            factor = 1.0 / gl.where(some, total, 1.0)
            out = (acc * gl.convert_layout(factor, OF_ROWS)[:, None]).to(dtype)
        else:
            out = (acc * s_out).to(dtype)
        put_rows(out, q, o_rows, o_base, sto, row, left, D)  # the queries are used up: their place takes the results
        held = stage
        item += 1
        row, left, _, kv, low, high, place, _, keep = told(places, place_full, place_free, item, 4)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=(*VARYING, "total", "keys"))
def forward_long(
    Q, K, V, OUT, LSE, QO, KO, COUNTER,
    B, total, keys, kv_length, window, s_in, s_out, HEADS, stq, shq, stk, shk, stv, shv,
    GROUP: gl.constexpr, D: gl.constexpr, ACT: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
    DENSE: gl.constexpr, ROUNDS: gl.constexpr, SCALED: gl.constexpr, BLOCK_KV: gl.constexpr, STAGES: gl.constexpr,
    OVERLAP: gl.constexpr, TMA: gl.constexpr,
):  # fmt: skip
    """Program i has head ``i % HEADS``; ``COUNTER`` has a zero for each head, ``total`` and ``keys`` are all rows."""
    dtype: gl.constexpr = Q.dtype.element_ty
    h = gl.program_id(0) % HEADS
    part = gl.program_id(0) // HEADS
    parts = gl.num_programs(0) // HEADS
    hk = h // GROUP
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, D], dtype)
    BLOCK: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_KV, D], dtype)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    o_base = OUT + h * D
    sto = HEADS * D
    l_base = o_base
    if ACT == "softmax":
        l_base = LSE + h
    q_rows = tma.make_tensor_descriptor(Q + h * shq, [total, D], [stq, 1], [ROWS, D], TILE)
    o_rows = tma.make_tensor_descriptor(o_base, [total, D], [sto, 1], [ROWS, D], TILE)
    k_rows = tma.make_tensor_descriptor(K + hk * shk, [keys, D], [stk, 1], [BLOCK_KV, D], BLOCK)
    v_rows = tma.make_tensor_descriptor(V + hk * shv, [keys, D], [stv, 1], [BLOCK_KV, D], BLOCK)
    q_tiles = gl.allocate_shared_memory(dtype, [QUERIES * 2, ROWS, D], TILE)
    k_blocks = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_KV, D], BLOCK)
    v_blocks = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_KV, D], BLOCK)
    places = gl.allocate_shared_memory(gl.int32, [SLOTS, 16 if WINDOW else 8], FLAT)
    q_full = gl.allocate_shared_memory(gl.int64, [QUERIES * 2, 1], BARRIER)
    q_free = gl.allocate_shared_memory(gl.int64, [QUERIES * 2, 1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    place_full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIER)
    place_free = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIER)
    for i in gl.static_range(QUERIES * 2):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_free.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_free.index(i), count=2)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_free.index(i), count=2)
    for i in gl.static_range(SLOTS):
        mbarrier.init(place_full.index(i), count=1)
        mbarrier.init(place_free.index(i), count=3)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_compute, (
                0, o_rows, q_tiles, k_blocks, v_blocks, q_full, q_free, k_full, k_free, v_full, v_free,
                places, place_full, place_free, o_base, sto, l_base, HEADS, window, s_in, s_out,
                ACT, CAUSAL, WINDOW, SCALED, BLOCK_KV, STAGES, OVERLAP, D,
            )),
            (_compute, (
                1, o_rows, q_tiles, k_blocks, v_blocks, q_full, q_free, k_full, k_free, v_full, v_free,
                places, place_full, place_free, o_base, sto, l_base, HEADS, window, s_in, s_out,
                ACT, CAUSAL, WINDOW, SCALED, BLOCK_KV, STAGES, OVERLAP, D,
            )),
            (_load, (
                q_rows, k_rows, v_rows, q_tiles, k_blocks, v_blocks, q_full, q_free, k_full, k_free, v_full, v_free,
                places, place_full, place_free, WINDOW, BLOCK_KV, STAGES,
            )),
            (schedule, (
                places, place_full, place_free, QO, KO, COUNTER + h, B, total // (2 * ROWS) + B, part, parts, window,
                kv_length, ACT == "softmax", CAUSAL, WINDOW, ROUNDS, False, DENSE,
                BLOCK_KV, STAGES,
            )),
        ],
        [4, 1, 1],
        [240, 24, 24],
    )  # fmt: skip
