"""Backward kernels of jagged attention; names and layouts as in ``attention_forward``.

With ``S = logit_scale Q K^T``, ``dP = dO V^T`` and, per element, ``P`` and ``dS``:
activation ``P = scale act(S)``, ``dS = scale act'(S) dP``; softmax ``P = exp(S - LSE)``, ``dS = P (dP - delta)`` with
``delta_i = sum(dO_i O_i)``. Then ``dV = P^T dO``, ``dQ = logit_scale dS K``, ``dK = logit_scale dS^T Q``.

``backward_kv`` keeps a block of keys and streams queries past it. Where the block holds all keys of its sequence
(``WHOLE``), five products in one pass make every gradient. Else the query gradient is left to ``backward_q``, which
computes S and dP again: seven products, but measured no slower on an H200 than adding to a float32 buffer (five
products and its traffic), and the same bits in every run: no kernel here uses atomics.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl

from kernels.common.activations import activate_with_slope
from kernels.common.attention_forward import LOG2E, visible
from kernels.common.sequences import load_rows, sequence_rows, sequence_tile, store_rows


@triton.jit
def _elements(
    s, dp, lse, delta, place, j, kv, window, s_in, s_out, rows, MASK: tl.constexpr,
    ACT: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """``P / scale`` and ``logit_scale dS`` from the raw products; all operands broadcast to the shape of ``s``."""
    if ACT == "softmax":
        p = tl.exp2(s * (s_in * LOG2E) - lse * LOG2E)
        if MASK:
            p = tl.where(visible(place, j, kv, window, CAUSAL, WINDOW), p, 0.0)
        return p, p * (dp - delta) * s_in
    else:
        p, slope = activate_with_slope(s * s_in, ACT, FAST)
        ds = dp * slope * (s_in * s_out)
        if MASK:
            seen = visible(place, j, kv, window, CAUSAL, WINDOW)
            p = tl.where(seen, p, 0.0)
            ds = tl.where(seen, ds, 0.0)
        return p, ds


@triton.jit
def backward_kv(
    Q, K, V, DO, DQ, DK, DV, LSE, DELTA, QO, KO, B, KV_HEADS, q_length, kv_length, s_in, s_out, window,
    stq, shq, stk, shk, stv, shv, stg, shg, stdq, shdq, stdk, shdk, stdv, shdv,
    GROUP: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    ACT: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BROADCAST: tl.constexpr, DENSE: tl.constexpr,
    ROUNDS: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr, WHOLE: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, TMA: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A program has ``BLOCK_KV`` keys of one sequence and key head, and goes over the queries that see them."""
    hk = tl.program_id(0) % KV_HEADS
    if WHOLE:
        b = tl.program_id(0) // KV_HEADS
        k0, kv = sequence_rows(KO, b, kv_length, DENSE)
        first = b * 0
    else:
        b, k0, kv, first = sequence_tile(KO, B, kv_length, tl.program_id(0) // KV_HEADS, BLOCK_KV, DENSE, ROUNDS)
        if first >= kv:
            return
    q0, rows = sequence_rows(QO, b, q_length, BROADCAST)
    SOFTMAX: tl.constexpr = ACT == "softmax"
    shift = 0
    if SOFTMAX:
        shift = kv - rows
    low, high = first * 0, rows
    if not WHOLE:
        if CAUSAL:
            low = tl.maximum(first - shift, 0)
        if WINDOW:
            low = tl.maximum(first - shift - window, low)
            high = tl.minimum(first + BLOCK_KV - shift + window, rows)
    q_first = q0
    if BROADCAST:
        q_first = q0 * 0
    k = load_rows(K + k0 * stk + hk * shk, stk, first, kv, D, BLOCK_KV, BLOCK_D)
    v = load_rows(V + k0 * stv + hk * shv, stv, first, kv, E, BLOCK_KV, BLOCK_E)
    dk = tl.zeros([BLOCK_KV, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_KV, BLOCK_E], tl.float32)
    column = (first + tl.arange(0, BLOCK_KV))[:, None]
    for g in range(GROUP):
        h = hk * GROUP + g
        q_base, g_base = Q + q_first * stq + h * shq, DO + q0 * stg + h * shg
        dq_base = DQ + q0 * stdq + h * shdq
        if TMA:
            q_rows = tl.make_tensor_descriptor(q_base, [rows, D], [stq, 1], [BLOCK_Q, BLOCK_D])
            g_rows = tl.make_tensor_descriptor(g_base, [rows, E], [stg, 1], [BLOCK_Q, BLOCK_E])
            if WHOLE:
                dq_rows = tl.make_tensor_descriptor(dq_base, [rows, D], [stdq, 1], [BLOCK_Q, BLOCK_D])
        for start in tl.range(low, high, BLOCK_Q, num_stages=STAGES):
            if TMA:
                q = q_rows.load([start, 0])
                do = g_rows.load([start, 0])
            else:
                q = load_rows(q_base, stq, start, rows, D, BLOCK_Q, BLOCK_D)
                do = load_rows(g_base, stg, start, rows, E, BLOCK_Q, BLOCK_E)
            r = start + tl.arange(0, BLOCK_Q)
            if SOFTMAX:
                at = (q0 + r) * (KV_HEADS * GROUP) + h
                lse = tl.load(LSE + at, mask=r < rows, other=0.0)[None, :]
                delta = tl.load(DELTA + at, mask=r < rows, other=0.0)[None, :]
            else:
                lse, delta = 0.0, 0.0
            s = tl.dot(k, tl.trans(q), input_precision=PRECISION)
            dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)
            p, ds = _elements(
                s, dp, lse, delta, (r + shift)[None, :], column, kv, window, s_in, s_out, rows,
                SOFTMAX or CAUSAL or WINDOW, ACT, CAUSAL, WINDOW, FAST,
            )  # fmt: skip
            ds = ds.to(q.dtype)
            dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
            dk = tl.dot(ds, q, dk, input_precision=PRECISION)
            if WHOLE:
                dq = tl.dot(tl.trans(ds), k, input_precision=PRECISION)
                if TMA:
                    dq_rows.store([start, 0], dq.to(DQ.dtype.element_ty))
                else:
                    store_rows(dq_base, dq, stdq, start, rows, D, BLOCK_Q, BLOCK_D)
    store_rows(DK + k0 * stdk + hk * shdk, dk, stdk, first, kv, D, BLOCK_KV, BLOCK_D)
    if not SOFTMAX:
        dv = dv * s_out
    store_rows(DV + k0 * stdv + hk * shdv, dv, stdv, first, kv, E, BLOCK_KV, BLOCK_E)


