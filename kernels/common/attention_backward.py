"""Backward kernels of jagged attention; names and layouts as in ``attention_forward``.

With ``S = logit_scale Q K^T``, ``dP = dO V^T`` and, per element, ``P`` and ``dS``:
activation ``P = scale act(S)``, ``dS = scale act'(S) dP``; softmax ``P = exp(S - LSE)``, ``dS = P (dP - delta)`` with
``delta_i = sum(dO_i O_i)``. Then ``dV = P^T dO``, ``dQ = logit_scale dS K``, ``dK = logit_scale dS^T Q``.

``backward_kv`` keeps a block of keys and streams queries past it. Where it has all keys of a sequence (``PASSES`` > 0:
so many blocks one after another), five products make every gradient; between its passes the query gradient waits in a
float32 buffer. Else the query gradient is left to ``backward_q``, which computes S and dP again: seven products, but
measured no slower on an H200 than adding to a float32 buffer from many programs, and the same bits in every run: no
kernel here uses atomics. For softmax ``backward_q`` runs first and leaves delta for ``backward_kv``.

DO, OUT, DQ, DK and DV are contiguous. Factors that are the same for all elements are applied to the sums, except in
float16, whose range is too small for that.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl

from kernels.common.activations import activate_with_slope
from kernels.common.attention_forward import LOG2E, VARYING, at_edge, visible
from kernels.common.sequences import load_rows, sequence_rows, sequence_tile, store_rows


@triton.jit
def _elements(
    s, dp, lse, delta, place, j, kv, window, edge, s_in, factor,
    MASK: tl.constexpr, ACT: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SCALED: tl.constexpr,
    FAST: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """``P / scale`` and, short of the factor unless ``EARLY``, dS from the raw products; operands broadcast to s.

    lse is in units of log2. ``MASK``: whether blocks at an edge are to be masked.
    """
    if ACT == "softmax":
        if MASK:  # noqa: SIM102, Triton folds a constant branch only by itself
            if edge:
                s = tl.where(visible(place, j, kv, window, CAUSAL, WINDOW), s, float("-inf"))
        p = tl.exp2(s * (s_in * LOG2E) - lse)
        ds = p * (dp - delta)
    else:
        if MASK:  # noqa: SIM102, Triton folds a constant branch only by itself
            if edge:
                seen = visible(place, j, kv, window, CAUSAL, WINDOW)
                s = tl.where(seen, s, 0.0)
                dp = tl.where(seen, dp, 0.0)
        if SCALED:
            s = s * s_in
        p, slope = activate_with_slope(s, ACT, FAST)
        ds = dp * slope
    if EARLY:
        ds = ds * factor
    return p, ds


@triton.jit(do_not_specialize=VARYING)
def backward_kv(
    Q, K, V, DO, DQ, SUM, DK, DV, LSE, DELTA, QO, KO,
    B, q_length, kv_length, window, s_in, s_out,
    KV_HEADS: tl.constexpr, STQ: tl.constexpr, SHQ: tl.constexpr,
    STK: tl.constexpr, SHK: tl.constexpr, STV: tl.constexpr, SHV: tl.constexpr,
    GROUP: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    ACT: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BROADCAST: tl.constexpr, DENSE: tl.constexpr,
    ROUNDS: tl.constexpr, SCALED: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr, PASSES: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, TMA: tl.constexpr, TMA_OUT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A program has ``BLOCK_KV`` keys of one sequence and key head, or ``PASSES`` times as many, which are all."""
    hk = tl.program_id(0) % KV_HEADS
    SOFTMAX: tl.constexpr = ACT == "softmax"
    if PASSES:
        b = tl.program_id(0) // KV_HEADS
        k0, kv = sequence_rows(KO, b, kv_length, DENSE)
        begin = b * 0
    else:
        b, k0, kv, begin = sequence_tile(KO, B, kv_length, tl.program_id(0) // KV_HEADS, BLOCK_KV, DENSE, ROUNDS)
        if begin >= kv:
            return
    q0, rows = sequence_rows(QO, b, q_length, BROADCAST)
    shift = 0
    if SOFTMAX:
        shift = kv - rows
    low, high = begin * 0, rows
    if not PASSES:
        if CAUSAL:
            low = tl.maximum(begin - shift, 0)
        if WINDOW:
            low = tl.maximum(begin - shift - window, low)
            high = tl.minimum(begin + BLOCK_KV - shift + window, rows)
    q_first = q0
    if BROADCAST:
        q_first = q0 * 0
    EARLY: tl.constexpr = Q.dtype.element_ty == tl.float16
    factor = s_in * s_out
    step = KV_HEADS * GROUP
    for turn in tl.static_range(PASSES if PASSES else 1):
        first = begin + turn * BLOCK_KV
        k = load_rows(K + k0 * STK + hk * SHK, STK, first, kv, D, BLOCK_KV, BLOCK_D)
        v = load_rows(V + k0 * STV + hk * SHV, STV, first, kv, E, BLOCK_KV, BLOCK_E)
        dk = tl.zeros([BLOCK_KV, BLOCK_D], tl.float32)
        dv = tl.zeros([BLOCK_KV, BLOCK_E], tl.float32)
        column = (first + tl.arange(0, BLOCK_KV))[:, None]
        for g in range(GROUP):
            h = hk * GROUP + g
            q_base, g_base = Q + q_first * STQ + h * SHQ, DO + (q0 * step + h) * E
            dq_at = (q0 * step + h) * D
            if TMA:
                q_rows = tl.make_tensor_descriptor(q_base, [rows, D], [STQ, 1], [BLOCK_Q, BLOCK_D])
                g_rows = tl.make_tensor_descriptor(g_base, [rows, E], [step * E, 1], [BLOCK_Q, BLOCK_E])
                if TMA_OUT:
                    dq_rows = tl.make_tensor_descriptor(DQ + dq_at, [rows, D], [step * D, 1], [BLOCK_Q, BLOCK_D])
            for start in tl.range(low, high, BLOCK_Q, num_stages=STAGES):
                if TMA:
                    q = q_rows.load([start, 0])
                    do = g_rows.load([start, 0])
                else:
                    q = load_rows(q_base, STQ, start, rows, D, BLOCK_Q, BLOCK_D)
                    do = load_rows(g_base, step * E, start, rows, E, BLOCK_Q, BLOCK_E)
                r = start + tl.arange(0, BLOCK_Q)
                if SOFTMAX:
                    at = (q0 + r) * step + h
                    lse = tl.load(LSE + at, mask=r < rows, other=0.0)[None, :] * LOG2E
                    delta = tl.load(DELTA + at, mask=r < rows, other=0.0)[None, :]
                else:
                    lse, delta = 0.0, 0.0
                s = tl.dot(k, tl.trans(q), input_precision=PRECISION)
                dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)
                edge = at_edge(start, first, kv, shift, window, BLOCK_Q, BLOCK_KV, False, CAUSAL, WINDOW)
                p, ds = _elements(
                    s, dp, lse, delta, (r + shift)[None, :], column, kv, window, edge, s_in, factor,
                    CAUSAL or WINDOW, ACT, CAUSAL, WINDOW, SCALED, FAST, EARLY,
                )  # fmt: skip
                ds = ds.to(q.dtype)
                dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
                dk = tl.dot(ds, q, dk, input_precision=PRECISION)
                if PASSES:
                    dq = tl.dot(tl.trans(ds), k, input_precision=PRECISION)
                    if turn > 0:
                        dq += load_rows(SUM + dq_at, step * D, start, rows, D, BLOCK_Q, BLOCK_D)
                    if turn + 1 < PASSES:
                        store_rows(SUM + dq_at, dq, step * D, start, rows, D, BLOCK_Q, BLOCK_D)
                    else:
                        if not EARLY:
                            dq = dq * factor
                        if TMA_OUT:
                            dq_rows.store([start, 0], dq.to(DQ.dtype.element_ty))
                        else:
                            store_rows(DQ + dq_at, dq, step * D, start, rows, D, BLOCK_Q, BLOCK_D)
        if not EARLY:
            dk = dk * factor
        store_rows(DK + (k0 * KV_HEADS + hk) * D, dk, KV_HEADS * D, first, kv, D, BLOCK_KV, BLOCK_D)
        store_rows(DV + (k0 * KV_HEADS + hk) * E, dv * s_out, KV_HEADS * E, first, kv, E, BLOCK_KV, BLOCK_E)
        if turn + 1 < PASSES:
            tl.debug_barrier()  # the query gradients so far, for all threads of this program


