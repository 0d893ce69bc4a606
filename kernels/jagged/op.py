"""Jagged data movement as PyTorch operators (``opengem::to_padded`` and others) with autograd.

Operators come in pairs, each the backward of the other: ``to_padded`` and ``from_padded``, ``gather_rows`` and
``scatter_sum``, ``segment_sum`` and ``spread``, ``concat`` and ``split``, ``gather_sequences`` and ``sum_sequences``.
The layout is that of ``kernels/jagged/reference.py``; all offsets are int64, indexes int64 or int32.

Legend: T rows, B sequences, L padded length, N gathered rows or sequences, C choices of a row, R source rows or
sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from kernels.common import inputs
from kernels.common.eager import readable
from kernels.common.inputs import cast, require_floats, require_index, require_range, require_spans
from kernels.common.operators import operator
from kernels.jagged import reference


def _backend(values: Tensor) -> ModuleType:
    """The implementation for the device of ``values``; each has the functions of ``reference``."""
    return _kernels() if values.is_cuda else reference


@cache
def _kernels() -> ModuleType:
    from kernels.jagged import triton  # not installed with PyTorch for CPU

    return triton


def to_padded(values: Tensor, offsets: Tensor, max_length: int, padding: float = 0.0) -> Tensor:
    """``values [T, ...]`` to ``[B, L, ...]``, left aligned; what a sequence has beyond L rows is cut off."""
    _require_packed("to_padded", values, offsets)
    _require_length("max_length", max_length)
    return _to_padded(values, offsets, max_length, padding, False)


def from_padded(padded: Tensor, offsets: Tensor, total: int) -> Tensor:
    """``padded [B, L, ...]`` to ``[T, ...]`` with T = ``total``; rows of a sequence beyond L are zero."""
    if padded.dim() < 2:
        raise ValueError(f"from_padded: padded must be [B, L, ...], is {list(padded.shape)}")
    _require_length("total", total)
    _require_packed("from_padded", padded, offsets, total, padded.shape[0])
    return _from_padded(padded, offsets, total, False)


def last_k(values: Tensor, offsets: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The last k rows of each sequence, right aligned: ``[B, k, ...]``, zeros where a sequence is shorter.

    Returns:
        the rows, and a bool mask ``[B, k]`` of the real ones.
    """
    _require_packed("last_k", values, offsets)
    _require_length("k", k)
    rows, real = _last_k(values, offsets, k)
    return rows, real


def gather_rows(values: Tensor, index: Tensor, *, rising: bool = False) -> Tensor:
    """Rows ``index [N]`` of ``values [R, ...]``, or for ``index [N, C]`` the sums of C rows: ``[N, ...]``.

    Args:
        rising: the caller promises that ``index [N]`` never falls, like a ``request_index``: the backward, which
            sums the gradients of a row taken more than once, then needs no sort.
    """
    require_index("gather_rows", values, index, name="index")
    if not values.dim():
        raise ValueError("gather_rows: values must be [R, ...], are a single number")
    require_range("gather_rows", index, values.shape[0], rising=rising)
    return _gather_rows(values, index, rising)


def scatter_sum(values: Tensor, index: Tensor, rows: int, *, rising: bool = False) -> Tensor:
    """``out[r]`` = sum of the rows of ``values [N, ...]`` for which r is in ``index [N]`` or ``[N, C]``."""
    require_index("scatter_sum", values, index, name="index")
    _require_length("rows", rows)
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
    require_floats("embedding_add", values=values, table=table)
    if values.shape[1:] != table.shape[1:] or index.shape[:1] != values.shape[:1] or index.dim() not in (1, 2):
        raise ValueError(
            f"values {list(values.shape)}, table {list(table.shape)} and index {list(index.shape)} do not go together: "
            "[T, ...], [R, ...] and [T] or [T, C] are wanted"
        )
    if index.device != values.device or index.dtype != torch.int64:
        require_index("embedding_add", values, index, name="index")
    if sizes and (min(sizes) < 0 or sum(sizes) != table.shape[0] or index.dim() != 2 or len(sizes) != index.shape[1]):
        raise ValueError(
            f"sizes {list(sizes)} must sum to the {table.shape[0]} rows of the table, one for each column of index "
            f"{list(index.shape)}"
        )
    require_range("embedding_add", index, table.shape[0])
    for column in range(len(sizes) if readable(index) else 0):
        first = sum(sizes[:column])
        require_range("embedding_add", index[:, column] - first, sizes[column], name=f"column {column} of index")
    return _embedding_add(values, cast(table, values.dtype), index, sizes)


def segment_sum(values: Tensor, offsets: Tensor) -> Tensor:
    """Sum over each sequence: ``[T, ...]`` to ``[B, ...]``; zero for an empty one."""
    _require_packed("segment_sum", values, offsets)
    return _segment_sum(values, offsets, False)


def segment_mean(values: Tensor, offsets: Tensor) -> Tensor:
    """Mean over each sequence: ``[T, ...]`` to ``[B, ...]``; zero for an empty one."""
    _require_packed("segment_mean", values, offsets)
    require_floats("segment_mean", values=values)
    return _segment_sum(values, offsets, True)


