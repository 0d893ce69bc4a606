"""Forward kernels of jagged attention, with softmax or an element-wise activation in its place.

``forward_short``: all keys of a sequence fit one block; a program keeps K and V and streams queries past them.
``forward_general``: a program keeps a block of queries and streams K and V past it.

``ACT`` is a name of ``kernels.gdpa.ACTIVATIONS`` or ``softmax``. Query i stands at ``i + shift`` among the keys, with
``shift`` 0 for activations and ``nk - nq`` for softmax. Tiles are read through TMA descriptors where ``TMA``: their row
bound is the end of the sequence, so what lies beyond reads as zero and is never written. Only blocks at an edge of what
a query sees are masked. ``SCALED``: whether the factor inside, ``s_in``, is another than 1.

Shapes: Q ``[Tq, H, .]``, K, V ``[Tk, H / GROUP, .]`` with ``ST*`` and ``SH*`` the strides of rows and heads and a
contiguous last dim; OUT ``[Tq, H, .]`` and LSE ``[Tq, H]`` contiguous. Tensors come first among the arguments, then
numbers, then constants, as ``kernels/common/launcher.py`` wants.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl

from kernels.common.activations import activate
from kernels.common.sequences import load_rows, sequence_chunk, sequence_rows, sequence_tile, store_rows

LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1e30)

VARYING = ("B", "q_length", "kv_length", "window")
"""Arguments that change from call to call, for which no kernel is compiled anew."""


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
def at_edge(start, j, kv, shift, window, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, SOFTMAX: tl.constexpr,
            CAUSAL: tl.constexpr, WINDOW: tl.constexpr):  # fmt: skip
    """Whether some query of the block at ``start`` sees only some keys of the block at j. Zero keys do not count."""
    edge = start < 0
    if SOFTMAX:
        edge = j + BLOCK_KV > kv
    if CAUSAL:
        edge = edge | (j + BLOCK_KV - 1 > start + shift)
    if WINDOW:
        edge = edge | (start + BLOCK_Q - 1 + shift - j > window) | (j + BLOCK_KV - 1 - start - shift > window)
    return edge


@triton.jit
def _over_keys(
    acc, top, total, q, k_base, v_base, k_rows, v_rows, low, high, start, kv, shift, window, logit,
    STK: tl.constexpr, STV: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, ACT: tl.constexpr,
    MASK: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SCALED: tl.constexpr, FAST: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, TMA: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The keys from low to high, into the accumulators; where ``MASK``, with blocks at an edge of what is seen."""
    SOFTMAX: tl.constexpr = ACT == "softmax"
    place = (start + shift + tl.arange(0, BLOCK_Q))[:, None]
    columns = tl.arange(0, BLOCK_KV)[None, :]
    for j in tl.range(low, high, BLOCK_KV, num_stages=STAGES):
        if TMA:
            k = k_rows.load([j, 0])
            v = v_rows.load([j, 0])
        else:
            k = load_rows(k_base, STK, j, kv, D, BLOCK_KV, BLOCK_D)
            v = load_rows(v_base, STV, j, kv, E, BLOCK_KV, BLOCK_E)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if MASK:  # noqa: SIM102, Triton folds a constant branch only by itself
            if at_edge(start, j, kv, shift, window, BLOCK_Q, BLOCK_KV, SOFTMAX, CAUSAL, WINDOW):
                hidden: tl.constexpr = float("-inf") if SOFTMAX else 0.0
                s = tl.where(visible(place, j + columns, kv, window, CAUSAL, WINDOW), s, hidden)
        if SOFTMAX:
            new_top = tl.maximum(top, tl.max(s, 1))
            p = tl.exp2(s * logit - (new_top * logit)[:, None])
            shrink = tl.exp2((top - new_top) * logit)
            total = total * shrink + tl.sum(p, 1)
            acc = acc * shrink[:, None]
            top = new_top
        else:
            if SCALED:
                s = s * logit
            p = activate(s, ACT, FAST)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
    return acc, top, total


