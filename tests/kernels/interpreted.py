"""Runs the Triton kernels on the CPU, element by element; started by ``test_triton_interpreted.py``.

A process of its own: Triton reads ``TRITON_INTERPRET`` when a kernel is defined.
"""

from __future__ import annotations

import sys
from itertools import product

import torch
from torch import Tensor

from kernels.common import launch
from kernels.common.activations import activate, activate_with_slope, activate_with_slope_in_less
from kernels.common.launch import Call, Config
from kernels.gdpa import reference as gdpa_reference
from kernels.gdpa import triton as gdpa_triton
from kernels.jagged_attention import reference as softmax_reference
from tests.kernels.unwritten import apart, unwritten_is_nan

TOLERANCE = 2e-6
"""Relative, of float32 sums of at most 64 products against float64: some roundings of 6e-8."""

_APART: set[object] = set()
"""Activations that ``check`` has seen on tensors whose elements do not lie side by side."""

Q_LENGTHS, KV_LENGTHS = [3, 0, 40, 1, 5, 2], [5, 4, 33, 0, 1, 37]


def offsets(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def make(
    heads: int, key_heads: int, width: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    q_offsets, kv_offsets = offsets(Q_LENGTHS), offsets(KV_LENGTHS)
    fused = torch.randn(int(kv_offsets[-1]), 2, key_heads, width).to(dtype)
    q = torch.randn(int(q_offsets[-1]), heads, width).to(dtype)
    return q, fused[:, 0], fused[:, 1], torch.randn_like(q), q_offsets, kv_offsets


def close(got: Tensor, want: Tensor, tolerance: float = TOLERANCE) -> None:
    assert got.isfinite().all()
    error = (got.double() - want).norm() / want.norm().clamp(min=1e-30)
    assert error < tolerance, float(error)


def blocks(tma: bool, **extra: object) -> Config:
    return {"BLOCK_Q": 32, "BLOCK_KV": 32, "TMA": tma, "STAGES": 2, "num_warps": 4, **extra}


def check(
    call: tuple[object, ...], grad: Tensor, config: Config, back: Config, dtype: torch.dtype = torch.float32
) -> None:
    q, k, v, q_offsets, kv_offsets, act, logit, factor, causal, window, _ = call
    exact = [x.double() for x in (q, k, v)]  # type: ignore[attr-defined]
    one = Call(*call)  # type: ignore[arg-type]
    out, lse = launch.forward(one, config)
    gradients = launch.backward(one, grad, out if act == "softmax" else None, lse, back)
    if act not in _APART:
        _APART.add(act)
        other = Call(*(apart(x) if isinstance(x, Tensor) else x for x in call))  # type: ignore[arg-type]
        away, away_lse = launch.forward(other, config)
        saved = (None, None) if away_lse is None else (apart(away), apart(away_lse))
        away_gradients = launch.backward(other, apart(grad), *saved, back)
        for a, b in zip((out, *gradients), (away, *away_gradients), strict=True):
            assert torch.equal(a, b)
    if act == "softmax":
        options = (q_offsets, kv_offsets, logit, causal, window)
        want_out, want_lse = softmax_reference.forward(*exact, *options)
        want = softmax_reference.backward(grad.double(), *exact, want_out, want_lse, *options)
        assert lse is not None
        close(lse, want_lse)
    else:
        choice = (q_offsets, kv_offsets, act, factor, logit, window)
        want_out = gdpa_reference.forward(*exact, *choice)
        want = gdpa_reference.backward(grad.double(), *exact, *choice)
    close(out, want_out)
    for got, expected in zip(gradients, want, strict=True):
        close(got, expected.flatten(0, 1) if expected.dim() == 4 else expected)


def short() -> None:
    """K and V of a sequence in one block, or two; grouped heads; window."""
    q, k, v, grad, q_offsets, kv_offsets = make(2, 1, 20)
    for window, tma in ((-1, False), (3, True)):
        call = (q, k, v, q_offsets, kv_offsets, "gelu", 0.5, 0.7, False, window, 37)
        config = blocks(tma, HALVES=2 if tma else 1, CHUNK=32)
        config["BLOCK_KV"] = 32 if tma else 64
        check(call, grad, config, {**blocks(tma), "BLOCK_KV": 64})


def general() -> None:
    """K and V streamed past the queries."""
    q, k, v, grad, q_offsets, kv_offsets = make(2, 2, 8)
    for window, tma in ((-1, False), (3, True)):
        call = (q, k, v, q_offsets, kv_offsets, "silu", 0.5, 0.7, False, window, -1)
        check(call, grad, blocks(tma), blocks(tma, query=blocks(tma)))


def dense() -> None:
    """The same number of keys for all, and queries for all."""
    torch.manual_seed(0)
    k, v = torch.randn(2, 3, 6, 2, 8)
    learned, grad = torch.randn(5, 2, 8), torch.randn(15, 2, 8)
    q_offsets = offsets([3, 0, 40])
    for queries, where, gradient in ((learned, None, grad), (torch.randn(43, 2, 8), q_offsets, torch.randn(43, 2, 8))):
        for act, extra, more in (
            ("relu2", {"HALVES": 1, "CHUNK": 32}, {}),
            ("hardswish", {}, {"query": blocks(False)}),
        ):
            back = blocks(False, **more)
            check((queries, k, v, where, None, act, 0.5, 0.7, False, -1, -1), gradient, blocks(False, **extra), back)


def softmax() -> None:
    """Causal and window, other lengths of keys than of queries, values of another width, learned queries."""
    q, k, v, grad, q_offsets, kv_offsets = make(2, 2, 8)
    for causal, window, tma in ((False, -1, False), (True, -1, True), (False, 3, True), (True, 3, False)):
        call = (q, k, v, q_offsets, kv_offsets, "softmax", 0.5, 1.0, causal, window, -1)
        check(call, grad, blocks(tma), blocks(tma, query=blocks(tma)))
    values, learned = torch.randn(v.shape[0], 2, 20), torch.randn(3, 2, 8)
    call = (learned, k, values, None, kv_offsets, "softmax", 0.5, 1.0, False, -1, -1)
    back = blocks(False, query=blocks(False))
    check(call, torch.randn(3 * len(KV_LENGTHS), 2, 20), blocks(False), back)


def empty() -> None:
    """Nothing at all; queries but no keys; keys but no queries."""
    for q_lengths, kv_lengths in (([], []), ([0, 0], [0, 0]), ([2, 1], [0, 0]), ([0, 0], [3, 1])):
        q, k = torch.randn(sum(q_lengths), 2, 8), torch.randn(sum(kv_lengths), 2, 8)
        where = (offsets(q_lengths), offsets(kv_lengths))
        for bound in (-1, 4):
            out = gdpa_triton.forward(q, k, k, *where, "silu", 1.0, 1.0, -1, bound)
            gradients = gdpa_triton.backward(torch.randn_like(q), q, k, k, *where, "silu", 1.0, 1.0, -1, bound)
            assert out.shape == q.shape
            assert not any(x.any() for x in (out, *gradients))
    learned, none = torch.randn(3, 2, 8), torch.randn(4, 0, 2, 8)
    out = gdpa_triton.forward(learned, none, none, None, None, "silu", 1.0, 1.0, -1)
    assert out.shape == (12, 2, 8)
    gradients = gdpa_triton.backward(out, learned, none, none, None, None, "silu", 1.0, 1.0, -1)
    assert [x.shape for x in gradients] == [learned.shape, none.shape, none.shape]
    assert not any(x.any() for x in (out, *gradients))


def leaks() -> None:
    """What one sequence holds never reaches another, whatever a block reads beyond its end."""
    q, k, v, grad, q_offsets, kv_offsets = make(1, 1, 8)
    for tma, act in ((False, "softmax"), (True, "silu")):
        dirty = [x.clone() for x in (q, k, v, grad)]
        for x, where in zip(dirty, (q_offsets, kv_offsets, kv_offsets, q_offsets), strict=True):
            x[where[2] : where[3]] = torch.nan
        results = []
        for a, b, c, g in ((q, k, v, grad), dirty):
            call = Call(a, b, c, q_offsets, kv_offsets, act, 1.0, 1.0, False, -1, -1)
            out, lse = launch.forward(call, blocks(tma))
            back = blocks(tma, query=blocks(tma))
            results.append((out, *launch.backward(call, g, out if lse is not None else None, lse, back)))
        for clean, other, where in zip(*results, (q_offsets, q_offsets, kv_offsets, kv_offsets), strict=True):
            assert torch.equal(clean[: where[2]], other[: where[2]])
            assert torch.equal(clean[where[3] :], other[where[3] :])


def activations() -> None:
    """Values and slopes against float64."""
    import triton
    import triton.language as tl

    @triton.jit
    def values(X, Y, S, ACT: tl.constexpr, FAST: tl.constexpr, LESS: tl.constexpr, N: tl.constexpr):  # type: ignore
        i = tl.arange(0, N)
        x = tl.load(X + i)
        if LESS:
            y, slope = activate_with_slope_in_less(x, ACT)
        else:
            y, slope = activate_with_slope(x, ACT, FAST)
        tl.store(Y + i, y)
        tl.store(S + i, slope)
        tl.store(Y + N + i, activate(x, ACT, FAST))

    points = torch.linspace(-12, 12, 4096)
    kinks = torch.tensor([-3.0, 3.0])
    points[0] = 0.0
    points[1:7] = torch.cat([kinks, torch.nextafter(kinks, -kinks), torch.nextafter(kinks, 2 * kinks)])
    for name, (fast, less) in product(gdpa_reference.ACTIVATIONS, ((False, False), (True, False), (True, True))):
        y, slope = torch.empty(2, 4096), torch.empty(4096)
        values[(1,)](points, y, slope, name, fast, less, 4096)
        x = points.double().requires_grad_()
        want = gdpa_reference._ACTIVATIONS[name].forward(x)
        (want_slope,) = torch.autograd.grad(want.sum(), x)
        value_error, slope_error = (1e-4, 2e-4) if fast and name == "gelu" else (2e-6, 2e-6)
        assert less or torch.equal(y[0], y[1])
        assert y[0, 0] == 0, name
        assert ((y[0] - want).abs() / (1 + want.abs())).max() < value_error, name
        assert ((slope - want_slope).abs() / (1 + want_slope.abs())).max() < slope_error, name
        values[(1,)](torch.full((4096,), torch.nan), y, slope, name, fast, less, 4096)
        assert y.isnan().all(), name


if __name__ == "__main__":
    torch.set_num_threads(1)
    with unwritten_is_nan():
        for part in sys.argv[1:]:
            globals()[part]()
    print("checked")
