"""The speed of maps over tokens and of sums of Kronecker products: ``python -m kernels.benchmarks.token_mixing``.

Baselines: a batched product with the matrix repeated by strides; for sums of Kronecker products two ``einsum``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kernels.benchmarks import command
from kernels.benchmarks.bandwidth import Pass, host_cost, measure_copy, print_table, size_of
from kernels.token_mixing import mix_tokens, reference, sum_kron
from kernels.token_mixing.op import _mix_tokens_backward

MIXES = [(4096, 26, 512, 28), (16384, 32, 128, 32), (16384, 64, 256, 64), (512, 128, 1536, 16)]
"""Rows, tokens in, width, tokens out; bf16."""
KRONS = [(16384, 32, 128, 8, 4), (16384, 64, 256, 16, 4), (512, 128, 1536, 8, 2)]
"""Rows, tokens in, width, tokens out, terms; bf16."""


def einsums(x: Tensor, mix: Tensor, maps: Tensor) -> Tensor:
    """The sum in PyTorch, tokens first."""
    mixed = torch.einsum("bne,kno->boke", x, mix).flatten(2)
    return torch.matmul(mixed, maps.flatten(0, 1))


def mix_passes(count: int, tokens: int, width: int, outputs: int) -> list[Pass]:
    """Forward and backward of ``mix_tokens``."""
    x = torch.randn(count, tokens, width, device="cuda").bfloat16()
    matrix = torch.randn(tokens, outputs, device="cuda").bfloat16()
    grad = torch.randn(count, outputs, width, device="cuda").bfloat16()
    case = f"{count} rows, {tokens} tokens of {width} to {outputs}"
    return passes(
        case, size_of(x, matrix, grad), size_of(x, x, matrix, matrix, grad), [x, matrix], grad, mix_tokens,
        reference.forward, lambda: _mix_tokens_backward(grad, x, matrix), "bmm",
    )  # fmt: skip


def kron_passes(count: int, tokens: int, width: int, outputs: int, terms: int) -> list[Pass]:
    """Forward and backward of ``sum_kron``."""
    x = torch.randn(count, tokens, width, device="cuda").bfloat16()
    mix = torch.randn(terms, tokens, outputs, device="cuda").bfloat16()
    maps = torch.randn(terms, width, width, device="cuda").bfloat16() * width**-0.5
    grad = torch.randn(count, outputs, width, device="cuda").bfloat16()
    case = f"{count} rows, {tokens} tokens of {width} to {outputs}, {terms} terms"
    size = size_of(x, mix, maps, grad)
    matrix, flat = mix.permute(1, 2, 0).reshape(tokens, outputs * terms), maps.flatten(0, 1)
    mixed = mix_tokens(x, matrix).view(count * outputs, terms * width)

    def kernels() -> object:
        d_maps = mixed.t() @ grad.flatten(0, 1)
        d_mixed = (grad.flatten(0, 1) @ flat.t()).view(count, outputs * terms, width)
        return d_maps, _mix_tokens_backward(d_mixed, x, mix)

    inputs = [x, mix, maps]
    return passes(case, size, size + size_of(x, mix, maps), inputs, grad, sum_kron, einsums, kernels, "einsums")


def passes(
    case: str, size: int, back_size: int, inputs: list[Tensor], grad: Tensor, op: Callable[..., Tensor],
    other: Callable[..., Tensor], kernels: Callable[[], object], name: str,
) -> list[Pass]:  # fmt: skip
    """Forward and backward of ``op`` beside ``other``."""
    leaves = [t.detach().requires_grad_() for t in inputs]
    out, other_out = op(*leaves), other(*leaves)

    def without_gradients(call: Callable[..., Tensor]) -> Callable[[], object]:
        def run() -> object:
            with torch.no_grad():
                return call(*inputs)

        return run

    def gradients(out: Tensor) -> Callable[[], object]:
        return lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)

    return [
        Pass(
            case=case, name="forward", size=size, eager=without_gradients(op),
            baselines={name: without_gradients(other)},
        ),
        Pass(
            case=case, name="backward", size=back_size, eager=gradients(out), kernels=kernels,
            baselines={name: gradients(other_out)},
        ),
    ]  # fmt: skip


def main() -> None:
    """Prints the tables."""
    bandwidth = measure_copy()
    print_table((mix_passes(*shape) for shape in MIXES), bandwidth)
    print_table((kron_passes(*shape) for shape in KRONS), bandwidth)
    x, matrix = torch.randn(8, 26, 512, device="cuda").bfloat16(), torch.randn(26, 28, device="cuda").bfloat16()
    leaf = x.detach().requires_grad_()
    out = mix_tokens(leaf, matrix)
    host_cost(
        [
            ("mix_tokens, no gradients", lambda: mix_tokens(x, matrix)),
            ("mix_tokens, with gradients", lambda: torch.autograd.grad(mix_tokens(leaf, matrix), leaf, out.detach())),
        ]
    )


if __name__ == "__main__":
    command.run("token_mixing", __doc__, main)
