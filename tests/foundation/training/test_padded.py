"""The benchmark's padded attention computes what the kernels compute."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental import _config as shape_config

from foundation.training.benchmarks.padded import (
    Kernels,
    Lengths,
    kernels_of,
    padded_attention,
    padded_block_attention,
    padded_gdpa,
)
from foundation.training.compile import compile_regions
from kernels.block_attention import block_attention
from kernels.gdpa import gdpa
from kernels.jagged_attention import jagged_attention
from tests.foundation.training.test_compile import LIKE_LARGE, batches, build, gradients

LENGTHS = torch.tensor([3, 0, 130, 64, 1])


def offsets(lengths: torch.Tensor = LENGTHS) -> torch.Tensor:
    return torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])


def rows(count: int, seed: int = 0, heads: int = 2) -> torch.Tensor:
    return torch.randn(count, heads, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


def test_self_attention_pooling_and_shared_keys() -> None:
    total = int(LENGTHS.sum())
    q, k, v = (rows(total, seed) for seed in range(3))
    ours = jagged_attention(q, k, v, offsets(), offsets())
    torch.testing.assert_close(padded_attention(q, k, v, offsets(), offsets()), ours, rtol=1e-4, atol=1e-5)
    seeds = rows(4, 7)
    pooled = jagged_attention(seeds, k, v, None, offsets())
    torch.testing.assert_close(padded_attention(seeds, k, v, None, offsets()), pooled, rtol=1e-4, atol=1e-5)
    request = torch.tensor([0, 0, 2, 3, 3, 4])
    queries, q_offsets = rows(12, 5), torch.arange(7) * 2
    shared = jagged_attention(queries, k, v, q_offsets, offsets(), request_index=request)
    found = padded_attention(queries, k, v, q_offsets, offsets(), request_index=request)
    torch.testing.assert_close(found, shared, rtol=1e-4, atol=1e-5)


def test_blocks() -> None:
    total = int(LENGTHS.sum())
    q, k, v = (rows(total, seed) for seed in range(3))
    turned = {"positions": torch.arange(total, dtype=torch.float32), "frequencies": torch.rand(4)}
    for options in ({}, turned):
        ours = block_attention(q, k, v, offsets(), **options)
        found = padded_block_attention(q, k, v, offsets(), **options)
        torch.testing.assert_close(found, ours, rtol=1e-4, atol=1e-5)


def test_generated_networks() -> None:
    q, k, v = rows(int(LENGTHS.sum())), torch.randn(5, 6, 2, 8), torch.randn(5, 6, 2, 8)
    for activation in ("silu", "gelu_tanh"):
        ours = gdpa(q, k, v, offsets(), activation=activation, scale=0.5, logit_scale=0.3)
        found = padded_gdpa(q, k, v, offsets(), activation=activation, scale=0.5, logit_scale=0.3)
        torch.testing.assert_close(found, ours, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["padded", "torch"])
def test_a_model_computes_the_same(kind: Kernels) -> None:
    plain = build(LIKE_LARGE)
    batch = batches(1)[0]
    ours = gradients(plain, batch)
    with kernels_of(kind):
        for known in (False, True):
            if known:
                Lengths(plain)
            for name, gradient in gradients(plain, batch).items():
                torch.testing.assert_close(gradient, ours[name], rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_compiled_it_takes_new_lengths_without_a_new_graph() -> None:
    torch._dynamo.reset()
    plain, compiled = build(LIKE_LARGE), build(LIKE_LARGE)
    first, *others = batches(4)
    theirs = [gradients(plain, batch) for batch in others]
    with kernels_of("torch"), shape_config.patch(use_duck_shape=True), torch._dynamo.config.patch(recompile_limit=8):
        lengths = Lengths(compiled)
        compile_regions(compiled, "parts", backend="aot_eager")
        gradients(compiled, first)
        with torch._dynamo.config.patch(error_on_recompile=True):
            for number, (batch, wanted) in enumerate(zip(others, theirs, strict=True)):
                lengths.batch = 1 + number
                for name, gradient in gradients(compiled, batch).items():
                    torch.testing.assert_close(gradient, wanted[name], rtol=1e-4, atol=1e-6)
    torch._dynamo.reset()
