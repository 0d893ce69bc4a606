"""Maps over the token axis as a PyTorch operator, ``opengem::mix_tokens``, and sums of Kronecker products made of it.

Legend: N rows of a batch, n tokens in, P tokens out, D width, K terms.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.common.backend import Backend
from kernels.common.eager import all_direct, refuse_transforms
from kernels.common.inputs import FLOATS, cast, require_floats, require_tensors
from kernels.common.operators import operator, undifferentiated, wanted
from kernels.token_mixing import reference

BACKEND = Backend(reference)


def mix_tokens(x: Tensor, matrix: Tensor) -> Tensor:
    """``M^T X`` of each row of a batch: new tokens as sums of the old ones with learned weights.

    Args:
        x: ``[N, n, D]``; the last dim contiguous, or it is copied on a GPU.
        matrix: ``[n, P]``, the same for all rows; cast to the dtype of x.

    Returns:
        ``[N, P, D]`` in the dtype of x. On a GPU, 16-bit inputs of up to 256 tokens on one side and 128 on the other
        run in kernels that read x once, with sums in float32.

    Raises:
        ValueError: shapes or devices that do not go together, or a type that is not of real floats.
    """
    require_tensors("mix_tokens", x=x, matrix=matrix)
    if x.dtype not in FLOATS or matrix.dtype not in FLOATS or x.device != matrix.device:
        require_floats("mix_tokens", x=x, matrix=matrix)
    if x.dim() != 3 or matrix.dim() != 2 or matrix.shape[0] != x.shape[1]:
        raise ValueError(
            f"mix_tokens: x {list(x.shape)} and matrix {list(matrix.shape)} do not go together: [N, n, D] and [n, P] "
            "are wanted"
        )
    return _mix_tokens(x, cast(matrix, x.dtype))


def sum_kron(x: Tensor, mix: Tensor, maps: Tensor) -> Tensor:
    """``sum_k Z_k^T X W_k`` of each row of a batch: a sum of Kronecker products as one map (Kunlun, arXiv 2602.10016).

    The tokens are mixed first, which are few afterwards, for all terms in one pass over x; one product with all W
    follows.

    Args:
        x: ``[N, n, D]``.
        mix: Z, ``[K, n, P]``. maps: W, ``[K, D, E]``. Both cast to the dtype of x.

    Returns:
        ``[N, P, E]`` in the dtype of x.

    Raises:
        ValueError: shapes or devices that do not go together, or a type that is not of real floats.
    """
    require_tensors("sum_kron", x=x, mix=mix, maps=maps)
    of_x, of_mix, of_maps = x.shape, mix.shape, maps.shape
    fits = len(of_x) == len(of_mix) == len(of_maps) == 3 and of_mix[0] == of_maps[0]
    if not fits or of_mix[1] != of_x[1] or of_maps[1] != of_x[2]:
        raise ValueError(
            f"sum_kron: x {list(of_x)}, mix {list(of_mix)} and maps {list(of_maps)} do not go together: [N, n, D], "
            "[K, n, P] and [K, D, E] are wanted"
        )
    if not x.dtype == mix.dtype == maps.dtype or x.dtype not in FLOATS or not x.device == mix.device == maps.device:
        require_floats("sum_kron", x=x, mix=mix, maps=maps)
        mix, maps = mix.to(x.dtype), maps.to(x.dtype)
    inputs = (x, mix, maps)
    if torch._C._is_any_autocast_enabled() and not x.is_meta:
        with torch.autocast(x.device.type, enabled=False):  # which would change the dtype of the product
            return _apply(inputs)
    return _apply(inputs)


def _apply(inputs: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    if all_direct(inputs):
        return _SumKron.apply(*inputs) if wanted(inputs) else _sum_kron(*inputs)[0]
    refuse_transforms("sum_kron", inputs)
    x, mix, maps = inputs
    (terms, width, outputs), rows, few = maps.shape, x.shape[0], mix.shape[2]
    mixed = _mix_tokens(x, mix).view(rows * few, terms * width)
    return torch.mm(mixed, maps.reshape(terms * width, outputs)).view(rows, few, outputs)


def _sum_kron(x: Tensor, mix: Tensor, maps: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The sum, and for the backward the mixed tokens ``[N P, K D]`` and the maps as one, ``[K D, E]``."""
    (terms, width, outputs), rows, few = maps.shape, x.shape[0], mix.shape[2]
    mixed = _forward(x, mix).view(rows * few, terms * width)
    joined = maps.reshape(terms * width, outputs)
    return torch.mm(mixed, joined).view(rows, few, outputs), mixed, joined


class _SumKron(torch.autograd.Function):
    """``sum_kron`` as one step of autograd, where it has five otherwise."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mix: Tensor, maps: Tensor) -> Tensor:  # type: ignore[override]
        out, mixed, joined = _sum_kron(x, mix, maps)
        ctx.save_for_backward(x, mix, joined, mixed if ctx.needs_input_grad[2] else None)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # type: ignore[override]
        gradients: tuple[Tensor | None, Tensor | None, Tensor | None] = _sum_kron_backward(
            grad, *ctx.saved_tensors, ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        )
        return gradients


def _run_sum_kron_backward(
    grad: Tensor, x: Tensor, mix: Tensor, joined: Tensor, mixed: Tensor | None, of_product: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    (rows, _, width), (terms, _, few) = x.shape, mix.shape
    grad = grad.reshape(rows * few, joined.shape[1])
    dx = d_mix = d_maps = None
    with torch.autocast(x.device.type, enabled=False):
        if of_product:
            dx, d_mix = _mix_tokens_backward(torch.mm(grad, joined.t()).view(rows, terms * few, width), x, mix)
        if mixed is not None:
            d_maps = torch.mm(mixed.t(), grad).view(terms, width, joined.shape[1])
    return dx, d_mix, d_maps


_sum_kron_backward = undifferentiated("sum_kron", _run_sum_kron_backward)


def _forward(x: Tensor, matrix: Tensor) -> Tensor:
    return BACKEND.of(x, matrix).forward(x, matrix)


def _backward(grad: Tensor, x: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor]:
    dx, d_matrix = BACKEND.of(x, matrix).backward(grad, x, matrix)
    return dx, d_matrix


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _autograd(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    dx, d_matrix = _mix_tokens_backward(grad, *ctx.saved_tensors)
    return dx, d_matrix


_mix_tokens_backward = operator(
    "mix_tokens_backward", _backward, lambda grad, x, matrix: (x.new_empty(x.shape), matrix.new_empty(matrix.shape))
)
_mix_tokens = operator(
    "mix_tokens",
    _forward,
    lambda x, matrix: x.new_empty(x.shape[0], reference.sides(matrix)[1], x.shape[2]),
    backward=_autograd,
    setup_context=_setup_context,
)
