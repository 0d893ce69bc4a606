"""Norms on the GPU: the functions of ``reference.py`` beside this in Triton.

A program has a tile of whole rows in registers: every tensor is read once and written once. Nothing but z is saved for
backward, which makes the statistics of a row again while it has it. There, a program takes one tile after another, all
``PROGRAMS`` apart, and keeps its own sums for the gradients of weight and bias; they are added up afterwards in a fixed
order, so gradients have the same bits in every run.

Shapes: X, RES, GATE, Y, Z and their gradients ``[N, WIDTH]``, W, BIAS ``[WIDTH]``, PARTIAL ``[2, programs, WIDTH]``;
``st*`` are strides of rows of what is passed in, results are packed.
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
from kernels.common.launcher import Launch
from kernels.common.rows import matrix

WIDEST = 8192
"""The widest rows of the kernels."""

FINISH = {"ROWS": 256, "COLUMNS": 16}
"""The tile of ``finish_kernel``: much in flight, since it runs alone."""


@triton.jit
def _load(X, st, r, live, c, inside):
    mask = live[:, None] & inside[None, :]
    return tl.load(X + r.to(tl.int64)[:, None] * st + c[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store(X, value, r, live, c, inside, WIDTH: tl.constexpr):
    mask = live[:, None] & inside[None, :]
    tl.store(X + r.to(tl.int64)[:, None] * WIDTH + c[None, :], value.to(X.dtype.element_ty), mask=mask)


@triton.jit
def _normalise(z, inside, eps, WIDTH: tl.constexpr, CENTER: tl.constexpr):
    """u, and what z was multiplied by ``[ROWS, 1]``; columns that are not ``inside`` stay zero."""
    if CENTER:
        mean = tl.sum(z, 1) / WIDTH
        z = tl.where(inside[None, :], z - mean[:, None], 0.0)
    scale = tl.rsqrt(tl.sum(z * z, 1) / WIDTH + eps)[:, None]
    return z * scale, scale


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit(do_not_specialize=["rows"])
def forward_kernel(
    X, RES, GATE, W, BIAS, Y, Z, rows, eps, stx, ste, stg, CENTER: tl.constexpr, SILU: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """A program has ``ROWS`` rows."""
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, BLOCK)
    live, inside = r < rows, c < WIDTH
    z = _load(X, stx, r, live, c, inside)
    if RES is not None:
        z = (z + _load(RES, ste, r, live, c, inside)).to(Z.dtype.element_ty)
        _store(Z, z, r, live, c, inside, WIDTH)
        z = z.to(tl.float32)  # as it is saved, so that backward sees the same
    if GATE is not None:
        gate = _load(GATE, stg, r, live, c, inside)
    y, _ = _normalise(z, inside, eps, WIDTH, CENTER)
    if W is not None:
        y = y * tl.load(W + c, mask=inside, other=0.0).to(tl.float32)[None, :]
    if BIAS is not None:
        y = y + tl.load(BIAS + c, mask=inside, other=0.0).to(tl.float32)[None, :]
    if GATE is not None:
        s = _sigmoid(gate)
        if SILU:
            s = s * gate
        y = y * s
    _store(Y, y, r, live, c, inside, WIDTH)


@triton.jit(do_not_specialize=["rows"])
def backward_kernel(
    DY, DZ_IN, Z, GATE, W, BIAS, DZ, DGATE, PARTIAL, rows, eps, std, sti, stz, stg, CENTER: tl.constexpr,
    SILU: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A program has every so many-th tile of ``ROWS`` rows."""
    c = tl.arange(0, BLOCK)
    inside = c < WIDTH
    d_weight = tl.zeros([ROWS, BLOCK], tl.float32)
    d_bias = d_weight
    if W is not None:
        weight = tl.load(W + c, mask=inside, other=0.0).to(tl.float32)[None, :]
    if BIAS is not None and GATE is not None:
        bias = tl.load(BIAS + c, mask=inside, other=0.0).to(tl.float32)[None, :]
    for start in tl.range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        r = start + tl.arange(0, ROWS)
        live = r < rows
        z = _load(Z, stz, r, live, c, inside)
        g = _load(DY, std, r, live, c, inside)
        u, scale = _normalise(z, inside, eps, WIDTH, CENTER)
        if GATE is not None:
            gate = _load(GATE, stg, r, live, c, inside)
            s = _sigmoid(gate)
            slope = s * (1.0 - s)
            if SILU:
                slope = s + gate * slope
                s = s * gate
            y = u
            if W is not None:
                y = y * weight
            if BIAS is not None:
                y = y + bias
            _store(DGATE, g * y * slope, r, live, c, inside, WIDTH)
            g = g * s
        if W is not None:
            d_weight += g * u
        if BIAS is not None:
            d_bias += g
        if W is not None:
            g = g * weight
        dz = g - u * (tl.sum(g * u, 1) / WIDTH)[:, None]
        if CENTER:
            dz = dz - (tl.sum(g, 1) / WIDTH)[:, None]
        dz = dz * scale
        if DZ_IN is not None:
            dz = dz + _load(DZ_IN, sti, r, live, c, inside)
        _store(DZ, dz, r, live, c, inside, WIDTH)
    if W is not None:
        tl.store(PARTIAL + tl.program_id(0) * WIDTH + c, tl.sum(d_weight, 0), mask=inside)
    if BIAS is not None:
        place = (tl.num_programs(0) + tl.program_id(0)) * WIDTH
        tl.store(PARTIAL + place + c, tl.sum(d_bias, 0), mask=inside)


