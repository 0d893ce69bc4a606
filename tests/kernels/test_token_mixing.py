"""Maps over tokens against autograd in float64, as an operator, in the interpreter, compiled and on a GPU."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from kernels.token_mixing import mix_tokens, sum_kron
from tests.kernels.unwritten import unwritten_is_nan

SHAPES = [(5, 9, 24, 4), (3, 20, 70, 33), (2, 70, 130, 10), (0, 9, 24, 4), (1, 1, 1, 1), (2, 10, 40, 130)]
"""N, n, D and P."""


def plain(x: Tensor, matrix: Tensor) -> Tensor:
    return torch.einsum("bnd,np->bpd", x, matrix)


def inputs(count: int, tokens: int, width: int, outputs: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(count)
    shapes = ((count, tokens, width), (tokens, outputs), (count, outputs, width))
    x, matrix, grad = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return x, matrix, grad


@pytest.mark.parametrize("shape", SHAPES)
def test_output_and_gradients_equal_autograd(shape: tuple[int, int, int, int]) -> None:
    x, matrix, grad = inputs(*shape)
    leaves = [t.requires_grad_() for t in (x, matrix)]
    for got, want in zip(
        (mix_tokens(*leaves), *torch.autograd.grad(mix_tokens(*leaves), leaves, grad)),
        (plain(*leaves), *torch.autograd.grad(plain(*leaves), leaves, grad)),
        strict=True,
    ):
        assert got.shape == want.shape
        torch.testing.assert_close(got, want)


def kron_inputs(count: int, tokens: int, width: int, outputs: int, terms: int) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = ((count, tokens, width), (terms, tokens, outputs), (terms, width, width))
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


def kron(x: Tensor, mix: Tensor, maps: Tensor) -> Tensor:
    return torch.einsum("bnd,knp,kde->bpe", x, mix, maps)


def test_sum_of_kronecker_products_equals_its_equation() -> None:
    leaves = [t.requires_grad_() for t in kron_inputs(3, 5, 4, 2, 3)]
    torch.testing.assert_close(sum_kron(*leaves), kron(*leaves))
    assert torch.autograd.gradcheck(sum_kron, leaves)
    for i in range(3):  # only what is asked for
        only = [t.detach().requires_grad_(i == j) for j, t in enumerate(leaves)]
        (grad,) = torch.autograd.grad(sum_kron(*only).sum(), only[i])
        torch.testing.assert_close(grad, torch.autograd.grad(kron(*leaves).sum(), leaves[i])[0])
    empty = torch.zeros(0, 5, 4, dtype=torch.float64, requires_grad=True)
    out = sum_kron(empty, *leaves[1:])
    assert out.shape == (0, 2, 4)
    for grad, leaf in zip(torch.autograd.grad(out.sum(), (empty, *leaves[1:])), (empty, *leaves[1:]), strict=True):
        assert torch.equal(grad, torch.zeros_like(leaf))


def test_operator() -> None:
    x, matrix, _ = inputs(3, 5, 8, 2)
    x, matrix = x.requires_grad_(), matrix.requires_grad_()
    torch.library.opcheck(torch.ops.opengem.mix_tokens.default, (x, matrix))
    terms = torch.randn(3, 5, 2, dtype=torch.float64, requires_grad=True)
    torch.library.opcheck(torch.ops.opengem.mix_tokens.default, (x, terms))
    for op, tensors in ((mix_tokens, [x, matrix]), (sum_kron, kron_inputs(3, 5, 4, 2, 3))):
        leaves = [t.detach().requires_grad_() for t in tensors]
        traced, out = torch.compile(op, fullgraph=True, backend="aot_eager")(*leaves), op(*leaves)
        assert torch.equal(traced, out)
        got, want = (torch.autograd.grad(t.square().sum(), leaves) for t in (traced, out))
        torch.testing.assert_close(got, want)


def test_faults_are_named() -> None:
    with pytest.raises(ValueError, match=r"\[2, 3, 4\] and matrix \[4, 5\] do not go together"):
        mix_tokens(torch.zeros(2, 3, 4), torch.zeros(4, 5))
    with pytest.raises(ValueError, match=r"maps \[2, 3, 3\] do not go together"):
        sum_kron(torch.zeros(2, 3, 4), torch.zeros(2, 3, 5), torch.zeros(2, 3, 3))
    whole = torch.ones(2, 3, 4, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"mix_tokens: x is torch.int32"):
        mix_tokens(whole, torch.zeros(3, 5))
    with pytest.raises(ValueError, match=r"sum_kron: maps is torch.complex64"):
        sum_kron(whole.float(), torch.zeros(2, 3, 5), torch.zeros(2, 4, 5, dtype=torch.complex64))


def interpreted() -> None:
    """The kernels element by element in float32, for rows with strides; started by ``test_ops_interpreted.py``."""
    from kernels.common.memory_tuning import forced
    from kernels.token_mixing import reference
    from kernels.token_mixing import triton as kernels

    for shape in (SHAPES[0], SHAPES[2], SHAPES[3]):
        x, matrix, grad = inputs(*shape)
        terms = matrix.unflatten(1, (-1, 2)).permute(2, 0, 1).contiguous()
        for group, form in ((1, matrix), (4, matrix), *([(4, terms)] if shape == SHAPES[0] else [])):
            small = [t.float() for t in (x, form, grad)]
            small[0] = torch.stack([small[0], small[0]], dim=2)[:, :, 1]
            config = {**kernels.default("mix_forward"), "GROUP": group}
            with forced("mix_forward", config), forced("mix_backward", config):
                got = (kernels.forward(*small[:2]), *kernels.backward(small[2], *small[:2]))
            want = (reference.forward(x, form), *reference.backward(grad, x, form))
            for a, b in zip(got, want, strict=True):
                assert a.shape == b.shape
                assert (a - b).norm() <= 2e-6 * b.norm().clamp(min=1e-30)  # some roundings of 6e-8


@pytest.mark.parametrize(("sides", "arch"), [((26, 28), 90), ((256, 64), 90), ((26, 28), 100)])
@pytest.mark.parametrize("backward", [False, True])
def test_kernels_compile(backward: bool, sides: tuple[int, int], arch: int) -> None:
    pytest.importorskip("triton")
    from kernels.token_mixing import triton as kernels
    from tests.kernels.compiled import resources
    from tests.kernels.test_ops_compile import build

    kernel = kernels.backward_kernel if backward else kernels.forward_kernel
    _, constants, options = kernels.build(kernels.default(""), *sides, 512)
    constants |= {"STXB": sides[0] * 512, "STXT": 512} | ({"STDB": sides[1] * 512, "STDT": 512} if backward else {})
    compiled = build(kernel, constants, arch, torch.bfloat16, **options)
    assert compiled.metadata.shared <= 232448
    if arch == 90:
        assert "wgmma.mma_async" in compiled.asm["ptx"]
        assert resources(compiled)["stack"] < 128


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [*SHAPES, (3000, 26, 512, 28), (500, 128, 1536, 16), (300, 200, 200, 64)])
def test_kernels_on_a_gpu(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    """Also the same bits in two runs. Products of rounded inputs are exact; sums are float32 until they are stored."""
    tensors = [(t * 0.3).to("cuda", dtype) for t in inputs(*shape)]
    runs = []
    for memory in (unwritten_is_nan(), nullcontext()):
        leaves = [t.clone().requires_grad_() for t in tensors[:2]]
        with memory:
            out = mix_tokens(*leaves)
            runs.append((out, *torch.autograd.grad(out, leaves, tensors[2])))
    exact = [t.double().requires_grad_() for t in tensors[:2]]
    want = plain(*exact)
    for got, again, precise in zip(*runs, (want, *torch.autograd.grad(want, exact, tensors[2].double())), strict=True):
        assert torch.equal(got, again)
        assert (got.double() - precise).norm() <= (4e-3 if dtype == torch.bfloat16 else 5e-4) * precise.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(300, 32, 128, 8, 4), (64, 128, 320, 8, 2)])
def test_sums_of_kronecker_products_on_a_gpu(shape: tuple[int, int, int, int, int]) -> None:
    """Two products with a rounding to 2^-9 between them and one at the end."""
    tensors = [(t * 0.3).to("cuda", torch.bfloat16) for t in kron_inputs(*shape)]
    leaves = [t.clone().requires_grad_() for t in tensors]
    with unwritten_is_nan():
        out = sum_kron(*leaves)
        grad = torch.randn_like(out)
        got_all = (out, *torch.autograd.grad(out, leaves, grad))
    exact = [t.double().requires_grad_() for t in tensors]
    want = kron(*exact)
    want_all = (want, *torch.autograd.grad(want, exact, grad.double()))
    for got, precise in zip(got_all, want_all, strict=True):
        assert (got.double() - precise).norm() <= 8e-3 * precise.norm()
