"""Results have the strides that the fake kernels promise, whatever those of the inputs; empty dims give zeros."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from kernels import jagged
from kernels.block_attention import block_attention
from kernels.gdpa import gdpa
from kernels.interaction import fm_block
from kernels.jagged_attention import jagged_attention
from kernels.norms import add_layer_norm, layer_norm, rms_norm
from kernels.token_mixing import mix_tokens, sum_kron
from tests.kernels.test_autocast import CALLS, OFF, PLACES


def columns_first(x: Tensor) -> Tensor:
    """The same numbers, with strides that rise from the first dim to the last."""
    order = list(range(x.dim()))[::-1]
    return x.permute(order).contiguous().permute(order)


def results(call: Callable[..., Any], inputs: list[Tensor]) -> list[Tensor]:
    """What a call gives, and its gradients."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = [x for x in tree_leaves(call(*leaves)) if x.requires_grad]
    torch.manual_seed(1)
    grads = [columns_first(torch.randn(x.shape, dtype=x.dtype)) for x in out]
    return [*out, *torch.autograd.grad(out, leaves, grads)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CALLS)
def test_compiled_code_takes_any_strides(name: str, dtype: torch.dtype) -> None:
    call, shapes = CALLS[name]
    torch.manual_seed(0)
    inputs = [columns_first(torch.randn(shape, dtype=dtype)) for shape in shapes]
    packed = results(call, [x.contiguous() for x in inputs])
    torch._dynamo.reset()
    compiled = results(torch.compile(call, backend="aot_eager", fullgraph=True), inputs)
    for got, want in zip([*results(call, inputs), *compiled], [*packed, *packed], strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CALLS)
def test_results_are_contiguous(name: str, dtype: torch.dtype) -> None:
    call, shapes = CALLS[name]
    inputs = [columns_first(torch.randn(shape, dtype=dtype)) for shape in shapes]
    assert all(x.is_contiguous() for x in tree_leaves(call(*inputs)))


