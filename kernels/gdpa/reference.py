"""GDPA in plain PyTorch: the CPU path and the oracle of the GPU kernels.

Per sequence and head, ``O_i = scale * sum_j act(logit_scale * q_i . k_j) v_j``, over the keys j of the sequence with
``|i - j| <= window`` when there is a window. The order of scale and activation is that of Meta's published kernel
(github.com/facebookresearch/ads_model_kernel_library, ``gdpa/triton``).

Backward, with ``S = logit_scale * Q K^T``, ``P = scale * act(S)`` and ``dP = dO V^T``:
``dV = P^T dO``, ``dS = scale * act'(S) * dP``, ``dQ = logit_scale * dS K``, ``dK = logit_scale * dS^T Q``.

Computes in float32, or float64 for float64 inputs.

Legend: Tq query rows, Tk key rows, B sequences, M keys per sequence where they are dense, H heads, G key heads, d head
width; b, Lq, Lk: a padded group (``kernels/jagged/padding.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.jagged.padding import (
    DenseSide,
    Group,
    PackedSide,
    compute_dtype,
    join_heads,
    nothing,
    padded_groups,
    spread_heads,
)

_aten = torch.ops.aten


class _Activation(NamedTuple):
    forward: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]  # (gradient of the output, input) -> gradient of the input


_ACTIVATIONS: dict[str, _Activation] = {
    "identity": _Activation(lambda x: x, lambda g, x: g),
    "gelu": _Activation(F.gelu, lambda g, x: _aten.gelu_backward(g, x)),
    "gelu_tanh": _Activation(
        lambda x: F.gelu(x, approximate="tanh"), lambda g, x: _aten.gelu_backward(g, x, approximate="tanh")
    ),
    "silu": _Activation(F.silu, lambda g, x: _aten.silu_backward(g, x)),
    "relu": _Activation(F.relu, lambda g, x: _aten.threshold_backward(g, x, 0)),
    "relu2": _Activation(lambda x: F.relu(x).square(), lambda g, x: 2 * g * F.relu(x)),
    "hardswish": _Activation(F.hardswish, lambda g, x: _aten.hardswish_backward(g, x)),
}

ACTIVATIONS: tuple[str, ...] = tuple(_ACTIVATIONS)
"""Names of the activations; each maps 0 to 0, so a key whose value is zero adds nothing."""


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor | None,
    kv_offsets: Tensor | None,
    activation: str,
    scale: float,
    logit_scale: float,
    window: int,
    max_keys: int = -1,
) -> Tensor:
    """Output ``[Tq, H, d]``; arguments as in ``kernels.gdpa.gdpa``, ``window`` -1 for none.

    Without ``q_offsets`` the output has the rows of the B copies of q, one after another. ``max_keys`` is of use to
    the GPU kernels only.
    """
    act = _ACTIVATIONS[activation]
    if nothing(q, k):
        rows = q.shape[0] if q_offsets is not None else q.shape[0] * _batch(k, kv_offsets)
        return q.new_zeros((rows, *q.shape[1:]))
    dtype, heads = compute_dtype(q.dtype), q.shape[1]
    groups, queries, keys = _sides(q, k, q_offsets, kv_offsets)
    out = queries.buffer(v.shape[-1], dtype)
    for g, group in enumerate(groups):
        k_padded = spread_heads(keys.take(k, g, dtype) * logit_scale, heads)
        v_padded = spread_heads(keys.take(v, g, dtype) * _factor(keys.real(g), scale, dtype), heads)
        p = act.forward(_queries(q, q_offsets, queries, g, dtype) @ k_padded.transpose(2, 3))
        if window >= 0:
            p = p.masked_fill(_outside(group, window, q.device), 0)
        queries.put_product(out, g, p, v_padded)
    return queries.result(out, q.dtype)


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor | None,
    kv_offsets: Tensor | None,
    activation: str,
    scale: float,
    logit_scale: float,
    window: int,
    max_keys: int = -1,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, each of the shape of its tensor."""
    act = _ACTIVATIONS[activation]
    if nothing(q, k):
        return q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
    dtype, heads = compute_dtype(q.dtype), q.shape[1]
    groups, queries, keys = _sides(q, k, q_offsets, kv_offsets)
    dq = queries.buffer(q.shape[-1], dtype)
    dk, dv = keys.buffer(k.shape[-1], dtype), keys.buffer(v.shape[-1], dtype)
    for g, group in enumerate(groups):
        q_padded = _queries(q, q_offsets, queries, g, dtype)
        k_padded = spread_heads(keys.take(k, g, dtype) * logit_scale, heads)
        v_padded = spread_heads(keys.take(v, g, dtype) * _factor(keys.real(g), scale, dtype), heads)
        do = queries.take(grad, g, dtype) * _factor(queries.real(g), 1.0, dtype)
        s = q_padded @ k_padded.transpose(2, 3)
        p = act.forward(s)
        ds = act.backward(do @ v_padded.transpose(2, 3), s)
        if window >= 0:
            outside = _outside(group, window, q.device)
            p = p.masked_fill(outside, 0)
            ds = ds.masked_fill(outside, 0)
        queries.put_product(dq, g, ds, k_padded)
        ds, p, q_padded, do = (join_heads(x, k.shape[-2], s.shape[0]) for x in (ds, p, q_padded, do))
        keys.put_product(dk, g, ds.transpose(2, 3), q_padded)
        keys.put_product(dv, g, p.transpose(2, 3), do)
    dk.mul_(logit_scale)
    dv.mul_(scale)
    dq_rows = queries.result(dq, dtype)
    if q_offsets is None:
        dq_rows = dq_rows.view(-1, *q.shape).sum(0)
    return dq_rows.to(q.dtype), keys.result(dk, k.dtype), keys.result(dv, v.dtype)


