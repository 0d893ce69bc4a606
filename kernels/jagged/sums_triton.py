"""Sums over sequences of any length on the GPU.

Sums are made in float32, one program per ``CHUNK`` rows of a sequence. Of a longer sequence the program that ends last
adds up what the others left: all parts, its own too, in the order of the rows, so the same bits in every run.

Shapes: X and OUT are matrices of rows of ``WIDTH`` elements, ``stx`` the stride of X's; OFFSETS int64.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.common import memory_tuning
from kernels.common.launcher import Launch
from kernels.common.rows import matrix, rounds
from kernels.common.sequences import sequence_chunk
from kernels.jagged.short_sums_triton import SHORT, short_sum
from kernels.jagged.tiles_triton import load, tile

WIDEST = 512
"""Columns of a program."""


@triton.jit(do_not_specialize=["B"])
def sum_kernel(
    X, OUT, PARTIAL, ENDED, OFFSETS, ORDER, B, stx, MEAN: tl.constexpr, CHOICES: tl.constexpr, WIDTH: tl.constexpr,
    ROUNDS: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """``segment_sum`` of the rows ``ORDER[i] // CHOICES``.

    Parts of sequences of more than ``CHUNK`` rows stand in ``PARTIAL`` at twice the chunk in which they begin, plus 1
    but for the first. ``ENDED`` counts, for the chunk in which such a sequence begins, the programs that wrote theirs;
    it is the last sequence that begins there.
    """
    PARTS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    chunk, c, inside = tile(WIDTH, 1, BLOCK)
    b, first, rows, start = sequence_chunk(OFFSETS, B, 0, chunk, CHUNK, False, ROUNDS)
    if (start >= rows) & (start > 0):
        return
    lane = tl.arange(0, ROWS)
    acc = tl.zeros([ROWS, BLOCK], tl.float32)
    end = tl.minimum(start + CHUNK, rows)
    for i in tl.range(start, end, ROWS, num_stages=STAGES):
        r = first + i + lane
        live = i + lane < end
        if ORDER is not None:
            r = tl.load(ORDER + r, mask=live, other=0) // CHOICES
        acc += load(X, stx, r, live, c, inside).to(tl.float32)
    total = tl.sum(acc, 0)
    if PARTIAL is not None:
        parts = (rows + CHUNK - 1) // CHUNK
        if parts > 1:
            cell = first // CHUNK
            slot = 2 * ((first + start) // CHUNK) + (start > 0)
            tl.store(PARTIAL + slot * WIDTH + c, total, mask=inside)
            tl.debug_barrier()  # all threads have written before one says so
            if tl.atomic_add(ENDED + cell * PARTS + tl.program_id(0) % PARTS, 1, sem="acq_rel") < parts - 1:
                return
            acc = tl.zeros([ROWS, BLOCK], tl.float32)
            for i in range(0, parts, ROWS):
                part = i + lane
                at = PARTIAL + (2 * (cell + part) + (part > 0))[:, None] * WIDTH + c[None, :]
                there = (part < parts)[:, None] & inside[None, :]
                acc += tl.load(at, mask=there, other=0.0, cache_modifier=".cg")  # others wrote them: not from L1
            total = tl.sum(acc, 0)
    if MEAN:
        total = total / tl.maximum(rows, 1).to(tl.float32)
    tl.store(OUT + b.to(tl.int64) * WIDTH + c, total.to(OUT.dtype.element_ty), mask=inside)


def segment_total(values: Tensor, offsets: Tensor, order: Tensor | None, choices: int, mean: bool) -> Tensor:
    """Sums or means ``[B, ...]`` of the rows ``order[i] // choices``, i from ``offsets[b]`` to ``offsets[b + 1]``.

    order: int64, for no other order ``None``. Results in the dtype of values ``[T, ...]``.
    """
    batch = offsets.shape[0] - 1
    out = values.new_empty(batch, *values.shape[1:])
    if out.numel() == 0:
        return out
    if values.numel() == 0:
        return out.zero_()
    (x, stride), total, offsets = matrix(values), values.shape[0] * choices, offsets.contiguous()
    if order is None and total <= SHORT * batch:
        return short_sum(x, stride, offsets, mean, out)
    length = memory_tuning.bucket(total // batch)
    launch = _launch(x.device, x.dtype, x.shape[1], length, rounds(batch), mean, choices)
    chunk, parts = launch.constants["CHUNK"], -(-x.shape[1] // launch.constants["BLOCK"])
    chunks = total // chunk + 1
    partial, ended = None, None
    if total > chunk:
        partial = x.new_empty(2 * chunks, x.shape[1], dtype=torch.float32)
        ended = offsets.new_zeros(chunks * parts, dtype=torch.int32)
    launch.start((batch + chunks) * parts, (x, out, partial, ended, offsets, order), (batch,), (stride,))
    return out


@memory_tuning.plan
def _launch(
    device: torch.device, dtype: torch.dtype, width: int, length: int, rounds: int, mean: bool, choices: int
) -> Launch:
    """The kernel with what it is compiled for."""
    config = memory_tuning.find("sum", device, dtype, width, length) or default(width)
    block = min(triton.next_power_of_2(width), WIDEST)
    constants = {**config, "BLOCK": block, "ROUNDS": rounds, "MEAN": mean, "WIDTH": width, "CHOICES": choices}
    return Launch(sum_kernel, constants)


def default(width: int) -> dict[str, int]:
    """4,096 elements at a time."""
    rows = min(64, max(1, 4096 // min(triton.next_power_of_2(width), WIDEST)))
    return {"CHUNK": 512, "ROWS": rows, "num_warps": 4, "STAGES": 1}
