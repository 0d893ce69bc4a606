"""Jagged data movement on the GPU: the functions of ``reference.py`` beside this in Triton.

Rows are copied in tiles of several, 16 bytes a thread. Tiles of packed rows ignore where sequences begin and end: each
row looks up its owner (``kernels/common/rows.py``), so short sequences waste nothing.

Shapes: X, OUT and the like are matrices of rows of ``WIDTH`` elements; ``st*`` are the strides of their rows.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.common import memory_tuning
from kernels.common.launcher import Launch
from kernels.common.rows import matrix, rounds, row_owners
from kernels.jagged import reference, tables_triton
from kernels.jagged.offsets_triton import gathered_offsets as gathered_offsets
from kernels.jagged.short_sums_triton import sort, starts
from kernels.jagged.sums_triton import segment_total
from kernels.jagged.tiles_triton import load, store, tile

_MOVED = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.int32)
_SUMMED = (torch.bfloat16, torch.float16, torch.float32)
_VARYING = ["B", "N", "rows", "length"]  # a batch's own numbers: one compiled kernel serves all of them


@triton.jit(do_not_specialize=_VARYING)
def pad_kernel(
    X, OUT, REAL, OFFSETS, rows, length, padding, stx, WIDTH: tl.constexpr, RIGHT: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """``to_padded``; ``rows`` is B times ``length``. Which rows are no padding goes to ``REAL``, if that is wanted."""
    start, c, inside = tile(WIDTH, ROWS, BLOCK)
    r = start + tl.arange(0, ROWS)
    live = r < rows
    b = r // length
    begin = tl.load(OFFSETS + b, mask=live, other=0)
    end = tl.load(OFFSETS + b + 1, mask=live, other=0)
    place = begin + (r - b * length)
    if RIGHT:
        place = end - length + (r - b * length)
    real = live & (place >= begin) & (place < end)
    if REAL is not None:
        tl.store(REAL + r, real, mask=live & (tl.min(c, 0) == 0))
    x = load(X, stx, place, real, c, inside)
    x = tl.where(real[:, None], x, tl.full([ROWS, BLOCK], padding, x.dtype))
    store(OUT, WIDTH, x, r, live, c, inside)


@triton.jit(do_not_specialize=_VARYING)
def unpad_kernel(
    X, OUT, OFFSETS, B, rows, length, stb, stx, WIDTH: tl.constexpr, RIGHT: tl.constexpr, ROUNDS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``from_padded``; ``rows`` is T, ``stb`` the stride of a sequence."""
    start, c, inside = tile(WIDTH, ROWS, BLOCK)
    r = start + tl.arange(0, ROWS)
    live = r < rows
    b = row_owners(OFFSETS, B, start, rows, ROWS, ROUNDS)
    if RIGHT:
        place = r - tl.load(OFFSETS + b + 1, mask=live, other=0) + length
    else:
        place = r - tl.load(OFFSETS + b, mask=live, other=0)
    real = live & (place >= 0) & (place < length)
    pointer = X + b.to(tl.int64)[:, None] * stb + place[:, None] * stx + c[None, :]
    x = tl.load(pointer, mask=real[:, None] & inside[None, :], other=0)
    store(OUT, WIDTH, x, r, live, c, inside)


