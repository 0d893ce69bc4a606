"""Forward kernels of jagged attention, with softmax or an element-wise activation in its place.

``forward_short``: all keys of a sequence fit one block; a program keeps K and V and streams queries past them.
``forward_general``: a program keeps a block of queries and streams K and V past it.

``ACT`` is a name of ``kernels.gdpa.ACTIVATIONS`` or ``softmax``. Query i stands at ``i + shift`` among the keys, with
``shift`` 0 for activations and ``nk - nq`` for softmax. Tiles are read through TMA descriptors where ``TMA``: their row
bound is the end of the sequence, so what lies beyond reads as zero and is never written.

Shapes: Q, OUT ``[Tq, H, .]``, K, V ``[Tk, H / GROUP, .]``, LSE ``[Tq, H]``; ``st*`` and ``sh*`` are strides of rows and
heads, the last dim is contiguous.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl

from kernels.common.activations import activate
from kernels.common.sequences import load_rows, sequence_chunk, sequence_rows, sequence_tile, store_rows

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-1e30)


@triton.jit
def visible(place, j, kv, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Whether the key at j counts for the query at ``place``; broadcasts."""
    seen = (j < kv) & (place == place)
    if CAUSAL:
        seen = seen & (j <= place)
    if WINDOW:
        seen = seen & (j - place <= window) & (place - j <= window)
    return seen


