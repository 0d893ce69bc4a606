"""The Triton kernels on a GPU, through the ops, against the references in float64."""

from __future__ import annotations

import itertools

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.common import launch
from kernels.common.activations import activate_with_slope
from kernels.common.launch import Call
from kernels.gdpa import gdpa
from kernels.gdpa import reference as gdpa_reference
from kernels.jagged import offsets_from_lengths
from kernels.jagged_attention import jagged_attention
from kernels.jagged_attention import reference as softmax_reference
from tests.kernels.graphs import check_graph, without_waiting
from tests.kernels.unwritten import unwritten_is_nan

pytestmark = pytest.mark.gpu

TOLERANCE = {torch.float32: 5e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}
"""Norm of the error over that of the result: float32 sums of thousands of products; two roundings to 2^-12 and 2^-9."""

LENGTHS = [3, 0, 700, 1, 129, 64, 0, 65, 2]


def packed(lengths: list[int], heads: int, width: int, dtype: torch.dtype, seed: int) -> tuple[list[Tensor], Tensor]:
    """Views of one fused tensor, as a projection makes them, and offsets."""
    torch.manual_seed(seed)
    offsets = offsets_from_lengths(torch.tensor(lengths)).cuda()
    fused = torch.randn(int(offsets[-1]), 3, heads, width, device="cuda").mul_(0.5).to(dtype)
    return list(fused.unbind(1)), offsets


