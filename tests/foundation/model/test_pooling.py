"""Hierarchical seed pooling against its equations."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from foundation.model.pooling import Pooling, SeedPooling, SumKron
from kernels.jagged import offsets_from_lengths

LENGTHS, WIDTH, HEADS, SEEDS = [3, 0, 5, 1], 8, 2, 5


def rows(lengths: list[int]) -> tuple[Tensor, Tensor]:
    offsets = offsets_from_lengths(torch.tensor(lengths))
    return torch.randn(int(offsets[-1]), WIDTH, dtype=torch.float64), offsets


def test_sum_kron_is_one_matrix() -> None:
    torch.manual_seed(0)
    layer, x = SumKron(SEEDS, 2, WIDTH, 3).double(), torch.randn(4, SEEDS, WIDTH, dtype=torch.float64)
    matrix = sum(torch.kron(z.T.contiguous(), w.T.contiguous()) for z, w in zip(layer.mix, layer.maps, strict=True))
    torch.testing.assert_close(layer(x).flatten(1), x.flatten(1) @ matrix.T)  # type: ignore[union-attr]


@pytest.mark.parametrize("target_aware", [False, True])
def test_seed_pooling_equals_its_equations(target_aware: bool) -> None:
    torch.manual_seed(0)
    pool = SeedPooling(2, SEEDS, 3, HEADS, target_aware, WIDTH).double()
    (values, offsets), target = rows(LENGTHS), torch.randn(4, WIDTH, dtype=torch.float64)
    out = pool(values, offsets, target)
    assert out.shape == (4, 2, WIDTH)
    for b in range(4):
        s = values[offsets[b] : offsets[b + 1]]
        seeds = F.layer_norm(pool.seeds + target[b] if target_aware else pool.seeds, (WIDTH,))
        q, k, v = pool.query(seeds), pool.key(s), pool.value(s)
        heads = []
        for h in range(HEADS):
            part = slice(h * WIDTH // HEADS, (h + 1) * WIDTH // HEADS)
            weights = torch.softmax(q[:, part] @ k[:, part].T / (WIDTH / HEADS) ** 0.5, dim=1)
            heads.append(weights @ v[:, part])
        pooled = pool.out(torch.cat(heads, dim=1))
        want = sum(z.T @ pooled @ w for z, w in zip(pool.compress.mix, pool.compress.maps, strict=True))
        torch.testing.assert_close(out[b], want)


@pytest.mark.parametrize("kind", ["pma", "hsp"])
@pytest.mark.parametrize("target_aware", [False, True])
def test_rows_of_a_request_share_its_keys(kind: str, target_aware: bool) -> None:
    torch.manual_seed(0)
    pool = Pooling(2, HEADS, target_aware, WIDTH) if kind == "pma" else SeedPooling(2, 5, 2, HEADS, target_aware, WIDTH)
    pool = pool.double()
    (values, offsets), index = rows(LENGTHS), torch.tensor([0, 0, 1, 2, 2, 2])
    target = torch.randn(6, WIDTH, dtype=torch.float64)
    own = [values[offsets[r] : offsets[r + 1]] for r in index.tolist()]
    copies = offsets_from_lengths(torch.tensor([len(part) for part in own]))
    torch.testing.assert_close(pool(values, offsets, target, index), pool(torch.cat(own), copies, target))
