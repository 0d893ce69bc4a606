"""The factorisation machine as a PyTorch operator, ``opengem::fm_block``.

Legend: N rows of a batch, n tokens, D width, k rank.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kernels.common.backend import Backend
from kernels.common.inputs import FLOATS, cast, require_floats, require_tensors
from kernels.common.operators import operator
from kernels.interaction import reference

BACKEND = Backend(reference)


def fm_block(x: Tensor, y: Tensor) -> Tensor:
    """``X X^T Y`` of each row of a batch: the low-rank factorisation machine of Wukong (arXiv 2403.02545).

    Args:
        x: ``[N, n, D]``.
        y: ``[n, k]``, the same for all rows, or ``[N, n, k]``; cast to the dtype of x.

    Returns:
        ``[N, n, k]`` in the dtype of x. On a GPU, 16-bit inputs of up to 128 tokens and rank 128 run in one kernel with
        sums in float32.

    Raises:
        ValueError: shapes or devices that do not go together, or a type that is not of real floats.
    """
    require_tensors("fm_block", x=x, y=y)
    if x.dtype not in FLOATS or y.dtype not in FLOATS or x.device != y.device:
        require_floats("fm_block", x=x, y=y)
    if x.dim() != 3 or y.dim() not in (2, 3) or y.shape[-2] != x.shape[1] or (y.dim() == 3 and len(y) != len(x)):
        raise ValueError(
            f"fm_block: x {list(x.shape)} and y {list(y.shape)} do not go together: [N, n, D], and [n, k] or [N, n, k] "
            "are wanted"
        )
    return _fm_block(x, cast(y, x.dtype))


def _forward(x: Tensor, y: Tensor) -> Tensor:
    return BACKEND.of(x, y).forward(x, y)


def _backward(grad: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    dx, dy = BACKEND.of(x, y).backward(grad, x, y)
    return dx, dy


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _autograd(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    dx, dy = _fm_block_backward(grad, *ctx.saved_tensors)
    return dx, dy


_fm_block_backward = operator(
    "fm_block_backward", _backward, lambda grad, x, y: (x.new_empty(x.shape), y.new_empty(y.shape))
)
_fm_block = operator(
    "fm_block",
    _forward,
    lambda x, y: x.new_empty(x.shape[0], x.shape[1], y.shape[-1]),
    backward=_autograd,
    setup_context=_setup_context,
)
