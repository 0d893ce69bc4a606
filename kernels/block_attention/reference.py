"""Block attention in plain PyTorch: the CPU path and the oracle of the GPU kernels.

Each sequence is cut into blocks of ``BLOCK`` tokens, the last one shorter; a token sees its own block. That is softmax
attention over sequences that are the blocks, so ``kernels/jagged_attention/reference.py`` does the sums.

Rotary: pair i of a head is elements i and ``i + d / 2``; token t turns it by ``positions[t] * frequencies[i]`` (RoPE,
arXiv 2104.09864). With two columns of positions the first half of the pairs takes column 0, the second column 1.
Positions are counted from the first token of the block, which changes no difference between two of them, in a type that
holds the difference: so they may count from anywhere.

Legend: T tokens, B sequences, H heads, G key heads, d head width, P columns of positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.jagged.padding import compute_dtype
from kernels.jagged.reference import sequence_ids
from kernels.jagged_attention import reference as jagged_reference

BLOCK = 64
"""Tokens of a block."""


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    positions: Tensor | None,
    frequencies: Tensor | None,
    scale: float,
) -> Tensor:
    """Output ``[T, H, d]``; arguments as in ``kernels.block_attention.block_attention``."""
    blocks = block_offsets(offsets)
    if positions is not None and frequencies is not None:
        dtype = compute_dtype(q.dtype)
        turn = angles(from_block_start(positions, offsets, dtype), frequencies, dtype)
        q, k = rotate(q, turn), rotate(k, turn)
    with torch.autocast(q.device.type, enabled=False):
        return jagged_reference.forward(q, k, v, blocks, blocks, scale, False, -1)[0].to(v.dtype)


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
    """Gradients of q, k and v."""
    given, blocks, turn = q.dtype, block_offsets(offsets), None
    dtype = compute_dtype(given)
    q, k, v, grad = (x.to(dtype) for x in (q, k, v, grad))
    if positions is not None and frequencies is not None:
        turn = angles(from_block_start(positions, offsets, dtype), frequencies, dtype)
        q, k = rotate(q, turn), rotate(k, turn)
    choice = (blocks, blocks, scale, False, -1)
    with torch.autocast(q.device.type, enabled=False):
        out, lse = jagged_reference.forward(q, k, v, *choice)
        dq, dk, dv = jagged_reference.backward(grad, q, k, v, out, lse, *choice)
    if turn is not None:
        dq, dk = rotate(dq, -turn), rotate(dk, -turn)
    return dq.to(given), dk.to(given), dv.to(given)


def block_offsets(offsets: Tensor) -> Tensor:
    """Offsets of sequences ``[B + 1]`` to offsets of their blocks, int64; an empty sequence has none."""
    counts = (offsets.diff() + BLOCK - 1) // BLOCK
    ends = counts.cumsum(0)
    owner = torch.repeat_interleave(counts)
    number = torch.arange(owner.shape[0], device=offsets.device) - (ends - counts).index_select(0, owner)
    starts = offsets.index_select(0, owner) + number * BLOCK
    return torch.cat([starts, offsets[-1:]])


def from_block_start(positions: Tensor, offsets: Tensor, dtype: torch.dtype) -> Tensor:
    """Positions ``[T]`` or ``[T, P]`` less that of the first token of the block, in ``dtype``.

    The difference is taken in ``dtype`` or the type given, whichever holds more; of integers in int64. Waits for no
    device.
    """
    wide = torch.promote_types(positions.dtype, dtype) if positions.is_floating_point() else torch.int64
    place = torch.arange(positions.shape[0], device=positions.device)
    begin = offsets.index_select(0, sequence_ids(offsets, positions.shape[0]))
    first = place - (place - begin) % BLOCK
    positions = positions.to(wide)
    return (positions - positions.index_select(0, first)).to(dtype)


def angles(positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> Tensor:
    """Angle of each token and pair, ``[T, d / 2]``, in ``dtype``."""
    columns = (positions if positions.dim() == 2 else positions[:, None]).to(dtype)
    each = frequencies.shape[0] // columns.shape[1]
    return columns.repeat_interleave(each, dim=1) * frequencies.to(dtype)


def rotate(x: Tensor, turn: Tensor) -> Tensor:
    """Turns the pairs of ``x [T, H, d]`` by ``turn [T, d / 2]``, in the dtype of ``turn``."""
    cos, sin = turn.cos()[:, None], turn.sin()[:, None]
    first, second = x.to(turn.dtype).chunk(2, dim=2)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=2)
