"""Block attention, jagged movement and norms on a GPU, through the ops, against the references in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from kernels.block_attention import block_attention
from kernels.jagged import offsets_from_lengths

pytestmark = pytest.mark.gpu

TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 6e-3}
"""Norm of the error over that of the result: float32 sums of some thousand terms, products as three of TF32, 2^-20 off;
two roundings to 2^-12 and 2^-9."""

LENGTHS = [3, 0, 700, 1, 129, 64, 0, 65, 2]


def random(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").mul_(0.5).to(dtype)


def offsets_of(lengths: Sequence[int]) -> Tensor:
    return offsets_from_lengths(torch.tensor(lengths)).cuda()


def compare(op: Callable[..., Tensor], inputs: Sequence[Tensor], dtype: torch.dtype) -> None:
    """Output and gradients of ``op`` on the GPU against float64, which the references compute on the GPU too."""
    results = []
    for precise in (False, True):
        leaves = [(x.double() if precise else x).detach().requires_grad_() for x in inputs]
        out = op(*leaves)
        grad = random(*out.shape, dtype=dtype, seed=1).to(out.dtype)
        results.append((out, *torch.autograd.grad(out, leaves, grad)))
    for got, want in zip(*results, strict=True):
        assert got.isfinite().all()
        assert (got.double() - want).norm() / want.norm() < TOLERANCE[dtype]


def twice(op: Callable[..., Tensor], inputs: Sequence[Tensor]) -> None:
    """The same bits in two runs, without waiting for the device; and from a CUDA graph, and compiled in one piece."""
    runs = []
    for _ in range(2):
        leaves = [x.detach().requires_grad_() for x in inputs]
        torch.cuda.set_sync_debug_mode("error")
        try:
            out = op(*leaves)
            runs.append((out, *torch.autograd.grad(out, leaves, torch.ones_like(out))))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    with torch.no_grad():
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = op(*inputs)
        graph.replay()
        assert torch.equal(captured, runs[0][0])
        assert torch.equal(torch.compile(op, fullgraph=True, backend="aot_eager")(*inputs), captured)


@pytest.mark.parametrize("columns", [0, 1, 2])
@pytest.mark.parametrize(
    ("width", "key_heads", "dtype"),
    [
        (32, 4, torch.bfloat16), (64, 2, torch.float16), (96, 4, torch.bfloat16), (128, 4, torch.bfloat16),
        (128, 1, torch.bfloat16), (256, 4, torch.bfloat16), (44, 4, torch.bfloat16), (64, 4, torch.float32),
        (128, 2, torch.float32),
    ],
)  # fmt: skip
def test_block_attention(width: int, key_heads: int, columns: int, dtype: torch.dtype) -> None:
    offsets = offsets_of(LENGTHS)
    rows = int(offsets[-1])
    q = random(rows, 4, width, dtype=dtype)
    k, v = random(rows, 2, key_heads, width, dtype=dtype, seed=2).unbind(1)
    positions = torch.rand(rows, columns, device="cuda") * 30 if columns else None
    frequencies = torch.rand(width // 2, device="cuda") if columns else None

    def op(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return block_attention(q, k, v, offsets, positions=positions, frequencies=frequencies, scale=0.4)

    compare(op, (q, k, v), dtype)
    if width == 128:
        twice(op, (q, k, v))


def test_block_attention_beyond_two_billion_elements() -> None:
    offsets = offsets_of([300, *[1] * 1_048_400, 150])
    q = torch.empty(int(offsets[-1]), 8, 256, dtype=torch.bfloat16, device="cuda").normal_(std=0.5)
    assert q.numel() > 2**31
    leaf = q.requires_grad_()
    out = block_attention(leaf, leaf.detach(), leaf.detach(), offsets)
    (gradient,) = torch.autograd.grad(out, leaf, q.detach())
    last, end = q.detach()[-150:].double().requires_grad_(), torch.tensor([0, 150], device="cuda")
    want = block_attention(last, last.detach(), last.detach(), end)
    (want_gradient,) = torch.autograd.grad(want, last, last.detach())
    for got, exact in ((out[-150:], want), (gradient[-150:], want_gradient)):
        assert (got.double() - exact).norm() / exact.norm() < TOLERANCE[torch.bfloat16]
