from __future__ import annotations

import pytest
import torch
from torch import nn

from foundation.training.optimizer import DenseConfig, DenseOptimizer


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 1))


def test_equals_adamw_with_decay_on_matrices_only() -> None:
    ours, theirs = model(), model()
    optimizer = DenseOptimizer(dict(ours.named_parameters()), DenseConfig(lr=0.01, weight_decay=0.3, clip_norm=0.0))
    matrices = [p for p in theirs.parameters() if p.ndim >= 2]
    vectors = [p for p in theirs.parameters() if p.ndim < 2]
    adamw = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.3}, {"params": vectors, "weight_decay": 0.0}], 0.01
    )
    for seed in range(5):
        x = torch.randn(6, 3, generator=torch.Generator().manual_seed(seed))
        for net in (ours, theirs):
            net.zero_grad()
            net(x).pow(2).mean().backward()
        optimizer.scale(0.5 if seed == 2 else 1.0)
        adamw.param_groups[0]["lr"] = adamw.param_groups[1]["lr"] = 0.005 if seed == 2 else 0.01
        optimizer.clip()
        optimizer.step()
        adamw.step()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(p, q)


def test_clips_to_the_norm_and_reports_the_one_before() -> None:
    net = model()
    optimizer = DenseOptimizer(dict(net.named_parameters()), DenseConfig(clip_norm=0.5))
    (net(torch.ones(2, 3)) * 100).sum().backward()
    before = torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None]).norm()
    norm = optimizer.clip()
    after = torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None]).norm()
    assert norm.item() == pytest.approx(before.item(), rel=1e-5) and before > 1
    assert after.item() == pytest.approx(0.5, rel=1e-4)


def test_a_parameter_without_a_gradient_stays() -> None:
    net = model()
    optimizer = DenseOptimizer(dict(net.named_parameters()), DenseConfig(weight_decay=0.1))
    start = net[2].weight.detach().clone()
    net[1](net[0](torch.ones(2, 3))).pow(2).sum().backward()
    optimizer.clip()
    optimizer.step()
    assert torch.equal(net[2].weight, start)
    assert optimizer.tensors()["2.weight.step"] == 0 and optimizer.tensors()["0.weight.step"] == 1


@pytest.mark.parametrize(("key", "value"), [("lr", -1.0), ("clip_norm", -0.1), ("betas", (0.9, 1.0))])
def test_config_names_the_wrong_key(key: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"dense.{key}"):
        DenseConfig(**{key: value})  # type: ignore[arg-type]
