"""Rows that an index names as PyTorch operators: ``gather_rows`` and ``scatter_sum``, each the other's backward.

``embedding_add`` is ``gather_rows`` with a sum; the backward of two tables makes both gradients in one pass.

Legend: T rows, N gathered rows, C choices of a row, R source rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kernels.common.eager import readable
from kernels.common.inputs import (
    cast,
    require_flag,
    require_floats,
    require_index,
    require_int,
    require_length,
    require_range,
    require_tensors,
)
from kernels.common.operators import operator
from kernels.jagged.op import BACKEND, keep


def gather_rows(values: Tensor, index: Tensor, *, rising: bool = False) -> Tensor:
    """Rows ``index [N]`` of ``values [R, ...]``, or for ``index [N, C]`` the sums of C rows: ``[N, ...]``.

    Args:
        rising: the caller promises that ``index [N]`` never falls, like a ``request_index``: the backward, which
            sums the gradients of a row taken more than once, then needs no sort.
    """
    require_flag("gather_rows", "rising", rising)
    require_index("gather_rows", values, index, name="index", choices=True)
    if not values.dim():
        raise ValueError("gather_rows: values must be [R, ...], are a single number")
    require_range("gather_rows", index, values.shape[0], rising=rising)
    return _gather_rows(values, index, rising)


def scatter_sum(values: Tensor, index: Tensor, rows: int, *, rising: bool = False) -> Tensor:
    """``out[r]`` = sum of the rows of ``values [N, ...]`` for which r is in ``index [N]`` or ``[N, C]``."""
    require_flag("scatter_sum", "rising", rising)
    require_index("scatter_sum", values, index, name="index", choices=True)
    require_length("scatter_sum", "rows", rows)
    if values.shape[:1] != index.shape[:1]:
        raise ValueError(f"scatter_sum: values {list(values.shape)} and index {list(index.shape)} differ in rows")
    require_range("scatter_sum", index, rows, rising=rising)
    return _scatter_sum(values, index, rows, rising)


def embedding_add(values: Tensor, table: Tensor, index: Tensor, *, sizes: Sequence[int] = ()) -> Tensor:
    """``values [T, ...]`` plus rows of ``table [R, ...]``: ``out[t] = values[t] + sum_c table[index[t, c]]``.

    For embeddings of time and position, put the tables one under the other and give two columns of indexes. The
    table's gradient is summed in a fixed order, so it has the same bits in every run.

    Args:
        table: cast to the dtype of ``values``.
        index: ``[T]`` or ``[T, C]``, all of them rows of the table.
        sizes: rows of the tables that stand one under the other in ``table``; with it, the caller promises that column
            c names rows of its own table only. On a GPU the gradients of two tables, one of at most 64 rows and the
            other of at most 16,384, then need one pass over that of ``values`` in place of two (of 16 bits).

    Raises:
        ValueError: values, table and index do not go together, a type that is not of real floats, or sizes that are
        not those of the table and of the columns.
    """
    require_tensors("embedding_add", values=values, table=table, index=index)
    require_floats("embedding_add", values=values, table=table)
    if values.shape[1:] != table.shape[1:] or index.shape[:1] != values.shape[:1] or index.dim() not in (1, 2):
        raise ValueError(
            f"embedding_add: values {list(values.shape)}, table {list(table.shape)} and index {list(index.shape)} do "
            "not go together: [T, ...], [R, ...] and [T] or [T, C] are wanted"
        )
    if index.device != values.device or index.dtype != torch.int64:
        require_index("embedding_add", values, index, name="index", choices=True)
    if not isinstance(sizes, tuple) or sizes:
        _require_sizes(table, index, sizes)
    require_range("embedding_add", index, table.shape[0])
    for column in range(len(sizes) if readable(index) else 0):
        first = sum(sizes[:column])
        require_range("embedding_add", index[:, column] - first, sizes[column], name=f"column {column} of index")
    return _embedding_add(values, cast(table, values.dtype), index, sizes)


def _require_sizes(table: Tensor, index: Tensor, sizes: Sequence[int]) -> None:
    if not isinstance(sizes, list | tuple):
        raise ValueError(f"embedding_add: sizes must be a list or tuple of integers, is {type(sizes).__name__}")
    for rows in sizes:
        require_int("embedding_add", "each of sizes", rows)
    if sizes and (sum(sizes) != table.shape[0] or index.dim() != 2 or len(sizes) != index.shape[1]):
        raise ValueError(
            f"embedding_add: sizes {list(sizes)} must sum to the {table.shape[0]} rows of the table, one for each "
            f"column of index {list(index.shape)}"
        )


def _run_gather_rows(values: Tensor, index: Tensor, rising: bool) -> Tensor:
    return BACKEND.of(values).gather_rows(values, index)


def _run_scatter_sum(values: Tensor, index: Tensor, rows: int, rising: bool) -> Tensor:
    return BACKEND.of(values).scatter_sum(values, index, rows, rising)


def _run_embedding_add(values: Tensor, table: Tensor, index: Tensor, sizes: Sequence[int]) -> Tensor:
    return BACKEND.of(values).embedding_add(values, table, index)


def _run_table_sum(values: Tensor, index: Tensor, sizes: Sequence[int]) -> Tensor:
    return BACKEND.of(values).table_sum(values, index, sizes)


def _back_gather_rows(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return _scatter_sum(grad, *ctx.saved_tensors, ctx.rows[0], ctx.options[0]), None, None


def _back_scatter_sum(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return _gather_rows(grad, *ctx.saved_tensors, ctx.options[1]), None, None, None


def _keep_table(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[2])
    ctx.rows, ctx.sizes = inputs[1].shape[0], inputs[3]


def _back_embedding_add(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    if ctx.sizes:
        return grad, _table_sum(grad, *ctx.saved_tensors, ctx.sizes), None, None
    return grad, _scatter_sum(grad, *ctx.saved_tensors, ctx.rows, False), None, None


def _back_table_sum(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return _gather_rows(grad, *ctx.saved_tensors, False), None, None


_gather_rows = operator(
    "gather_rows",
    _run_gather_rows,
    lambda values, index, rising: values.new_empty((index.shape[0], *values.shape[1:])),
    backward=_back_gather_rows,
    setup_context=keep,
)
_scatter_sum = operator(
    "scatter_sum",
    _run_scatter_sum,
    lambda values, index, rows, rising: values.new_empty((rows, *values.shape[1:])),
    backward=_back_scatter_sum,
    setup_context=keep,
)
_embedding_add = operator(
    "embedding_add",
    _run_embedding_add,
    lambda values, table, index, sizes: values.new_empty(values.shape),
    backward=_back_embedding_add,
    setup_context=_keep_table,
)
_table_sum = operator(
    "table_sum",
    _run_table_sum,
    lambda values, index, sizes: values.new_empty((sum(sizes), *values.shape[1:])),
    backward=_back_table_sum,
    setup_context=keep,
)