def _sides(
    q: Tensor, k: Tensor, q_offsets: Tensor | None, kv_offsets: Tensor | None
) -> tuple[list[Group], PackedSide, PackedSide | DenseSide]:
    if q_offsets is None:
        batch = _batch(k, kv_offsets)
        q_offsets = torch.arange(batch + 1, device=q.device) * q.shape[0]
        q_rows = q.shape[0] * batch
    else:
        q_rows = q.shape[0]
    q_lengths = q_offsets.diff()
    kv_lengths = torch.full_like(q_lengths, k.shape[1]) if kv_offsets is None else kv_offsets.diff()
    groups = padded_groups(q_lengths, kv_lengths, q.shape[1])
    rows = [group.rows for group in groups]
    queries = PackedSide(q_offsets, q_rows, rows, [g.q_length for g in groups], q.shape[1])
    if kv_offsets is None:
        return groups, queries, DenseSide(k, rows)
    return groups, queries, PackedSide(kv_offsets, k.shape[0], rows, [g.kv_length for g in groups], k.shape[1])


def _batch(k: Tensor, kv_offsets: Tensor | None) -> int:
    return k.shape[0] if kv_offsets is None else kv_offsets.shape[0] - 1


def _queries(q: Tensor, q_offsets: Tensor | None, side: PackedSide, group: int, dtype: torch.dtype) -> Tensor:
    """Queries ``[b, H, Lq, d]``, or ``[1, H, Q, d]`` where all sequences ask the same."""
    return side.take(q, group, dtype) if q_offsets is not None else q.to(dtype).transpose(0, 1)[None]


def _factor(real: Tensor, factor: float, dtype: torch.dtype) -> Tensor:
    """Zero for padding, ``factor`` elsewhere: ``[b, 1, L, 1]``. A padded key with value zero adds nothing."""
    return (real.to(dtype) * factor)[:, None, :, None]


def _outside(group: Group, window: int, device: torch.device) -> Tensor:
    """True beyond the window: bool ``[Lq, Lk]``."""
    i = torch.arange(group.q_length, device=device)[:, None]
    return (i - torch.arange(group.kv_length, device=device)).abs() > window
