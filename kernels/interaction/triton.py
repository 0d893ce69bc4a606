"""The functions of ``reference.py`` beside this in Triton, for many small matrices.

A program has a tile of 64 or 128 tokens: one row of the batch, or several side by side whose products with one another
are made zero. X is read once forward, and its dot products never leave the program. Backward makes them again, and
reads X once more from the cache where a tile is not as wide as X. Where all rows share Y, a program adds up the
gradient over its tiles and the sums of the programs are added in a fixed order, so gradients have the same bits in
every run.

Rows of the batch in one tile meet as zeros times what they have: where that is not finite, gradients of its neighbours
become NaN, and outputs where Y is not shared.

Shapes: X, DX ``[N, n, D]``, OUT, DO ``[N, n, k]``, Y ``[n, k]`` or, not ``SHARED``, ``[N, n, k]``; ``STB`` and ``STX``
are the strides of X in N and n, all else is packed.
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

MOST_TOKENS = 128
MOST_RANK = 128


@triton.jit
def _tile(tile, N, TOKENS: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr):
    """Row of the batch and token of each of ``ROWS`` places, which places are real, which pairs are of one row."""
    place = tl.arange(0, ROWS)
    b = tile * (ROWS // PAD) + place // PAD
    token = place % PAD
    return b.to(tl.int64), token, (b < N) & (token < TOKENS), (place // PAD)[:, None] == (place // PAD)[None, :]


@triton.jit
def _tokens(X, at, live, first, WIDTH: tl.constexpr, STEP: tl.constexpr):
    """Columns ``first .. first + STEP`` of the tokens, which are ``at`` in X."""
    c = first + tl.arange(0, STEP)
    return tl.load(X + at[:, None] + c[None, :], mask=live[:, None] & (c < WIDTH)[None, :], other=0.0)


@triton.jit
def _products(X, at, live, same, WIDTH: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr):
    """Dot products of the tokens; zero between rows of the batch."""
    products = tl.zeros([ROWS, ROWS], tl.float32)
    for first in range(0, WIDTH, STEP):
        x = _tokens(X, at, live, first, WIDTH, STEP)
        products = tl.dot(x, tl.trans(x), products)
    return tl.where(same, products, 0.0)


@triton.jit
def _put_gradient(DX, inner, x, at, live, first, WIDTH: tl.constexpr, STEP: tl.constexpr):
    c = first + tl.arange(0, STEP)
    mask = live[:, None] & (c < WIDTH)[None, :]
    tl.store(DX + at[:, None] * WIDTH + c[None, :], tl.dot(inner, x).to(DX.dtype.element_ty), mask=mask)


@triton.jit
def _matrix(Y, at, live, RANK: tl.constexpr, WIDE: tl.constexpr):
    c = tl.arange(0, WIDE)
    return tl.load(Y + at[:, None] * RANK + c[None, :], mask=live[:, None] & (c < RANK)[None, :], other=0.0)


@triton.jit
def _put(Y, value, at, live, RANK: tl.constexpr, WIDE: tl.constexpr):
    c = tl.arange(0, WIDE)
    mask = live[:, None] & (c < RANK)[None, :]
    tl.store(Y + at[:, None] * RANK + c[None, :], value.to(Y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["N"])
def forward_kernel(
    X, Y, OUT, N, STB: tl.constexpr, STX: tl.constexpr, SHARED: tl.constexpr, TOKENS: tl.constexpr, PAD: tl.constexpr,
    WIDTH: tl.constexpr, RANK: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """A program has every so many-th tile."""
    if SHARED:
        token = tl.arange(0, ROWS) % PAD
        y = _matrix(Y, token, token < TOKENS, RANK, WIDE)
    for tile in tl.range(tl.program_id(0), tl.cdiv(N, ROWS // PAD), tl.num_programs(0), num_stages=STAGES):
        b, token, live, same = _tile(tile, N, TOKENS, PAD, ROWS)
        at = b * TOKENS + token
        if not SHARED:
            y = _matrix(Y, at, live, RANK, WIDE)
        products = _products(X, b * STB + token * STX, live, same, WIDTH, ROWS, STEP).to(y.dtype)
        _put(OUT, tl.dot(products, y), at, live, RANK, WIDE)


@triton.jit(do_not_specialize=["N"])
def backward_kernel(
    X, Y, DO, DX, DY, N, STB: tl.constexpr, STX: tl.constexpr, SHARED: tl.constexpr, TOKENS: tl.constexpr,
    PAD: tl.constexpr, WIDTH: tl.constexpr, RANK: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
    STEP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A program has every so many-th tile. DY, where ``SHARED``: float32 ``[programs, ROWS, RANK]``."""
    sums = tl.zeros([ROWS, WIDE], tl.float32)
    if SHARED:
        token = tl.arange(0, ROWS) % PAD
        y = _matrix(Y, token, token < TOKENS, RANK, WIDE)
    for tile in tl.range(tl.program_id(0), tl.cdiv(N, ROWS // PAD), tl.num_programs(0), num_stages=STAGES):
        b, token, live, same = _tile(tile, N, TOKENS, PAD, ROWS)
        at, source = b * TOKENS + token, b * STB + token * STX
        if not SHARED:
            y = _matrix(Y, at, live, RANK, WIDE)
        do = _matrix(DO, at, live, RANK, WIDE)
        if WIDTH <= STEP:
            x = _tokens(X, source, live, 0, WIDTH, STEP)
            products = tl.where(same, tl.dot(x, tl.trans(x)), 0.0).to(y.dtype)
        else:
            products = _products(X, source, live, same, WIDTH, ROWS, STEP).to(y.dtype)
        if SHARED:
            sums = tl.dot(products, do, sums)
        else:
            _put(DY, tl.dot(products, do), at, live, RANK, WIDE)
        inner = tl.dot(do, tl.trans(y))
        inner = tl.dot(y, tl.trans(do), inner)
        inner = tl.where(same, inner, 0.0).to(y.dtype)
        if WIDTH <= STEP:
            _put_gradient(DX, inner, x, at, live, 0, WIDTH, STEP)
        else:
            for first in range(0, WIDTH, STEP):
                x = _tokens(X, source, live, first, WIDTH, STEP)
                _put_gradient(DX, inner, x, at, live, first, WIDTH, STEP)
    if SHARED:
        place = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        _put(DY, sums, place.to(tl.int64), place >= 0, RANK, WIDE)


def supports(x: Tensor, y: Tensor) -> bool:
    """Whether the kernels take these: 16-bit, at most ``MOST_TOKENS`` tokens and rank ``MOST_RANK``."""
    fits = 0 < x.shape[1] <= MOST_TOKENS and 0 < y.shape[-1] <= MOST_RANK and x.shape[2] > 0
    return fits and x.dtype in (torch.bfloat16, torch.float16) and y.dtype == x.dtype


def forward(x: Tensor, y: Tensor) -> Tensor:
    """See ``reference.forward``."""
    count, tokens, _ = x.shape
    out = x.new_empty(count, tokens, y.shape[-1])
    if count:
        x, y = _rows(x), y.contiguous()
        programs, kernel = _plan("fm_forward", x, y)
        tiles = -(-count * kernel.constants["PAD"] // kernel.constants["ROWS"])
        kernel.start(min(tiles, programs), (x, y, out), (count,))
    return out


def backward(grad: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """See ``reference.backward``."""
    shared, (count, tokens, _), rank = y.dim() == 2, x.shape, y.shape[-1]
    dx = x.new_empty(*x.shape)
    if count == 0:
        return dx, torch.zeros_like(y)
    x, y = _rows(x), y.contiguous()
    programs, kernel = _plan("fm_backward", x, y)
    pad, rows = kernel.constants["PAD"], kernel.constants["ROWS"]
    tiles = -(-count * pad // rows)
    programs = min(tiles, programs) if shared else tiles
    dy = x.new_empty(programs, rows, rank, dtype=torch.float32) if shared else y.new_empty(*y.shape)
    kernel.start(programs, (x, y, grad.contiguous(), dx, dy), (count,))
    if shared:
        dy = dy.view(-1, pad, rank)[:, :tokens].sum(0).to(y.dtype)
    return dx, dy


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(2) == 1 else x.contiguous()


def _plan(kernel: str, x: Tensor, y: Tensor) -> tuple[int, Variant]:
    count, tokens, width = x.shape
    row, token, _ = x.stride()
    fixed = (row if count > 1 else 0, token if tokens > 1 else 0, y.dim() == 2)
    return _variant(kernel, x.device, x.dtype, fixed, tokens, width, y.shape[-1])


@memory_tuning.plan
def _variant(
    kernel: str, device: torch.device, dtype: torch.dtype, fixed: tuple[int, int, bool], tokens: int, width: int,
    rank: int,
) -> tuple[int, Variant]:  # fmt: skip
    """Programs of a whole GPU, and the kernel for these strides and shapes."""
    config = memory_tuning.find(kernel, device, dtype, width, tokens) or default(tokens)
    programs, constants, options = build(config, tokens, width, rank)
    constants |= dict(zip(("STB", "STX", "SHARED"), fixed, strict=True))
    function = forward_kernel if kernel == "fm_forward" else backward_kernel
    return programs * _processors(device), Variant(function, constants, options)


def build(config: dict[str, Any], tokens: int, width: int, rank: int) -> tuple[int, dict[str, Any], dict[str, int]]:
    """Programs for each multiprocessor, constants and options of a configuration.

    On tensor cores sides under 64 are padded: they have gone wrong on Hopper.
    """
    pad = max(16, triton.next_power_of_2(tokens))
    constants = {
        "TOKENS": tokens,
        "PAD": pad,
        "WIDTH": width,
        "RANK": rank,
        "WIDE": max(64, triton.next_power_of_2(rank)),
        "ROWS": max(64, pad),
        "STEP": min(config["STEP"], max(64, triton.next_power_of_2(width))),
        "STAGES": config["STAGES"],
    }
    return config["PROGRAMS"], constants, {"num_warps": config["num_warps"], "num_stages": config["STAGES"]}


def default(tokens: int) -> dict[str, Any]:
    """What is used where nothing is tuned."""
    return {"STEP": 128, "STAGES": 3, "PROGRAMS": 8, "num_warps": 4 if tokens <= 64 else 8}


@cache
def _processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 1 in the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
