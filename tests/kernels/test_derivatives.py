"""Derivatives that an operator lacks are refused; nothing is taken for a constant without a word."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import jagged
from kernels.block_attention import block_attention
from kernels.gdpa import gdpa
from kernels.jagged_attention import jagged_attention
from kernels.norms import rms_norm
from tests.kernels.test_autocast import CALLS, HEADS, OFF

TWICE = {name for name, (call, _) in CALLS.items() if "jagged." in inspect.getsource(call)}
"""Calls of jagged movement, whose second derivatives are there."""


def made(name: str) -> tuple[Any, list[Tensor]]:
    torch.manual_seed(0)
    call, shapes = CALLS[name]
    return call, [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def loss(out: Any) -> Tensor:
    return (out[0] if isinstance(out, tuple) else out).square().sum()


@pytest.mark.parametrize("name", CALLS)
def test_second_derivatives_are_refused_or_right(name: str) -> None:
    call, inputs = made(name)
    gradients = torch.autograd.grad(loss(call(*inputs)), inputs, create_graph=True)
    penalty = sum(gradient.square().sum() for gradient in gradients) + loss(call(*inputs))
    if name in TWICE:
        penalty.backward()
    else:
        with pytest.raises(NotImplementedError, match=r"\w+ has no second derivative"):
            penalty.backward()


@pytest.mark.parametrize("name", CALLS)
def test_forward_mode_is_refused(name: str) -> None:
    call, inputs = made(name)
    values = tuple(x.detach() for x in inputs)
    with pytest.raises(NotImplementedError, match=r"\w+ has no forward-mode derivative"):
        torch.func.jvp(lambda *args: loss(call(*args)), values, values)
    with torch.autograd.forward_ad.dual_level():
        call(*values)  # without tangents nothing is lost
        with pytest.raises(NotImplementedError, match=r"\w+ has no forward-mode derivative"):
            call(torch.autograd.forward_ad.make_dual(values[0], values[0]), *values[1:])


@pytest.mark.parametrize("name", CALLS)
def test_torch_func_is_refused_by_name(name: str) -> None:
    call, inputs = made(name)
    values, places = [x.detach() for x in inputs], tuple(range(len(inputs)))
    pairs = [torch.stack([x, x]) for x in values]
    for run, args in (
        (torch.func.grad(lambda *x: loss(call(*x)), places), values),
        (torch.func.vmap(torch.func.grad(lambda *x: loss(call(*x)), places)), pairs),
        (torch.func.grad(lambda *x: torch.func.vmap(lambda *y: loss(call(*y)))(*x).sum(), places), pairs),
    ):
        with pytest.raises(NotImplementedError, match=r"\w+ has no derivative for torch.func"):
            run(*args)
    constant = torch.func.grad(lambda x: loss(call(*values)) + x.sum())(torch.ones(2))
    assert torch.equal(constant, torch.ones(2)), "what is not differentiated may be called"


@pytest.mark.parametrize("name", CALLS)
def test_batched_gradients_go_one_by_one(name: str) -> None:
    call, inputs = made(name)
    out = call(*inputs)
    out = out[0] if isinstance(out, tuple) else out
    grads = torch.randn(2, *out.shape, dtype=out.dtype)
    batched = torch.autograd.grad(out, inputs, grads, is_grads_batched=True, retain_graph=True)
    for row, grad in enumerate(grads):
        for got, want in zip(batched, torch.autograd.grad(out, inputs, grad, retain_graph=True), strict=True):
            torch.testing.assert_close(got[row], want)


@pytest.mark.parametrize("strict", [False, True])
def test_exported_sequences_of_unknown_length(strict: bool) -> None:
    class Gather(torch.nn.Module):
        def forward(self, values: Tensor, index: Tensor) -> Tensor:
            return jagged.gather_sequences(values, OFF, index)[0]

    values, other = torch.randn(8, 2), torch.tensor([0, 0, 2])
    exported = torch.export.export(Gather(), (values, torch.tensor([2, 0, 2])), strict=strict).module()
    assert torch.equal(exported(values, other), Gather()(values, other))


def test_learned_numbers_are_refused() -> None:
    q, number = torch.randn(HEADS), torch.ones((), requires_grad=True)
    for option in ("scale", "logit_scale"):
        with pytest.raises(ValueError, match=f"gdpa: {option} must be a number, is a tensor"):
            gdpa(q, q, q, OFF, OFF, **{option: number})
    with pytest.raises(ValueError, match="jagged_attention: scale must be a number"):
        jagged_attention(q, q, q, OFF, OFF, scale=number)
    with pytest.raises(ValueError, match="rms_norm: eps must be a number"):
        rms_norm(q, eps=number)


@pytest.mark.parametrize("name", ["layer_norm, gate", "add_rms_norm", "fm_block", "mix_tokens", "sum_kron"])
def test_meta_tensors_give_shapes(name: str) -> None:
    call, inputs = made(name)
    meta, real = call(*(x.to("meta") for x in inputs)), call(*inputs)
    pairs = zip(meta, real, strict=True) if isinstance(real, tuple) else [(meta, real)]
    assert all(a.is_meta and a.shape == b.shape and a.dtype == b.dtype for a, b in pairs)


def test_meta_offsets_give_shapes() -> None:
    q, offsets = torch.randn(HEADS).to("meta"), OFF.to("meta")
    for kernel in (gdpa, jagged_attention):
        assert kernel(q, q, q, offsets, offsets).shape == q.shape
        assert kernel(q, q, q, None, offsets).shape == (3, *HEADS)
    assert block_attention(q, q, q, offsets).shape == q.shape
    assert jagged.to_padded(q, offsets, 5).shape == (3, 5, *HEADS[1:])


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_a_trace_holds_for_other_lengths() -> None:
    q, other = torch.randn(HEADS), torch.tensor([0, 1, 8, 8])
    with torch.no_grad():
        traced = torch.jit.trace(lambda x, offsets: gdpa(x, x, x, offsets, offsets), (q, OFF))
        torch.testing.assert_close(traced(q, other), gdpa(q, q, q, other, other))


@pytest.mark.parametrize("name", CALLS)
def test_calls_compile_whole(name: str) -> None:
    call, inputs = made(name)
    torch._dynamo.reset()
    compiled = torch.compile(call, backend="eager", fullgraph=True)(*inputs)
    torch.testing.assert_close(compiled, call(*inputs))
