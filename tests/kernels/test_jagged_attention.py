"""Jagged softmax attention against a loop over sequences."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.jagged import offsets_from_lengths
from kernels.jagged_attention import jagged_attention
from kernels.jagged_attention.op import _jagged_attention


def make(lengths: list[int], heads: int, width: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    offsets = offsets_from_lengths(torch.tensor(lengths, dtype=torch.int64))
    rows = torch.randn(int(offsets[-1]), heads, width, generator=generator, dtype=torch.float64)
    return rows, offsets


def split(values: Tensor, offsets: Tensor) -> list[Tensor]:
    return [values[offsets[b] : offsets[b + 1]] for b in range(offsets.numel() - 1)]


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None, scale: float | None) -> Tensor:
    """The definition for one sequence, one query at a time."""
    out = torch.zeros(q.shape[0], v.shape[1], v.shape[2], dtype=q.dtype)
    for i in range(q.shape[0]):
        place = i + k.shape[0] - q.shape[0]
        seen = [
            j for j in range(k.shape[0]) if (not causal or j <= place) and (window is None or abs(place - j) <= window)
        ]
        for h in range(q.shape[1] if seen else 0):
            logits = torch.stack([q[i, h] @ k[j, h] for j in seen]) * (scale or q.shape[2] ** -0.5)
            out[i, h] = torch.softmax(logits, 0) @ v[seen, h]
    return out


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 0, 2])
@pytest.mark.parametrize("same", [True, False])
def test_equals_the_definition(causal: bool, window: int | None, same: bool) -> None:
    q_lengths, kv_lengths = [3, 0, 1, 6, 2], [3, 0, 1, 6, 2] if same else [5, 4, 0, 2, 3]
    q, q_offsets = make(q_lengths, 2, 3, seed=1)
    k, kv_offsets = make(kv_lengths, 2, 3, seed=2)
    v, _ = make(kv_lengths, 2, 4, seed=3)
    out = jagged_attention(q, k, v, q_offsets, kv_offsets, causal=causal, window=window, scale=0.8)
    parts = zip(split(q, q_offsets), split(k, kv_offsets), split(v, kv_offsets), strict=True)
    torch.testing.assert_close(out, torch.cat([attend(*p, causal, window, 0.8) for p in parts]))


@pytest.mark.parametrize("lengths", [[33, 1, 64, 65, 200, 32], [1], [0, 0, 40], [31] * 9])
def test_odd_lengths_in_several_groups(lengths: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels.jagged.padding.GROUP_ELEMENTS", 4000)
    q, offsets = make(lengths, 2, 5, seed=1)
    k, _ = make(lengths, 2, 5, seed=2)
    v, _ = make(lengths, 2, 5, seed=3)
    out = jagged_attention(q, k, v, offsets, offsets)
    for i, (a, b, c) in enumerate(zip(split(q, offsets), split(k, offsets), split(v, offsets), strict=True)):
        p = torch.softmax(torch.einsum("ihd,jhd->hij", a, b) * 5**-0.5, dim=2)
        torch.testing.assert_close(split(out, offsets)[i], torch.einsum("hij,jhd->ihd", p, c))


def test_large_logits_neither_overflow_nor_vanish() -> None:
    q, offsets = make([4, 50], 1, 3, seed=1)
    k, _ = make([4, 50], 1, 3, seed=2)
    for size in (1e3, 1e-6):
        out = jagged_attention((q * size).float(), k.float(), k.float(), offsets, offsets)
        exact = jagged_attention(q * size, k, k, offsets, offsets)
        torch.testing.assert_close(out.double(), exact, rtol=1e-3, atol=1e-3)
    shifted = jagged_attention(torch.ones_like(q), -100 * torch.ones_like(k), k, offsets, offsets)
    torch.testing.assert_close(shifted[0], k[:4].mean(0))


def test_learned_queries_equal_their_copies() -> None:
    learned = torch.randn(3, 2, 4, dtype=torch.float64)
    k, kv_offsets = make([5, 0, 40, 1], 2, 4, seed=2)
    v, _ = make([5, 0, 40, 1], 2, 6, seed=3)
    out = jagged_attention(learned, k, v, None, kv_offsets)
    assert out.shape == (4, 3, 2, 6)
    copies = learned.repeat(4, 1, 1)
    want = jagged_attention(copies, k, v, torch.arange(5) * 3, kv_offsets)
    torch.testing.assert_close(out.flatten(0, 1), want)
    assert not out[1].any()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 1])
@pytest.mark.parametrize("learned", [False, True])
def test_gradients(causal: bool, window: int | None, learned: bool) -> None:
    q, q_offsets = make([2, 0, 1, 3], 2, 2, seed=1)
    k, kv_offsets = make([1, 2, 0, 3], 2, 2, seed=2)
    v, _ = make([1, 2, 0, 3], 2, 1, seed=3)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        offsets = None if learned else q_offsets
        return jagged_attention(q, k, v, offsets, kv_offsets, causal=causal, window=window)

    assert torch.autograd.gradcheck(call, tuple(x.requires_grad_() for x in (q, k, v)))


def test_impressions_of_a_request_share_its_keys() -> None:
    q, q_offsets = make([3, 0, 2, 4, 1], 2, 4, seed=1)
    request_index = torch.tensor([0, 0, 2, 2, 2])
    k, kv_offsets = make([5, 3, 2], 2, 4, seed=2)
    v, _ = make([5, 3, 2], 2, 4, seed=3)
    keys, values = (torch.cat([split(x, kv_offsets)[r] for r in request_index]) for x in (k, v))
    own = offsets_from_lengths(kv_offsets.diff()[request_index])
    out = jagged_attention(q, k, v, q_offsets, kv_offsets, request_index=request_index)
    torch.testing.assert_close(out, jagged_attention(q, keys, values, q_offsets, own))


@pytest.mark.parametrize("learned", [False, True])
def test_query_heads_share_key_heads(learned: bool) -> None:
    q, q_offsets = make([3, 1, 4], 4, 2, seed=1)
    k, kv_offsets = make([2, 0, 3], 2, 2, seed=2)
    v, _ = make([2, 0, 3], 2, 3, seed=3)
    offsets = None if learned else q_offsets

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return jagged_attention(q, k, v, offsets, kv_offsets)

    copies = (x.repeat_interleave(2, dim=1) for x in (k, v))
    torch.testing.assert_close(call(q, k, v), call(q, *copies))
    assert torch.autograd.gradcheck(call, tuple(x.requires_grad_() for x in (q, k, v)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("causal", [False, True])
def test_operator_passes_opcheck(dtype: torch.dtype, causal: bool) -> None:
    q, q_offsets = make([3, 0, 1], 2, 3, seed=1)
    k, kv_offsets = make([2, 5, 0], 2, 3, seed=2)
    q, k, v = (x.to(dtype).requires_grad_() for x in (q, k, k * 2))
    torch.library.opcheck(_jagged_attention, (q, k, v, q_offsets, kv_offsets, 0.5, causal, -1))
    torch.library.opcheck(_jagged_attention, (q, k, v, None, kv_offsets, 0.5, causal, 1))


def test_low_precision_is_computed_in_float32() -> None:
    q, offsets = make([5, 40], 2, 8, seed=1)
    k, _ = make([5, 40], 2, 8, seed=2)
    q, k = q.bfloat16(), k.bfloat16()
    out = jagged_attention(q, k, k, offsets, offsets)
    assert torch.equal(out, jagged_attention(q.float(), k.float(), k.float(), offsets, offsets).bfloat16())


def test_autocast_does_not_reach_inside() -> None:
    q, offsets = make([5, 40], 2, 8, seed=1)
    k, _ = make([5, 40], 2, 8, seed=2)
    q, k = q.float().requires_grad_(), k.float().requires_grad_()
    exact = torch.autograd.grad(jagged_attention(q, k, k, offsets, offsets).sum(), (q, k))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = jagged_attention(q, k, k, offsets, offsets)
        assert out.dtype == torch.float32
        for got, want in zip(torch.autograd.grad(out.sum(), (q, k)), exact, strict=True):
            assert torch.equal(got, want)


def test_empty_batches() -> None:
    for lengths in ([], [0, 0]):
        q, offsets = make(lengths, 2, 3, seed=1)
        q.requires_grad_()
        learned = torch.randn(2, 2, 3, dtype=torch.float64, requires_grad=True)
        own = jagged_attention(q, q, q, offsets, offsets)
        pooled = jagged_attention(learned, q, q, None, offsets)
        assert own.shape == (0, 2, 3)
        assert pooled.shape == (len(lengths), 2, 2, 3)
        assert not pooled.any()
        (own.sum() + pooled.sum()).backward()
        assert learned.grad is not None
        assert not learned.grad.any()


def test_one_sequence_never_touches_another() -> None:
    q, offsets = make([3, 40, 2], 2, 3, seed=1)
    k, _ = make([3, 40, 2], 2, 3, seed=2)
    clean = jagged_attention(q, k, k, offsets, offsets)
    q[3:43], k[3:43] = torch.nan, torch.inf
    dirty = jagged_attention(q, k, k, offsets, offsets)
    assert torch.equal(clean[:3], dirty[:3])
    assert torch.equal(clean[43:], dirty[43:])


def test_wrong_arguments_are_refused() -> None:
    q, offsets = make([3], 2, 3, seed=1)
    with pytest.raises(ValueError, match="window"):
        jagged_attention(q, q, q, offsets, offsets, window=-1)
    with pytest.raises(ValueError, match="do not go together"):
        jagged_attention(q, q[:, :1], q, offsets, offsets)
    with pytest.raises(ValueError, match="do not go together"):
        jagged_attention(q[:, :1], q, q, offsets, offsets)
    with pytest.raises(ValueError, match="request_index"):
        jagged_attention(q, q, q, offsets, offsets, request_index=torch.zeros(1, dtype=torch.int64), causal=True)
