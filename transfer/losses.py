"""Losses of distillation: an auxiliary head that learns from the teacher beside the head that serves.

ExFM (arXiv 2502.17494), equations 1 and 3-7, with ``h`` the binary cross-entropy on logits:

    L = h(z_serving, y) + w h(z_auxiliary, min(alpha y_teacher, 1)) + v h(z_adapted, y_adapter)

The gradient of the distillation heads into the shared network is multiplied by beta.

Shapes: N impressions, K tasks, D width of the shared representation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True, kw_only=True, slots=True)
class DistillLossConfig:
    """Weights of the distillation losses; each at 0 leaves its part out.

    Attributes:
        auxiliary: weight w of the auxiliary head, which learns the teacher's probabilities.
        label_scale: alpha, multiplies the teacher's probabilities; the product is clipped at 1.
        gradient_scale: beta, multiplies the gradient of both distillation heads into the shared network.
        adapter: weight v of the second distillation head, which learns the student adapter's output.
        direct: weight of the teacher's probabilities as targets of the serving head itself (plain distillation).
    """

    auxiliary: float = 1.0
    label_scale: float = 1.0
    gradient_scale: float = 1.0
    adapter: float = 1.0
    direct: float = 0.0

    def __post_init__(self) -> None:
        for key in ("auxiliary", "adapter", "direct", "gradient_scale"):
            if getattr(self, key) < 0:
                raise ValueError(f"loss.{key} must not be negative, got {getattr(self, key)}")
        if self.label_scale <= 0:
            raise ValueError(f"loss.label_scale must be above 0, got {self.label_scale}")


class _ScaleGradient(torch.autograd.Function):
    """Identity forward; backward multiplies the gradient by a number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.scale, None


def scale_gradient(x: Tensor, scale: float) -> Tensor:
    """``x`` itself; the gradient that flows back through it is multiplied by ``scale`` (ExFM's gradient scaling)."""
    return cast(Tensor, _ScaleGradient.apply(x, scale))


def masked_bce(logits: Tensor, targets: Tensor, mask: Tensor, weight: Tensor, task_weight: Tensor) -> Tensor:
    """Binary cross-entropy summed over valid cells, divided by the total weight of the rows.

    A task that is valid on few rows thus counts by its rows, as in the likelihood of all labels.

    Args:
        logits: ``[N, K]``. targets: ``[N, K]`` in [0, 1]. mask: bool ``[N, K]``, cells that count.
        weight: ``[N]``. task_weight: ``[K]``.

    Returns:
        A scalar; 0 for N = 0.
    """
    # A masked target may hold anything, NaN included, which would survive a multiplication by 0 in backward.
    loss = F.binary_cross_entropy_with_logits(logits, torch.where(mask, targets, 0.0), reduction="none")
    cells = torch.where(mask, loss, 0.0) * weight.unsqueeze(1) * task_weight
    return cells.sum() / weight.sum().clamp(min=1e-12)


def scaled_labels(probabilities: Tensor, scale: float) -> Tensor:
    """``min(alpha y, 1)``: lifts a teacher's probabilities that cluster near 0 (ExFM's label scaling)."""
    return (probabilities * scale).clamp(max=1.0)


class DistillationHeads(nn.Module):
    """The two heads that learn from the teacher; both are dropped after training.

    Args:
        width: D. tasks: K. gradient_scale: beta.
    """

    def __init__(self, width: int, tasks: int, gradient_scale: float = 1.0) -> None:
        super().__init__()
        self.auxiliary = nn.Linear(width, tasks)
        self.adapted = nn.Linear(width, tasks)
        self.gradient_scale = gradient_scale

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Logits ``[N, K]`` of the auxiliary and of the second head for ``features [N, D]``."""
        features = scale_gradient(features, self.gradient_scale)
        return self.auxiliary(features), self.adapted(features)