def same(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    assert got.isfinite().all()
    assert (got.double() - want).norm() / want.norm() < TOLERANCE[dtype]


def compare(op, inputs: list[Tensor], dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    """Output and gradients of ``op`` on the GPU against float64, which the references compute on the GPU too."""
    results = []
    for precise in (False, True):
        leaves = [(x.double() if precise else x).detach().requires_grad_() for x in inputs]
        with unwritten_is_nan():
            out = op(*leaves)
            torch.manual_seed(1)
            grad = torch.randn(out.shape, device="cuda").to(dtype).to(out.dtype)
            results.append((out, *torch.autograd.grad(out, leaves, grad)))
    for got, want in zip(*results, strict=True):
        assert got.dtype == dtype
        same(got, want, dtype)


@pytest.mark.parametrize(
    ("width", "dtype"),
    [
        (32, torch.bfloat16), (64, torch.float16), (96, torch.bfloat16), (128, torch.bfloat16), (256, torch.bfloat16),
        (33, torch.bfloat16), (64, torch.float32),
    ],
)  # fmt: skip
def test_gdpa_self_attention(width: int, dtype: torch.dtype) -> None:
    inputs, offsets = packed(LENGTHS, 2, width, dtype, 0)
    compare(lambda q, k, v: gdpa(q, k, v, offsets, offsets, activation="silu", scale=0.5), inputs, dtype)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("act", ["gelu_tanh", "softmax"])
def test_tensors_on_a_gpu_that_is_not_the_current_one(act: str) -> None:
    """Forward and backward there, at first and again, and with tensors of the current one in between."""
    (q, k, v), offsets = packed(LENGTHS, 2, 128, torch.bfloat16, 0)

    def run(device: int) -> list[Tensor]:
        leaves = [x.to(device).detach().requires_grad_() for x in (q, k, v)]
        where = offsets.to(device)
        out = jagged_attention(*leaves, where, where) if act == "softmax" else gdpa(*leaves, where, where)
        return [x.cpu() for x in (out, *torch.autograd.grad(out.float().square().sum(), leaves))]

    here, there, again, back = run(0), run(1), run(1), run(0)
    assert torch.cuda.current_device() == 0
    for a, b, c, d in zip(here, there, again, back, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c) and torch.equal(a, d)


@pytest.mark.parametrize(
    ("activation", "keys"),
    [
        *itertools.product(("gelu", "gelu_tanh", "relu2"), (7, 64, 100, 200)),
        *((activation, 64) for activation in ("identity", "silu", "relu", "hardswish")),
    ],
)
def test_gdpa_with_few_keys(activation: str, keys: int) -> None:
    (q, _, _), offsets = packed(LENGTHS, 4, 128, torch.bfloat16, 0)
    k, v = (torch.randn(len(LENGTHS), keys, 2, 128, device="cuda").mul_(0.5).bfloat16() for _ in range(2))
    compare(lambda q, k, v: gdpa(q, k, v, offsets, activation=activation, logit_scale=0.3), [q, k, v], torch.bfloat16)


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("blocks", [1, 2])
def test_streamed_queries(width: int, blocks: int) -> None:
    """The kernel scheduled by hand: ragged tiles, sequences without queries or keys, and NaN in a neighbour."""
    (q, _, _), offsets = packed([*LENGTHS, *[70] * 300], 2, width, torch.bfloat16, 0)
    lengths = torch.randint(0, 128 * blocks + 1, (offsets.numel() - 1,))
    lengths[:3] = torch.tensor([0, 1, 128 * blocks])
    kv_offsets = offsets_from_lengths(lengths).cuda()
    k, v = (torch.randn(int(kv_offsets[-1]), 2, width, device="cuda").mul_(0.5).bfloat16() for _ in range(2))
    config = {"BLOCK_KV": 128, "BLOCKS": blocks, "BUFFERS": 3 - blocks, "STAGES": 4, "TMA": True, "num_warps": 4}
    results = []
    for dirty in (False, True):
        if dirty:
            for x, where in ((q, offsets), (k, kv_offsets), (v, kv_offsets)):
                x[where[2] : where[3]] = torch.nan
        call = Call(q, k, v, offsets, kv_offsets, "silu", 0.7, 0.5, False, -1, 128 * blocks)
        results.append(launch.forward(call, config)[0])
    torch.cuda.synchronize()
    clean, other = results
    assert torch.equal(clean[: offsets[2]], other[: offsets[2]])
    assert torch.equal(clean[offsets[3] :], other[offsets[3] :])
    (q, _, _), _ = packed([*LENGTHS, *[70] * 300], 2, width, torch.bfloat16, 0)
    k[kv_offsets[2] : kv_offsets[3]] = v[kv_offsets[2] : kv_offsets[3]] = 0
    want = gdpa(q.double(), k.double(), v.double(), offsets, kv_offsets, activation="silu", logit_scale=0.7, scale=0.5)
    clean[offsets[2] : offsets[3]] = want[offsets[2] : offsets[3]] = 0
    same(clean, want, torch.bfloat16)


LONG = [("silu", False, -1), ("softmax", False, -1), ("softmax", True, -1)]
WINDOWS = [("silu", False, 50), ("gelu", False, 128), ("softmax", False, 90), ("softmax", True, 40)]


@pytest.mark.parametrize(("act", "causal", "window", "width", "block", "stages", "overlap"), [
    *((*mask, *config) for mask in (*LONG, *WINDOWS) for config in ((64, 128, 2, True), (128, 64, 4, False))),
    *((*mask, 128, 128, 2, True) for mask in LONG),
    *((*mask, 128, 64, 5, True) for mask in WINDOWS),
])  # fmt: skip
def test_long_sequences(
    act: str, causal: bool, window: int, width: int, block: int, stages: int, overlap: bool
) -> None:  # fmt: skip
    """The other kernel scheduled by hand, with grouped heads, more tiles than programs, and NaN in a neighbour."""
    lengths = [*LENGTHS, *[70, 300] * 150]
    (q, _, _), offsets = packed(lengths, 4, width, torch.bfloat16, 0)
    keys = torch.tensor(lengths)
    if not causal:
        keys = torch.randint(0, 500, (offsets.numel() - 1,))
        keys[:3] = torch.tensor([0, 1, 256])
    kv_offsets = offsets_from_lengths(keys).cuda()
    k, v = (torch.randn(int(kv_offsets[-1]), 2, width, device="cuda").mul_(0.5).bfloat16() for _ in range(2))
    config = {"BLOCK_KV": block, "STAGES": stages, "OVERLAP": overlap, "TMA": True, "num_warps": 4}
    options = (act, 0.3, 1.0 if act == "softmax" else 0.5, causal, window, -1)
    clean, lse = launch.forward(Call(q, k, v, offsets, kv_offsets, *options), config)
    exact = (q.double(), k.double(), v.double(), offsets, kv_offsets)
    if lse is None:
        want = gdpa_reference.forward(*exact, act, 0.5, 0.3, window)
    else:
        want, want_lse = softmax_reference.forward(*exact, 0.3, causal, window)
        assert torch.allclose(lse.double(), want_lse, atol=1e-4)
    same(clean, want, torch.bfloat16)
    for x, where in ((q, offsets), (k, kv_offsets), (v, kv_offsets)):
        x[where[2] : where[3]] = torch.nan
    other, _ = launch.forward(Call(q, k, v, offsets, kv_offsets, *options), config)
    assert torch.equal(clean[: offsets[2]], other[: offsets[2]])
    assert torch.equal(clean[offsets[3] :], other[offsets[3] :])


def test_long_sequences_with_dense_keys() -> None:
    """200 keys of each user, a few more than fill a block."""
    (q, _, _), offsets = packed([*LENGTHS, *[70, 300] * 150], 2, 128, torch.bfloat16, 0)
    k, v = (torch.randn(offsets.numel() - 1, 200, 2, 128, device="cuda").mul_(0.5).bfloat16() for _ in range(2))
    config = {"BLOCK_KV": 128, "STAGES": 2, "OVERLAP": False, "TMA": True, "num_warps": 4}
    out, _ = launch.forward(Call(q, k, v, offsets, None, "gelu", 0.3, 0.5, False, -1, -1), config)
    want = gdpa_reference.forward(q.double(), k.double(), v.double(), offsets, None, "gelu", 0.5, 0.3, -1)
    same(out, want, torch.bfloat16)


@pytest.mark.parametrize(("act", "causal", "window", "width", "kept", "stages"), [
    *((*mask, width, 4, 3) for mask in (*LONG, WINDOWS[3]) for width in (64, 128)),
    *((*mask, 64, 4, 8) for mask in WINDOWS[1:3]),
    *((*mask, 128, 3, 4) for mask in WINDOWS[1:]),
])  # fmt: skip
def test_gradients_of_long_sequences(
    act: str, causal: bool, window: int, width: int, kept: int, stages: int
) -> None:  # fmt: skip
    lengths = [*LENGTHS, *[70, 300] * 150]
    (q, _, _), offsets = packed(lengths, 4, width, torch.bfloat16, 0)
    keys = torch.tensor(lengths)
    if not causal:
        keys = torch.randint(0, 500, (offsets.numel() - 1,))
        keys[:3] = torch.tensor([0, 1, 256])
    kv_offsets = offsets_from_lengths(keys).cuda()
    k, v = (torch.randn(int(kv_offsets[-1]), 4, width, device="cuda").mul_(0.5).bfloat16() for _ in range(2))
    grad = torch.randn(q.shape, device="cuda").bfloat16()
    by_hand = {"KEPT": kept, "STAGES": stages, "TMA": True, "num_warps": 4}
    options = (act, 0.3, 1.0 if act == "softmax" else 0.5, causal, window, -1)
    runs = []
    for dirty in (False, True, True):
        if dirty:
            for x, where in ((q, offsets), (k, kv_offsets), (v, kv_offsets), (grad, offsets)):
                x[where[2] : where[3]] = torch.nan
        call = Call(q, k, v, offsets, kv_offsets, *options)
        out, lse = launch.forward(call)
        saved = None if lse is None else out
        runs.append(launch.backward(call, grad, saved, lse, {**by_hand, "query": by_hand}))
        if not dirty:
            exact, where = (q.double(), k.double(), v.double()), (offsets, kv_offsets)
            if lse is None:
                want = gdpa_reference.backward(grad.double(), *exact, *where, act, 0.5, 0.3, window)
            else:
                choice = (*where, 0.3, causal, window)
                want = softmax_reference.backward(
                    grad.double(), *exact, *softmax_reference.forward(*exact, *choice), *choice
                )
            for got, expected in zip(runs[0], want, strict=True):
                same(got, expected, torch.bfloat16)
    for clean, other, again, where in zip(*runs, (offsets, kv_offsets, kv_offsets), strict=True):
        assert torch.equal(clean[: where[2]], other[: where[2]])
        assert torch.equal(clean[where[3] :], other[where[3] :])
        assert torch.equal(other[where[3] :], again[where[3] :])


def test_kernels_by_hand_in_float16() -> None:
    (q, k, v), offsets = packed([*LENGTHS, *[70, 300] * 20], 2, 128, torch.float16, 0)
    grad = torch.randn(q.shape, device="cuda").half()
    exact = (q.double(), k.double(), v.double())
    options = (offsets, offsets, "gelu_tanh", 0.5, 0.3, -1)
    want = [gdpa_reference.forward(*exact, *options), *gdpa_reference.backward(grad.double(), *exact, *options)]
    call = Call(q, k, v, offsets, offsets, "gelu_tanh", 0.3, 0.5, False, -1, -1)
    by_hand = {"KEPT": 4, "STAGES": 3, "TMA": True, "num_warps": 4}
    ahead = {"BLOCK_KV": 128, "STAGES": 2, "OVERLAP": True, "TMA": True, "num_warps": 4}
    got = [launch.forward(call, ahead)[0], *launch.backward(call, grad, None, None, {**by_hand, "query": by_hand})]
    for a, b in zip(got, want, strict=True):
        same(a, b, torch.float16)


@pytest.mark.parametrize("activation", ["identity", "relu", "relu2", "hardswish"])
def test_other_activations_of_long_sequences(activation: str) -> None:
    inputs, offsets = packed([*LENGTHS, *[700, 300] * 10], 2, 128, torch.bfloat16, 0)
    options = {"activation": activation, "logit_scale": 0.3, "scale": 0.5}
    compare(lambda q, k, v: gdpa(q, k, v, offsets, offsets, **options), inputs, torch.bfloat16)


@pytest.mark.parametrize("softmax", [False, True])
def test_a_heavy_tail_of_lengths(softmax: bool) -> None:
    inputs, offsets = packed([16384, 1, 0, 3001, 517, 130, *[70, 9] * 8], 1, 128, torch.bfloat16, 0)

    def op(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if softmax:
            return jagged_attention(q, k, v, offsets, offsets)
        return gdpa(q, k, v, offsets, offsets, activation="silu", logit_scale=0.3)

    compare(op, inputs, torch.bfloat16)


@triton.jit
def fast_activation(X, Y, S, ACT: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    y, slope = activate_with_slope(tl.load(X + i), ACT, True)
    tl.store(Y + i, y)
    tl.store(S + i, slope)


@pytest.mark.parametrize("name", gdpa_reference.ACTIVATIONS)
def test_fast_activations_keep_their_stated_error(name: str) -> None:
    """A tangent t that is off by 2^-11 moves ``x (1 + t) / 2`` and its slope so much; the fit of gelu: 3e-5, 1e-4."""
    x = torch.linspace(-12, 12, 2**16, device="cuda")
    x[0] = 0
    y, slope = torch.empty_like(x), torch.empty_like(x)
    fast_activation[(64,)](x, y, slope, name)
    exact = x.double().requires_grad_()
    want = gdpa_reference._ACTIVATIONS[name].forward(exact)
    (want_slope,) = torch.autograd.grad(want.sum(), exact)
    size, off = x.double().abs(), 2**-11 if "gelu" in name or name == "silu" else 0.0
    rise = 0.5 if name == "silu" else 0.8 + 0.11 * size**2  # the slope of t's argument
    fit = 1.0 if name == "gelu" else 0.0
    assert y[0] == 0
    assert ((y - want).abs() <= off * size / 2 + 3e-5 * fit + 2e-6 * (1 + size**2)).all()
    assert ((slope - want_slope).abs() <= off * (0.5 + size * rise) + 1e-4 * fit + 2e-6 * (1 + size)).all()
    fast_activation[(64,)](torch.full_like(x, torch.nan), y, slope, name)
    assert y.isnan().all()


def test_gdpa_window_and_learned_queries() -> None:
    inputs, offsets = packed(LENGTHS, 2, 64, torch.bfloat16, 0)
    compare(lambda q, k, v: gdpa(q, k, v, offsets, offsets, window=50), inputs, torch.bfloat16)
    learned = torch.randn(20, 2, 64, device="cuda").bfloat16()
    compare(lambda q, k, v: gdpa(q, k, v, None, offsets), [learned, *inputs[1:]], torch.bfloat16)


@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (False, 40), (True, 40)])
@pytest.mark.parametrize("width", [64, 128])
def test_softmax(causal: bool, window: int | None, width: int) -> None:
    inputs, offsets = packed(LENGTHS, 2, width, torch.bfloat16, 0)
    other = offsets_from_lengths(torch.tensor(LENGTHS[::-1])).cuda()

    def op(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return jagged_attention(q, k, v, offsets, other, causal=causal, window=window)

    compare(op, inputs, torch.bfloat16)


@pytest.mark.parametrize(
    ("width", "dtype"),
    [(32, torch.bfloat16), (33, torch.bfloat16), (96, torch.bfloat16), (256, torch.bfloat16), (64, torch.float16)],
)
def test_softmax_of_other_widths(width: int, dtype: torch.dtype) -> None:
    inputs, offsets = packed(LENGTHS, 2, width, dtype, 0)
    compare(lambda q, k, v: jagged_attention(q, k, v, offsets, offsets, causal=True), inputs, dtype)


def test_softmax_in_float32_and_with_learned_queries() -> None:
    inputs, offsets = packed(LENGTHS, 2, 64, torch.float32, 0)
    learned = torch.randn(4, 2, 64, device="cuda")
    compare(lambda q, k, v: jagged_attention(q, k, v, None, offsets), [learned, *inputs[1:]], torch.float32)


def test_two_runs_give_the_same_bits_without_waiting_for_the_device() -> None:
    inputs, offsets = packed([16384, 0, 300, *range(40)], 2, 128, torch.bfloat16, 0)

    def step() -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in inputs]
        out = jagged_attention(*leaves, offsets, offsets) + gdpa(*leaves, offsets, offsets, activation="silu")
        return (out, *torch.autograd.grad(out, leaves, torch.ones_like(out)))

    runs = [without_waiting(step) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_heads_that_are_not_within_rows() -> None:
    inputs, offsets = packed(LENGTHS, 2, 64, torch.bfloat16, 0)
    apart = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in inputs]
    compare(lambda q, k, v: gdpa(q, k, v, offsets, offsets), apart, torch.bfloat16)


@pytest.mark.parametrize("softmax", [False, True])
def test_graph_capture_and_compile(softmax: bool) -> None:
    inputs, offsets = packed(LENGTHS, 2, 64, torch.bfloat16, 0)
    grad = torch.ones_like(inputs[0])

    def op(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if softmax:
            return jagged_attention(q, k, v, offsets, offsets, causal=True) * 2
        return gdpa(q, k, v, offsets, offsets, activation="silu") * 2

    def step() -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in inputs]
        out = op(*leaves)
        return (out, *torch.autograd.grad(out, leaves, grad))

    want = step()
    check_graph(step, want)
    op = torch.compile(op, fullgraph=True, backend="aot_eager")
    for a, b in zip(step(), want, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("kind", ["long", "softmax", "few keys"])
def test_gradients_beyond_two_billion_elements(kind: str) -> None:
    """The last sequence begins behind them; by hand but for few keys."""
    offsets = torch.arange(259, device="cuda") * 4096
    x = torch.empty(int(offsets[-1]), 16, 128, dtype=torch.bfloat16, device="cuda").normal_(std=0.5)
    assert x[:-4096].numel() > 2**31
    few = torch.randn(2, 258, 64, 16, 128, device="cuda").mul_(0.5).bfloat16()
    keys = few.unbind(0) if kind == "few keys" else (x, x)

    def op(q: Tensor, k: Tensor, v: Tensor, where: Tensor) -> Tensor:
        if kind == "softmax":
            return jagged_attention(q, k, v, where, where, causal=True)
        return gdpa(q, k, v, where, where if k.dim() == 3 else None, activation="silu", logit_scale=0.3)

    leaves = [t.detach().requires_grad_() for t in (x, *keys)]
    out = op(*leaves, offsets)
    got = (out, *torch.autograd.grad(out, leaves, x))
    last = [(t[-1:] if t.dim() == 4 else t[-4096:]).detach().double().requires_grad_() for t in leaves]
    out = op(*last, torch.tensor([0, 4096], device="cuda"))
    want = (out, *torch.autograd.grad(out, last, x[-4096:].double()))
    for a, b in zip(got, want, strict=True):
        same(a[-b.shape[0] :], b, torch.bfloat16)


def test_more_than_two_billion_elements_in_more_than_a_million_sequences() -> None:
    """So many programs that descriptors of their own would not fit."""
    lengths = [300, *[1] * 1_048_400, 150]
    offsets = offsets_from_lengths(torch.tensor(lengths)).cuda()
    q = torch.empty(int(offsets[-1]), 8, 256, dtype=torch.bfloat16, device="cuda").normal_(std=0.5)
    assert q.numel() > 2**31
    leaf = q.requires_grad_()
    out = gdpa(leaf, leaf, leaf, offsets, offsets, activation="silu")
    (gradient,) = torch.autograd.grad(out, leaf, q.detach())
    last, end = q.detach()[-150:].double().requires_grad_(), torch.tensor([0, 150], device="cuda")
    want = gdpa(last, last, last, end, end, activation="silu")
    (want_gradient,) = torch.autograd.grad(want, last, last.detach())
    same(out[-150:], want, torch.bfloat16)
    same(gradient[-150:], want_gradient, torch.bfloat16)
