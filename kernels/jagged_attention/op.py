"""Softmax attention over packed sequences as a PyTorch operator, ``opengem::jagged_attention``.

Legend: Tq query rows, Tk key rows, B sequences, R requests, Q learned queries, H heads, G key heads, d key width,
e value width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.common.attention_inputs import alike, by_request, require_shapes
from kernels.common.backend import Backend
from kernels.common.eager import direct, refuse_transforms
from kernels.common.inputs import require_finite, require_flag, require_int, require_packed, require_tensors
from kernels.common.operators import refusal, undifferentiated
from kernels.jagged.padding import compute_dtype
from kernels.jagged_attention import reference

BACKEND = Backend(reference)


def _forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    backend = BACKEND.of(q, v)
    if backend is not reference:
        return backend.forward(q, k, v, *rest)
    with torch.autocast(q.device.type, enabled=False):
        return reference.forward(q, k, v, *rest)


def _backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    backend = BACKEND.of(q, v)
    if backend is not reference:
        return backend.backward(grad, q, k, v, *rest)
    with torch.autocast(q.device.type, enabled=False):
        return reference.backward(grad, q, k, v, *rest)


def jagged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor | None,
    kv_offsets: Tensor,
    *,
    request_index: Tensor | None = None,
    scale: float | None = None,
    causal: bool = False,
    window: int | None = None,
) -> Tensor:
    """Softmax attention; each sequence sees only itself.

    Per sequence and head: ``O_i = sum_j softmax_j(scale * q_i . k_j) v_j``. Where a sequence's numbers of queries
    and keys differ, its last query stands at its last key. A query with no key to see gives 0.

    Args:
        q: packed queries ``[Tq, H, d]`` with ``q_offsets``; or learned queries ``[Q, H, d]`` without, which every
            sequence asks (pooling by multi-head attention, PMA).
        k: keys ``[Tk, G, d]``. v: values ``[Tk, G, e]``. Cast to the dtype of q. H is a multiple of G; query head h
            looks at key head ``h // (H / G)``.
        q_offsets: int64 ``[B + 1]`` or ``None``. kv_offsets: int64 ``[B + 1]``.
        request_index: int64 ``[B]``, rising: the sequence of keys, of which there are R, that each sequence of
            queries looks at. Several impressions of a request so share one copy.
        scale: default ``1 / sqrt(d)``.
        causal: a query sees the keys up to its own place.
        window: a query sees the keys at most this many places away; ``None``: all.

    Returns:
        ``[Tq, H, e]``, or ``[B, Q, H, e]`` without ``q_offsets``, in the dtype of q.

    Raises:
        ValueError: arguments that do not go together, or a negative window, or a scale that is not positive.
    """
    require_flag("jagged_attention", "causal", causal)
    if window is not None:
        require_int("jagged_attention", "window", window)
    if scale is not None:
        require_finite("jagged_attention", "scale", scale)
    require_tensors("jagged_attention", q=q, k=k, v=v)
    of_q, of_k, of_v = q.shape, k.shape, v.shape
    require_shapes("jagged_attention", of_q, of_k, of_v)
    if len(of_k) != 3:
        raise ValueError(f"jagged_attention: k {list(of_k)} and v {list(of_v)} must be [Tk, G, d] and [Tk, G, e]")
    k, v = alike("jagged_attention", q, k, v)
    sequences = require_packed("jagged_attention", "kv_offsets", kv_offsets, k)
    if request_index is not None:
        if causal or window is not None:
            raise ValueError(
                "jagged_attention: request_index goes with neither causal nor window: copy the keys for each "
                "impression, kernels.jagged.gather_sequences"
            )
        q_offsets = by_request("jagged_attention", q, q_offsets, request_index, kv_offsets.shape[0] - 1)
    elif q_offsets is not None:
        require_packed("jagged_attention", "q_offsets", q_offsets, q, sequences=sequences)
    factor = of_q[2] ** -0.5 if scale is None else scale
    if not factor > 0:
        raise ValueError(
            f"jagged_attention: scale must be positive, got {factor}: to turn the order of the keys round, negate q"
        )
    limit = -1 if window is None else window
    inputs = (q, k, v, q_offsets, kv_offsets, factor, causal, limit)
    if not direct(q, k, v):
        refuse_transforms("jagged_attention", inputs)
        out, _ = _jagged_attention(*inputs)
    elif torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        out = _Eager.apply(*inputs)
    else:
        out, _ = _forward(*inputs)
    if q_offsets is None:
        return out.view(kv_offsets.shape[0] - 1, of_q[0], of_q[1], of_v[2])
    return out


@torch.library.custom_op("opengem::jagged_attention", mutates_args=())
def _jagged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor | None,
    kv_offsets: Tensor,
    scale: float,
    causal: bool,
    window: int,
) -> tuple[Tensor, Tensor]:
    return _forward(q, k, v, q_offsets, kv_offsets, scale, causal, window)


@_jagged_attention.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor | None,
    kv_offsets: Tensor,
    scale: float,
    causal: bool,
    window: int,
) -> tuple[Tensor, Tensor]:
    rows = q.shape[0] if q_offsets is not None else q.shape[0] * (kv_offsets.shape[0] - 1)
    lse_dtype = compute_dtype(q.dtype)
    return q.new_empty((rows, q.shape[1], v.shape[2])), q.new_empty((rows, q.shape[1]), dtype=lse_dtype)


@torch.library.custom_op("opengem::jagged_attention_backward", mutates_args=())
def _jagged_attention_backward(
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
    return _backward(grad, q, k, v, out, lse, q_offsets, kv_offsets, scale, causal, window)


@_jagged_attention_backward.register_fake
def _(
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
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


_jagged_attention_backward.register_autograd(refusal("jagged_attention"))
_backward_once = undifferentiated("jagged_attention", _backward)


class _Eager(torch.autograd.Function):
    """The operator without the dispatcher, whose Python layers take longer than short kernels."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:  # type: ignore[override]
        output = _forward(*inputs)
        _setup_context(ctx, inputs, output)
        return output[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        saved = ctx.saved_tensors
        run = _backward_once if direct(grad, *saved[1:3]) else _jagged_attention_backward
        gradients = run(grad, *saved, *ctx.options)
        return (*gradients, None, None, None, None, None)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, q_offsets, kv_offsets, *options = inputs
    ctx.save_for_backward(q, k, v, *output, q_offsets, kv_offsets)
    ctx.options = options


def _autograd(ctx: Any, grad: Tensor, _grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    gradients = _jagged_attention_backward(grad, *ctx.saved_tensors, *ctx.options)
    return (*gradients, None, None, None, None, None)


_jagged_attention.register_autograd(_autograd, setup_context=_setup_context)
