from __future__ import annotations

import math

import pytest
import torch

from transfer.losses import DistillationHeads, DistillLossConfig, masked_bce, scale_gradient, scaled_labels


def test_masked_bce_by_hand() -> None:
    logits = torch.tensor([[0.0, 2.0], [1.0, -1.0]])
    targets = torch.tensor([[1.0, 0.0], [0.25, 1.0]])
    mask = torch.tensor([[True, False], [True, True]])
    weight, task_weight = torch.tensor([1.0, 3.0]), torch.tensor([1.0, 0.5])
    first = math.log(2)  # -ln sigmoid(0)
    second = 0.25 * math.log(1 + math.exp(-1)) + 0.75 * math.log(1 + math.exp(1))
    third = math.log(1 + math.exp(1))  # -ln sigmoid(-1)
    expected = (1 * first + 3 * second + 3 * 0.5 * third) / 4
    assert float(masked_bce(logits, targets, mask, weight, task_weight)) == pytest.approx(expected, rel=1e-6)


def test_masked_bce_ignores_what_is_masked_even_nan() -> None:
    logits = torch.tensor([[0.0], [0.0]], requires_grad=True)
    targets = torch.tensor([[1.0], [float("nan")]])
    loss = masked_bce(logits, targets, torch.tensor([[True], [False]]), torch.ones(2), torch.ones(1))
    loss.backward()
    assert loss.item() == pytest.approx(math.log(2) / 2)
    assert logits.grad is not None and torch.isfinite(logits.grad).all()


def test_masked_bce_of_no_rows_is_zero() -> None:
    empty = torch.zeros(0, 2)
    assert float(masked_bce(empty, empty, empty.bool(), torch.zeros(0), torch.ones(2))) == 0.0


def test_label_scaling_clips_at_one() -> None:
    got = scaled_labels(torch.tensor([0.01, 0.15, 0.2, 0.9]), 5.0)
    torch.testing.assert_close(got, torch.tensor([0.05, 0.75, 1.0, 1.0]))


def test_gradient_scaling_changes_the_gradient_only() -> None:
    x = torch.tensor([1.0, -2.0], requires_grad=True)
    y = scale_gradient(x, 20.0)
    torch.testing.assert_close(y, x)
    (y * torch.tensor([3.0, 5.0])).sum().backward()
    torch.testing.assert_close(x.grad, torch.tensor([60.0, 100.0]))


def test_heads_scale_the_gradient_into_the_network_but_not_their_own() -> None:
    def gradients(scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(0)
        heads = DistillationHeads(3, 2, scale)
        features = torch.ones(4, 3, requires_grad=True)
        auxiliary, adapted = heads(features)
        (auxiliary.sum() + adapted.pow(2).sum()).backward()
        assert features.grad is not None and heads.auxiliary.weight.grad is not None
        return features.grad, heads.auxiliary.weight.grad

    network, own = gradients(1.0)
    network_scaled, own_scaled = gradients(0.25)
    torch.testing.assert_close(network_scaled, 0.25 * network)
    torch.testing.assert_close(own_scaled, own)


@pytest.mark.parametrize(
    "values", [{"auxiliary": -1.0}, {"adapter": -1.0}, {"direct": -0.1}, {"label_scale": 0.0}, {"gradient_scale": -1.0}]
)
def test_config_errors_name_the_key(values: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"loss.{next(iter(values))}"):
        DistillLossConfig(**values)
