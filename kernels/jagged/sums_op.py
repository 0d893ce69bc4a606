"""Sums over sequences as operators: ``segment_sum`` and ``spread``, each the other's backward, ``broadcast_add``.

Legend: T rows, B sequences.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.common.inputs import cast, require_floats, require_one_device, require_packed, require_tensors
from kernels.common.operators import operator
from kernels.jagged.op import BACKEND, keep


def segment_sum(values: Tensor, offsets: Tensor) -> Tensor:
    """Sum over each sequence: ``[T, ...]`` to ``[B, ...]``; zero for an empty one."""
    require_packed("segment_sum", "offsets", offsets, values)
    return _segment_sum(values, offsets, False)


def segment_mean(values: Tensor, offsets: Tensor) -> Tensor:
    """Mean over each sequence: ``[T, ...]`` to ``[B, ...]``; zero for an empty one."""
    require_packed("segment_mean", "offsets", offsets, values)
    require_floats("segment_mean", values=values)
    return _segment_sum(values, offsets, True)


def broadcast_add(values: Tensor, offsets: Tensor, dense: Tensor) -> Tensor:
    """Adds row b of ``dense [B, ...]``, in the dtype of values, to every row of sequence b of ``values [T, ...]``."""
    require_tensors("broadcast_add", values=values, dense=dense)
    require_packed("broadcast_add", "offsets", offsets, values, None, dense.shape[0] if dense.dim() else None)
    if not dense.dim() or dense.shape[1:] != values.shape[1:]:
        raise ValueError(
            f"broadcast_add: values {list(values.shape)} and dense {list(dense.shape)} do not go together: rows differ"
        )
    if dense.device != values.device:
        require_one_device("broadcast_add", values=values, dense=dense)
    if dense.dtype != values.dtype and not _fits(dense.dtype, values.dtype):
        raise ValueError(f"broadcast_add: dense is {dense.dtype}, which does not fit into {values.dtype}: cast it")
    return _broadcast_add(values, offsets, cast(dense, values.dtype))


def _fits(dtype: torch.dtype, other: torch.dtype) -> bool:
    """Whether a cast to the other type keeps what is meant: floats are rounded, all else must be held as it is."""
    return (dtype.is_floating_point and other.is_floating_point) or torch.promote_types(dtype, other) == other


def _run_segment_sum(values: Tensor, offsets: Tensor, mean: bool) -> Tensor:
    return BACKEND.of(values).segment_sum(values, offsets, mean)


def _run_spread(rows: Tensor, offsets: Tensor, total: int, mean: bool) -> Tensor:
    return BACKEND.of(rows).spread(rows, offsets, total, mean)


def _run_broadcast_add(values: Tensor, offsets: Tensor, dense: Tensor) -> Tensor:
    return BACKEND.of(values).broadcast_add(values, offsets, dense)


def _back_segment_sum(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return _spread(grad, *ctx.saved_tensors, ctx.rows[0], ctx.options[0]), None, None


def _back_spread(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return _segment_sum(grad, *ctx.saved_tensors, ctx.options[1]), None, None, None


def _keep_offsets(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _back_broadcast_add(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return grad, None, _segment_sum(grad, *ctx.saved_tensors, False)


_segment_sum = operator(
    "segment_sum",
    _run_segment_sum,
    lambda values, offsets, mean: values.new_empty((offsets.shape[0] - 1, *values.shape[1:])),
    backward=_back_segment_sum,
    setup_context=keep,
)
_spread = operator(
    "spread",
    _run_spread,
    lambda rows, offsets, total, mean: rows.new_empty((total, *rows.shape[1:])),
    backward=_back_spread,
    setup_context=keep,
)
_broadcast_add = operator(
    "broadcast_add",
    _run_broadcast_add,
    lambda values, offsets, dense: values.new_empty(values.shape),
    backward=_back_broadcast_add,
    setup_context=_keep_offsets,
)
