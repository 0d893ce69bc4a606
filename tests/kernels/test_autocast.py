"""Every operator under autocast, which says nothing to them: results and gradients have the types of the inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import kernels.jagged
from kernels import jagged
from kernels.block_attention import block_attention
from kernels.gdpa import gdpa
from kernels.interaction import fm_block
from kernels.jagged_attention import jagged_attention
from kernels.norms import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from kernels.token_mixing import mix_tokens, sum_kron

OFF = torch.tensor([0, 3, 3, 8])
ROWS, HEADS = (8, 4), (8, 2, 4)
DENSE = (3, 5, 2, 4)
INDEX = torch.tensor([2, 0, 2])
PAIRS = torch.tensor([[0, 2], [1, 3]]).repeat(4, 1)
PLACES = {"positions": torch.arange(8.0), "frequencies": torch.rand(2)}

CALLS: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "gdpa": (lambda q, k, v: gdpa(q, k, v, OFF, OFF, max_keys=5), [HEADS] * 3),
    "gdpa, dense": (lambda q, k, v: gdpa(q, k, v, OFF, activation="silu"), [HEADS, DENSE, DENSE]),
    "gdpa, learned": (lambda q, k, v: gdpa(q, k, v, None, OFF), [HEADS] * 3),
    "jagged_attention": (lambda q, k, v: jagged_attention(q, k, v, OFF, OFF, causal=True), [HEADS] * 3),
    "jagged_attention, learned": (lambda q, k, v: jagged_attention(q, k, v, None, OFF), [HEADS] * 3),
    "block_attention": (lambda q, k, v: block_attention(q, k, v, OFF, **PLACES), [HEADS] * 3),
    "to_padded": (lambda x: jagged.to_padded(x, OFF, 4), [ROWS]),
    "from_padded": (lambda x: jagged.from_padded(x, OFF, 8), [(3, 4, 2)]),
    "last_k": (lambda x: jagged.last_k(x, OFF, 2)[0], [ROWS]),
    "concat": (lambda a, b: jagged.concat(a, OFF, b, OFF)[0], [ROWS, ROWS]),
    "split": (lambda x: jagged.split(x, torch.tensor([0, 1, 3]), torch.tensor([0, 2, 5]), 3), [ROWS]),
    "gather_rows": (lambda x: jagged.gather_rows(x, INDEX), [ROWS]),
    "gather_rows, pairs": (lambda x: jagged.gather_rows(x, PAIRS), [ROWS]),
    "scatter_sum": (lambda x: jagged.scatter_sum(x, PAIRS, 4), [ROWS]),
    "gather_sequences": (lambda x: jagged.gather_sequences(x, OFF, INDEX)[0], [ROWS]),
    "broadcast_add": (lambda x, y: jagged.broadcast_add(x, OFF, y), [ROWS, (3, 4)]),
    "segment_sum": (lambda x: jagged.segment_sum(x, OFF), [ROWS]),
    "segment_mean": (lambda x: jagged.segment_mean(x, OFF), [ROWS]),
    "embedding_add": (lambda x, t: jagged.embedding_add(x, t, PAIRS, sizes=(2, 2)), [ROWS, (4, 4)]),
    "layer_norm": (layer_norm, [ROWS, (4,), (4,)]),
    "layer_norm, gate": (lambda x, w, b, g: layer_norm(x, w, b, gate=g), [ROWS, (4,), (4,), ROWS]),
    "rms_norm": (rms_norm, [ROWS, (4,)]),
    "rms_norm, gate": (lambda x, w, g: rms_norm(x, w, gate=g, act="silu"), [ROWS, (4,), ROWS]),
    "add_layer_norm": (add_layer_norm, [ROWS, ROWS, (4,), (4,)]),
    "add_rms_norm": (add_rms_norm, [ROWS, ROWS, (4,)]),
    "fm_block": (fm_block, [(3, 6, 4), (6, 2)]),
    "fm_block, own": (fm_block, [(3, 6, 4), (3, 6, 2)]),
    "mix_tokens": (mix_tokens, [(3, 6, 4), (6, 2)]),
    "sum_kron": (sum_kron, [(3, 6, 4), (2, 6, 2), (2, 4, 5)]),
}
NO_GRADIENT = {"lengths_from_offsets", "offsets_from_lengths", "sequence_ids"}


def test_every_movement_is_here() -> None:
    assert {name.split(",")[0] for name in CALLS} >= set(kernels.jagged.__all__) - NO_GRADIENT


def outputs(name: str, leaves: list[Tensor]) -> tuple[Tensor, ...]:
    found = CALLS[name][0](*leaves)
    return found if isinstance(found, tuple) else (found,)


@pytest.mark.parametrize("within", [False, True], ids=["", "backward within"])
@pytest.mark.parametrize("first", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CALLS)
def test_an_operator_does_the_same_under_autocast(name: str, first: torch.dtype, within: bool) -> None:
    """``first``: of activations, where parameters are float32."""
    torch.manual_seed(0)
    inputs = [torch.randn(shape) for shape in CALLS[name][1]]
    inputs[0] = inputs[0].to(first)
    results = []
    for enabled in (False, True):
        leaves = [x.clone().requires_grad_() for x in inputs]
        autocast = torch.autocast("cpu", torch.bfloat16, enabled=enabled)
        with autocast:
            out = outputs(name, leaves)
        weights = [torch.ones_like(x) for x in out]
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled and within):
            gradients = torch.autograd.grad(out, leaves, weights)
        assert [x.dtype for x in gradients] == [x.dtype for x in leaves]
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            plain = outputs(name, leaves)
        results.append([*out, *plain, *gradients])
    for without, under in zip(*results, strict=True):
        assert torch.equal(without, under)
        assert without.dtype == under.dtype
