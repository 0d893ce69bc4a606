"""The factorisation machine against autograd in float64, as an operator, in the interpreter, compiled and on a GPU."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from kernels.interaction import fm_block
from tests.kernels.unwritten import unwritten_is_nan

SHAPES = [(5, 9, 24, 4), (3, 20, 70, 33), (2, 70, 130, 10), (0, 9, 24, 4), (1, 1, 1, 1)]
"""N, n, D and k."""


def plain(x: Tensor, y: Tensor) -> Tensor:
    return x @ (x.transpose(1, 2) @ y)


def inputs(count: int, tokens: int, width: int, rank: int, shared: bool) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(count)
    y = (tokens, rank) if shared else (count, tokens, rank)
    shapes = ((count, tokens, width), y, (count, tokens, rank))
    x, y, grad = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return x, y, grad


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_output_and_gradients_equal_autograd(shape: tuple[int, int, int, int], shared: bool) -> None:
    x, y, grad = inputs(*shape, shared)
    leaves = [t.requires_grad_() for t in (x, y)]
    for got, want in zip(
        (fm_block(*leaves), *torch.autograd.grad(fm_block(*leaves), leaves, grad)),
        (plain(*leaves), *torch.autograd.grad(plain(*leaves), leaves, grad)),
        strict=True,
    ):
        assert got.shape == want.shape
        torch.testing.assert_close(got, want)


def test_operator() -> None:
    x, y, _ = inputs(3, 5, 8, 2, True)
    torch.library.opcheck(torch.ops.opengem.fm_block.default, (x.requires_grad_(), y.requires_grad_()))
    assert torch.equal(torch.compile(fm_block, fullgraph=True, backend="aot_eager")(x, y), fm_block(x, y))


def test_faults_are_named() -> None:
    with pytest.raises(ValueError, match="do not go together"):
        fm_block(torch.zeros(2, 3, 4), torch.zeros(4, 5))
    with pytest.raises(ValueError, match="do not go together"):
        fm_block(torch.zeros(2, 3, 4), torch.zeros(3, 3, 5))
    with pytest.raises(ValueError, match=r"fm_block: x is torch.int64"):  # y would be cast to it: zeros
        fm_block(torch.ones(2, 3, 4, dtype=torch.int64), torch.full((3, 5), 0.5))
    with pytest.raises(ValueError, match=r"fm_block: y is on meta, but x on cpu"):
        fm_block(torch.zeros(2, 3, 4), torch.zeros(3, 5, device="meta"))


def interpreted() -> None:
    """The kernels element by element in float32; started by ``test_ops_interpreted.py``."""
    from kernels.interaction import reference
    from kernels.interaction import triton as kernels

    for shape in (SHAPES[0], SHAPES[2], SHAPES[3]):
        for shared in (False, True):
            x, y, grad = inputs(*shape, shared)
            small = [t.float() for t in (x, y, grad)]
            got = (kernels.forward(*small[:2]), *kernels.backward(small[2], *small[:2]))
            want = (reference.forward(x, y), *reference.backward(grad, x, y))
            for a, b in zip(got, want, strict=True):
                assert a.shape == b.shape
                assert (a - b).norm() <= 2e-6 * b.norm().clamp(min=1e-30)  # some roundings of 6e-8


@pytest.mark.parametrize("arch", [90, 100])
@pytest.mark.parametrize("backward", [False, True])
def test_kernels_compile(backward: bool, arch: int) -> None:
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from kernels.interaction import triton as kernels
    from tests.kernels.compiled import resources

    kernel = kernels.backward_kernel if backward else kernels.forward_kernel
    _, constants, options = kernels.build(kernels.default(20), 20, 512, 32)
    constants |= {"SHARED": True, "STB": 20 * 512, "STX": 512}
    signature = {name: "constexpr" if name in constants else "*bf16" for name in kernel.arg_names}
    signature |= {"N": "i32"} | ({"DY": "*fp32"} if backward else {})
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if name != "N"}
    constexprs = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    aligned = {place: x for place, x in aligned.items() if place not in constexprs}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    assert compiled.metadata.shared <= 232448
    if arch == 90:
        assert "wgmma.mma_async" in compiled.asm["ptx"]
        assert resources(compiled)["stack"] < 128


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("shape", [*SHAPES, (3000, 26, 512, 32), (700, 38, 256, 32), (300, 128, 200, 64)])
def test_kernels_on_a_gpu(shape: tuple[int, int, int, int], shared: bool, dtype: torch.dtype) -> None:
    """Also the same bits in two runs. Products are rounded to 2^-9 or 2^-12 before the second product."""
    tensors = [(t * 0.3).to("cuda", dtype) for t in inputs(*shape, shared)]
    runs = []
    for memory in (unwritten_is_nan(), nullcontext()):
        leaves = [t.clone().requires_grad_() for t in tensors[:2]]
        with memory:
            out = fm_block(*leaves)
            runs.append((out, *torch.autograd.grad(out, leaves, tensors[2])))
    exact = [t.double().requires_grad_() for t in tensors[:2]]
    want = plain(*exact)
    for got, again, precise in zip(*runs, (want, *torch.autograd.grad(want, exact, tensors[2].double())), strict=True):
        assert torch.equal(got, again)
        assert (got.double() - precise).norm() <= (8e-3 if dtype == torch.bfloat16 else 1e-3) * precise.norm()
