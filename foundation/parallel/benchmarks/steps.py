"""A training step as the training loop does it, for benchmarks: the same order of calls, without its bookkeeping."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch.profiler import record_function

from foundation.data.batch import Batch
from foundation.parallel.ranges import BACKWARD
from foundation.training.loop import rank_share
from foundation.training.state import TrainState


def train_step(
    state: TrainState,
    batch: Batch,
    following: Batch | None = None,
    autocast: Callable[[], AbstractContextManager] = nullcontext,
) -> torch.Tensor:
    """One step; a collective call.

    Args:
        state: what is trained.
        batch: of this rank.
        following: trained on next, if its ids are to travel during this step.
        autocast: a context for the forward pass.

    Returns:
        This rank's share of the loss, on the device: their mean over ranks is the loss of the global batch.
    """
    if following is not None:
        state.model.lookups.announce(following)
    with autocast():
        output = state.model(batch)
    state.model.lookups.send()
    loss = state.model.module.loss(output, batch).total * rank_share(batch)
    with record_function(BACKWARD):
        loss.backward()
    state.model.average_tables()
    state.dense.clip()
    state.dense.step()
    state.dense.zero_grad()
    return loss.detach()


def mean_loss(loss: torch.Tensor) -> float:
    """The loss of the global batch from what `train_step` returned; the host waits for it. A collective call."""
    total = loss.clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()
