"""The benchmark's padded attention computes what the kernels compute."""

from __future__ import annotations

import torch

from foundation.training.benchmarks.padded import padded_attention, padded_block_attention, padded_gdpa
from kernels.block_attention import block_attention
from kernels.gdpa import gdpa
from kernels.jagged_attention import jagged_attention

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
