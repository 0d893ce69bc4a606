"""The student adapter: maps a stale teacher's prediction to fresh labels (ExFM, equations 6-7, algorithm 1).

Shapes: N impressions, K tasks.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from transfer.losses import masked_bce


class StudentAdapter(nn.Module):
    """A small MLP on the teacher's logits of all tasks; starts as the identity.

    It learns from fresh labels only. Its output is detached before it supervises the student's second
    distillation head, so the student cannot pull it towards itself.

    Args:
        tasks: K.
        hidden: width of the hidden layer.
    """

    def __init__(self, tasks: int, hidden: int = 32) -> None:
        super().__init__()
        last = nn.Linear(hidden, tasks)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        self.correction = nn.Sequential(nn.Linear(tasks, hidden), nn.SiLU(), last)

    def forward(self, teacher_logits: Tensor) -> Tensor:
        """Corrected logits ``[N, K]`` of the teacher's ``[N, K]``."""
        corrected: Tensor = teacher_logits + self.correction(teacher_logits)
        return corrected

    def loss(
        self, teacher_logits: Tensor, labels: Tensor, mask: Tensor, weight: Tensor, task_weight: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The adapter's own loss, and the targets it gives the student.

        Args:
            teacher_logits: ``[N, K]``. labels: ``[N, K]`` in {0, 1}. mask: bool ``[N, K]``, rows the teacher
                scored and labels that count. weight: ``[N]``. task_weight: ``[K]``.

        Returns:
            A scalar, and detached probabilities ``[N, K]``.
        """
        logits = self(teacher_logits.detach())
        return masked_bce(logits, labels, mask, weight, task_weight), torch.sigmoid(logits).detach()
