"""Maps over the token axis as a PyTorch operator, ``opengem::mix_tokens``, and sums of Kronecker products made of it.

Legend: N rows of a batch, n tokens in, P tokens out, D width, K terms.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from kernels.common.inputs import cast, require_floats
from kernels.common.operators import operator
from kernels.token_mixing import reference


def _backend(x: Tensor, matrix: Tensor) -> ModuleType:
    """The implementation for the device of ``x``; each has ``forward`` and ``backward`` of ``reference``."""
    return _kernels() if x.is_cuda and _kernels().supports(x, matrix) else reference


@cache
def _kernels() -> ModuleType:
    from kernels.token_mixing import triton  # not installed with PyTorch for CPU

    return triton


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
    require_floats("mix_tokens", x=x, matrix=matrix)
    if x.dim() != 3 or matrix.dim() != 2 or matrix.shape[0] != x.shape[1]:
        raise ValueError(
            f"x {list(x.shape)} and matrix {list(matrix.shape)} do not go together: [N, n, D] and [n, P] are wanted"
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
    require_floats("sum_kron", x=x, mix=mix, maps=maps)
    fits = x.dim() == mix.dim() == maps.dim() == 3 and mix.shape[:2] == (maps.shape[0], x.shape[1])
    if not fits or maps.shape[1] != x.shape[2]:
        raise ValueError(
            f"x {list(x.shape)}, mix {list(mix.shape)} and maps {list(maps.shape)} do not go together: [N, n, D], "
            "[K, n, P] and [K, D, E] are wanted"
        )
    mixed = _mix_tokens(x, cast(mix, x.dtype))
    (terms, width, outputs), rows, few = maps.shape, x.shape[0], mix.shape[2]
    maps = cast(maps, x.dtype).reshape(terms * width, outputs)
    return torch.mm(mixed.view(rows * few, terms * width), maps).view(rows, few, outputs)


def _forward(x: Tensor, matrix: Tensor) -> Tensor:
    return _backend(x, matrix).forward(x, matrix)


def _backward(grad: Tensor, x: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor]:
    dx, d_matrix = _backend(x, matrix).backward(grad, x, matrix)
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
