"""Norms against PyTorch's and against autograd through the formula."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.norms import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from kernels.norms.op import _norm


def inputs(*shape: int, count: int = 3, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(*shape, dtype=dtype, requires_grad=True) for _ in range(count)]


def test_plain_norms_equal_those_of_pytorch() -> None:
    (x,), (weight, bias) = inputs(4, 3, 7, count=1), inputs(7, count=2)
    torch.testing.assert_close(layer_norm(x, weight, bias), F.layer_norm(x, (7,), weight, bias))
    torch.testing.assert_close(layer_norm(x, eps=0.1), F.layer_norm(x, (7,), eps=0.1))
    torch.testing.assert_close(rms_norm(x, weight, eps=0.1), F.rms_norm(x, (7,), weight, eps=0.1))
    torch.testing.assert_close(rms_norm(x), F.rms_norm(x, (7,), eps=1e-6))


@pytest.mark.parametrize("act", ["sigmoid", "silu"])
def test_gate_and_residual(act: str) -> None:
    (x, residual, gate), (weight, bias) = inputs(5, 7), inputs(7, count=2)
    factor = torch.sigmoid(gate) if act == "sigmoid" else F.silu(gate)
    y, z = add_layer_norm(x, residual, weight, bias, gate=gate, act=act)
    torch.testing.assert_close(z, x + residual)
    torch.testing.assert_close(y, F.layer_norm(x + residual, (7,), weight, bias) * factor)
    y, z = add_rms_norm(x, residual, weight, gate=gate, act=act)
    torch.testing.assert_close(y, F.rms_norm(x + residual, (7,), weight, eps=1e-6) * factor)


@pytest.mark.parametrize(("center", "residual", "gate", "affine"), itertools.product([False, True], repeat=4))
def test_gradients(center: bool, residual: bool, gate: bool, affine: bool) -> None:
    (x, r, g), (weight, bias) = inputs(3, 5), inputs(5, count=2)
    rest = (
        r if residual else None,
        g if gate else None,
        weight if affine else None,
        bias if affine and center else None,
    )

    def call(*tensors: Tensor | None) -> tuple[Tensor, ...]:
        y, z = _norm(*tensors, 0.1, center, "silu", torch.float64)
        return (y, z) if residual else (y,)

    assert torch.autograd.gradcheck(call, (x, *rest))


def test_a_gradient_that_reaches_only_the_sum() -> None:
    x, residual, _ = inputs(3, 5)
    _, z = add_rms_norm(x, residual)
    for grad in torch.autograd.grad(z.sum(), (x, residual)):
        assert torch.equal(grad, torch.ones_like(grad))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operator_passes_opcheck(dtype: torch.dtype) -> None:
    (x, residual, gate), (weight, bias) = inputs(4, 6, dtype=dtype), inputs(6, count=2, dtype=torch.float32)
    torch.library.opcheck(
        torch.ops.opengem.norm.default, (x, None, None, weight, bias, 1e-5, True, "sigmoid", torch.float32)
    )
    torch.library.opcheck(torch.ops.opengem.norm.default, (x, residual, gate, weight, None, 1e-5, False, "silu", dtype))


@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_what_is_not_there_are_different_tensors(dtype: torch.dtype, center: bool) -> None:
    x, grad, _ = inputs(4, 6, dtype=dtype)
    arguments = (grad, None, x, None, None, None, 1e-5, center, "silu")
    torch.library.opcheck(torch.ops.opengem.norm_backward.default, arguments, test_utils="test_schema")


def test_low_precision_is_computed_in_float32() -> None:
    (x, gate), (weight,) = inputs(4, 6, count=2, dtype=torch.bfloat16), inputs(6, count=1, dtype=torch.float32)
    exact = rms_norm(x.float(), weight, gate=gate.float())
    assert torch.equal(rms_norm(x, weight, gate=gate), exact.bfloat16())
    assert torch.equal(rms_norm(x, weight, gate=gate, dtype=torch.float32), exact)


def test_no_rows_give_no_gradient() -> None:
    x, weight = torch.zeros(0, 3, requires_grad=True), torch.ones(3, requires_grad=True)
    rms_norm(x, weight).sum().backward()
    assert weight.grad is not None
    assert not weight.grad.any()


def test_wrong_arguments_are_refused() -> None:
    x = torch.zeros(2, 3)
    with pytest.raises(ValueError, match="act"):
        rms_norm(x, gate=x, act="relu")
    with pytest.raises(ValueError, match="gate"):
        rms_norm(x, gate=x[0])
    with pytest.raises(ValueError, match="weight"):
        layer_norm(x, torch.ones(2))
