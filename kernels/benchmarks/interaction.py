"""The speed of Wukong's factorisation machine: ``python -m kernels.benchmarks.interaction``.

Baseline: two batched products of PyTorch, in the cheaper order.
"""

from __future__ import annotations

import torch

from kernels.benchmarks import command
from kernels.benchmarks.bandwidth import Pass, host_cost, measure_copy, print_table, size_of
from kernels.interaction import fm_block, reference
from kernels.interaction.op import _fm_block_backward

CASES = [
    (16384, 32, 128, 16),
    (16384, 32, 128, 32),
    (16384, 64, 128, 32),
    (8192, 64, 256, 32),
    (8192, 128, 256, 64),
    (4096, 24, 512, 32),
]
"""Rows, tokens, width, rank; bf16; Y is the same for all rows."""


def passes(count: int, tokens: int, width: int, rank: int) -> list[Pass]:
    """Forward and backward of a case."""
    x = torch.randn(count, tokens, width, device="cuda").bfloat16()
    y = torch.randn(tokens, rank, device="cuda").bfloat16()
    grad = torch.randn(count, tokens, rank, device="cuda").bfloat16()
    case = f"{count} rows, {tokens} tokens of {width}, rank {rank}"
    leaves = [t.detach().requires_grad_() for t in (x, y)]
    out, other = fm_block(*leaves), reference.forward(*leaves)

    def forward() -> object:
        with torch.no_grad():
            return fm_block(x, y)

    return [
        Pass(
            case=case, name="forward", size=size_of(x, y, grad), eager=forward,
            baselines={"two products": lambda: reference.forward(x, y)},
        ),
        Pass(
            case=case, name="backward", size=size_of(x, x, y, y, grad),
            eager=lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True),
            kernels=lambda: _fm_block_backward(grad, x, y),
            baselines={"two products": lambda: torch.autograd.grad(other, leaves, grad, retain_graph=True)},
        ),
    ]  # fmt: skip


def main() -> None:
    """Prints the table."""
    print_table((passes(*case) for case in CASES), measure_copy())
    x, y = torch.randn(8, 26, 512, device="cuda").bfloat16(), torch.randn(26, 32, device="cuda").bfloat16()
    leaf = x.detach().requires_grad_()
    grad = fm_block(x, y)
    host_cost(
        [
            ("fm_block, no gradients", lambda: fm_block(x, y)),
            ("fm_block, with gradients", lambda: torch.autograd.grad(fm_block(leaf, y), leaf, grad)),
        ]
    )


if __name__ == "__main__":
    command.run("interaction", __doc__, main)
