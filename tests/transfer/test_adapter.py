from __future__ import annotations

import torch

from transfer.adapter import StudentAdapter


def test_starts_as_the_identity() -> None:
    logits = torch.randn(5, 2)
    torch.testing.assert_close(StudentAdapter(2)(logits), logits)


def test_targets_are_detached_and_only_the_adapter_learns_from_its_loss() -> None:
    adapter = StudentAdapter(1)
    teacher = torch.randn(8, 1, requires_grad=True)
    loss, targets = adapter.loss(teacher, torch.ones(8, 1), torch.ones(8, 1).bool(), torch.ones(8), torch.ones(1))
    assert not targets.requires_grad
    loss.backward()
    assert teacher.grad is None
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in adapter.parameters())


def test_learns_what_a_stale_teacher_got_wrong() -> None:
    torch.manual_seed(0)
    true = torch.randn(4000, 1)
    teacher = 0.5 * true - 1.0  # the world has moved on since
    labels = torch.bernoulli(torch.sigmoid(true))
    adapter = StudentAdapter(1)
    optimizer = torch.optim.Adam(adapter.parameters(), lr=0.02)
    ones = torch.ones(4000)
    for _ in range(150):
        loss, _ = adapter.loss(teacher, labels, torch.ones(4000, 1).bool(), ones, torch.ones(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    _, targets = adapter.loss(teacher, labels, torch.ones(4000, 1).bool(), ones, torch.ones(1))
    before = (torch.sigmoid(teacher) - torch.sigmoid(true)).abs().mean()
    after = (targets - torch.sigmoid(true)).abs().mean()
    assert after < 0.2 * before