@triton.jit(do_not_specialize=VARYING)
def forward_general(
    Q, K, V, OUT, LSE, QO, KO, B, q_length, kv_length, window, s_in, s_out,
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
    q_base = Q + q_first * STQ + h * SHQ
    k_base, v_base = K + k0 * STK + hk * SHK, V + k0 * STV + hk * SHV
    if TMA:
        q_rows = tl.make_tensor_descriptor(q_base, shape=[rows, D], strides=[STQ, 1], block_shape=[BLOCK_Q, BLOCK_D])
        k_rows = tl.make_tensor_descriptor(k_base, shape=[kv, D], strides=[STK, 1], block_shape=[BLOCK_KV, BLOCK_D])
        v_rows = tl.make_tensor_descriptor(v_base, shape=[kv, E], strides=[STV, 1], block_shape=[BLOCK_KV, BLOCK_E])
        q = q_rows.load([start, 0])
    else:
        q = load_rows(q_base, STQ, start, rows, D, BLOCK_Q, BLOCK_D)
        k_rows, v_rows = k_base, v_base
    acc = tl.zeros([BLOCK_Q, BLOCK_E], tl.float32)
    top = tl.full([BLOCK_Q], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    middle = high
    if SOFTMAX or CAUSAL:  # full blocks first, without a mask
        middle = low + tl.maximum(high - low, 0) // BLOCK_KV * BLOCK_KV
    if CAUSAL:
        middle = tl.minimum(middle, tl.maximum(start + shift + 1, 0) // BLOCK_KV * BLOCK_KV)
    if WINDOW:
        middle = low
    else:
        acc, top, total = _over_keys(
            acc, top, total, q, k_base, v_base, k_rows, v_rows, low, middle, start, kv, shift, window, logit,
            STK, STV,
            D, E, BLOCK_D, BLOCK_E, ACT, False, CAUSAL, WINDOW, SCALED, FAST, PRECISION, BLOCK_Q, BLOCK_KV, TMA, STAGES,
        )  # fmt: skip
    if SOFTMAX or CAUSAL or WINDOW:
        acc, top, total = _over_keys(
            acc, top, total, q, k_base, v_base, k_rows, v_rows, middle, high, start, kv, shift, window, logit,
            STK, STV,
            D, E, BLOCK_D, BLOCK_E, ACT, True, CAUSAL, WINDOW, SCALED, FAST, PRECISION, BLOCK_Q, BLOCK_KV, TMA, STAGES,
        )  # fmt: skip
    if SOFTMAX:
        some = total > 0
        acc = acc / tl.where(some, total, 1.0)[:, None]
        r = start + tl.arange(0, BLOCK_Q)
        lse = tl.where(some, top * s_in + tl.log(tl.where(some, total, 1.0)), 0.0)
        tl.store(LSE + (q0 + r) * HEADS + h, lse, mask=r < rows)
    else:
        acc = acc * s_out
    store_rows(OUT + (q0 * HEADS + h) * E, acc, HEADS * E, start, rows, E, BLOCK_Q, BLOCK_E)


@triton.jit
def _short_weights(
    q, k, s_in, place, column, kv, window,
    ACT: tl.constexpr, WINDOW: tl.constexpr, SCALED: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if WINDOW:
        s = tl.where(visible(place, column, kv, window, False, True), s, 0.0)
    if SCALED:
        s = s * s_in
    return activate(s, ACT, FAST).to(k.dtype)


@triton.jit(do_not_specialize=VARYING)
def forward_short(
    Q, K, V, OUT, QO, KO, B, q_length, kv_length, window, s_in, s_out,
    HEADS: tl.constexpr, STQ: tl.constexpr, SHQ: tl.constexpr,
    STK: tl.constexpr, SHK: tl.constexpr, STV: tl.constexpr, SHV: tl.constexpr,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    ACT: tl.constexpr, WINDOW: tl.constexpr, BROADCAST: tl.constexpr, DENSE: tl.constexpr,
    ROUNDS: tl.constexpr, SCALED: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, HALVES: tl.constexpr, CHUNK: tl.constexpr, TMA: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """A program has ``CHUNK`` query rows of one sequence and head. ``HALVES`` 2: keys in two blocks of BLOCK_KV."""
    h = tl.program_id(0) % HEADS
    b, q0, rows, begin = sequence_chunk(QO, B, q_length, tl.program_id(0) // HEADS, CHUNK, BROADCAST, ROUNDS)
    if begin >= rows:
        return
    k0, kv = sequence_rows(KO, b, kv_length, DENSE)
    hk = h // GROUP
    k_base, v_base = K + k0 * STK + hk * SHK, V + k0 * STV + hk * SHV
    q_first = q0
    if BROADCAST:
        q_first = q0 * 0
    q_base = Q + q_first * STQ + h * SHQ
    o_base = OUT + (q0 * HEADS + h) * D
    if TMA:
        q_rows = tl.make_tensor_descriptor(q_base, shape=[rows, D], strides=[STQ, 1], block_shape=[BLOCK_Q, BLOCK_D])
        o_rows = tl.make_tensor_descriptor(
            o_base, shape=[rows, D], strides=[HEADS * D, 1], block_shape=[BLOCK_Q, BLOCK_D]
        )
    k = load_rows(k_base, STK, 0, kv, D, BLOCK_KV, BLOCK_D)
    v = load_rows(v_base, STV, 0, kv, D, BLOCK_KV, BLOCK_D)
    if HALVES == 2:
        k2 = load_rows(k_base, STK, BLOCK_KV, kv, D, BLOCK_KV, BLOCK_D)
        v2 = load_rows(v_base, STV, BLOCK_KV, kv, D, BLOCK_KV, BLOCK_D)
    column = tl.arange(0, BLOCK_KV)[None, :]
    end = tl.minimum(begin + CHUNK, rows)
    for start in tl.range(begin, end, BLOCK_Q, num_stages=STAGES):
        if TMA:  # noqa: SIM108, Triton folds a constant branch only as a statement
            q = q_rows.load([start, 0])
        else:
            q = load_rows(q_base, STQ, start, rows, D, BLOCK_Q, BLOCK_D)
        place = (start + tl.arange(0, BLOCK_Q))[:, None]
        p = _short_weights(q, k, s_in, place, column, kv, window, ACT, WINDOW, SCALED, FAST, PRECISION)
        o = tl.dot(p, v, input_precision=PRECISION)
        if HALVES == 2:  # after the first half, whose logits so need no registers any more
            p = _short_weights(q, k2, s_in, place, column + BLOCK_KV, kv, window, ACT, WINDOW, SCALED, FAST, PRECISION)
            o = tl.dot(p, v2, o, input_precision=PRECISION)
        o = o * s_out
        if TMA:
            o_rows.store([start, 0], o.to(OUT.dtype.element_ty))
        else:
            store_rows(o_base, o, HEADS * D, start, rows, D, BLOCK_Q, BLOCK_D)
