"""Runs the Triton kernels of block attention, jagged movement and norms on the CPU; see ``interpreted.py``."""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from kernels.block_attention import reference as block_reference
from kernels.block_attention import triton as block_triton

TOLERANCE = 2e-6
"""Relative, of float32 sums of at most some hundred terms against float64: some roundings of 6e-8."""


def offsets_of(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def close(got: Tensor, want: Tensor, tolerance: float = TOLERANCE) -> None:
    assert got.shape == want.shape
    assert got.isfinite().all()
    error = (got.double() - want).norm() / want.norm().clamp(min=1e-30)
    assert error < tolerance, float(error)


def block_attention() -> None:
    """All forms of rotary, grouped heads, ragged and empty sequences, views of a fused tensor."""
    offsets = offsets_of([3, 0, 70, 64, 0])
    rows = int(offsets[-1])
    for columns, width, group in ((0, 20, 1), (1, 12, 2), (2, 8, 1), (0, 8, 2)):
        torch.manual_seed(columns)
        q = torch.randn(rows, 2, width)
        k, v = torch.randn(rows, 2, 2 // group, width).unbind(1)
        grad = torch.randn(2, rows, width).transpose(0, 1)
        positions = torch.rand(rows, columns) * 9 if columns else None
        frequencies = torch.rand(width // 2) if columns else None
        rotary = (offsets, positions, frequencies, 0.4)
        exact = [x.double() for x in (q, k, v)]
        close(block_triton.forward(q, k, v, *rotary), block_reference.forward(*exact, *rotary))
        gradients = block_triton.backward(grad, q, k, v, *rotary)
        for got, want in zip(gradients, block_reference.backward(grad.double(), *exact, *rotary), strict=True):
            close(got, want)


def block_attention_leaks() -> None:
    """What a block holds never reaches another one, and a program writes only its own rows."""
    offsets = offsets_of([3, 66, 5])
    torch.manual_seed(0)
    q, k, v, grad = torch.randn(4, 74, 1, 8)
    dirty = [x.clone() for x in (q, k, v, grad)]
    for x in dirty:
        x[3:67] = torch.nan
    results = []
    for a, b, c, g in ((q, k, v, grad), dirty):
        rotary = (offsets, None, None, 1.0)
        results.append((block_triton.forward(a, b, c, *rotary), *block_triton.backward(g, a, b, c, *rotary)))
    for clean, other in zip(*results, strict=True):
        assert torch.equal(clean[:3], other[:3])
        assert torch.equal(clean[67:], other[67:])
    empty = torch.zeros(0, 1, 8)
    for lengths in ([], [0, 0]):
        out = block_triton.forward(empty, empty, empty, offsets_of(lengths), None, None, 1.0)
        assert out.shape == (0, 1, 8)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in sys.argv[1:]:
        globals()[name]()
    print("checked")
