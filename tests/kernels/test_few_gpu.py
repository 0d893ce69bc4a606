"""The backward kernel for few keys on a GPU, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.benchmarks.cases import runs_kernels_by_hand
from kernels.benchmarks.tune import few_keys
from kernels.common import launch
from kernels.common.launch import Call
from kernels.gdpa import gdpa
from kernels.gdpa import reference as gdpa_reference
from kernels.jagged import offsets_from_lengths
from tests.kernels.graphs import check_graph, without_waiting
from tests.kernels.test_triton_gpu import LENGTHS, compare, packed, same
from tests.kernels.unwritten import unwritten_is_nan

pytestmark = pytest.mark.gpu


def check_backward(act: str, width: int, keys: int, group: int, dtype: torch.dtype, config: launch.Config) -> None:
    """Ragged sequences, some without queries or keys, some with one; the same bits again and beside a NaN."""
    lengths = [*LENGTHS, *[70, 1, 300] * 60]
    (q, _, _), offsets = packed(lengths, 2 * group, width, dtype, 0)
    counts = torch.randint(0, keys + 1, (len(lengths),))
    counts[:5] = torch.tensor([0, 1, keys, 1, keys])
    kv_offsets = offsets_from_lengths(counts).cuda()
    fused = torch.randn(int(kv_offsets[-1]), 2, 2, width, device="cuda").mul_(0.5).to(dtype)
    k, v = fused.unbind(1)
    grad = torch.randn(q.shape, device="cuda").to(dtype)
    call = Call(q, k, v, offsets, kv_offsets, act, 0.3, 0.5, False, -1, keys)
    with unwritten_is_nan():
        clean = launch.backward(call, grad, None, None, config)
    exact = (grad.double(), q.double(), k.double(), v.double())
    for got, want in zip(clean, gdpa_reference.backward(*exact, offsets, kv_offsets, act, 0.5, 0.3, -1), strict=True):
        same(got, want, dtype)
    again = launch.backward(call, grad, None, None, config)
    assert all(torch.equal(a, b) for a, b in zip(clean, again, strict=True))
    for x, where in ((q, offsets), (k, kv_offsets), (v, kv_offsets), (grad, offsets)):
        x[where[2] : where[3]] = torch.nan
    beside = launch.backward(call, grad, None, None, config)
    for a, b, where in zip(clean, beside, (offsets, kv_offsets, kv_offsets), strict=True):
        assert torch.equal(a[: where[2]], b[: where[2]])
        assert torch.equal(a[where[3] :], b[where[3] :])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("width", "keys", "group", "extra"),
    [
        (128, 64, 1, {}), (128, 128, 1, {}), (128, 64, 3, {}), (128, 128, 2, {}),
        (64, 64, 2, {"maxnreg": 168}), (64, 128, 1, {}), (128, 256, 1, {}), (128, 200, 3, {}), (64, 256, 1, {}),
    ],
)  # fmt: skip
def test_gradients(width: int, keys: int, group: int, extra: dict[str, int], dtype: torch.dtype) -> None:
    check_backward("gelu_tanh", width, keys, group, dtype, few_keys(keys, **extra))


@pytest.mark.parametrize("act", [name for name in gdpa_reference.ACTIVATIONS if name != "gelu_tanh"])
def test_other_activations(act: str) -> None:
    for keys in (64, 128):
        check_backward(act, 128, keys, 1, torch.bfloat16, few_keys(keys))


def chosen(call: Call) -> dict[str, Any]:
    """Constants of the kernel that a call gets on this GPU."""
    of_keys, of_queries = launch._backward_plans(call.signature())
    assert of_queries is None
    return of_keys.constants


@pytest.mark.parametrize(
    ("width", "keys"), [(128, 1), (128, 7), (128, 64), (128, 65), (128, 100), (128, 129), (128, 256), (64, 20)]
)
@pytest.mark.parametrize("learned", [False, True])
def test_dense_keys_through_the_op(width: int, keys: int, learned: bool) -> None:
    asked = [20 if keys <= 128 else 70]
    (q, _, _), offsets = packed(asked if learned else LENGTHS, 4, width, torch.bfloat16, 0)
    where = None if learned else offsets
    k, v = (torch.randn(len(LENGTHS), keys, 2, width, device="cuda").mul_(0.5).bfloat16() for _ in range(2))
    if runs_kernels_by_hand():
        call = Call(q, k, v, where, None, "silu", 0.3, 0.5, False, -1, -1)
        assert chosen(call)["KEYS"] == (64 if keys <= 64 else 128)

    def op(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return gdpa(q, k, v, where, activation="silu", logit_scale=0.3, scale=0.5)

    compare(op, [q, k, v], torch.bfloat16)


def test_a_graph_gives_the_same_bits_and_nothing_waits() -> None:
    (q, _, _), offsets = packed([*LENGTHS, *range(100)], 4, 128, torch.bfloat16, 0)
    k, v = (torch.randn(len(offsets) - 1, 64, 4, 128, device="cuda").mul_(0.5).bfloat16() for _ in range(2))
    grad = torch.randn_like(q)

    def step() -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = gdpa(*leaves, offsets, activation="gelu_tanh", logit_scale=0.3)
        return torch.autograd.grad(out, leaves, grad)

    step()
    check_graph(step, without_waiting(step))


def test_a_gradient_at_an_odd_address() -> None:
    (q, _, _), offsets = packed(LENGTHS, 2, 128, torch.bfloat16, 0)
    k, v = (torch.randn(len(LENGTHS), 64, 2, 128, device="cuda").mul_(0.5).bfloat16() for _ in range(2))
    call = Call(q, k, v, offsets, None, "silu", 0.3, 0.5, False, -1, -1)
    grad = torch.randn(q.numel() + 8, device="cuda").bfloat16()
    one, other = grad[8:].view(q.shape), grad[:-7][1:].view(q.shape)
    other.copy_(one.clone())
    again = other.clone()
    for a, b in zip(launch.backward(call, other, None, None), launch.backward(call, again, None, None), strict=True):
        assert torch.equal(a, b)
