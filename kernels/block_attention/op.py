"""Block attention as a PyTorch operator, ``opengem::block_attention``.

Legend: T tokens, B sequences, H heads, G key heads, d head width, P columns of positions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.block_attention import reference
from kernels.block_attention.reference import BLOCK
from kernels.common.attention_inputs import alike, require_shapes
from kernels.common.backend import Backend
from kernels.common.inputs import require_finite, require_one_device, require_packed, require_tensors
from kernels.common.operators import operator

__all__ = ["BLOCK", "block_attention"]


BACKEND = Backend(reference)


def block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    *,
    scale: float | None = None,
    positions: Tensor | None = None,
    frequencies: Tensor | None = None,
) -> Tensor:
    """Softmax attention in which a token sees the 64-token block of its own sequence that it stands in.

    The first block of a sequence starts at its first token; the last one may be shorter. Per block and head:
    ``O_i = sum_j softmax_j(scale * q_i . k_j) v_j``. With ``positions``, q and k are rotated first: elements i and
    ``i + d / 2`` of token t by the angle ``positions[t] * frequencies[i]`` (RoPE, arXiv 2104.09864).

    Args:
        q: ``[T, H, d]``. k, v: ``[T, G, d]``, cast to the dtype of q. H is a multiple of G; query head h looks at key
            head ``h // (H / G)``.
        offsets: int64 ``[B + 1]``.
        scale: default ``1 / sqrt(d)``.
        positions: ``[T]``, or ``[T, 2]``, of which the first half of the pairs takes column 0 and the second column 1:
            for instance the place and ``log1p`` of the time gap. Of floats or integers; only differences within a block
            matter, which are taken in the type given. On a GPU float32 is best, float64 and integers cost a pass of
            their own. Gets no gradient.
        frequencies: ``[d / 2]``, radians per unit of position. Gets no gradient.

    Returns:
        ``[T, H, d]`` in the dtype of q.

    Raises:
        ValueError: arguments that do not go together.
    """
    require_tensors("block_attention", q=q, k=k, v=v)
    of_q, of_k = q.shape, k.shape
    require_shapes("block_attention", of_q, of_k, v.shape)
    if of_k != v.shape or len(of_k) != 3 or of_k[0] != of_q[0]:
        raise ValueError(
            f"block_attention: q {list(of_q)}, k {list(of_k)} and v {list(v.shape)} do not go together: [T, H, d] and "
            "twice [T, G, d] are wanted"
        )
    if scale is not None:
        require_finite("block_attention", "scale", scale)
    k, v = alike("block_attention", q, k, v)
    require_packed("block_attention", "offsets", offsets, q)
    if positions is not None or frequencies is not None:
        _require_rotary(q, positions, frequencies)
    factor = q.shape[2] ** -0.5 if scale is None else scale
    return _block_attention(q, k, v, offsets, positions, frequencies, factor)


def _require_rotary(q: Tensor, positions: Tensor | None, frequencies: Tensor | None) -> None:
    if positions is None or frequencies is None:
        raise ValueError("block_attention: positions and frequencies go together")
    require_tensors("block_attention", positions=positions, frequencies=frequencies)
    require_one_device("block_attention", q=q, positions=positions, frequencies=frequencies)
    columns = positions.shape[1] if positions.dim() == 2 else 1
    if positions.dim() not in (1, 2) or columns not in (1, 2) or positions.shape[0] != q.shape[0]:
        raise ValueError(
            f"block_attention: positions {list(positions.shape)} do not fit q {list(q.shape)}: [T] or [T, 2] is wanted"
        )
    if q.shape[2] % (2 * columns):
        raise ValueError(
            f"block_attention: q {list(q.shape)}: d must be a multiple of {2 * columns} with {columns} column(s) of "
            "positions"
        )
    if frequencies.shape != (q.shape[2] // 2,):
        raise ValueError(
            f"block_attention: frequencies: expected {q.shape[2] // 2}, one per pair, got {list(frequencies.shape)}"
        )
    if positions.is_complex() or frequencies.is_complex():
        raise ValueError("block_attention: positions and frequencies must be real")
    if (positions.requires_grad or frequencies.requires_grad) and torch.is_grad_enabled():
        name = "positions" if positions.requires_grad else "frequencies"
        raise ValueError(f"block_attention: {name} would get no gradient: detach them, or rotate q and k outside")


def _from_block_start(positions: Tensor | None, offsets: Tensor) -> Tensor | None:
    """Positions as kernels take them: in float32, in which they count from the block's start on their own."""
    if positions is None or (positions.is_floating_point() and positions.dtype != torch.float64):
        return positions
    return reference.from_block_start(positions, offsets, torch.float32)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    positions: Tensor | None,
    frequencies: Tensor | None,
    scale: float,
) -> Tensor:
    backend = BACKEND.of(q)
    if backend is not reference:
        positions = _from_block_start(positions, offsets)
    return backend.forward(q, k, v, offsets, positions, frequencies, scale)


def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    positions: Tensor | None,
    frequencies: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    backend = BACKEND.of(q)
    if backend is not reference:
        positions = _from_block_start(positions, offsets)
    dq, dk, dv = backend.backward(grad, q, k, v, offsets, positions, frequencies, scale)
    return dq, dk, dv


def _fake_forward(q: Tensor, *_: Any) -> Tensor:
    return q.new_empty(q.shape)


def _fake_backward(grad: Tensor, q: Tensor, k: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), k.new_empty(k.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:6])
    ctx.scale = inputs[6]


def _autograd(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    gradients = _block_attention_backward(grad, *ctx.saved_tensors, ctx.scale)
    return (*gradients, None, None, None, None)


_block_attention_backward = operator("block_attention_backward", _backward, _fake_backward)
_block_attention = operator(
    "block_attention", _forward, _fake_forward, backward=_autograd, setup_context=_setup_context
)
