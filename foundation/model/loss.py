"""The training loss.

Legend: N impressions, K tasks, M ensemble members, P partners of an impression.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from foundation.data.batch import Batch


@dataclass(frozen=True, kw_only=True, slots=True)
class LossConfig:
    """What is added to the binary cross-entropy.

    Args:
        pairwise: factor of a ranking loss on pairs of a positive and a negative impression; 0: none.
        within: pairs are of one ``request`` or of one ``user`` (in the batch).
        partners: each positive is compared with so many neighbours, all of them where the group is no larger.
    """

    pairwise: float = 0.0
    within: Literal["request", "user"] = "request"
    partners: int = 16

    def __post_init__(self) -> None:
        if self.pairwise < 0:
            raise ValueError(f"loss.pairwise: must not be negative, got {self.pairwise}")
        if self.within not in ("request", "user"):
            raise ValueError(f"loss.within: must be request or user, got {self.within!r}")
        if self.partners < 1:
            raise ValueError(f"loss.partners: must be at least 1, got {self.partners}")


class LossOutput(NamedTuple):
    """``total``: scalar to minimise. ``per_task`` ``[K]``: mean log loss of valid impressions, NaN without any."""

    total: Tensor
    per_task: Tensor


def masked_loss(
    logits: Tensor,
    batch: Batch,
    task_weights: Tensor,
    config: LossConfig | None = None,
    surface_weight: Tensor | None = None,
) -> LossOutput:
    """Binary cross-entropy of the valid labels, weighted by impression and task.

    ``total`` is the sum over tasks and valid labels divided by the weight of *all* impressions: each label counts the
    same, however few of its task are valid in a batch. Ensemble members have their own losses, which are averaged.

    Args:
        logits: ``[N, K]`` or ``[M, N, K]``.
        task_weights: ``[K]``.
        config: what is added.
        surface_weight: ``[N]``, factor of each impression's loss in ``total``; the divisor stays what it is.
    """
    logits = logits.float()
    counted = batch.weight[:, None] * batch.label_valid
    labels = torch.where(batch.label_valid, batch.labels, 0.0).expand_as(logits)
    losses = F.binary_cross_entropy_with_logits(logits, labels, reduction="none") * counted
    plain = by_task = _by_task(losses)
    if surface_weight is not None:
        by_task = _by_task(losses * surface_weight[:, None])
    if config is not None and config.pairwise:
        by_task = by_task + config.pairwise * _by_task(pairwise_losses(logits, batch, config, surface_weight))
    weight = batch.weight.sum()
    total = (by_task * task_weights).sum() / torch.where(weight > 0, weight, 1.0)
    return LossOutput(total, plain.detach() / counted.sum(0))


def pairwise_losses(logits: Tensor, batch: Batch, config: LossConfig, surface_weight: Tensor | None = None) -> Tensor:
    """Ranking losses of the positives, weighted, shaped like the logits; 0 for all other impressions.

    A positive i has the mean of ``log(1 + exp(z_j - z_i))`` over the negatives j among its partners: the ``partners``
    impressions that follow it in its group, which goes round in a circle. No sorting by size, no waiting for the
    device.
    """
    group = batch.request_index
    if config.within == "user":
        group = batch.user_id.index_select(0, group)
    order = torch.argsort(group, stable=True)
    sorted_group = group.index_select(0, order)
    start = torch.searchsorted(sorted_group, sorted_group)
    size = torch.searchsorted(sorted_group, sorted_group, right=True) - start
    place = torch.arange(group.shape[0], device=group.device) - start
    step = torch.arange(1, config.partners + 1, device=group.device)[:, None]
    partner = start + (place + step) % size.clamp(min=1)  # [P, N], places in the order
    z, y, valid = logits.index_select(-2, order), batch.labels.index_select(0, order), batch.label_valid[order]
    positive, negative = valid & (y == 1), valid & (y == 0)
    pair = (step < size)[..., None] & positive & negative[partner]  # [P, N, K]
    losses = F.softplus(z[..., partner, :] - z.unsqueeze(-3)) * pair
    weight = batch.weight if surface_weight is None else batch.weight * surface_weight
    mean = losses.sum(-3) / pair.sum(0).clamp(min=1) * weight.index_select(0, order)[:, None]
    return torch.zeros_like(mean).index_copy(-2, order, mean)


def _by_task(losses: Tensor) -> Tensor:
    return losses.mean(0).sum(0) if losses.dim() == 3 else losses.sum(0)
