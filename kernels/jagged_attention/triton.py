"""Jagged softmax attention on the GPU: the functions of ``reference.py`` beside this as Triton launches."""

from __future__ import annotations

from torch import Tensor

from kernels.common import launch
from kernels.common.launch import Call, supports

__all__ = ["backward", "forward", "supports"]


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
    """Output ``[Tq, H, e]`` and LSE ``[Tq, H]``; see ``kernels.jagged_attention.reference.forward``."""
    out, lse = launch.forward(Call(q, k, v, q_offsets, kv_offsets, "softmax", scale, 1.0, causal, window, -1))
    assert lse is not None
    return out, lse


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
    """Gradients of q, k and v; see ``kernels.jagged_attention.reference.backward``."""
    call = Call(q, k, v, q_offsets, kv_offsets, "softmax", scale, 1.0, causal, window, -1)
    return launch.backward(call, grad, out, lse)
