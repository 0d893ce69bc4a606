"""Runs a model over a split and measures it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import islice

import torch
from torch import nn

from foundation.data.logs import LogReader
from foundation.training.metrics import MetricSuite, Results
from foundation.training.pipeline import device_batches


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationConfig:
    """When and on what the model is evaluated during training.

    Args:
        split: which split.
        every: steps between evaluations; 0 evaluates at the end of every epoch and of the run only.
        max_batches: at most so many batches per rank; 0 means all.
        batch_size: impressions per batch.
        metric: TASK/SURFACE/NAME that chooses the best checkpoint; TASK may be "mean", SURFACE "all", NAME is auc,
            gauc or ne.
        patience: stop after so many evaluations in a row without a better value; 0 never stops early.
    """

    split: str = "validation"
    every: int = 0
    max_batches: int = 0
    batch_size: int = 4096
    metric: str = "mean/all/ne"
    patience: int = 0

    def __post_init__(self) -> None:
        for key, least in (("every", 0), ("max_batches", 0), ("batch_size", 1), ("patience", 0)):
            if getattr(self, key) < least:
                raise ValueError(f"evaluation.{key}: must be at least {least}, got {getattr(self, key)}")


@torch.no_grad()
def evaluate(
    model: nn.Module,
    reader: LogReader,
    device: torch.device,
    *,
    max_batches: int = 0,
    autocast: Callable[[], AbstractContextManager] = nullcontext,
) -> Results:
    """Metrics of a model on the reader's split, over the rows of all ranks; a collective call.

    Args:
        model: takes a `Batch` and returns an object with `logits [N, K]`; put into eval mode and back.
        reader: each rank's share; read from its start.
        device: where the model is.
        max_batches: at most so many batches per rank; 0 means all.
        autocast: a context for the forward pass.
    """
    schema = reader.dataset.schema
    suite = MetricSuite(schema.task_names, schema.surface_names)
    training = model.training
    model.eval()
    reader.set_epoch(0)
    try:
        for batch, *_ in islice(device_batches(reader, device), max_batches or None):
            with autocast():
                logits = model(batch).logits
            suite.update(
                logits,
                batch.labels,
                batch.label_valid,
                batch.weight,
                batch.surface[batch.request_index],
                batch.user_id[batch.request_index],
            )
    finally:
        model.train(training)
    return suite.compute()