@triton.jit
def _total(PARTIAL, OUT, programs, c, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    total = tl.zeros([ROWS, c.shape[0]], tl.float32)
    mask = (c < WIDTH)[None, :]
    for start in range(0, programs, ROWS):
        r = start + tl.arange(0, ROWS)[:, None]
        total += tl.load(PARTIAL + r.to(tl.int64) * WIDTH + c[None, :], mask=(r < programs) & mask, other=0.0)
    tl.store(OUT + c, tl.sum(total, 0).to(OUT.dtype.element_ty), mask=c < WIDTH)


@triton.jit(do_not_specialize=["programs"])
def finish_kernel(
    PARTIAL, DW, DBIAS, programs, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Sums of the programs of ``backward_kernel``; a program has ``COLUMNS`` columns."""
    c = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    if DW is not None:
        _total(PARTIAL, DW, programs, c, WIDTH, ROWS)
    if DBIAS is not None:
        _total(PARTIAL + programs.to(tl.int64) * WIDTH, DBIAS, programs, c, WIDTH, ROWS)


def supports(x: Tensor) -> bool:
    """Whether the kernels take these rows: 16-bit and float32, of at most ``WIDEST`` elements."""
    return x.dtype in (torch.float32, torch.bfloat16, torch.float16) and x.shape[1] <= WIDEST


def forward(
    x: Tensor,
    residual: Tensor | None,
    gate: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    center: bool,
    act: str,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """y and z; see ``reference.forward``."""
    y = torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    z = x.new_empty(0) if residual is None else torch.empty_like(x, memory_format=torch.contiguous_format)
    rows, width = x.shape
    if y.numel():
        launch = _forward_launch(x.device, x.dtype, width, center, act)
        x, step = matrix(x)
        residual, residual_step = (None, 0) if residual is None else matrix(residual)
        gate, gate_step = (None, 0) if gate is None else matrix(gate)
        weight, bias = _whole(weight), _whole(bias)
        tensors = (x, residual, gate, weight, bias, y, z)
        launch.start(
            -(-rows // launch.constants["ROWS"]), tensors, (rows, float(eps)), (step, residual_step, gate_step)
        )
    return y, z


def backward(
    grad: Tensor,
    grad_z: Tensor | None,
    z: Tensor,
    gate: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    center: bool,
    act: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of z, gate, weight and bias; see ``reference.backward``."""
    dz, d_gate, d_weight, d_bias = (
        z.new_empty(0) if t is None else torch.empty_like(t, memory_format=torch.contiguous_format)
        for t in (z, gate, weight, bias)
    )
    rows, width = z.shape
    if dz.numel() == 0:
        return dz, d_gate, d_weight.zero_(), d_bias.zero_()
    most, launch, finish = _backward_launches(z.device, z.dtype, width, center, act)
    programs = min(-(-rows // launch.constants["ROWS"]), most)
    partial = z.new_empty(2, programs, width, dtype=torch.float32)
    z, step = matrix(z)
    grad, grad_step = matrix(grad)
    grad_z, grad_z_step = (None, 0) if grad_z is None else matrix(grad_z)
    gate, gate_step = (None, 0) if gate is None else matrix(gate)
    tensors = (grad, grad_z, z, gate, _whole(weight), _whole(bias), dz, d_gate, partial)
    launch.start(programs, tensors, (rows, float(eps)), (grad_step, grad_z_step, step, gate_step))
    if weight is not None or bias is not None:
        sums = (None if weight is None else d_weight, None if bias is None else d_bias)
        finish.start(-(-width // FINISH["COLUMNS"]), (partial, *sums), (programs,))
    return dz, d_gate, d_weight, d_bias


def _whole(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


@memory_tuning.plan
def _forward_launch(device: torch.device, dtype: torch.dtype, width: int, center: bool, act: str) -> Launch:
    return Launch(forward_kernel, _constants("norm_forward", device, dtype, width, center, act))


@memory_tuning.plan
def _backward_launches(
    device: torch.device, dtype: torch.dtype, width: int, center: bool, act: str
) -> tuple[int, Launch, Launch]:
    """Most programs, and the two kernels that one backward takes."""
    constants = _constants("norm_backward", device, dtype, width, center, act)
    most = constants.pop("PROGRAMS") * _processors(device)
    return most, Launch(backward_kernel, constants), Launch(finish_kernel, {"WIDTH": width, **FINISH, "num_warps": 8})


def _constants(
    kernel: str, device: torch.device, dtype: torch.dtype, width: int, center: bool, act: str
) -> dict[str, Any]:
    config = memory_tuning.find(kernel, device, dtype, width, 1) or default(kernel, width)
    return {
        "CENTER": center,
        "SILU": act == "silu",
        "WIDTH": width,
        "BLOCK": triton.next_power_of_2(width),
        **config,
    }


def default(kernel: str, width: int) -> dict[str, int]:
    """A tile of about 4,096 elements, half of that backward; ``PROGRAMS``: for each multiprocessor."""
    block, backwards = triton.next_power_of_2(width), kernel == "norm_backward"
    rows = max(1, (2048 if backwards else 4096) // block)
    return {"ROWS": rows, "num_warps": 4 if block <= 2048 else 8} | ({"PROGRAMS": 8, "STAGES": 1} if backwards else {})


@cache
def _processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 1 in the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