@triton.jit(do_not_specialize=VARYING)
def backward_q(
    Q, K, V, DO, OUT, DQ, LSE, DELTA, QO, KO,
    B, q_length, kv_length, window, s_in, s_out,
    HEADS: tl.constexpr, STQ: tl.constexpr, SHQ: tl.constexpr,
    STK: tl.constexpr, SHK: tl.constexpr, STV: tl.constexpr, SHV: tl.constexpr,
    GROUP: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    ACT: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BROADCAST: tl.constexpr, DENSE: tl.constexpr,
    ROUNDS: tl.constexpr, SCALED: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, TMA: tl.constexpr, STAGES: tl.constexpr,
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
    at = q0 * HEADS + h
    r = start + tl.arange(0, BLOCK_Q)
    q = load_rows(Q + q_first * STQ + h * SHQ, STQ, start, rows, D, BLOCK_Q, BLOCK_D)
    do = load_rows(DO + at * E, HEADS * E, start, rows, E, BLOCK_Q, BLOCK_E)
    if SOFTMAX:
        out = load_rows(OUT + at * E, HEADS * E, start, rows, E, BLOCK_Q, BLOCK_E)
        delta = tl.sum(do.to(tl.float32) * out.to(tl.float32), 1)
        tl.store(DELTA + at + r * HEADS, delta, mask=r < rows)
        lse = tl.load(LSE + at + r * HEADS, mask=r < rows, other=0.0)[:, None] * LOG2E
        delta = delta[:, None]
    else:
        lse, delta = 0.0, 0.0
    k_base, v_base = K + k0 * STK + hk * SHK, V + k0 * STV + hk * SHV
    if TMA:
        k_rows = tl.make_tensor_descriptor(k_base, shape=[kv, D], strides=[STK, 1], block_shape=[BLOCK_KV, BLOCK_D])
        v_rows = tl.make_tensor_descriptor(v_base, shape=[kv, E], strides=[STV, 1], block_shape=[BLOCK_KV, BLOCK_E])
    columns = tl.arange(0, BLOCK_KV)
    EARLY: tl.constexpr = Q.dtype.element_ty == tl.float16
    factor = s_in * s_out
    dq = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    for j in tl.range(low, high, BLOCK_KV, num_stages=STAGES):
        if TMA:
            k = k_rows.load([j, 0])
            v = v_rows.load([j, 0])
        else:
            k = load_rows(k_base, STK, j, kv, D, BLOCK_KV, BLOCK_D)
            v = load_rows(v_base, STV, j, kv, E, BLOCK_KV, BLOCK_E)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
        edge = at_edge(start, j, kv, shift, window, BLOCK_Q, BLOCK_KV, SOFTMAX, CAUSAL, WINDOW)
        _, ds = _elements(
            s, dp, lse, delta, (r + shift)[:, None], (j + columns)[None, :], kv, window, edge, s_in, factor,
            SOFTMAX or CAUSAL or WINDOW, ACT, CAUSAL, WINDOW, SCALED, FAST, EARLY,
        )  # fmt: skip
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    if not EARLY:
        dq = dq * factor
    store_rows(DQ + at * D, dq, HEADS * D, start, rows, D, BLOCK_Q, BLOCK_D)
