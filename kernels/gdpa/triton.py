"""GDPA on the GPU: the functions of ``kernels/gdpa/reference.py`` as Triton launches."""

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
    kv_offsets: Tensor | None,
    activation: str,
    scale: float,
    logit_scale: float,
    window: int,
    max_keys: int = -1,
) -> Tensor:
    """Output ``[Tq, H, d]``; see ``kernels.gdpa.reference.forward``."""
    call = Call(q, k, v, q_offsets, kv_offsets, activation, logit_scale, scale, False, window, max_keys)
    return launch.forward(call)[0]


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
    """Gradients of q, k and v; see ``kernels.gdpa.reference.backward``."""
    call = Call(q, k, v, q_offsets, kv_offsets, activation, logit_scale, scale, False, window, max_keys)
    dq, dk, dv = launch.backward(call, grad, None, None)
    return dq, dk.view(k.shape), dv.view(v.shape)
