"""GDPA as a PyTorch operator, ``opengem::gdpa``, with autograd and device dispatch.

Legend: Tq query rows, Tk key rows, B sequences, M keys per sequence where they are dense, H heads, d head width.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from kernels.gdpa import reference


def _backend(q: Tensor) -> ModuleType:
    """The implementation for the device of ``q``; each has ``forward`` and ``backward`` of ``reference``."""
    return reference


def gdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    kv_offsets: Tensor | None = None,
    *,
    activation: str = "gelu",
    scale: float = 1.0,
    logit_scale: float = 1.0,
    window: int | None = None,
) -> Tensor:
    """Generalised dot-product attention over packed sequences.

    Per sequence and head: ``O_i = scale * sum_j act(logit_scale * q_i . k_j) v_j``. No softmax: with generated K
    and V of a few rows it is a feed-forward network whose two matrices belong to the sequence (PFFN of InterFormer,
    arXiv 2411.09852; the attention form is Kunlun's, arXiv 2602.10016). A query whose sequence has no keys gives 0.

    Args:
        q: queries ``[Tq, H, d]``.
        k, v: keys and values, packed ``[Tk, H, d]`` with ``kv_offsets``, or dense ``[B, M, H, d]`` without. Cast to the
            dtype of q.
        q_offsets: int64 ``[B + 1]``.
        kv_offsets: int64 ``[B + 1]``, or ``None`` for dense keys.
        activation: one of ``kernels.gdpa.ACTIVATIONS``.
        scale: factor after the activation.
        logit_scale: factor inside the activation.
        window: only keys with ``|i - j| <= window`` count; ``None``: all.

    Returns:
        ``[Tq, H, d]`` in the dtype of q.

    Raises:
        ValueError: an unknown activation, or shapes that do not go together.
    """
    if activation not in reference.ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(reference.ACTIVATIONS)}, got {activation!r}")
    if window is not None and window < 0:
        raise ValueError(f"window must not be negative, got {window}")
    if q.dim() != 3 or k.shape != v.shape or k.shape[-2:] != q.shape[-2:]:
        raise ValueError(f"q {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)} do not go together")
    if k.dim() != (4 if kv_offsets is None else 3):
        raise ValueError("keys must be [Tk, H, d] with kv_offsets or [B, M, H, d] without")
    k, v = k.to(q.dtype), v.to(q.dtype)
    limit = -1 if window is None else window
    return _gdpa(q, k, v, q_offsets, kv_offsets, activation, scale, logit_scale, limit)


@torch.library.custom_op("opengem::gdpa", mutates_args=())
def _gdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    kv_offsets: Tensor | None,
    activation: str,
    scale: float,
    logit_scale: float,
    window: int,
) -> Tensor:
    return _backend(q).forward(q, k, v, q_offsets, kv_offsets, activation, scale, logit_scale, window)


@_gdpa.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    kv_offsets: Tensor | None,
    activation: str,
    scale: float,
    logit_scale: float,
    window: int,
) -> Tensor:
    return q.new_empty(q.shape)


@torch.library.custom_op("opengem::gdpa_backward", mutates_args=())
def _gdpa_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    kv_offsets: Tensor | None,
    activation: str,
    scale: float,
    logit_scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    return _backend(q).backward(grad, q, k, v, q_offsets, kv_offsets, activation, scale, logit_scale, window)


@_gdpa_backward.register_fake
def _(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    kv_offsets: Tensor | None,
    activation: str,
    scale: float,
    logit_scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.options = inputs[5:]


def _autograd(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    gradients = _gdpa_backward(grad.contiguous(), *ctx.saved_tensors, *ctx.options)
    return (*gradients, None, None, None, None, None, None)


_gdpa.register_autograd(_autograd, setup_context=_setup_context)
