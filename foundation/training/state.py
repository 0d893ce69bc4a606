"""Everything that training changes, as one object that goes into a checkpoint and comes back."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from foundation.parallel.parallelize import ParallelModel
from foundation.parallel.pieces import Spread
from foundation.parallel.tables import TableRates, dense_parameters, dense_tensors, model_tensors, table_momentum
from foundation.training.ema import EMA, EMAConfig
from foundation.training.optimizer import DenseConfig, DenseOptimizer

MODEL, MOMENTUM, OPTIMIZER, AVERAGE = "model.", "momentum.", "optimizer.", "ema."


@dataclass(kw_only=True, slots=True)
class Progress:
    """Counters of a run; the loop's own, so that a step is a step however many optimizers there are.

    Args:
        step: batches trained or skipped since the start of the run.
        epoch: current epoch, 0 for the first.
        epoch_step: batches of the current epoch so far.
        samples: impressions so far, over all ranks.
        skipped: steps without an update because the loss or a gradient was not finite.
        skipped_in_a_row: the last so many steps were skipped.
        best: best value of the chosen metric so far, None before the first evaluation that has one.
        best_step: the step of that evaluation.
        evaluations_since_best: evaluations that did not improve on it.
        evaluated_at: step of the last evaluation.
    """

    step: int = 0
    epoch: int = 0
    epoch_step: int = 0
    samples: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0
    best: float | None = None
    best_step: int | None = None
    evaluations_since_best: int = 0
    evaluated_at: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a manifest."""
        return dataclasses.asdict(self)


@dataclass(kw_only=True, slots=True)
class TrainState:
    """Model, optimizers, averages and progress.

    Args:
        model: the sharded model.
        rates: learning rates of its tables.
        dense: optimizer of the rest.
        ema: averages of the weights, None when off.
        progress: counters.
    """

    model: ParallelModel
    rates: TableRates
    dense: DenseOptimizer
    ema: EMA | None
    progress: Progress = field(default_factory=Progress)

    @staticmethod
    def of(model: ParallelModel, dense: DenseConfig, ema: EMAConfig) -> TrainState:
        """The state at step 0 of a sharded model."""
        return TrainState(
            model=model,
            rates=TableRates(model),
            dense=DenseOptimizer(dense_parameters(model), dense, dense_tensors(model)),
            ema=EMA(model, ema) if ema.decay else None,
        )

    def tensors(self) -> dict[str, Spread]:
        """All tensors of a checkpoint by key, in the memory that training uses: filling them restores the state."""
        tensors: dict[str, Spread] = {}
        parts = (
            (MODEL, model_tensors(self.model)),
            (MOMENTUM, table_momentum(self.model)),
            (OPTIMIZER, self.dense.tensors()),
            (AVERAGE, self.ema.tensors() if self.ema else {}),
        )
        for prefix, part in parts:
            tensors |= {prefix + name: value for name, value in part.items()}
        return tensors