@triton.jit(do_not_specialize=_VARYING)
def gather_kernel(
    X, ADD, INDEX, OUT, rows, stx, sta, CHOICES: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """``gather_rows``, or with ``ADD`` ``embedding_add``; ``rows`` is N."""
    start, c, inside = tile(WIDTH, ROWS, BLOCK)
    r = start + tl.arange(0, ROWS)
    live = r < rows
    if CHOICES == 1 and ADD is None:
        out = load(X, stx, tl.load(INDEX + r, mask=live, other=0), live, c, inside)
    else:
        out = tl.zeros([ROWS, BLOCK], tl.float32)
        if ADD is not None:
            out = load(ADD, sta, r, live, c, inside).to(tl.float32)
        for i in tl.static_range(CHOICES):
            place = tl.load(INDEX + r.to(tl.int64) * CHOICES + i, mask=live, other=0)
            out += load(X, stx, place, live, c, inside).to(tl.float32)
    store(OUT, WIDTH, out, r, live, c, inside)


@triton.jit(do_not_specialize=_VARYING)
def spread_kernel(
    X, ADD, OUT, OFFSETS, B, rows, stx, sta, MEAN: tl.constexpr, WIDTH: tl.constexpr, ROUNDS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``spread``, or with ``ADD`` ``broadcast_add``; ``rows`` is T."""
    start, c, inside = tile(WIDTH, ROWS, BLOCK)
    r = start + tl.arange(0, ROWS)
    live = r < rows
    b = row_owners(OFFSETS, B, start, rows, ROWS, ROUNDS)
    x = load(X, stx, b, live, c, inside)
    if MEAN:
        begin, end = tl.load(OFFSETS + b, mask=live, other=0), tl.load(OFFSETS + b + 1, mask=live, other=1)
        x = x.to(tl.float32) * (1.0 / (end - begin).to(tl.float32))[:, None]
    if ADD is not None:
        x = x.to(tl.float32) + load(ADD, sta, r, live, c, inside).to(tl.float32)
    store(OUT, WIDTH, x, r, live, c, inside)


@triton.jit
def _joined(A_OFFSETS, OFFSETS, B, start, r, live, rows, ROWS: tl.constexpr, ROUNDS: tl.constexpr):
    """Of joined rows: whether each is of the first batch, and its place there or in the second."""
    b = row_owners(OFFSETS, B, start, rows, ROWS, ROUNDS)
    begin = tl.load(OFFSETS + b, mask=live, other=0)
    a_begin = tl.load(A_OFFSETS + b, mask=live, other=0)
    a_end = tl.load(A_OFFSETS + b + 1, mask=live, other=0)
    place = r - begin + a_begin
    return place < a_end, tl.where(place < a_end, place, r - a_end)


@triton.jit(do_not_specialize=_VARYING)
def concat_kernel(
    X, Y, OUT, A_OFFSETS, OFFSETS, B, rows, stx, sty, WIDTH: tl.constexpr, ROUNDS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """``concat``; ``OFFSETS`` are those of the result, ``rows`` its number of rows."""
    start, c, inside = tile(WIDTH, ROWS, BLOCK)
    r = start + tl.arange(0, ROWS)
    live = r < rows
    first, place = _joined(A_OFFSETS, OFFSETS, B, start, r, live, rows, ROWS, ROUNDS)
    x = load(X, stx, place, live & first, c, inside)
    y = load(Y, sty, place, live & (first == 0), c, inside)
    store(OUT, WIDTH, tl.where(first[:, None], x, y), r, live, c, inside)


@triton.jit(do_not_specialize=_VARYING)
def split_kernel(
    X, OUT, SECOND, A_OFFSETS, OFFSETS, B, rows, stx, WIDTH: tl.constexpr, ROUNDS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """``split``; arguments as in ``concat_kernel``."""
    start, c, inside = tile(WIDTH, ROWS, BLOCK)
    r = start + tl.arange(0, ROWS)
    live = r < rows
    first, place = _joined(A_OFFSETS, OFFSETS, B, start, r, live, rows, ROWS, ROUNDS)
    x = load(X, stx, r, live, c, inside)
    store(OUT, WIDTH, x, place, live & first, c, inside)
    store(SECOND, WIDTH, x, place, live & (first == 0), c, inside)


@triton.jit(do_not_specialize=_VARYING)
def sequences_kernel(
    X, OUT, OFFSETS, INDEX, NEW_OFFSETS, N, rows, stx, WIDTH: tl.constexpr, ROUNDS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """``gather_sequences``; ``rows`` is its number of rows."""
    start, c, inside = tile(WIDTH, ROWS, BLOCK)
    r = start + tl.arange(0, ROWS)
    live = r < rows
    n = row_owners(NEW_OFFSETS, N, start, rows, ROWS, ROUNDS)
    place = r - tl.load(NEW_OFFSETS + n, mask=live, other=0)
    place += tl.load(OFFSETS + tl.load(INDEX + n, mask=live, other=0), mask=live, other=0)
    store(OUT, WIDTH, load(X, stx, place, live, c, inside), r, live, c, inside)


@triton.jit(do_not_specialize=_VARYING)
def copies_kernel(
    X, OUT, OFFSETS, STARTS, ORDER, NEW_OFFSETS, B, rows, stx, WIDTH: tl.constexpr, ROUNDS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """``sum_sequences``: copies ``ORDER[STARTS[b] .. STARTS[b + 1] - 1]`` of sequence b; ``rows`` is T."""
    start, c, inside = tile(WIDTH, ROWS, BLOCK)
    r = start + tl.arange(0, ROWS)
    live = r < rows
    b = row_owners(OFFSETS, B, start, rows, ROWS, ROUNDS)
    place = r - tl.load(OFFSETS + b, mask=live, other=0)
    begin = tl.load(STARTS + b, mask=live, other=0)
    count = tl.load(STARTS + b + 1, mask=live, other=0) - begin
    out = tl.zeros([ROWS, BLOCK], tl.float32)
    for i in tl.range(0, tl.max(count, 0).to(tl.int32), num_stages=STAGES):
        some = live & (i < count)
        copy = begin + i
        if ORDER is not None:
            copy = tl.load(ORDER + copy, mask=some, other=0)
        source = tl.load(NEW_OFFSETS + copy, mask=some, other=0) + place
        out += load(X, stx, source, some, c, inside).to(tl.float32)
    store(OUT, WIDTH, out, r, live, c, inside)


def to_padded(values: Tensor, offsets: Tensor, max_length: int, padding: float, right: bool) -> Tensor:
    """See ``reference.to_padded``."""
    if values.dtype not in _MOVED:
        return reference.to_padded(values, offsets, max_length, padding, right)
    out = values.new_empty(offsets.shape[0] - 1, max_length, *values.shape[1:])
    if out.numel():
        _pad(values, offsets, out, None, padding, right)
    return out


def last_k(values: Tensor, offsets: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """See ``reference.last_k``."""
    if values.dtype not in _MOVED:
        return reference.last_k(values, offsets, k)
    batch = offsets.shape[0] - 1
    out = values.new_empty(batch, k, *values.shape[1:])
    if not out.numel():
        return out, reference.last_mask(offsets, k)
    real = values.new_empty((batch, k), dtype=torch.bool)
    _pad(values, offsets, out, real, 0.0, True)
    return out, real


def _pad(values: Tensor, offsets: Tensor, out: Tensor, real: Tensor | None, padding: float, right: bool) -> None:
    (x, stride), (batch, length) = matrix(values), out.shape[:2]
    tensors, numbers = (x, out, real, offsets.contiguous()), (batch * length, length, float(padding))
    _launch("pad_kernel", batch * length, x, tensors, numbers, (stride,), RIGHT=right)


def from_padded(padded: Tensor, offsets: Tensor, total: int, right: bool) -> Tensor:
    """See ``reference.from_padded``."""
    if padded.dtype not in _MOVED:
        return reference.from_padded(padded, offsets, total, right)
    out = padded.new_empty(total, *padded.shape[2:])
    if padded.numel() == 0:
        return out.zero_()
    batch, length = padded.shape[:2]
    if out.numel():
        x = padded if padded.dim() == 3 else padded.reshape(batch, length, -1)
        x = x if x.stride(2) == 1 else x.contiguous()
        tensors, numbers, strides = (x, out, offsets.contiguous()), (batch, total, length), x.stride()[:2]
        _launch("unpad_kernel", total, x, tensors, numbers, strides, RIGHT=right, ROUNDS=rounds(batch))
    return out


def gather_rows(values: Tensor, index: Tensor) -> Tensor:
    """See ``reference.gather_rows``."""
    if values.dtype not in (_MOVED if index.dim() == 1 else _SUMMED):
        return reference.gather_rows(values, index)
    return _gather(values, None, index)


def embedding_add(values: Tensor, table: Tensor, index: Tensor) -> Tensor:
    """See ``reference.embedding_add``."""
    if values.dtype not in _SUMMED:
        return reference.embedding_add(values, table, index)
    return _gather(table, values, index)


def _gather(values: Tensor, add: Tensor | None, index: Tensor) -> Tensor:
    rows = index.shape[0]
    out = values.new_empty(rows, *values.shape[1:])
    if out.numel():
        (x, stride), index = matrix(values), index.contiguous()
        more, more_stride = (None, 0) if add is None else matrix(add)
        choices = index.shape[1] if index.dim() == 2 else 1
        _launch("gather_kernel", rows, x, (x, more, index, out), (rows,), (stride, more_stride), CHOICES=choices)
    return out


def scatter_sum(values: Tensor, index: Tensor, rows: int, rising: bool) -> Tensor:
    """See ``reference.scatter_sum``; ``rising`` promises that ``index [N]`` does, and saves sorting it."""
    if values.dtype not in _SUMMED:
        return reference.scatter_sum(values, index, rows, rising)
    if rising and index.dim() == 1:
        return segment_total(values, starts(index, rows), None, 1, False)
    ordered, order = sort(index.flatten(), rows)
    return segment_total(values, starts(ordered, rows), order, index.shape[1] if index.dim() == 2 else 1, False)


def table_sum(values: Tensor, index: Tensor, sizes: Sequence[int]) -> Tensor:
    """See ``reference.table_sum``."""
    if not tables_triton.supports(values, sizes):
        return scatter_sum(values, index, sum(sizes), False)
    return tables_triton.table_sum(matrix(values)[0], index, sizes).view(-1, *values.shape[1:])


def segment_sum(values: Tensor, offsets: Tensor, mean: bool) -> Tensor:
    """See ``reference.segment_sum``."""
    if values.dtype not in _SUMMED:
        return reference.segment_sum(values, offsets, mean)
    return segment_total(values, offsets, None, 1, mean)


def spread(rows: Tensor, offsets: Tensor, total: int, mean: bool) -> Tensor:
    """See ``reference.spread``."""
    if rows.dtype not in (_SUMMED if mean else _MOVED):
        return reference.spread(rows, offsets, total, mean)
    return _spread(rows, None, offsets, total, mean)


def broadcast_add(values: Tensor, offsets: Tensor, dense: Tensor) -> Tensor:
    """See ``reference.broadcast_add``."""
    if values.dtype not in _SUMMED:
        return reference.broadcast_add(values, offsets, dense)
    return _spread(dense, values, offsets, values.shape[0], False)


def _spread(rows: Tensor, add: Tensor | None, offsets: Tensor, total: int, mean: bool) -> Tensor:
    out = rows.new_empty(total, *rows.shape[1:])
    if out.numel():
        (x, stride), batch = matrix(rows), offsets.shape[0] - 1
        more, more_stride = (None, 0) if add is None else matrix(add)
        tensors, strides = (x, more, out, offsets.contiguous()), (stride, more_stride)
        _launch("spread_kernel", total, x, tensors, (batch, total), strides, MEAN=mean, ROUNDS=rounds(batch))
    return out


def concat(a: Tensor, b: Tensor, a_offsets: Tensor, offsets: Tensor) -> Tensor:
    """See ``reference.concat``."""
    if a.dtype not in _MOVED:
        return reference.concat(a, b, a_offsets, offsets)
    total, batch = a.shape[0] + b.shape[0], a_offsets.shape[0] - 1
    out = a.new_empty(total, *a.shape[1:])
    if out.numel():
        (x, stride), (y, y_stride) = matrix(a), matrix(b)
        tensors, strides = (x, y, out, a_offsets.contiguous(), offsets.contiguous()), (stride, y_stride)
        _launch("concat_kernel", total, x, tensors, (batch, total), strides, ROUNDS=rounds(batch))
    return out


def split(values: Tensor, a_offsets: Tensor, offsets: Tensor, a_rows: int) -> tuple[Tensor, Tensor]:
    """See ``reference.split``."""
    if values.dtype not in _MOVED:
        return reference.split(values, a_offsets, offsets, a_rows)
    total, batch = values.shape[0], a_offsets.shape[0] - 1
    a, b = (values.new_empty(rows, *values.shape[1:]) for rows in (a_rows, total - a_rows))
    if values.numel():
        x, stride = matrix(values)
        tensors = (x, a, b, a_offsets.contiguous(), offsets.contiguous())
        _launch("split_kernel", total, x, tensors, (batch, total), (stride,), ROUNDS=rounds(batch))
    return a, b


def gather_sequences(values: Tensor, offsets: Tensor, index: Tensor, new_offsets: Tensor, total: int) -> Tensor:
    """See ``reference.gather_sequences``."""
    if values.dtype not in _MOVED:
        return reference.gather_sequences(values, offsets, index, new_offsets, total)
    out = values.new_empty(total, *values.shape[1:])
    if out.numel():
        (x, stride), count = matrix(values), index.shape[0]
        tensors = (x, out, offsets.contiguous(), index.contiguous(), new_offsets.contiguous())
        _launch("sequences_kernel", total, x, tensors, (count, total), (stride,), ROUNDS=rounds(count))
    return out


def sum_sequences(
    grad: Tensor, offsets: Tensor, index: Tensor, new_offsets: Tensor, total: int, rising: bool
) -> Tensor:
    """See ``reference.sum_sequences``; ``rising`` promises that ``index`` does, and saves sorting it."""
    if grad.dtype not in _SUMMED:
        return reference.sum_sequences(grad, offsets, index, new_offsets, total, rising)
    out, batch, order = grad.new_empty(total, *grad.shape[1:]), offsets.shape[0] - 1, None
    if out.numel():
        if not rising:
            index, order = sort(index, batch)
        x, stride = matrix(grad)
        tensors = (x, out, offsets.contiguous(), starts(index, batch), order, new_offsets.contiguous())
        _launch("copies_kernel", total, x, tensors, (batch, total), (stride,), ROUNDS=rounds(batch))
    return out


def _launch(
    name: str, rows: int, x: Tensor, tensors: tuple[Tensor | None, ...], numbers: tuple[float, ...],
    strides: tuple[int, ...], **constants: Any,
) -> None:  # fmt: skip
    """Runs a kernel over the tiles of ``rows`` rows as wide as those of ``x``, its last dim."""
    launch, parts = _plan(name, x.device, x.dtype, x.shape[-1], *constants.items())
    launch.start(-(-rows // launch.constants["ROWS"]) * parts, tensors, numbers, strides)


@memory_tuning.plan
def _plan(
    name: str, device: torch.device, dtype: torch.dtype, width: int, *constants: tuple[str, int]
) -> tuple[Launch, int]:
    """A kernel, by its name, which is hashed faster, with its constants, and how many tiles a row has."""
    config = memory_tuning.find(name, device, dtype, width, 1)
    if config is None:
        config = default(width, dtype.itemsize, name == "copies_kernel")
    if width * dtype.itemsize % 16:  # moved element by element, for which a tuned limit would make registers spill
        config = {option: value for option, value in config.items() if option != "maxnreg"}
    block = _block(width)
    launch = Launch(globals()[name], {**dict(constants), **config, "WIDTH": width, "BLOCK": block})
    return launch, -(-width // block)


def _block(width: int) -> int:
    return min(triton.next_power_of_2(width), 1024)


def default(width: int, size: int, loop: bool) -> dict[str, int]:
    """16 KB a tile; ``loop``: of a kernel that goes over several."""
    config = {"ROWS": min(256, max(1, 16384 // (size * _block(width)))), "num_warps": 4}
    return config | {"STAGES": 1} if loop else config