BACKWARDS: dict[str, list[Any]] = {
    "norm_backward": [*[(8, 4)] * 4, (4,), (4,), 1e-5, True, "silu"],
    "norm_backward, plain": [(8, 4), None, (8, 4), None, (4,), None, 1e-5, False, "silu"],
    "block_attention_backward": [*[(8, 2, 4)] * 4, OFF, *PLACES.values(), 0.5],
    "fm_block_backward": [(3, 6, 2), (3, 6, 4), (3, 6, 2)],
    "mix_tokens_backward": [(3, 4, 5), (3, 6, 5), (2, 6, 2)],
    "gdpa_backward": [*[(8, 2, 4)] * 4, OFF, OFF, "silu", 1.0, 1.0, -1, -1],
    "jagged_attention_backward": [*[(8, 2, 4)] * 5, (8, 2), OFF, OFF, 1.0, True, -1],
    "segment_sum": [(8, 4), OFF, True],
    "table_sum": [(8, 4), torch.zeros(8, 1, dtype=torch.int64), [3]],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", BACKWARDS)
def test_gradients_are_contiguous(name: str, dtype: torch.dtype) -> None:
    shaped = [columns_first(torch.randn(x, dtype=dtype)) if isinstance(x, tuple) else x for x in BACKWARDS[name]]
    out = tree_leaves(getattr(torch.ops.opengem, name.split(",")[0])(*shaped))
    assert all(x.is_contiguous() for x in out)


EMPTY: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "gdpa, no query heads": (lambda q, k, v: gdpa(q, k, v, OFF, OFF), [(8, 0, 4), (8, 2, 4), (8, 2, 4)]),
    "gdpa, no keys": (lambda q, k, v: gdpa(q, k, v, OFF), [(8, 2, 4), (3, 0, 2, 4), (3, 0, 2, 4)]),
    "gdpa, no sequences": (lambda q, k, v: gdpa(q, k, v, None), [(8, 2, 4), (0, 5, 2, 4), (0, 5, 2, 4)]),
    "gdpa, no learned queries": (lambda q, k, v: gdpa(q, k, v, None, OFF), [(0, 2, 4), (8, 2, 4), (8, 2, 4)]),
    "jagged_attention, no query heads": (
        lambda q, k, v: jagged_attention(q, k, v, OFF, OFF), [(8, 0, 4), (8, 2, 4), (8, 2, 4)]
    ),
    "jagged_attention, no learned queries": (
        lambda q, k, v: jagged_attention(q, k, v, None, OFF), [(0, 2, 4), (8, 2, 4), (8, 2, 4)]
    ),
    "jagged_attention, no width of values": (
        lambda q, k, v: jagged_attention(q, k, v, OFF, OFF), [(8, 2, 4), (8, 2, 4), (8, 2, 0)]
    ),
    "jagged_attention, no width, causal": (
        lambda q, k, v: jagged_attention(q, k, v, None, OFF, causal=True), [(3, 2, 4), (8, 1, 4), (8, 1, 0)]
    ),
    "block_attention, no query heads": (
        lambda q, k, v: block_attention(q, k, v, OFF, **PLACES), [(8, 0, 4), (8, 2, 4), (8, 2, 4)]
    ),
    "fm_block, no rank": (fm_block, [(3, 6, 4), (6, 0)]),
    "fm_block, no tokens": (fm_block, [(3, 0, 4), (0, 2)]),
    "fm_block, no width": (fm_block, [(3, 6, 0), (3, 6, 2)]),
    "fm_block, no rows": (fm_block, [(0, 6, 4), (6, 2)]),
    "mix_tokens, none in": (mix_tokens, [(3, 0, 4), (0, 2)]),
    "mix_tokens, none out": (mix_tokens, [(3, 6, 4), (6, 0)]),
    "mix_tokens, no rows": (mix_tokens, [(0, 6, 4), (6, 2)]),
    "sum_kron, no terms": (sum_kron, [(3, 6, 4), (0, 6, 2), (0, 4, 5)]),
    "sum_kron, no columns": (sum_kron, [(3, 6, 4), (2, 6, 0), (2, 4, 5)]),
    "sum_kron, no outputs": (sum_kron, [(3, 6, 4), (2, 6, 2), (2, 4, 0)]),
    "sum_kron, no width": (sum_kron, [(3, 6, 0), (2, 6, 2), (2, 0, 5)]),
    "sum_kron, no rows": (sum_kron, [(0, 6, 4), (2, 6, 2), (2, 4, 5)]),
    "layer_norm, no rows": (layer_norm, [(2, 0, 4), (4,), (4,)]),
    "rms_norm, no rows": (rms_norm, [(0, 4), (4,)]),
    "add_layer_norm, no rows": (add_layer_norm, [(0, 4), (0, 4), (4,), (4,)]),
}  # fmt: skip
NARROW = [name for name, (_, shapes) in CALLS.items() if shapes[0] in ((8, 4), (3, 4, 2)) and "norm" not in name]


@pytest.mark.parametrize("name", [*EMPTY, *NARROW])
def test_empty_dims_give_zeros(name: str) -> None:
    """Of jagged movement: rows of width 0."""
    call, shapes = EMPTY[name] if name in EMPTY else (CALLS[name][0], [(*s[:-1], 0) for s in CALLS[name][1]])
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    out = tree_leaves(call(*inputs))
    gradients = torch.autograd.grad(out, inputs, [torch.ones_like(x) for x in out])
    assert not any(x.any() for x in (*out, *gradients))
    meta = [x.to("meta") for x in inputs]
    if "norm" in name or "fm_block" in name or "mix" in name or "kron" in name:
        assert [x.shape for x in tree_leaves(call(*meta))] == [x.shape for x in out]


def test_padded_to_no_rows() -> None:
    x = torch.randn(8, 2, requires_grad=True)
    for out in (jagged.to_padded(x, OFF, 0), jagged.last_k(x, OFF, 0)[0]):
        assert out.shape == (3, 0, 2)
        assert not torch.autograd.grad(out.sum(), x)[0].any()
    assert not jagged.from_padded(torch.randn(3, 0, 2), OFF, 8).any()
