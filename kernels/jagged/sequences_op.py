"""Whole sequences as PyTorch operators: ``concat`` and ``split``, ``gather_sequences`` and ``sum_sequences``.

Of each pair, one is the other's backward.

Legend: T rows, B sequences, N gathered sequences, R source sequences.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from kernels.common.eager import readable
from kernels.common.inputs import (
    require_flag,
    require_index,
    require_length,
    require_one_device,
    require_packed,
    require_range,
    require_tensors,
)
from kernels.common.operators import operator
from kernels.jagged import reference
from kernels.jagged.op import BACKEND, keep


def concat(a: Tensor, a_offsets: Tensor, b: Tensor, b_offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Joins two packed batches sequence by sequence, the rows of ``a`` first.

    Returns:
        values ``[Ta + Tb, ...]`` and offsets ``[B + 1]``.
    """
    require_tensors("concat", a=a, b=b)
    sequences = require_packed("concat", "a_offsets", a_offsets, a)
    if b.device != a.device:
        require_one_device("concat", a=a, b=b)
    require_packed("concat", "b_offsets", b_offsets, b, None, sequences)
    if a.shape[1:] != b.shape[1:]:
        raise ValueError(f"concat: a {list(a.shape)} and b {list(b.shape)} do not go together: rows differ")
    if a.dtype != b.dtype:
        dtype = torch.promote_types(a.dtype, b.dtype)
        a, b = a.to(dtype), b.to(dtype)
    offsets = a_offsets + b_offsets
    return _concat(a, b, a_offsets, offsets), offsets


def split(values: Tensor, a_offsets: Tensor, b_offsets: Tensor, a_rows: int) -> tuple[Tensor, Tensor]:
    """Undoes ``concat``: ``values [Ta + Tb, ...]`` to ``[Ta, ...]`` and ``[Tb, ...]``; ``a_rows`` is Ta."""
    require_length("split", "a_rows", a_rows)
    sequences = require_packed("split", "a_offsets", a_offsets, values, a_rows, end="a_rows")
    rest = "the number of rows less a_rows"
    require_packed("split", "b_offsets", b_offsets, values, values.shape[0] - a_rows, sequences, end=rest)
    a, b = _split(values, a_offsets, a_offsets + b_offsets, a_rows)
    return a, b


def gather_sequences(
    values: Tensor, offsets: Tensor, index: Tensor, *, total: int | None = None, rising: bool = False
) -> tuple[Tensor, Tensor]:
    """Whole sequences ``index [N]`` of a packed batch of R, again packed.

    Args:
        total: rows of the result, if known; otherwise the call waits for the device to say.
        rising: the caller promises that the index never falls; the backward then needs no sort.

    Returns:
        values ``[T', ...]`` and offsets ``[N + 1]``; the backward sums over the copies of a sequence.
    """
    require_packed("gather_sequences", "offsets", offsets, values)
    new_offsets, rows = _new_offsets("gather_sequences", offsets, index, total, rising)
    return _gather_sequences(values, offsets, index, new_offsets, rows, rising), new_offsets


def sequence_rows(offsets: Tensor, index: Tensor, total: int | None = None) -> tuple[Tensor, Tensor]:
    """Row numbers ``[T']`` of the sequences ``index [N]``, and their new offsets ``[N + 1]``.

    Args:
        total: T', where the caller knows it; otherwise the host waits for the device to learn it.
    """
    new_offsets, rows = _new_offsets("sequence_rows", offsets, index, total, False)
    return reference.sequence_rows(offsets, index, new_offsets, rows), new_offsets


def _new_offsets(operator: str, offsets: Tensor, index: Tensor, total: int | None, rising: bool) -> tuple[Tensor, int]:
    """Offsets of the gathered sequences, and the number of their rows."""
    require_flag(operator, "rising", rising)
    if total is not None:
        require_length(operator, "total", total)
    require_index(operator, offsets, index, name="index")
    require_range(operator, index, offsets.shape[0] - 1, rising=rising)
    new_offsets = _gathered_offsets(offsets, index)
    if total is None:
        return new_offsets, cast("int", new_offsets[-1].item())  # which export can follow, as it cannot int()
    if readable(new_offsets) and int(new_offsets[-1]) != total:
        raise ValueError(f"{operator}: total is {total}, but the sequences have {int(new_offsets[-1])} rows")
    return new_offsets, total


def _run_concat(a: Tensor, b: Tensor, a_offsets: Tensor, offsets: Tensor) -> Tensor:
    return BACKEND.of(a).concat(a, b, a_offsets, offsets)


def _run_split(values: Tensor, a_offsets: Tensor, offsets: Tensor, a_rows: int) -> tuple[Tensor, Tensor]:
    return BACKEND.of(values).split(values, a_offsets, offsets, a_rows)


def _run_gathered_offsets(offsets: Tensor, index: Tensor) -> Tensor:
    return BACKEND.of(offsets).gathered_offsets(offsets, index)


def _run_gather_sequences(
    values: Tensor, offsets: Tensor, index: Tensor, new_offsets: Tensor, total: int, rising: bool
) -> Tensor:
    return BACKEND.of(values).gather_sequences(values, offsets, index, new_offsets, total)


def _run_sum_sequences(
    values: Tensor, offsets: Tensor, index: Tensor, new_offsets: Tensor, total: int, rising: bool
) -> Tensor:
    return BACKEND.of(values).sum_sequences(values, offsets, index, new_offsets, total, rising)


def _keep_both_offsets(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[2:])
    ctx.rows = inputs[0].shape[0]


def _back_concat(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return (*_split(grad, *ctx.saved_tensors, ctx.rows), None, None)


def _back_split(ctx: Any, a: Tensor, b: Tensor) -> tuple[Tensor | None, ...]:
    return _concat(a, b, *ctx.saved_tensors), None, None, None


def _back_gather_sequences(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return _sum_sequences(grad, *ctx.saved_tensors, ctx.rows[0], ctx.options[1]), None, None, None, None, None


def _back_sum_sequences(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return _gather_sequences(grad, *ctx.saved_tensors, ctx.rows[0], ctx.options[1]), None, None, None, None, None


_concat = operator(
    "concat",
    _run_concat,
    lambda a, b, *_: a.new_empty((a.shape[0] + b.shape[0], *a.shape[1:])),
    backward=_back_concat,
    setup_context=_keep_both_offsets,
)
_split = operator(
    "split",
    _run_split,
    lambda values, a_offsets, offsets, a_rows: (
        values.new_empty((a_rows, *values.shape[1:])),
        values.new_empty((values.shape[0] - a_rows, *values.shape[1:])),
    ),
    backward=_back_split,
    setup_context=keep,
)
_gathered_offsets = operator(
    "gathered_offsets", _run_gathered_offsets, lambda offsets, index: offsets.new_empty((index.shape[0] + 1,))
)
_gather_sequences = operator(
    "gather_sequences",
    _run_gather_sequences,
    lambda values, offsets, index, new_offsets, total, rising: values.new_empty((total, *values.shape[1:])),
    backward=_back_gather_sequences,
    setup_context=keep,
)
_sum_sequences = operator(
    "sum_sequences",
    _run_sum_sequences,
    lambda values, offsets, index, new_offsets, total, rising: values.new_empty((total, *values.shape[1:])),
    backward=_back_sum_sequences,
    setup_context=keep,
)