@triton.jit
def _step(
    s, v, acc, top, total, place, j, kv, window,
    ACT: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    FAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One block of keys: logits ``s`` (times log2(e) for softmax) and values into the accumulators."""
    if ACT == "softmax":
        if MASK:
            s = tl.where(visible(place[:, None], j[None, :], kv, window, CAUSAL, WINDOW), s, float("-inf"))
        new_top = tl.maximum(top, tl.max(s, 1))
        p = tl.exp2(s - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None]
        top = new_top
    else:
        p = activate(s, ACT, FAST)
        if MASK:
            p = tl.where(visible(place[:, None], j[None, :], kv, window, CAUSAL, WINDOW), p, 0.0)
    acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
    return acc, top, total


@triton.jit
def forward_general(
    Q, K, V, OUT, LSE, QO, KO, B, HEADS, q_length, kv_length, s_in, s_out, window,
    stq, shq, stk, shk, stv, shv, sto, sho,
    GROUP: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    ACT: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BROADCAST: tl.constexpr, DENSE: tl.constexpr,
    ROUNDS: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
    TMA: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A program has ``BLOCK_Q`` query rows of one sequence and head, and goes over the keys that they see."""
    h = tl.program_id(0) % HEADS
    b, q0, rows, start = sequence_tile(QO, B, q_length, tl.program_id(0) // HEADS, BLOCK_Q, BROADCAST, ROUNDS)
    if start >= rows:
        return
    k0, kv = sequence_rows(KO, b, kv_length, DENSE)
    hk = h // GROUP
    SOFTMAX: tl.constexpr = ACT == "softmax"
    MASK: tl.constexpr = CAUSAL or WINDOW
    shift = 0
    logit = s_in
    if SOFTMAX:
        shift = kv - rows
        logit = s_in * LOG2E
    low, high = start * 0, kv
    if WINDOW:
        low = tl.minimum(tl.maximum(start + shift - window, 0), kv)
        high = tl.minimum(start + BLOCK_Q + shift + window, kv)
    if CAUSAL:
        high = tl.minimum(start + BLOCK_Q + shift, high)
    q_first = q0
    if BROADCAST:
        q_first = q0 * 0
    q = load_rows(Q + q_first * stq + h * shq, stq, start, rows, D, BLOCK_Q, BLOCK_D)
    k_base, v_base = K + k0 * stk + hk * shk, V + k0 * stv + hk * shv
    if TMA:
        k_rows = tl.make_tensor_descriptor(k_base, shape=[kv, D], strides=[stk, 1], block_shape=[BLOCK_KV, BLOCK_D])
        v_rows = tl.make_tensor_descriptor(v_base, shape=[kv, E], strides=[stv, 1], block_shape=[BLOCK_KV, BLOCK_E])
    place = start + shift + tl.arange(0, BLOCK_Q)
    columns = tl.arange(0, BLOCK_KV)
    acc = tl.zeros([BLOCK_Q, BLOCK_E], tl.float32)
    top = tl.full([BLOCK_Q], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    full = tl.maximum(high - low, 0)
    if SOFTMAX:
        full = full // BLOCK_KV * BLOCK_KV  # a last, partial block is masked; activations map its zeros to zero
    for j in tl.range(low, low + full, BLOCK_KV, num_stages=STAGES):
        if TMA:
            k = k_rows.load([j, 0])
            v = v_rows.load([j, 0])
        else:
            k = load_rows(k_base, stk, j, kv, D, BLOCK_KV, BLOCK_D)
            v = load_rows(v_base, stv, j, kv, E, BLOCK_KV, BLOCK_E)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * logit
        acc, top, total = _step(
            s, v, acc, top, total, place, j + columns, kv, window, ACT, MASK, CAUSAL, WINDOW, FAST, PRECISION
        )
    if SOFTMAX and low + full < high:
        j = low + full
        k = load_rows(k_base, stk, j, kv, D, BLOCK_KV, BLOCK_D)
        v = load_rows(v_base, stv, j, kv, E, BLOCK_KV, BLOCK_E)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * logit
        acc, top, total = _step(
            s, v, acc, top, total, place, j + columns, kv, window, ACT, True, CAUSAL, WINDOW, FAST, PRECISION
        )
    if SOFTMAX:
        some = total > 0
        acc = acc / tl.where(some, total, 1.0)[:, None]
        r = start + tl.arange(0, BLOCK_Q)
        lse = tl.where(some, top * LN2 + tl.log(tl.where(some, total, 1.0)), 0.0)
        tl.store(LSE + (q0 + r) * HEADS + h, lse, mask=r < rows)
    else:
        acc = acc * s_out
    store_rows(OUT + q0 * sto + h * sho, acc, sto, start, rows, E, BLOCK_Q, BLOCK_E)


@triton.jit
def _short_logits(q, k, logit, PRECISION: tl.constexpr):
    return tl.dot(q, tl.trans(k), input_precision=PRECISION) * logit


@triton.jit
def forward_short(
    Q, K, V, OUT, QO, KO, B, HEADS, q_length, kv_length, s_in, s_out, window,
    stq, shq, stk, shk, stv, shv, sto, sho,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    ACT: tl.constexpr, WINDOW: tl.constexpr, BROADCAST: tl.constexpr, DENSE: tl.constexpr,
    ROUNDS: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
    HALVES: tl.constexpr, CHUNK: tl.constexpr, TMA: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A program has ``CHUNK`` query rows of one sequence and head. ``HALVES`` 2: keys in two blocks of BLOCK_KV."""
    h = tl.program_id(0) % HEADS
    b, q0, rows, begin = sequence_chunk(QO, B, q_length, tl.program_id(0) // HEADS, CHUNK, BROADCAST, ROUNDS)
    if begin >= rows:
        return
    k0, kv = sequence_rows(KO, b, kv_length, DENSE)
    hk = h // GROUP
    k_base, v_base = K + k0 * stk + hk * shk, V + k0 * stv + hk * shv
    k = load_rows(k_base, stk, 0, kv, D, BLOCK_KV, BLOCK_D)
    v = load_rows(v_base, stv, 0, kv, D, BLOCK_KV, BLOCK_D)
    if HALVES == 2:
        k2 = load_rows(k_base, stk, BLOCK_KV, kv, D, BLOCK_KV, BLOCK_D)
        v2 = load_rows(v_base, stv, BLOCK_KV, kv, D, BLOCK_KV, BLOCK_D)
    q_first = q0
    if BROADCAST:
        q_first = q0 * 0
    q_base = Q + q_first * stq + h * shq
    o_base = OUT + q0 * sto + h * sho
    if TMA:
        q_rows = tl.make_tensor_descriptor(q_base, shape=[rows, D], strides=[stq, 1], block_shape=[BLOCK_Q, BLOCK_D])
        o_rows = tl.make_tensor_descriptor(o_base, shape=[rows, D], strides=[sto, 1], block_shape=[BLOCK_Q, BLOCK_D])
    column = tl.arange(0, BLOCK_KV)[None, :]
    end = tl.minimum(begin + CHUNK, rows)
    for start in tl.range(begin, end, BLOCK_Q, num_stages=STAGES):
        if TMA:  # noqa: SIM108, Triton folds a constant branch only as a statement
            q = q_rows.load([start, 0])
        else:
            q = load_rows(q_base, stq, start, rows, D, BLOCK_Q, BLOCK_D)
        place = (start + tl.arange(0, BLOCK_Q))[:, None]
        p = activate(_short_logits(q, k, s_in, PRECISION), ACT, FAST)
        if WINDOW:
            p = tl.where(visible(place, column, kv, window, False, True), p, 0.0)
        o = tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
        if HALVES == 2:  # after the first half, whose logits so need no registers any more
            p2 = activate(_short_logits(q, k2, s_in, PRECISION), ACT, FAST)
            if WINDOW:
                p2 = tl.where(visible(place, column + BLOCK_KV, kv, window, False, True), p2, 0.0)
            o = tl.dot(p2.to(v.dtype), v2, o, input_precision=PRECISION)
        o = o * s_out
        if TMA:
            o_rows.store([start, 0], o.to(OUT.dtype.element_ty))
        else:
            store_rows(o_base, o, sto, start, rows, D, BLOCK_Q, BLOCK_D)
