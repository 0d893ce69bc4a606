"""Block attention on the GPU: the functions of ``reference.py`` beside this in Triton.

One program has one block of one head: it reads its q, k and v once and writes its output once, which is all the memory
traffic there is. Backward, one program has a block of one key head and all query heads that share it: it makes the
probabilities again, takes ``sum_j P_ij dP_ij`` for the row sum of output times gradient, which is the same number, and
so reads q, k, v and the gradient of the output and writes dq, dk and dv, each once; nothing else is saved. Wide heads
run in ``persistent.py`` where that is tuned: there a program goes from block to block.

Positions count from the block's first token, which changes no difference between two of them and keeps angles small.

Shapes: Q, OUT, DO, DQ ``[T, H, D]``, K, V, DK, DV ``[T, H / GROUP, D]``, POSITIONS ``[T, COLUMNS]``, FREQUENCIES
``[D / 2]``; ``st*`` and ``sh*`` are strides of rows and heads of what is passed in, results are packed.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import functools
import operator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.block_attention import persistent
from kernels.block_attention.reference import BLOCK
from kernels.common import memory_tuning
from kernels.common.activations import INTERPRET
from kernels.common.launcher import Launch
from kernels.common.rows import head_rows, rounds
from kernels.common.sequences import load_rows, sequence_tile, store_rows

LOG2E = tl.constexpr(1.4426950408889634)

WIDEST = 256
"""The largest head width of the kernels."""

STAYS = (128, 256)
"""Widths of heads of which programs may stay and go from block to block (``persistent.py``)."""


@triton.jit
def _angles(
    POSITIONS, FREQUENCIES, start, rows, HALF: tl.constexpr, COLUMNS: tl.constexpr, SIDE: tl.constexpr,
    FAST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Cosine and sine of each row's angles, ``[BLOCK, SIDE]``.

    ``FAST``: one special-function instruction each, off by 5e-7 and 6e-8 of the angle.
    """
    r = start + tl.arange(0, BLOCK)
    i = tl.arange(0, SIDE)
    frequency = tl.load(FREQUENCIES + i, mask=i < HALF, other=0.0)[None, :]
    place = tl.load(POSITIONS + r * COLUMNS, mask=r < rows, other=0.0) - tl.load(POSITIONS + start * COLUMNS)
    angle = place[:, None] * frequency
    if COLUMNS == 2:
        place = tl.load(POSITIONS + r * 2 + 1, mask=r < rows, other=0.0) - tl.load(POSITIONS + start * 2 + 1)
        angle = tl.where((i < HALF // 2)[None, :], angle, place[:, None] * frequency)
    if FAST and not INTERPRET:
        cos = tl.inline_asm_elementwise(
            "cos.approx.f32 $0, $1;", "=f,f", [angle], dtype=tl.float32, is_pure=True, pack=1
        )
        sin = tl.inline_asm_elementwise(
            "sin.approx.f32 $0, $1;", "=f,f", [angle], dtype=tl.float32, is_pure=True, pack=1
        )
        return cos, sin
    else:
        return tl.cos(angle), tl.sin(angle)


@triton.jit
def _load(
    Base, stride, start, rows, cos, sin, D: tl.constexpr, SIDE: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr
):
    """A block of rows: whole, twice the same; or with rotary its two rotated halves."""
    if COLUMNS:
        first = load_rows(Base, stride, start, rows, D // 2, BLOCK, SIDE)
        second = load_rows(Base + D // 2, stride, start, rows, D // 2, BLOCK, SIDE)
        a = first.to(tl.float32)
        b = second.to(tl.float32)
        return (a * cos - b * sin).to(first.dtype), (b * cos + a * sin).to(first.dtype)
    else:
        x = load_rows(Base, stride, start, rows, D, BLOCK, SIDE)
        return x, x


@triton.jit
def _store(
    Base, a, b, stride, start, rows, cos, sin, D: tl.constexpr, SIDE: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Gradient of what ``_load`` read."""
    if COLUMNS:
        store_rows(Base, a * cos + b * sin, stride, start, rows, D // 2, BLOCK, SIDE)
        store_rows(Base + D // 2, b * cos - a * sin, stride, start, rows, D // 2, BLOCK, SIDE)
    else:
        store_rows(Base, a, stride, start, rows, D, BLOCK, SIDE)


@triton.jit
def _product(a, a2, b, b2, COLUMNS: tl.constexpr, PRECISION: tl.constexpr):
    """``a b^T`` over both halves."""
    s = tl.dot(a, tl.trans(b), input_precision=PRECISION)
    if COLUMNS:
        s = tl.dot(a2, tl.trans(b2), s, input_precision=PRECISION)
    return s


@triton.jit
def _probabilities(s, logit, keys, BLOCK: tl.constexpr):
    """Exponentials of the logits less their maximum, and their sums; keys beyond the sequence count 0."""
    s = tl.where((tl.arange(0, BLOCK) < keys)[None, :], s * logit, float("-inf"))
    p = tl.exp2(s - tl.max(s, 1)[:, None])
    return p, tl.sum(p, 1)


@triton.jit(do_not_specialize=["B"])
def forward_kernel(
    Q, K, V, OUT, OFFSETS, POSITIONS, FREQUENCIES, B, scale, stq, shq, stk, shk, stv, shv,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, SIDE: tl.constexpr, WIDE: tl.constexpr,
    COLUMNS: tl.constexpr, ROUNDS: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program has one block of one head."""
    h = tl.program_id(0) % HEADS
    _, first, rows, start = sequence_tile(OFFSETS, B, 0, tl.program_id(0) // HEADS, BLOCK, False, ROUNDS)
    if start >= rows:
        return
    hk = h // GROUP
    cos, sin = 0.0, 0.0
    if COLUMNS:
        cos, sin = _angles(POSITIONS + first * COLUMNS, FREQUENCIES, start, rows, D // 2, COLUMNS, SIDE, FAST, BLOCK)
    q, q2 = _load(Q + first * stq + h * shq, stq, start, rows, cos, sin, D, SIDE, COLUMNS, BLOCK)
    k, k2 = _load(K + first * stk + hk * shk, stk, start, rows, cos, sin, D, SIDE, COLUMNS, BLOCK)
    v = load_rows(V + first * stv + hk * shv, stv, start, rows, D, BLOCK, WIDE)
    p, total = _probabilities(_product(q, q2, k, k2, COLUMNS, PRECISION), scale * LOG2E, rows - start, BLOCK)
    out = tl.dot(p.to(v.dtype), v, input_precision=PRECISION) * (1.0 / total)[:, None]
    store_rows(OUT + (first * HEADS + h) * D, out, HEADS * D, start, rows, D, BLOCK, WIDE)


@triton.jit(do_not_specialize=["B"])
def backward_kernel(
    Q, K, V, DO, DQ, DK, DV, OFFSETS, POSITIONS, FREQUENCIES, B, scale, stq, shq, stk, shk, stv, shv, std, shd,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, SIDE: tl.constexpr, WIDE: tl.constexpr,
    COLUMNS: tl.constexpr, ROUNDS: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program has one block of one key head and, one after another, its ``GROUP`` query heads."""
    KEY_HEADS: tl.constexpr = HEADS // GROUP
    hk = tl.program_id(0) % KEY_HEADS
    _, first, rows, start = sequence_tile(OFFSETS, B, 0, tl.program_id(0) // KEY_HEADS, BLOCK, False, ROUNDS)
    if start >= rows:
        return
    cos, sin = 0.0, 0.0
    if COLUMNS:
        cos, sin = _angles(POSITIONS + first * COLUMNS, FREQUENCIES, start, rows, D // 2, COLUMNS, SIDE, FAST, BLOCK)
    k, k2 = _load(K + first * stk + hk * shk, stk, start, rows, cos, sin, D, SIDE, COLUMNS, BLOCK)
    v = load_rows(V + first * stv + hk * shv, stv, start, rows, D, BLOCK, WIDE)
    dk_base = DK + (first * KEY_HEADS + hk) * D
    dv_base = DV + (first * KEY_HEADS + hk) * D
    if GROUP > 1:
        dk = tl.zeros([BLOCK, SIDE], tl.float32)
        dk2 = dk
        dv = tl.zeros([BLOCK, WIDE], tl.float32)
    for g in tl.range(0, GROUP, num_stages=1):  # two query heads at a time would not fit
        h = hk * GROUP + g
        q, q2 = _load(Q + first * stq + h * shq, stq, start, rows, cos, sin, D, SIDE, COLUMNS, BLOCK)
        do = load_rows(DO + first * std + h * shd, std, start, rows, D, BLOCK, WIDE)
        p, total = _probabilities(_product(q, q2, k, k2, COLUMNS, PRECISION), scale * LOG2E, rows - start, BLOCK)
        p = p * (1.0 / total)[:, None]
        dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
        ds = p * (dp - tl.sum(p * dp, 1)[:, None]) * scale
        p = tl.trans(p.to(v.dtype))
        ds = ds.to(v.dtype)
        if GROUP > 1:
            dv = tl.dot(p, do, dv, input_precision=PRECISION)
            dk = tl.dot(tl.trans(ds), q, dk, input_precision=PRECISION)
            if COLUMNS:
                dk2 = tl.dot(tl.trans(ds), q2, dk2, input_precision=PRECISION)
        else:
            dv = tl.dot(p, do, input_precision=PRECISION)
            store_rows(dv_base, dv, KEY_HEADS * D, start, rows, D, BLOCK, WIDE)
            dk = tl.dot(tl.trans(ds), q, input_precision=PRECISION)
            dk2 = dk
            if COLUMNS:
                dk2 = tl.dot(tl.trans(ds), q2, input_precision=PRECISION)
            _store(dk_base, dk, dk2, KEY_HEADS * D, start, rows, cos, sin, D, SIDE, COLUMNS, BLOCK)
        dq = tl.dot(ds, k, input_precision=PRECISION)
        dq2 = dq
        if COLUMNS:
            dq2 = tl.dot(ds, k2, input_precision=PRECISION)
        dq_base = DQ + (first * HEADS + h) * D
        _store(dq_base, dq, dq2, HEADS * D, start, rows, cos, sin, D, SIDE, COLUMNS, BLOCK)
    if GROUP > 1:
        store_rows(dv_base, dv, KEY_HEADS * D, start, rows, D, BLOCK, WIDE)
        _store(dk_base, dk, dk2, KEY_HEADS * D, start, rows, cos, sin, D, SIDE, COLUMNS, BLOCK)


def supports(q: Tensor) -> bool:
    """Whether the kernels take these: 16-bit rows of at most ``WIDEST`` elements, float32 rows of half as many."""
    if q.dtype == torch.float32:
        return q.shape[2] <= WIDEST // 2
    return q.dtype in (torch.bfloat16, torch.float16) and q.shape[2] <= WIDEST


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    positions: Tensor | None,
    frequencies: Tensor | None,
    scale: float,
) -> Tensor:
    """Output ``[T, H, d]``; see ``reference.forward``."""
    total, heads, width = q.shape
    out = _empty(q)
    if out.numel() == 0:
        return out
    (q, q_steps), (k, k_steps), (v, v_steps) = map(head_rows, (q, k, v))
    positions, frequencies, columns = _rotary(positions, frequencies)
    tensors = (q, k, v, out, offsets.contiguous(), positions, frequencies)
    strides = (*q_steps, *k_steps, *v_steps)
    _start("block_forward", tensors, (heads, k.shape[1], width, columns), total, heads, scale, strides)
    return out


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    positions: Tensor | None,
    frequencies: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v; see ``reference.backward``."""
    total, heads, width = q.shape
    dq, dk, dv = _empty(q), _empty(k), _empty(v)
    if dq.numel() == 0:
        return dq, dk, dv
    positions, frequencies, columns = _rotary(positions, frequencies)
    key_heads = k.shape[1]
    if key_heads < heads and q.dtype == torch.float32:  # several query heads in float32 do not fit shared memory
        k, v = (x.repeat_interleave(heads // key_heads, dim=1) for x in (k, v))
        dq, dk, dv = backward(grad, q, k, v, offsets, positions, frequencies, scale)
        return dq, dk.unflatten(1, (key_heads, -1)).sum(2), dv.unflatten(1, (key_heads, -1)).sum(2)
    (q, q_steps), (k, k_steps), (v, v_steps), (grad, grad_steps) = map(head_rows, (q, k, v, grad))
    tensors = (q, k, v, grad, dq, dk, dv, offsets.contiguous(), positions, frequencies)
    strides = (*q_steps, *k_steps, *v_steps, *grad_steps)
    _start("block_backward", tensors, (heads, key_heads, width, columns), total, key_heads, scale, strides)
    return dq, dk, dv


def _start(
    kernel: str, tensors: tuple[Any, ...], shape: tuple[int, int, int, int], total: int, heads: int, scale: float,
    strides: tuple[int, ...],
) -> None:  # fmt: skip
    """Starts a kernel of ``shape``: query heads, key heads, width, columns; ``heads``: those that programs share."""
    q, batch = tensors[0], tensors[-3].shape[0] - 1
    wide = shape[2] in STAYS and functools.reduce(operator.or_, strides, _addresses(*tensors[:4])) & 15 == 0
    launch, stay = _launch(kernel, q.device, q.dtype, *shape, rounds(batch), BLOCK, wide)
    blocks = total // BLOCK + batch
    if stay:
        launch.start(min(stay, blocks * heads), tensors, (batch, blocks, float(scale)), strides)
    else:
        launch.start(blocks * heads, tensors, (batch, float(scale)), strides)


def _addresses(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> int:
    """Of four tensors, their bits together."""
    return a.data_ptr() | b.data_ptr() | c.data_ptr() | d.data_ptr()


def _empty(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _rotary(positions: Tensor | None, frequencies: Tensor | None) -> tuple[Tensor | None, Tensor | None, int]:
    """Positions and frequencies as the kernels read them, and the number of columns."""
    if positions is None or frequencies is None:
        return None, None, 0
    columns = positions.shape[1] if positions.dim() == 2 else 1
    return positions.float().contiguous(), frequencies.float().contiguous(), columns


@memory_tuning.plan
def _launch(
    kernel: str, device: torch.device, dtype: torch.dtype, heads: int, key_heads: int, width: int, columns: int,
    rounds: int, block: int, wide: bool,
) -> tuple[Launch, int]:  # fmt: skip
    """A kernel with what it is compiled for, and how many programs of it stay; 0: one for each block.

    ``wide``: whether rows can be copied 16 bytes at a time.
    """
    group, backwards = heads // key_heads, kernel == "block_backward"
    constants = {"HEADS": heads, "GROUP": group, "ROUNDS": rounds}
    name = f"{kernel}_rotary" if columns else kernel
    alone = group == 1 or not backwards  # a program adds up the query heads of a key head
    config = memory_tuning.find(name, device, dtype, width, 1) if alone else None
    if config and "STAY" in config:
        if wide and dtype != torch.float32:
            chosen = persistent.backward_kernel if backwards else persistent.forward_kernel
            stay = config["STAY"] * torch.cuda.get_device_properties(device).multi_processor_count
            constants |= {"D": width, "COLUMNS": columns, **config}
            taken = {x: y for x, y in constants.items() if x in chosen.arg_names or x in ("num_warps", "maxnreg")}
            return Launch(chosen, taken), stay
        config = config.get("plain")
    config = config or {"num_warps": default_warps(width, 1 if alone else group)}
    constants |= _constants(width, dtype == torch.float32, columns, block)
    return Launch(backward_kernel if backwards else forward_kernel, {**constants, **config}), 0


def _constants(width: int, exact: bool, columns: int, block: int) -> dict[str, Any]:
    """On tensor cores sides under 64 are padded: they have gone wrong on Hopper."""
    least = 16 if exact else 64
    return {
        "D": width,
        "SIDE": max(least, triton.next_power_of_2(width // 2 if columns else width)),
        "WIDE": max(least, triton.next_power_of_2(width)),
        "COLUMNS": columns,
        "FAST": not exact,
        "PRECISION": "tf32x3" if exact else "tf32",
        "BLOCK": block,
    }


def default_warps(width: int, group: int) -> int:
    """Warps where nothing is tuned; ``group``: query heads that one program adds up."""
    return 8 if width > 128 or group > 1 else 4
