"""GDPA against a loop over sequences, queries and keys."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.gdpa import ACTIVATIONS, gdpa
from kernels.gdpa.op import _gdpa
from kernels.jagged import offsets_from_lengths

ORACLE = {
    "identity": lambda x: x,
    "gelu": lambda x: 0.5 * x * (1 + math.erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "silu": lambda x: x / (1 + math.exp(-x)),
    "relu": lambda x: max(x, 0.0),
    "relu2": lambda x: max(x, 0.0) ** 2,
    "hardswish": lambda x: x * min(max(x + 3, 0.0), 6.0) / 6,
}


def make(lengths: list[int], heads: int, width: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    offsets = offsets_from_lengths(torch.tensor(lengths, dtype=torch.int64))
    rows = torch.randn(int(offsets[-1]), heads, width, generator=generator, dtype=torch.float64)
    return rows, offsets


def loop(
    q: Tensor,
    k: list[Tensor],
    v: list[Tensor],
    q_offsets: Tensor,
    activation: str,
    scale: float = 1.0,
    logit_scale: float = 1.0,
    window: int | None = None,
) -> Tensor:
    """The definition, one number at a time; k and v hold one tensor ``[Lk, H, d]`` per sequence."""
    act = ORACLE[activation]
    out = torch.zeros_like(q)
    for b in range(len(k)):
        for i in range(int(q_offsets[b + 1] - q_offsets[b])):
            row = int(q_offsets[b]) + i
            for h in range(q.shape[1]):
                for j in range(k[b].shape[0]):
                    if window is None or abs(i - j) <= window:
                        logit = logit_scale * float(q[row, h] @ k[b][j, h])
                        out[row, h] += scale * act(logit) * v[b][j, h]
    return out


def split(values: Tensor, offsets: Tensor) -> list[Tensor]:
    return [values[offsets[b] : offsets[b + 1]] for b in range(offsets.numel() - 1)]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_each_activation_equals_the_definition(activation: str) -> None:
    q, q_offsets = make([3, 0, 1, 4], 2, 3, seed=1)
    k, kv_offsets = make([2, 5, 0, 3], 2, 3, seed=2)
    v, _ = make([2, 5, 0, 3], 2, 3, seed=3)
    out = gdpa(q, k, v, q_offsets, kv_offsets, activation=activation, scale=0.3, logit_scale=1.7)
    want = loop(q, split(k, kv_offsets), split(v, kv_offsets), q_offsets, activation, 0.3, 1.7)
    torch.testing.assert_close(out, want)
    assert not out[3].any(), "a sequence without keys gives zero"


def test_activations_keep_zero_at_zero() -> None:
    """The padded form relies on it; see test_each_activation for the values themselves."""
    assert all(ORACLE[name](0.0) == 0 for name in ACTIVATIONS)


@pytest.mark.parametrize("window", [0, 1, 3])
def test_window(window: int) -> None:
    q, q_offsets = make([5, 2], 1, 3, seed=1)
    k, kv_offsets = make([4, 6], 1, 3, seed=2)
    out = gdpa(q, k, k, q_offsets, kv_offsets, activation="silu", window=window)
    keys = split(k, kv_offsets)
    torch.testing.assert_close(out, loop(q, keys, keys, q_offsets, "silu", window=window))


def test_dense_keys_equal_packed_ones() -> None:
    q, q_offsets = make([3, 0, 70, 2], 2, 3, seed=1)
    k = torch.randn(4, 6, 2, 3, dtype=torch.float64)
    v = torch.randn(4, 6, 2, 3, dtype=torch.float64)
    packed = torch.arange(5) * 6
    dense_out = gdpa(q, k, v, q_offsets)
    torch.testing.assert_close(dense_out, gdpa(q, k.flatten(0, 1), v.flatten(0, 1), q_offsets, packed))
    torch.testing.assert_close(dense_out, loop(q, list(k), list(v), q_offsets, "gelu"))


@pytest.mark.parametrize("lengths", [[33, 1, 64, 65, 200, 32], [1], [0, 0, 40], [31] * 9])
def test_odd_lengths_in_several_groups(lengths: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels.jagged.padding.GROUP_ELEMENTS", 4000)
    q, offsets = make(lengths, 2, 5, seed=1)
    k, _ = make(lengths, 2, 5, seed=2)
    v, _ = make(lengths, 2, 5, seed=3)
    out = gdpa(q, k, v, offsets, offsets, activation="gelu_tanh", window=7)
    for i, (a, b, c) in enumerate(zip(split(q, offsets), split(k, offsets), split(v, offsets), strict=True)):
        near = (torch.arange(len(a))[:, None] - torch.arange(len(a))).abs() <= 7
        p = F.gelu(torch.einsum("ihd,jhd->hij", a, b), approximate="tanh") * near
        want = torch.einsum("hij,jhd->ihd", p, c)
        torch.testing.assert_close(split(out, offsets)[i], want)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("window", [None, 1])
def test_gradients_of_packed_keys(activation: str, window: int | None) -> None:
    q, q_offsets = make([2, 0, 1, 3], 2, 2, seed=1)
    k, kv_offsets = make([1, 2, 0, 3], 2, 2, seed=2)
    v, _ = make([1, 2, 0, 3], 2, 2, seed=3)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return gdpa(q, k, v, q_offsets, kv_offsets, activation=activation, scale=0.5, logit_scale=0.7, window=window)

    assert torch.autograd.gradcheck(call, tuple(x.requires_grad_() for x in (q, k, v)))


def test_gradients_of_dense_keys() -> None:
    q, q_offsets = make([3, 0, 1], 2, 3, seed=1)
    k, v = torch.randn(2, 3, 4, 2, 3, dtype=torch.float64, requires_grad=True)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return gdpa(q, k, v, q_offsets, activation="silu", scale=0.5, logit_scale=0.7)

    assert torch.autograd.gradcheck(call, (q.requires_grad_(), k, v))


def test_learned_queries_equal_their_copies() -> None:
    learned = torch.randn(3, 2, 4, dtype=torch.float64)
    k, kv_offsets = make([5, 0, 40, 1], 2, 4, seed=2)
    v, _ = make([5, 0, 40, 1], 2, 4, seed=3)
    out = gdpa(learned, k, v, None, kv_offsets, activation="silu", window=2)
    assert out.shape == (4, 3, 2, 4)
    want = gdpa(learned.repeat(4, 1, 1), k, v, torch.arange(5) * 3, kv_offsets, activation="silu", window=2)
    torch.testing.assert_close(out.flatten(0, 1), want)


def test_impressions_of_a_request_share_its_keys() -> None:
    q, q_offsets = make([3, 0, 2, 4, 1], 2, 4, seed=1)
    request_index = torch.tensor([0, 0, 2, 2, 2])
    k, kv_offsets = make([5, 3, 2], 2, 4, seed=2)
    v, _ = make([5, 3, 2], 2, 4, seed=3)
    keys, values = (torch.cat([split(x, kv_offsets)[r] for r in request_index]) for x in (k, v))
    own = offsets_from_lengths(kv_offsets.diff()[request_index])
    out = gdpa(q, k, v, q_offsets, kv_offsets, request_index=request_index)
    torch.testing.assert_close(out, gdpa(q, keys, values, q_offsets, own))


def test_query_heads_share_key_heads() -> None:
    q, q_offsets = make([3, 1, 40], 6, 4, seed=1)
    k, kv_offsets = make([5, 0, 2], 2, 4, seed=2)
    v, _ = make([5, 0, 2], 2, 4, seed=3)
    out = gdpa(q, k, v, q_offsets, kv_offsets)
    copies = (x.repeat_interleave(3, dim=1) for x in (k, v))
    torch.testing.assert_close(out, gdpa(q, *copies, q_offsets, kv_offsets))


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("dense", [False, True])
def test_gradients_of_grouped_heads_and_learned_queries(learned: bool, dense: bool) -> None:
    q, q_offsets = make([2, 0, 3], 4, 2, seed=1)
    k, kv_offsets = make([2, 2, 2], 2, 2, seed=2)
    v, _ = make([2, 2, 2], 2, 2, seed=3)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if dense:
            return gdpa(q, k.view(3, 2, 2, 2), v.view(3, 2, 2, 2), None if learned else q_offsets)
        return gdpa(q, k, v, None if learned else q_offsets, kv_offsets)

    assert torch.autograd.gradcheck(call, tuple(x.requires_grad_() for x in (q, k, v)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_operator_passes_opcheck(dtype: torch.dtype) -> None:
    q, q_offsets = make([3, 0, 1], 2, 3, seed=1)
    k, kv_offsets = make([2, 5, 0], 2, 3, seed=2)
    q, k, v = (x.to(dtype).requires_grad_() for x in (q, k, k * 2))
    torch.library.opcheck(_gdpa, (q, k, v, q_offsets, kv_offsets, "gelu", 0.5, 0.7, 1, -1))
    k, v = (torch.randn(3, 4, 2, 3, dtype=dtype, requires_grad=True) for _ in range(2))
    torch.library.opcheck(_gdpa, (q, k, v, q_offsets, None, "relu2", 1.0, 1.0, -1, -1))
    learned = torch.randn(5, 2, 3, dtype=dtype, requires_grad=True)
    torch.library.opcheck(_gdpa, (learned, k, v, None, None, "silu", 1.0, 1.0, -1, -1))


def test_low_precision_is_computed_in_float32() -> None:
    q, offsets = make([5, 40], 2, 8, seed=1)
    k, _ = make([5, 40], 2, 8, seed=2)
    q, k = q.bfloat16(), k.bfloat16()
    out = gdpa(q, k, k, offsets, offsets)
    assert out.dtype == torch.bfloat16
    exact = gdpa(q.float(), k.float(), k.float(), offsets, offsets)
    assert torch.equal(out, exact.bfloat16())


def test_autocast_does_not_reach_inside() -> None:
    q, offsets = make([5, 40], 2, 8, seed=1)
    k, _ = make([5, 40], 2, 8, seed=2)
    q, k = q.float().requires_grad_(), k.float().requires_grad_()
    exact = torch.autograd.grad(gdpa(q, k, k, offsets, offsets).sum(), (q, k))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = gdpa(q, k, k, offsets, offsets)
        assert out.dtype == torch.float32
        for got, want in zip(torch.autograd.grad(out.sum(), (q, k)), exact, strict=True):
            assert torch.equal(got, want)


def test_empty_batches() -> None:
    for lengths in ([], [0, 0]):
        q, offsets = make(lengths, 2, 3, seed=1)
        q.requires_grad_()
        k = torch.randn(len(lengths), 4, 2, 3, dtype=torch.float64, requires_grad=True)
        out = gdpa(q, k, k, offsets)
        assert out.shape == (0, 2, 3)
        out.sum().backward()
        assert k.grad is not None
        assert not k.grad.any()


def test_one_sequence_never_touches_another() -> None:
    q, offsets = make([3, 40, 2], 2, 3, seed=1)
    k, _ = make([3, 40, 2], 2, 3, seed=2)
    clean = gdpa(q, k, k, offsets, offsets)
    q[3:43], k[3:43] = torch.nan, torch.inf
    dirty = gdpa(q, k, k, offsets, offsets)
    assert torch.equal(clean[:3], dirty[:3])
    assert torch.equal(clean[43:], dirty[43:])


def test_wrong_arguments_are_refused() -> None:
    q, offsets = make([3], 2, 3, seed=1)
    with pytest.raises(ValueError, match="activation must be one of"):
        gdpa(q, q, q, offsets, offsets, activation="softmax")
    with pytest.raises(ValueError, match="window"):
        gdpa(q, q, q, offsets, offsets, window=-2)
    with pytest.raises(ValueError, match="do not go together"):
        gdpa(q, q[:, :, :2], q[:, :, :2], offsets, offsets)
    with pytest.raises(ValueError, match="do not go together"):
        gdpa(q[:, :1], q, q, offsets, offsets)
    with pytest.raises(ValueError, match="request_index"):
        gdpa(q, q, q, offsets, offsets, request_index=torch.zeros(1, dtype=torch.int64), window=1)
    with pytest.raises(ValueError, match="keys must be"):
        gdpa(q, q, q, offsets)


def test_scale_is_as_exact_as_the_inputs() -> None:
    q, offsets = make([2, 0, 3], 1, 4, seed=1)
    q.requires_grad_()
    out, whole = (gdpa(q, q, q, offsets, offsets, scale=scale) for scale in (0.1, 1.0))
    torch.testing.assert_close(out, whole * 0.1, rtol=1e-14, atol=1e-14)
    (got,), (want,) = (torch.autograd.grad(x.sum(), q) for x in (out, whole))
    torch.testing.assert_close(got, want * 0.1, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_the_default_dtype_does_not_matter(default: torch.dtype, dtype: torch.dtype) -> None:
    q, offsets = make([2, 0, 3], 1, 4, seed=1)

    def run() -> list[Tensor]:
        leaf = q.to(dtype).requires_grad_()
        out = gdpa(leaf, leaf, leaf, offsets, offsets, scale=0.1, window=1)
        return [out, *torch.autograd.grad(out.sum(), leaf)]

    want = run()
    torch.set_default_dtype(default)
    try:
        got = run()
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
