"""The speed of block attention: ``python -m kernels.benchmarks.block_attention``.

``varlen_attn`` over the blocks as sequences computes the same function without rotary.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from kernels.benchmarks import command
from kernels.benchmarks.bandwidth import Pass, host_cost, measure_copy, packed_lengths, print_table, size_of
from kernels.block_attention import block_attention
from kernels.block_attention.op import _block_attention_backward
from kernels.block_attention.reference import BLOCK, block_offsets
from kernels.jagged import offsets_from_lengths

CASES = [
    ("B64 T2000 d128 s=.7", 64, 2000, 128, "s=.7", 0),
    ("B64 T2000 d128 s=.7, rotary", 64, 2000, 128, "s=.7", 1),
    ("B64 T2000 d128 s=.7, two rotaries", 64, 2000, 128, "s=.7", 2),
    ("B64 T2000 d128 dense", 64, 2000, 128, "dense", 0),
    ("B256 T1000 d128 heavy", 256, 1000, 128, "heavy", 0),
    ("B128 T2000 d64 s=.7", 128, 2000, 64, "s=.7", 0),
    ("B32 T2000 d256 s=.7", 32, 2000, 256, "s=.7", 0),
]
"""Name, batch, longest, head width, lengths, columns of positions; 4 heads, bf16, q, k, v views of one tensor."""


def make(batch: int, longest: int, width: int, lengths: str, columns: int) -> tuple[Tensor, ...]:
    """q, k, v, gradient, offsets, positions and frequencies."""
    offsets = offsets_from_lengths(packed_lengths(batch, longest, lengths)).cuda()
    rows = int(offsets[-1])
    fused = torch.randn(rows, 3, 4, width, device="cuda").mul_(0.5).bfloat16()
    positions = torch.rand(rows, max(columns, 1), device="cuda") * 100
    frequencies = torch.exp(-torch.arange(width // 2, device="cuda") * (math.log(1e4) / (width // 2)))
    return *fused.unbind(1), torch.randn_like(fused[:, 0]).contiguous(), offsets, positions, frequencies


def passes(name: str, batch: int, longest: int, width: int, lengths: str, columns: int) -> list[Pass]:
    """Forward and backward of a case."""
    q, k, v, grad, offsets, positions, frequencies = make(batch, longest, width, lengths, columns)
    rotary = (positions, frequencies) if columns else (None, None)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    blocks = block_offsets(offsets).int()

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return block_attention(q, k, v, offsets, positions=rotary[0], frequencies=rotary[1])

    def varlen(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = varlen_attn(q, k, v, blocks, blocks, BLOCK, BLOCK)
        assert isinstance(out, Tensor)
        return out

    out, other = call(*leaves), varlen(*leaves)
    arguments = (grad, q, k, v, offsets, *rotary, width**-0.5)

    def without_autograd() -> Tensor:
        with torch.no_grad():
            return call(q, k, v)

    def other_without_autograd() -> Tensor:
        with torch.no_grad():
            return varlen(q, k, v)

    return [
        Pass(
            case=name, name="forward", size=size_of(q, k, v, out), eager=without_autograd,
            baselines={} if columns else {"varlen_attn": other_without_autograd},
        ),
        Pass(
            case=name, name="backward", size=size_of(q, k, v, grad, *leaves),
            eager=lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True),
            kernels=lambda: _block_attention_backward(*arguments),
            baselines={} if columns
            else {"varlen_attn": lambda: torch.autograd.grad(other, leaves, grad, retain_graph=True)},
        ),
    ]  # fmt: skip


def main() -> None:
    """Prints the table."""
    print_table((passes(*case) for case in CASES), measure_copy())
    q, k, v, grad, offsets, *_ = make(4, 64, 64, "dense", 0)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]

    def forward() -> Tensor:
        with torch.no_grad():
            return block_attention(q, k, v, offsets)

    def both() -> object:
        a, b, c = leaves
        return torch.autograd.grad(block_attention(a, b, c, offsets), leaves, grad)

    host_cost([("forward, no gradients", forward), ("forward and backward", both)])


if __name__ == "__main__":
    command.run("block_attention", __doc__, main)
