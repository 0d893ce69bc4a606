"""Heads and the loss."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from foundation.model.heads import Heads, HeadsConfig
from foundation.model.loss import masked_loss
from tests.foundation.model.batches import make_batch, model_schema

COUNT, INPUTS = 6, 10


def build(members: int = 1, **options: object) -> Heads:
    torch.manual_seed(0)
    config = HeadsConfig(**{"trunk": (8, 7), "tower": 4, "adapter_rank": 2, **options})  # type: ignore[arg-type]
    return Heads(config, model_schema(), INPUTS, members)


def test_shapes() -> None:
    logits, trunk = build(members=2)(torch.randn(2, COUNT, INPUTS), torch.tensor([0, 1, 2, 0, 1, 2]))
    assert logits.shape == (2, COUNT, 3)
    assert trunk.shape == (2, COUNT, 7)


def test_an_impression_trains_the_adapter_of_its_own_surface() -> None:
    heads = build()
    logits, _ = heads(torch.randn(1, COUNT, INPUTS), torch.ones(COUNT, dtype=torch.int64))
    logits.sum().backward()
    assert heads.adapters is not None
    down = heads.adapters.down.weight.grad
    assert down is not None
    trained = down.view(7, 3, 2).abs().sum((0, 2)) > 0
    assert trained.tolist() == [False, True, False]
    assert heads.surface_bias is not None
    assert heads.surface_bias.grad is not None
    assert (heads.surface_bias.grad[0].abs().sum(1) > 0).tolist() == [False, True, False]


def test_surfaces_give_different_answers() -> None:
    heads, x = build(), torch.randn(1, 1, INPUTS)
    with torch.no_grad():
        assert heads.surface_bias is not None
        heads.surface_bias[:, 2] = 1.0
    answers = [heads(x, torch.tensor([surface]))[0] for surface in range(3)]
    assert not torch.allclose(answers[0], answers[1])
    assert not torch.allclose(answers[1], answers[2])


def test_a_conditional_task_reads_the_tower_of_its_condition() -> None:
    heads, x, surface = build(), torch.randn(1, COUNT, INPUTS), torch.zeros(COUNT, dtype=torch.int64)
    assert heads.given == [(2, 0)]
    before = heads(x, surface)[0]
    with torch.no_grad():
        heads.conditions[0].weight.zero_()
    after = heads(x, surface)[0]
    assert torch.equal(before[..., :2], after[..., :2])
    assert not torch.allclose(before[..., 2], after[..., 2])


def test_linear_heads_without_a_trunk() -> None:
    heads = build(norm=False, trunk=(), tower=0, adapter_rank=0, surface_bias=False, base_rate={"like": 0.1})
    x, surface = torch.randn(1, COUNT, INPUTS), torch.zeros(COUNT, dtype=torch.int64)
    logits, trunk = heads(x, surface)
    assert torch.equal(trunk, x)
    own = x[0] @ heads.towers.weight[0] + heads.towers.bias[0]
    own[:, 2] = own[:, 2] + own[:, 0] * heads.conditions[0].weight[0, 0, 0]
    torch.testing.assert_close(logits[0], own + torch.tensor([0.0, math.log(1 / 9), 0.0]))


def test_biases_start_from_the_base_rates() -> None:
    heads = build(base_rate={"click": 0.2})
    assert heads.bias[0, 0].tolist() == pytest.approx([math.log(0.25), 0, 0], abs=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reads": "all"}, "heads.reads"),
        ({"dropout": -0.1}, "heads.dropout"),
        ({"base_rate": {"click": 1.0}}, "heads.base_rate.click"),
        ({"base_rate": {"share": 0.5}}, "heads.base_rate.share: no such task; known: click, like, conversion"),
    ],
)
def test_wrong_options_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(**options)
    for key in ({"trunk": (0,)}, {"tower": -1}, {"adapter_rank": -1}):
        with pytest.raises(ValueError, match=f"heads.{next(iter(key))}"):
            HeadsConfig(**key)  # type: ignore[arg-type]


def test_loss_is_the_weighted_log_loss_of_valid_labels() -> None:
    batch = make_batch(model_schema(), [3, 2, 4])
    logits = torch.randn(9, 3)
    out = masked_loss(logits, batch, torch.tensor([1.0, 0.5, 2.0]))
    total, sums, weights = 0.0, [0.0] * 3, [0.0] * 3
    for n in range(9):
        for k, factor in enumerate((1.0, 0.5, 2.0)):
            if not batch.label_valid[n, k]:
                continue
            p = torch.sigmoid(logits[n, k]).item()
            y, w = batch.labels[n, k].item(), batch.weight[n].item()
            loss = -w * (y * math.log(p) + (1 - y) * math.log(1 - p))
            total += factor * loss
            sums[k] += loss
            weights[k] += w
    assert out.total.item() == pytest.approx(total / batch.weight.sum().item(), rel=1e-5)
    assert out.per_task.tolist() == pytest.approx([s / w for s, w in zip(sums, weights, strict=True)], rel=1e-5)


def test_invalid_labels_do_not_count_whatever_they_hold() -> None:
    batch = make_batch(model_schema(), [3, 2, 4])
    logits = torch.randn(9, 3, requires_grad=True)
    labels = torch.where(batch.label_valid, batch.labels, torch.nan)
    masked_loss(logits, dataclasses.replace(batch, labels=labels), torch.ones(3)).total.backward()
    assert logits.grad is not None
    assert torch.equal(logits.grad != 0, batch.label_valid)
    assert torch.isfinite(logits.grad).all()


def test_members_have_their_own_losses() -> None:
    batch = make_batch(model_schema(), [3, 2, 4])
    logits = torch.randn(2, 9, 3)
    out = masked_loss(logits, batch, torch.ones(3))
    parts = [masked_loss(member, batch, torch.ones(3)) for member in logits]
    torch.testing.assert_close(out.total, (parts[0].total + parts[1].total) / 2)
    torch.testing.assert_close(out.per_task, (parts[0].per_task + parts[1].per_task) / 2)


def test_loss_without_any_valid_label() -> None:
    batch = make_batch(model_schema(), [2])
    batch = dataclasses.replace(batch, label_valid=torch.zeros_like(batch.label_valid))
    logits = torch.randn(2, 3, requires_grad=True)
    out = masked_loss(logits, batch, torch.ones(3))
    assert out.total.item() == 0
    assert out.per_task.isnan().all()
    out.total.backward()
    assert logits.grad is not None
    assert not logits.grad.any()
