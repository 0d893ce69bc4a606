"""Ranking loss on pairs, weights of surfaces, and surfaces that share parameters."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.nn import functional as F

from foundation.model.gem import GEM, GEMConfig
from foundation.model.loss import LossConfig, masked_loss, pairwise_losses
from foundation.model.surfaces import SurfacesConfig
from tests.foundation.model.batches import TABLE_ROWS, make_batch, model_schema

SIZES = [3, 0, 1, 6, 2, 4]


@pytest.mark.parametrize("within", ["request", "user"])
def test_pairs_of_a_positive_and_a_negative_of_one_group(within: str) -> None:
    torch.manual_seed(0)
    batch = make_batch(model_schema(), SIZES)
    batch = dataclasses.replace(batch, user_id=torch.tensor([7, 7, 3, 7, 3, 9]))
    logits = torch.randn(2, sum(SIZES), 3, dtype=torch.float64)
    got = pairwise_losses(logits, batch, LossConfig(pairwise=1.0, within=within, partners=20))  # type: ignore[arg-type]
    group = batch.request_index if within == "request" else batch.user_id[batch.request_index]
    for m in range(2):
        for i in range(sum(SIZES)):
            for k in range(3):
                negatives = [
                    j for j in range(sum(SIZES))
                    if group[j] == group[i] and batch.label_valid[j, k] and batch.labels[j, k] == 0
                ]  # fmt: skip
                want = torch.zeros((), dtype=torch.float64)
                if batch.label_valid[i, k] and batch.labels[i, k] == 1 and negatives:
                    each = [F.softplus(logits[m, j, k] - logits[m, i, k]) for j in negatives]
                    want = torch.stack(each).mean() * batch.weight[i]
                torch.testing.assert_close(got[m, i, k], want, rtol=1e-6, atol=1e-9)


def test_few_partners_are_the_next_ones_of_the_group() -> None:
    batch = make_batch(model_schema(), [4])
    labels, valid = torch.tensor([[1.0], [0.0], [0.0], [0.0]]), torch.ones(4, 1, dtype=torch.bool)
    batch = dataclasses.replace(batch, labels=labels, label_valid=valid, weight=torch.ones(4))
    logits = torch.tensor([[0.0], [1.0], [2.0], [5.0]])
    got = pairwise_losses(logits, batch, LossConfig(pairwise=1.0, partners=2))
    torch.testing.assert_close(got[0, 0], F.softplus(torch.tensor([1.0, 2.0])).mean())
    assert not got[1:].any()


def test_the_ranking_loss_is_added() -> None:
    batch = make_batch(model_schema(), SIZES)
    logits, weights = torch.randn(sum(SIZES), 3), torch.tensor([1.0, 0.5, 2.0])
    plain, both = (masked_loss(logits, batch, weights, LossConfig(pairwise=factor)) for factor in (0.0, 0.3))
    pairs = pairwise_losses(logits, batch, LossConfig(pairwise=1.0)).sum(0)
    torch.testing.assert_close(both.total - plain.total, 0.3 * (pairs * weights).sum() / batch.weight.sum())
    torch.testing.assert_close(both.per_task, plain.per_task)
    empty = masked_loss(torch.zeros(0, 3), make_batch(model_schema(), []), weights, LossConfig(pairwise=1.0))
    assert empty.total == 0


def test_a_surface_of_weight_0_teaches_nothing() -> None:
    schema, batch = model_schema(), make_batch(model_schema(), SIZES)
    config = GEMConfig(width=8, surfaces=SurfacesConfig(weights={"feed": 0.0, "reels": 3.0}))
    torch.manual_seed(0)
    model = GEM(config, schema, TABLE_ROWS)
    output = model(batch)
    output.logits.retain_grad()
    model.loss(output, batch).total.backward()
    torch.manual_seed(0)
    plain = GEM(GEMConfig(width=8), schema, TABLE_ROWS)
    other = plain(batch)
    other.logits.retain_grad()
    plain.loss(other, batch).total.backward()
    factor = torch.tensor([0.0, 3.0, 1.0])[batch.surface[batch.request_index]]
    torch.testing.assert_close(output.logits.grad, other.logits.grad * factor[:, None])


def test_pooled_surfaces_use_the_parameters_of_other() -> None:
    schema = model_schema()
    torch.manual_seed(0)
    model = GEM(GEMConfig(width=8, surfaces=SurfacesConfig(pooled=("reels",))), schema, TABLE_ROWS).eval()
    batch = make_batch(schema, SIZES)
    feed, reels, other = (
        model(dataclasses.replace(batch, surface=torch.full_like(batch.surface, s))) for s in range(3)
    )
    assert torch.equal(reels.logits, other.logits)
    assert not torch.allclose(feed.logits, other.logits)


@pytest.mark.parametrize(
    ("kind", "options", "key"),
    [
        (LossConfig, {"pairwise": -1.0}, r"loss\.pairwise"),
        (LossConfig, {"within": "day"}, r"loss\.within"),
        (LossConfig, {"partners": 0}, r"loss\.partners"),
        (SurfacesConfig, {"weights": {"feed": -1.0}}, r"surfaces\.weights\.feed"),
    ],
)
def test_wrong_options_are_named(kind: type, options: dict[str, object], key: str) -> None:
    with pytest.raises(ValueError, match=key):
        kind(**options)


def test_unknown_surfaces_are_named() -> None:
    with pytest.raises(ValueError, match=r"surfaces\.pooled: no surface 'story'; known: feed, reels, other"):
        GEM(GEMConfig(width=8, surfaces=SurfacesConfig(pooled=("story",))), model_schema(), TABLE_ROWS)
    nothing = SurfacesConfig(weights={"feed": 0.0, "reels": 0.0})
    with pytest.raises(ValueError, match=r"surfaces\.weights: 0 for feed, reels leaves no surface to learn from"):
        GEM(GEMConfig(width=8, surfaces=nothing), model_schema(), TABLE_ROWS)
