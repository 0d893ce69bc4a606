"""The training loss.

Legend: N impressions, K tasks, M ensemble members.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from foundation.data.batch import Batch


class LossOutput(NamedTuple):
    """``total``: scalar to minimise. ``per_task`` ``[K]``: mean log loss of valid impressions, NaN without any."""

    total: Tensor
    per_task: Tensor


def masked_loss(logits: Tensor, batch: Batch, task_weights: Tensor) -> LossOutput:
    """Binary cross-entropy of the valid labels, weighted by impression and task.

    ``total`` is the sum over tasks and valid labels divided by the weight of *all* impressions: each label counts the
    same, however few of its task are valid in a batch. Ensemble members have their own losses, which are averaged.

    Args:
        logits: ``[N, K]`` or ``[M, N, K]``.
        task_weights: ``[K]``.
    """
    logits = logits.float()
    counted = batch.weight[:, None] * batch.label_valid
    labels = torch.where(batch.label_valid, batch.labels, 0.0).expand_as(logits)
    losses = F.binary_cross_entropy_with_logits(logits, labels, reduction="none") * counted
    by_task = losses.mean(0).sum(0) if logits.dim() == 3 else losses.sum(0)
    weight = batch.weight.sum()
    total = (by_task * task_weights).sum() / torch.where(weight > 0, weight, 1.0)
    return LossOutput(total, by_task.detach() / counted.sum(0))
