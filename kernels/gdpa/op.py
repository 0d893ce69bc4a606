"""GDPA as a PyTorch operator, ``opengem::gdpa``, with autograd and device dispatch.

Legend: Tq query rows, Tk key rows, B sequences, R requests, M keys per sequence where they are dense, Q learned
queries, H heads, G key heads, d head width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.common.attention_inputs import alike, by_request, require_shapes
from kernels.common.backend import Backend
from kernels.common.eager import direct, readable, refuse_transforms
from kernels.common.inputs import require_finite, require_int, require_packed, require_tensors
from kernels.common.operators import refusal, undifferentiated
from kernels.gdpa import reference

BACKEND = Backend(reference)


def _forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
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


def gdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor | None,
    kv_offsets: Tensor | None = None,
    *,
    request_index: Tensor | None = None,
    activation: str = "gelu",
    scale: float = 1.0,
    logit_scale: float = 1.0,
    window: int | None = None,
    max_keys: int | None = None,
) -> Tensor:
    """Generalised dot-product attention over packed sequences.

    Per sequence and head: ``O_i = scale * sum_j act(logit_scale * q_i . k_j) v_j``. No softmax: with generated K
    and V of a few rows it is a feed-forward network whose two matrices belong to the sequence (PFFN of InterFormer,
    arXiv 2411.09852; the attention form is Kunlun's, arXiv 2602.10016). A query whose sequence has no keys gives 0.

    Args:
        q: packed queries ``[Tq, H, d]`` with ``q_offsets``; or learned queries ``[Q, H, d]`` without, which every
            sequence asks.
        k, v: keys and values, packed ``[Tk, G, d]`` with ``kv_offsets``, or dense ``[B, M, G, d]`` without. Cast to the
            dtype of q. H is a multiple of G; query head h looks at key head ``h // (H / G)``.
        q_offsets: int64 ``[B + 1]`` or ``None``.
        kv_offsets: int64 ``[B + 1]``, or ``None`` for dense keys.
        request_index: int64 ``[B]``, rising: the sequence of K and V, of which there are R, that each sequence of
            queries looks at. Several impressions of a request so share one copy.
        activation: one of ``kernels.gdpa.ACTIVATIONS``.
        scale: factor after the activation.
        logit_scale: factor inside the activation.
        window: only keys with ``|i - j| <= window`` count; ``None``: all.
        max_keys: no sequence of packed keys is longer than this, which the caller promises; lets the GPU kernels for
            short K and V in. On a GPU nothing looks whether it holds: keys beyond it then count for nothing, and their
            gradients are not written.

    Returns:
        ``[Tq, H, d]``, or ``[B, Q, H, d]`` without ``q_offsets``, in the dtype of q.

    Raises:
        ValueError: an unknown activation, or arguments that do not go together.
    """
    if activation not in reference.ACTIVATIONS:
        raise ValueError(f"gdpa: activation must be one of {', '.join(reference.ACTIVATIONS)}, got {activation!r}")
    if window is not None:
        require_int("gdpa", "window", window)
    if max_keys is not None:
        require_int("gdpa", "max_keys", max_keys)
    require_finite("gdpa", "scale", scale)
    require_finite("gdpa", "logit_scale", logit_scale)
    require_tensors("gdpa", q=q, k=k, v=v)
    of_k, of_v = k.shape, v.shape
    require_shapes("gdpa", q.shape, of_k, of_v)
    if of_k != of_v:
        raise ValueError(f"gdpa: k {list(of_k)} and v {list(of_v)} do not go together: they must have one shape")
    if len(of_k) != (4 if kv_offsets is None else 3):
        given = "no kv_offsets" if kv_offsets is None else "kv_offsets"
        raise ValueError(
            f"gdpa: keys must be [Tk, G, d] with kv_offsets or [B, M, G, d] without, are {list(of_k)} and {given}"
        )
    k, v = alike("gdpa", q, k, v)
    sequences: int | None = of_k[0]
    if kv_offsets is not None:
        sequences = require_packed("gdpa", "kv_offsets", kv_offsets, k)
        if max_keys is not None:
            _require_longest(kv_offsets, max_keys)
    if request_index is not None:
        if window is not None:
            raise ValueError(
                "gdpa: request_index goes with no window: copy the keys for each impression, "
                "kernels.jagged.gather_sequences"
            )
        q_offsets = by_request("gdpa", q, q_offsets, request_index, _sequences(k, kv_offsets))
    elif q_offsets is not None:
        require_packed("gdpa", "q_offsets", q_offsets, q, sequences=sequences)
    limit = -1 if window is None else window
    bound = -1 if max_keys is None or kv_offsets is None else max_keys
    inputs = (q, k, v, q_offsets, kv_offsets, activation, scale, logit_scale, limit, bound)
    if not direct(q, k, v):
        refuse_transforms("gdpa", inputs)
        out = _gdpa(*inputs)
    elif torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        out = _Eager.apply(*inputs)
    else:
        out = _forward(*inputs)
    return out if q_offsets is not None else out.view(_sequences(k, kv_offsets), *q.shape)


def _require_longest(kv_offsets: Tensor, max_keys: int) -> None:
    if readable(kv_offsets) and kv_offsets.shape[0] > 1 and int(kv_offsets.diff().max()) > max_keys:
        raise ValueError(f"gdpa: max_keys is {max_keys}, but a sequence has {int(kv_offsets.diff().max())} keys")


def _sequences(k: Tensor, kv_offsets: Tensor | None) -> int:
    return k.shape[0] if kv_offsets is None else kv_offsets.shape[0] - 1


@torch.library.custom_op("opengem::gdpa", mutates_args=())
def _gdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor | None,
    kv_offsets: Tensor | None,
    activation: str,
    scale: float,
    logit_scale: float,
    window: int,
    max_keys: int,
) -> Tensor:
    return _forward(q, k, v, q_offsets, kv_offsets, activation, scale, logit_scale, window, max_keys)


@_gdpa.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor | None,
    kv_offsets: Tensor | None,
    activation: str,
    scale: float,
    logit_scale: float,
    window: int,
    max_keys: int,
) -> Tensor:
    return q.new_empty((q.shape[0] * (1 if q_offsets is not None else _sequences(k, kv_offsets)), *q.shape[1:]))


@torch.library.custom_op("opengem::gdpa_backward", mutates_args=())
def _gdpa_backward(
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
    max_keys: int,
) -> tuple[Tensor, Tensor, Tensor]:
    return _backward(grad, q, k, v, q_offsets, kv_offsets, activation, scale, logit_scale, window, max_keys)


@_gdpa_backward.register_fake
def _(
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
    max_keys: int,
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


_gdpa_backward.register_autograd(refusal("gdpa"))
_backward_once = undifferentiated("gdpa", _backward)


class _Eager(torch.autograd.Function):
    """The operator without the dispatcher, whose Python layers take longer than short kernels."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:  # type: ignore[override]
        _setup_context(ctx, inputs, None)
        return _forward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        saved = ctx.saved_tensors
        run = _backward_once if direct(grad, *saved[1:3]) else _gdpa_backward
        gradients = run(grad, *saved, *ctx.options)
        return (*gradients, None, None, None, None, None, None, None)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor | None) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.options = inputs[5:]


def _autograd(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    gradients = _gdpa_backward(grad, *ctx.saved_tensors, *ctx.options)
    return (*gradients, None, None, None, None, None, None, None)


_gdpa.register_autograd(_autograd, setup_context=_setup_context)
