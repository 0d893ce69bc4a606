"""The functions of ``reference.py`` beside this in Triton, for many small matrices.

A tile has all tokens of one row of the batch, or backward of several (``GROUP``), and ``STEP`` columns; M of several
rows has zeros between them, and a gradient that is not finite makes those of its neighbours NaN. A program keeps M and
takes one tile after another. X is read once forward. Backward reads X and the gradient once; a program adds up its part
of the gradient of M, and those sums are added in a fixed order, so gradients have the same bits in every run.

Shapes: X, DX ``[N, n, D]``, OUT, DO ``[N, P, D]``, M ``[n, P]``, or ``[TERMS, n, P / TERMS]``, in which output p is
column ``p / TERMS`` of term ``p % TERMS``; ``ST*B`` and ``ST*T`` are the strides of X and DO in rows of the batch and
tokens, all else is packed.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.common import memory_tuning
from kernels.common.launcher import Variant
from kernels.token_mixing import reference

MOST_TOKENS, MOST_FEWER = 256, 128
"""Tokens in or out, and the fewer of both."""

_TAKEN = (torch.bfloat16, torch.float16)


@triton.jit
def _places(group, N, GROUP: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr):
    """Row of the batch and token of each of ``ROWS`` places of a tile, and which places are real."""
    place = tl.arange(0, ROWS)
    token = place % (ROWS // GROUP)
    b = group * GROUP + place // (ROWS // GROUP)
    return b.to(tl.int64), token, (b < N) & (token < TOKENS)


@triton.jit
def _load(X, b, token, live, STB: tl.constexpr, STT: tl.constexpr, c, WIDTH: tl.constexpr):
    mask = live[:, None] & (c < WIDTH)[None, :]
    return tl.load(X + (b * STB + token * STT)[:, None] + c[None, :], mask=mask, other=0.0)


@triton.jit
def _store(X, value, b, token, live, c, TOKENS: tl.constexpr, WIDTH: tl.constexpr):
    mask = live[:, None] & (c < WIDTH)[None, :]
    tl.store(X + ((b * TOKENS + token) * WIDTH)[:, None] + c[None, :], value.to(X.dtype.element_ty), mask=mask)


@triton.jit
def _matrix(
    M, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, TERMS: tl.constexpr, GROUP: tl.constexpr, TALL: tl.constexpr,
    LONG: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """M of a tile, ``[TALL, LONG]``: tokens in down and tokens out along, or ``TURNED`` the other way."""
    COLUMNS: tl.constexpr = OUTPUTS // TERMS
    i, j = tl.arange(0, TALL), tl.arange(0, LONG)
    same = (i // (TALL // GROUP))[:, None] == (j // (LONG // GROUP))[None, :]
    i, j = i % (TALL // GROUP), j % (LONG // GROUP)
    if TURNED:
        mask = same & (i < OUTPUTS)[:, None] & (j < INPUTS)[None, :]
        at = j[None, :] * COLUMNS + (i % TERMS * INPUTS * COLUMNS + i // TERMS)[:, None]
    else:
        mask = same & (i < INPUTS)[:, None] & (j < OUTPUTS)[None, :]
        at = i[:, None] * COLUMNS + (j % TERMS * INPUTS * COLUMNS + j // TERMS)[None, :]
    return tl.load(M + at, mask=mask, other=0.0)


@triton.jit(do_not_specialize=["N"])
def forward_kernel(
    X, M, OUT, N, STXB: tl.constexpr, STXT: tl.constexpr, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr,
    TERMS: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, IN_ROWS: tl.constexpr, OUT_ROWS: tl.constexpr,
    STEP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A program has every so many-th tile."""
    PARTS: tl.constexpr = (WIDTH + STEP - 1) // STEP
    matrix = _matrix(M, INPUTS, OUTPUTS, TERMS, GROUP, OUT_ROWS, IN_ROWS, True)
    for tile in tl.range(tl.program_id(0), tl.cdiv(N, GROUP) * PARTS, tl.num_programs(0), num_stages=STAGES):
        c = (tile % PARTS) * STEP + tl.arange(0, STEP)
        b, token, live = _places(tile // PARTS, N, GROUP, INPUTS, IN_ROWS)
        out = tl.dot(matrix, _load(X, b, token, live, STXB, STXT, c, WIDTH))
        b, token, live = _places(tile // PARTS, N, GROUP, OUTPUTS, OUT_ROWS)
        _store(OUT, out, b, token, live, c, OUTPUTS, WIDTH)


@triton.jit(do_not_specialize=["N"])
def backward_kernel(
    X, M, DO, DX, PARTIAL, N, STXB: tl.constexpr, STXT: tl.constexpr, STDB: tl.constexpr, STDT: tl.constexpr,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, TERMS: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr,
    IN_ROWS: tl.constexpr, OUT_ROWS: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A program has every so many-th tile. PARTIAL: float32 ``[programs, IN_ROWS, OUT_ROWS]``."""
    PARTS: tl.constexpr = (WIDTH + STEP - 1) // STEP
    matrix = _matrix(M, INPUTS, OUTPUTS, TERMS, GROUP, IN_ROWS, OUT_ROWS, False)
    sums = tl.zeros([IN_ROWS, OUT_ROWS], tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(N, GROUP) * PARTS, tl.num_programs(0), num_stages=STAGES):
        c = (tile % PARTS) * STEP + tl.arange(0, STEP)
        b, token, live = _places(tile // PARTS, N, GROUP, OUTPUTS, OUT_ROWS)
        do = _load(DO, b, token, live, STDB, STDT, c, WIDTH)
        b, token, live = _places(tile // PARTS, N, GROUP, INPUTS, IN_ROWS)
        x = _load(X, b, token, live, STXB, STXT, c, WIDTH)
        sums = tl.dot(x, tl.trans(do), sums)
        _store(DX, tl.dot(matrix, do), b, token, live, c, INPUTS, WIDTH)
    i, j = tl.arange(0, IN_ROWS), tl.arange(0, OUT_ROWS)
    start = tl.program_id(0).to(tl.int64) * IN_ROWS * OUT_ROWS
    tl.store(PARTIAL + start + i[:, None] * OUT_ROWS + j[None, :], sums)


def supports(x: Tensor, matrix: Tensor) -> bool:
    """Whether the kernels take these: 16-bit, with few enough tokens."""
    if x.dtype not in _TAKEN or matrix.dtype != x.dtype:
        return False
    inputs, outputs, _ = reference.sides(matrix)
    fits = 0 < min(inputs, outputs) <= MOST_FEWER and max(inputs, outputs) <= MOST_TOKENS
    return fits and x.shape[2] > 0


def forward(x: Tensor, matrix: Tensor) -> Tensor:
    """See ``reference.forward``."""
    (count, _, width), (_, outputs, terms) = x.shape, reference.sides(matrix)
    out = x.new_empty(count, outputs, width)
    if count:
        x = _rows(x)
        programs, kernel = _plan("mix_forward", x, None, outputs, terms)
        kernel.start(min(programs, _tiles(kernel, count, width)), (x, matrix.contiguous(), out), (count,))
    return out


def backward(grad: Tensor, x: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor]:
    """See ``reference.backward``."""
    (count, _, width), (inputs, outputs, terms) = x.shape, reference.sides(matrix)
    dx = x.new_empty(*x.shape)
    if count == 0:
        return dx, torch.zeros_like(matrix)
    x, grad = _rows(x), _rows(grad)
    programs, kernel = _plan("mix_backward", x, grad, outputs, terms)
    programs, group = min(programs, _tiles(kernel, count, width)), kernel.constants["GROUP"]
    sides = (kernel.constants["IN_ROWS"] // group, kernel.constants["OUT_ROWS"] // group)
    partial = x.new_empty(programs, group, sides[0], group, sides[1], dtype=torch.float32)
    kernel.start(programs, (x, matrix.contiguous(), grad, dx, partial), (count,))
    total = partial.diagonal(dim1=1, dim2=3).sum((0, 3))[:inputs, :outputs]
    if matrix.dim() == 3:
        total = total.view(inputs, -1, terms).permute(2, 0, 1)
    return dx, matrix.new_empty(matrix.shape).copy_(total)


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(2) == 1 else x.contiguous()


def _tiles(kernel: Variant, count: int, width: int) -> int:
    return -(-count // kernel.constants["GROUP"]) * -(-width // kernel.constants["STEP"])


def _plan(kernel: str, x: Tensor, grad: Tensor | None, outputs: int, terms: int) -> tuple[int, Variant]:
    count, inputs, width = x.shape
    strides = _strides(x, count, inputs)
    if grad is not None:
        strides += _strides(grad, count, outputs)
    return _variant(kernel, x.device, x.dtype, strides, inputs, outputs, terms, width)


def _strides(x: Tensor, count: int, tokens: int) -> tuple[int, ...]:
    row, token, _ = x.stride()
    return row if count > 1 else 0, token if tokens > 1 else 0


@memory_tuning.plan
def _variant(
    kernel: str, device: torch.device, dtype: torch.dtype, strides: tuple[int, ...], inputs: int, outputs: int,
    terms: int, width: int,
) -> tuple[int, Variant]:  # fmt: skip
    """Programs of a whole GPU, and the kernel for these strides and shapes."""
    config = memory_tuning.find(kernel, device, dtype, width, inputs) or default(kernel)
    programs, constants, options = build(config, inputs, outputs, width, terms)
    constants |= dict(zip(("STXB", "STXT", "STDB", "STDT"), strides, strict=False))
    function = forward_kernel if kernel == "mix_forward" else backward_kernel
    return programs * _processors(device), Variant(function, constants, options)


def build(
    config: dict[str, Any], inputs: int, outputs: int, width: int, terms: int = 1
) -> tuple[int, dict[str, Any], dict[str, int]]:
    """Programs for each multiprocessor, constants and options of a configuration.

    On tensor cores sides under 64 are padded: they have gone wrong on Hopper.
    """
    padded = [max(16, triton.next_power_of_2(side)) for side in (inputs, outputs)]
    group = min(config["GROUP"], max(1, 64 // max(padded)))
    in_rows, out_rows = (max(64, side * group) for side in padded)
    widest = 256 if max(in_rows, out_rows) == 64 else 128 if max(in_rows, out_rows) == 128 else 64
    constants = {
        "INPUTS": inputs,
        "OUTPUTS": outputs,
        "TERMS": terms,
        "WIDTH": width,
        "GROUP": group,
        "IN_ROWS": in_rows,
        "OUT_ROWS": out_rows,
        "STEP": min(config["STEP"], max(64, triton.next_power_of_2(width)), widest),
        "STAGES": config["STAGES"],
    }
    warps = config["num_warps"] if in_rows * out_rows <= 128 * 64 else 8
    return config["PROGRAMS"], constants, {"num_warps": warps}


def default(kernel: str) -> dict[str, Any]:
    """What is used where nothing is tuned. Forward, a tile has one row: what a row has reaches no other."""
    return {"GROUP": 1 if kernel == "mix_forward" else 2, "STEP": 128, "STAGES": 3, "PROGRAMS": 4, "num_warps": 4}


@cache
def _processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 1 in the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
