"""Softmax attention over packed sequences in plain PyTorch: the CPU path and the oracle of the GPU kernels.

Per sequence and head, ``O_i = sum_j softmax_j(scale * q_i . k_j) v_j``. Query i of a sequence of nq queries and nk keys
stands at ``p_i = i + nk - nq``, so that the last query stands at the last key; causal keeps the keys ``j <= p_i``, a
window the keys ``|p_i - j| <= window``. A query that is left with no key gives 0.

Saved for backward, besides the inputs: the output and ``LSE_i = log sum_j exp(scale * q_i . k_j)``. Then, with
``P = exp(S - LSE)`` and ``D_i = sum(dO_i * O_i)``: ``dV = P^T dO``, ``dS = P * (dO V^T - D)``, ``dQ = scale * dS K``,
``dK = scale * dS^T Q`` (FlashAttention, arXiv 2205.14135).

Padded products rather than ``scaled_dot_product_attention``: on CPU, at the lengths met here, they are no slower,
and they take any dtype.
Computes in float32, or float64 for float64 inputs.

Legend: Tq query rows, Tk key rows, B sequences, Q learned queries, H heads, G key heads, d key width,
e value width; b, Lq, Lk: a padded group (``kernels/jagged/padding.py``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.jagged.padding import Group, PackedSide, compute_dtype, join_heads, nothing, padded_groups, spread_heads

_HIDDEN = -1e30
"""Logit of a key that does not count: finite, so that a query without keys stays free of NaN."""


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor | None,
    kv_offsets: Tensor,
    scale: float,
    causal: bool,
    window: int,
) -> tuple[Tensor, Tensor]:
    """Output ``[Tq, H, e]`` and LSE ``[Tq, H]`` (0 where no key counts).

    Arguments as in ``kernels.jagged_attention.jagged_attention``; ``window`` -1 for none. Without ``q_offsets`` the
    output has the rows of the B copies of q, one after another.
    """
    dtype, heads = compute_dtype(q.dtype), q.shape[1]
    if nothing(q, v):
        rows = q.shape[0] if q_offsets is not None else q.shape[0] * (kv_offsets.shape[0] - 1)
        return q.new_zeros((rows, heads, v.shape[2])), q.new_zeros((rows, heads), dtype=dtype)
    groups, queries, keys = _sides(q, q_offsets, kv_offsets, k)
    out, lse = queries.buffer(v.shape[2], dtype), queries.buffer(1, dtype)
    for g, group in enumerate(groups):
        bias, sees = _bias(group, queries.real(g), keys.real(g), causal, window, dtype)
        k_padded = spread_heads(keys.take(k, g, dtype), heads)
        s = _queries(q, q_offsets, queries, g, scale, dtype) @ k_padded.transpose(2, 3)
        p, top, total = _exponentials(s, bias)
        o = (p @ spread_heads(keys.take(v, g, dtype), heads)).div_(total)
        queries.put(out, g, o if sees is None else o * sees)
        queries.put(lse, g, top + total.log() if sees is None else (top + total.log()) * sees)
    return queries.result(out, q.dtype), queries.result(lse, dtype).squeeze(2)


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    q_offsets: Tensor | None,
    kv_offsets: Tensor,
    scale: float,
    causal: bool,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, each of the shape of its tensor."""
    if nothing(q, v):
        return q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
    dtype, heads = compute_dtype(q.dtype), q.shape[1]
    groups, queries, keys = _sides(q, q_offsets, kv_offsets, k)
    dq = queries.buffer(q.shape[2], dtype)
    dk, dv = keys.buffer(k.shape[2], dtype), keys.buffer(v.shape[2], dtype)
    for g, group in enumerate(groups):
        real = queries.real(g)
        bias, sees = _bias(group, real, keys.real(g), causal, window, dtype)
        q_padded = _queries(q, q_offsets, queries, g, scale, dtype)
        k_padded = spread_heads(keys.take(k, g, dtype), heads)
        v_padded = spread_heads(keys.take(v, g, dtype), heads)
        do = queries.take(grad, g, dtype) * real[:, None, :, None]
        if sees is not None:
            do = do * sees
        delta = (do * queries.take(out, g, dtype)).sum(3, keepdim=True)
        shift = queries.take(lse.unsqueeze(2), g, dtype)
        p = (q_padded @ k_padded.transpose(2, 3)).add_(bias).sub_(shift).exp_()
        ds = (do @ v_padded.transpose(2, 3)).sub_(delta).mul_(p)
        queries.put_product(dq, g, ds, k_padded)
        ds, p, q_padded, do = (join_heads(x, k.shape[1], p.shape[0]) for x in (ds, p, q_padded, do))
        keys.put_product(dk, g, ds.transpose(2, 3), q_padded)
        keys.put_product(dv, g, p.transpose(2, 3), do)
    dq.mul_(scale)
    dq_rows = queries.result(dq, dtype)
    if q_offsets is None:
        dq_rows = dq_rows.view(-1, *q.shape).sum(0)
    return dq_rows.to(q.dtype), keys.result(dk, k.dtype), keys.result(dv, v.dtype)


def _exponentials(s: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``exp(s + bias - top)``, ``top`` (the maximum) and the sum, over the last dim."""
    s = s.add_(bias)
    top = s.amax(3, keepdim=True)
    p = s.sub_(top).exp_()
    return p, top, p.sum(3, keepdim=True)


def _sides(
    q: Tensor, q_offsets: Tensor | None, kv_offsets: Tensor, k: Tensor
) -> tuple[list[Group], PackedSide, PackedSide]:
    if q_offsets is None:
        q_offsets = torch.arange(kv_offsets.shape[0], device=q.device) * q.shape[0]
        q_rows = q.shape[0] * (kv_offsets.shape[0] - 1)
    else:
        q_rows = q.shape[0]
    groups = padded_groups(q_offsets.diff(), kv_offsets.diff(), q.shape[1])
    rows = [group.rows for group in groups]
    return (
        groups,
        PackedSide(q_offsets, q_rows, rows, [g.q_length for g in groups], q.shape[1]),
        PackedSide(kv_offsets, k.shape[0], rows, [g.kv_length for g in groups], k.shape[1]),
    )


def _queries(
    q: Tensor, q_offsets: Tensor | None, side: PackedSide, group: int, scale: float, dtype: torch.dtype
) -> Tensor:
    """Queries times scale ``[b, H, Lq, d]``, or ``[1, H, Q, d]`` where all sequences ask the same."""
    if q_offsets is None:
        return q.to(dtype).transpose(0, 1)[None] * scale
    return side.take(q, group, dtype).mul_(scale)


def _bias(
    group: Group, q_real: Tensor, kv_real: Tensor, causal: bool, window: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """What to add to the logits ``[b, 1, Lq or 1, Lk]``; which queries see a key ``[b, 1, Lq, 1]`` (None: all)."""
    hidden = ~kv_real[:, None, None, :]
    if not causal and window < 0:
        return hidden.to(dtype) * _HIDDEN, None
    place = torch.arange(group.q_length, device=hidden.device) + (kv_real.sum(1) - q_real.sum(1))[:, None]
    ahead = torch.arange(group.kv_length, device=hidden.device) - place[:, None, :, None]
    if causal:
        hidden = hidden | (ahead > 0)
    if window >= 0:
        hidden = hidden | (ahead.abs() > window)
    return hidden.to(dtype) * _HIDDEN, ~hidden.all(3, keepdim=True)
