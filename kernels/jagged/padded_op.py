"""Padded layouts as PyTorch operators: ``to_padded`` and ``from_padded``, each the other's backward, and ``last_k``.

Legend: T rows, B sequences, L padded length.
"""

from __future__ import annotations

import math
from ctypes import c_float
from typing import Any

import torch
from torch import Tensor

from kernels.common.inputs import require_length, require_number, require_packed, require_tensors
from kernels.common.operators import operator
from kernels.jagged import reference
from kernels.jagged.op import BACKEND, keep

_FINER = (torch.float64, torch.int64, torch.int32)
"""Types that hold numbers that float32 does not."""


def to_padded(values: Tensor, offsets: Tensor, max_length: int, padding: float = 0.0) -> Tensor:
    """``values [T, ...]`` to ``[B, L, ...]``, left aligned; what a sequence has beyond L rows is cut off.

    Raises:
        ValueError: arguments that do not go together, or a padding that values of this type cannot hold.
    """
    require_packed("to_padded", "offsets", offsets, values)
    require_length("to_padded", "max_length", max_length)
    require_number("to_padded", "padding", padding)
    if padding:
        _require_padding(values, padding)
    return _to_padded(values, offsets, max_length, padding, False)


def from_padded(padded: Tensor, offsets: Tensor, total: int) -> Tensor:
    """``padded [B, L, ...]`` to ``[T, ...]`` with T = ``total``; rows of a sequence beyond L are zero."""
    require_tensors("from_padded", padded=padded)
    if padded.dim() < 2:
        raise ValueError(f"from_padded: padded must be [B, L, ...], is {list(padded.shape)}")
    require_length("from_padded", "total", total)
    require_packed("from_padded", "offsets", offsets, padded, total, padded.shape[0], end="total")
    return _from_padded(padded, offsets, total, False)


def last_k(values: Tensor, offsets: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The last k rows of each sequence, right aligned: ``[B, k, ...]``, zeros where a sequence is shorter.

    Returns:
        the rows, and a bool mask ``[B, k]`` of the real ones.
    """
    require_packed("last_k", "offsets", offsets, values)
    require_length("last_k", "k", k)
    rows, real = _last_k(values, offsets, k)
    return rows, real


def _require_padding(values: Tensor, padding: float) -> None:
    """Refuses a padding that the type of the values cannot hold; floats round it."""
    dtype = values.dtype
    if dtype.is_floating_point or dtype.is_complex:
        fits = not torch.finfo(dtype).max < abs(padding) < math.inf
    else:
        low, high = (0, 1) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
        fits = low <= padding <= high and padding == int(padding) == int(float(padding))  # the operator takes a float64
    if not fits:
        raise ValueError(f"to_padded: padding is {padding}, which does not fit into values of {dtype}")


def _run_to_padded(values: Tensor, offsets: Tensor, max_length: int, padding: float, right: bool) -> Tensor:
    backend = BACKEND.of(values)
    if padding and values.dtype in _FINER and c_float(padding).value != padding:
        backend = reference  # kernels take the padding as a float32
    return backend.to_padded(values, offsets, max_length, padding, right)


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