def broadcast_add(values: Tensor, offsets: Tensor, dense: Tensor) -> Tensor:
    """Adds row b of ``dense [B, ...]``, in the dtype of values, to every row of sequence b of ``values [T, ...]``."""
    _require_packed("broadcast_add", values, offsets, sequences=dense.shape[0] if dense.dim() else None)
    if not dense.dim() or dense.shape[1:] != values.shape[1:]:
        raise ValueError(f"values {list(values.shape)} and dense {list(dense.shape)} do not go together: rows differ")
    if dense.device != values.device:
        inputs.require_one_device("broadcast_add", values=values, dense=dense)
    if dense.dtype != values.dtype and dense.is_floating_point() > values.is_floating_point():
        raise ValueError(f"broadcast_add: dense is {dense.dtype}, which does not fit into {values.dtype}: cast it")
    return _broadcast_add(values, offsets, cast(dense, values.dtype))


def concat(a: Tensor, a_offsets: Tensor, b: Tensor, b_offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Joins two packed batches sequence by sequence, the rows of ``a`` first.

    Returns:
        values ``[Ta + Tb, ...]`` and offsets ``[B + 1]``.
    """
    inputs.require_offsets("concat", a, a_offsets=a_offsets, b_offsets=b_offsets)
    require_spans("concat", a_offsets=(a_offsets, a.shape[0]), b_offsets=(b_offsets, b.shape[:1].numel()))
    if a.shape[1:] != b.shape[1:]:
        raise ValueError(f"a {list(a.shape)} and b {list(b.shape)} do not go together: rows differ")
    if b.device != a.device:
        inputs.require_one_device("concat", a=a, b=b)
    if a.dtype != b.dtype:
        dtype = torch.promote_types(a.dtype, b.dtype)
        a, b = a.to(dtype), b.to(dtype)
    offsets = a_offsets + b_offsets
    return _concat(a, b, a_offsets, offsets), offsets


def split(values: Tensor, a_offsets: Tensor, b_offsets: Tensor, a_rows: int) -> tuple[Tensor, Tensor]:
    """Undoes ``concat``: ``values [Ta + Tb, ...]`` to ``[Ta, ...]`` and ``[Tb, ...]``; ``a_rows`` is Ta."""
    inputs.require_offsets("split", values, a_offsets=a_offsets, b_offsets=b_offsets)
    _require_length("a_rows", a_rows)
    require_spans("split", a_offsets=(a_offsets, a_rows), b_offsets=(b_offsets, values.shape[0] - a_rows))
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
    _require_packed("gather_sequences", values, offsets)
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
    require_index(operator, offsets, index, name="index")
    if index.dim() != 1:
        raise ValueError(f"{operator}: index must be [N], is {list(index.shape)}")
    require_range(operator, index, offsets.shape[0] - 1, rising=rising)
    new_offsets = _gathered_offsets(offsets, index)
    if total is None:
        return new_offsets, int(new_offsets[-1])
    require_spans(operator, **{"offsets of the gathered sequences, with total": (new_offsets, total)})
    return new_offsets, total


def _require_packed(
    operator: str, values: Tensor, offsets: Tensor, total: int | None = None, sequences: int | None = None
) -> None:
    inputs.require_offsets(operator, values, sequences, offsets=offsets)
    require_spans(operator, offsets=(offsets, values.shape[0] if total is None else total))


def _require_length(name: str, value: int) -> None:
    if torch.compiler.is_compiling():
        return
    if isinstance(value, float | Tensor):
        raise ValueError(f"{name} must be an integer, got {value}")
    if value < 0:
        raise ValueError(f"{name} must not be negative, got {value}")


# What runs on a device. Autograd passes gradients as they come; the kernels take any row stride.


def _run_to_padded(values: Tensor, offsets: Tensor, max_length: int, padding: float, right: bool) -> Tensor:
    return _backend(values).to_padded(values, offsets, max_length, padding, right)


def _run_last_k(values: Tensor, offsets: Tensor, k: int) -> tuple[Tensor, Tensor]:
    return _backend(values).last_k(values, offsets, k)


def _run_from_padded(padded: Tensor, offsets: Tensor, total: int, right: bool) -> Tensor:
    return _backend(padded).from_padded(padded, offsets, total, right)


def _run_gather_rows(values: Tensor, index: Tensor, rising: bool) -> Tensor:
    return _backend(values).gather_rows(values, index)


def _run_scatter_sum(values: Tensor, index: Tensor, rows: int, rising: bool) -> Tensor:
    return _backend(values).scatter_sum(values, index, rows, rising)


def _run_embedding_add(values: Tensor, table: Tensor, index: Tensor, sizes: Sequence[int]) -> Tensor:
    return _backend(values).embedding_add(values, table, index)


def _run_table_sum(values: Tensor, index: Tensor, sizes: Sequence[int]) -> Tensor:
    return _backend(values).table_sum(values, index, sizes)


def _run_segment_sum(values: Tensor, offsets: Tensor, mean: bool) -> Tensor:
    return _backend(values).segment_sum(values, offsets, mean)


def _run_spread(rows: Tensor, offsets: Tensor, total: int, mean: bool) -> Tensor:
    return _backend(rows).spread(rows, offsets, total, mean)


def _run_broadcast_add(values: Tensor, offsets: Tensor, dense: Tensor) -> Tensor:
    return _backend(values).broadcast_add(values, offsets, dense)


def _run_concat(a: Tensor, b: Tensor, a_offsets: Tensor, offsets: Tensor) -> Tensor:
    return _backend(a).concat(a, b, a_offsets, offsets)


def _run_split(values: Tensor, a_offsets: Tensor, offsets: Tensor, a_rows: int) -> tuple[Tensor, Tensor]:
    return _backend(values).split(values, a_offsets, offsets, a_rows)


def _run_gathered_offsets(offsets: Tensor, index: Tensor) -> Tensor:
    return _backend(offsets).gathered_offsets(offsets, index)


def _run_gather_sequences(
    values: Tensor, offsets: Tensor, index: Tensor, new_offsets: Tensor, total: int, rising: bool
) -> Tensor:
    return _backend(values).gather_sequences(values, offsets, index, new_offsets, total)


def _run_sum_sequences(
    values: Tensor, offsets: Tensor, index: Tensor, new_offsets: Tensor, total: int, rising: bool
) -> Tensor:
    return _backend(values).sum_sequences(values, offsets, index, new_offsets, total, rising)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Saves all tensors but the first, which every operator here is linear in, and its number of rows."""
    ctx.save_for_backward(*(x for x in inputs[1:] if isinstance(x, Tensor)))
    ctx.options = [x for x in inputs[1:] if not isinstance(x, Tensor)]
    ctx.rows = inputs[0].shape[:2]


def _back_to_padded(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return _from_padded(grad, *ctx.saved_tensors, ctx.rows[0], ctx.options[2]), None, None, None, None


def _keep_last(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)  # of the mask: there is none
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(inputs[1])
    ctx.rows = inputs[0].shape[0]


def _back_last_k(ctx: Any, grad: Tensor | None, _of_mask: None) -> tuple[Tensor | None, ...]:
    return None if grad is None else _from_padded(grad, *ctx.saved_tensors, ctx.rows, True), None, None


def _back_from_padded(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return _to_padded(grad, *ctx.saved_tensors, ctx.rows[1], 0.0, ctx.options[1]), None, None, None


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


def _back_segment_sum(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return _spread(grad, *ctx.saved_tensors, ctx.rows[0], ctx.options[0]), None, None


def _back_spread(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return _segment_sum(grad, *ctx.saved_tensors, ctx.options[1]), None, None, None


def _keep_offsets(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _back_broadcast_add(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return grad, None, _segment_sum(grad, *ctx.saved_tensors, False)


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


_to_padded = operator(
    "to_padded",
    _run_to_padded,
    lambda values, offsets, length, *_: values.new_empty((offsets.shape[0] - 1, length, *values.shape[1:])),
    backward=_back_to_padded,
    setup_context=_keep,
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
_from_padded = operator(
    "from_padded",
    _run_from_padded,
    lambda padded, offsets, total, right: padded.new_empty((total, *padded.shape[2:])),
    backward=_back_from_padded,
    setup_context=_keep,
)
_gather_rows = operator(
    "gather_rows",
    _run_gather_rows,
    lambda values, index, rising: values.new_empty((index.shape[0], *values.shape[1:])),
    backward=_back_gather_rows,
    setup_context=_keep,
)
_scatter_sum = operator(
    "scatter_sum",
    _run_scatter_sum,
    lambda values, index, rows, rising: values.new_empty((rows, *values.shape[1:])),
    backward=_back_scatter_sum,
    setup_context=_keep,
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
    setup_context=_keep,
)
_segment_sum = operator(
    "segment_sum",
    _run_segment_sum,
    lambda values, offsets, mean: values.new_empty((offsets.shape[0] - 1, *values.shape[1:])),
    backward=_back_segment_sum,
    setup_context=_keep,
)
_spread = operator(
    "spread",
    _run_spread,
    lambda rows, offsets, total, mean: rows.new_empty((total, *rows.shape[1:])),
    backward=_back_spread,
    setup_context=_keep,
)
_broadcast_add = operator(
    "broadcast_add",
    _run_broadcast_add,
    lambda values, offsets, dense: values.new_empty(values.shape),
    backward=_back_broadcast_add,
    setup_context=_keep_offsets,
)
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
    setup_context=_keep,
)
_gathered_offsets = operator(
    "gathered_offsets", _run_gathered_offsets, lambda offsets, index: offsets.new_empty((index.shape[0] + 1,))
)
_gather_sequences = operator(
    "gather_sequences",
    _run_gather_sequences,
    lambda values, offsets, index, new_offsets, total, rising: values.new_empty((total, *values.shape[1:])),
    backward=_back_gather_sequences,
    setup_context=_keep,
)
_sum_sequences = operator(
    "sum_sequences",
    _run_sum_sequences,
    lambda values, offsets, index, new_offsets, total, rising: values.new_empty((total, *values.shape[1:])),
    backward=_back_sum_sequences,
    setup_context=_keep,
)