@triton.jit
def backward_q(
    Q, K, V, DO, DQ, LSE, DELTA, QO, KO, B, HEADS, q_length, kv_length, s_in, s_out, window,
    stq, shq, stk, shk, stv, shv, stg, shg, stdq, shdq,
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
    shift = 0
    if SOFTMAX:
        shift = kv - rows
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
    do = load_rows(DO + q0 * stg + h * shg, stg, start, rows, E, BLOCK_Q, BLOCK_E)
    r = start + tl.arange(0, BLOCK_Q)
    if SOFTMAX:
        at = (q0 + r) * HEADS + h
        lse = tl.load(LSE + at, mask=r < rows, other=0.0)[:, None]
        delta = tl.load(DELTA + at, mask=r < rows, other=0.0)[:, None]
    else:
        lse, delta = 0.0, 0.0
    k_base, v_base = K + k0 * stk + hk * shk, V + k0 * stv + hk * shv
    if TMA:
        k_rows = tl.make_tensor_descriptor(k_base, shape=[kv, D], strides=[stk, 1], block_shape=[BLOCK_KV, BLOCK_D])
        v_rows = tl.make_tensor_descriptor(v_base, shape=[kv, E], strides=[stv, 1], block_shape=[BLOCK_KV, BLOCK_E])
    columns = tl.arange(0, BLOCK_KV)
    dq = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    for j in tl.range(low, high, BLOCK_KV, num_stages=STAGES):
        if TMA:
            k = k_rows.load([j, 0])
            v = v_rows.load([j, 0])
        else:
            k = load_rows(k_base, stk, j, kv, D, BLOCK_KV, BLOCK_D)
            v = load_rows(v_base, stv, j, kv, E, BLOCK_KV, BLOCK_E)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
        _, ds = _elements(
            s, dp, lse, delta, (r + shift)[:, None], (j + columns)[None, :], kv, window, s_in, s_out, rows,
            SOFTMAX or CAUSAL or WINDOW, ACT, CAUSAL, WINDOW, FAST,
        )  # fmt: skip
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    store_rows(DQ + q0 * stdq + h * shdq, dq, stdq, start, rows, D, BLOCK_Q, BLOCK_D)


@triton.jit
def output_dot(DO, OUT, DELTA, HEADS, stg, shg, sto, sho, total, E: tl.constexpr, BLOCK_E: tl.constexpr,
               BLOCK: tl.constexpr):  # fmt: skip
    """``delta[i, h] = sum(dO[i, h] * O[i, h])`` over ``total`` rows times heads."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    c = tl.arange(0, BLOCK_E)[None, :]
    row, head = (index // HEADS)[:, None], (index % HEADS)[:, None]
    mask = (index < total)[:, None] & (c < E)
    do = tl.load(DO + row * stg + head * shg + c, mask=mask, other=0.0).to(tl.float32)
    o = tl.load(OUT + row * sto + head * sho + c, mask=mask, other=0.0).to(tl.float32)
    tl.store(DELTA + index, tl.sum(do * o, 1), mask=index < total)
