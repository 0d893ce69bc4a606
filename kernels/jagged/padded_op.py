"""Padded layouts as PyTorch operators: ``to_padded`` and ``from_padded``, each the other's backward, and ``last_k``.

Legend: T rows, B sequences, L padded length.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.common.inputs import require_packed
from kernels.common.operators import operator
from kernels.jagged.op import BACKEND, keep, require_length


def to_padded(values: Tensor, offsets: Tensor, max_length: int, padding: float = 0.0) -> Tensor:
    """``values [T, ...]`` to ``[B, L, ...]``, left aligned; what a sequence has beyond L rows is cut off."""
    require_packed("to_padded", "offsets", offsets, values)
    require_length("max_length", max_length)
    return _to_padded(values, offsets, max_length, padding, False)


def from_padded(padded: Tensor, offsets: Tensor, total: int) -> Tensor:
    """``padded [B, L, ...]`` to ``[T, ...]`` with T = ``total``; rows of a sequence beyond L are zero."""
    if padded.dim() < 2:
        raise ValueError(f"from_padded: padded must be [B, L, ...], is {list(padded.shape)}")
    require_length("total", total)
    require_packed("from_padded", "offsets", offsets, padded, total, padded.shape[0])
    return _from_padded(padded, offsets, total, False)


def last_k(values: Tensor, offsets: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The last k rows of each sequence, right aligned: ``[B, k, ...]``, zeros where a sequence is shorter.

    Returns:
        the rows, and a bool mask ``[B, k]`` of the real ones.
    """
    require_packed("last_k", "offsets", offsets, values)
    require_length("k", k)
    rows, real = _last_k(values, offsets, k)
    return rows, real


def _run_to_padded(values: Tensor, offsets: Tensor, max_length: int, padding: float, right: bool) -> Tensor:
    return BACKEND.of(values).to_padded(values, offsets, max_length, padding, right)


def _run_from_padded(padded: Tensor, offsets: Tensor, total: int, right: bool) -> Tensor:
    return BACKEND.of(padded).from_padded(padded, offsets, total, right)


def _run_last_k(values: Tensor, offsets: Tensor, k: int) -> tuple[Tensor, Tensor]:
    return BACKEND.of(values).last_k(values, offsets, k)


def _back_to_padded(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return _from_padded(grad, *ctx.saved_tensors, ctx.rows[0], ctx.options[2]), None, None, None, None


def _back_from_padded(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return _to_padded(grad, *ctx.saved_tensors, ctx.rows[1], 0.0, ctx.options[1]), None, None, None


def _keep_last(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)  # of the mask: there is none
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(inputs[1])
    ctx.rows = inputs[0].shape[0]


def _back_last_k(ctx: Any, grad: Tensor | None, _of_mask: None) -> tuple[Tensor | None, ...]:
    return None if grad is None else _from_padded(grad, *ctx.saved_tensors, ctx.rows, True), None, None


_to_padded = operator(
    "to_padded",
    _run_to_padded,
    lambda values, offsets, length, *_: values.new_empty((offsets.shape[0] - 1, length, *values.shape[1:])),
    backward=_back_to_padded,
    setup_context=keep,
)
_from_padded = operator(
    "from_padded",
    _run_from_padded,
    lambda padded, offsets, total, right: padded.new_empty((total, *padded.shape[2:])),
    backward=_back_from_padded,
    setup_context=keep,
)
_last_k = operator(
    "last_k",
    _run_last_k,
    lambda values, offsets, k: (
        values.new_empty((offsets.shape[0] - 1, k, *values.shape[1:])),
        offsets.new_empty((offsets.shape[0] - 1, k), dtype=torch.bool),
    ),
    backward=_back_last_k,
    setup_context=_keep_last,
)
