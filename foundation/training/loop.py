"""The training loop, in plain sight: what happens in a step, and when a run evaluates, saves and stops."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric import Fabric

from foundation.data.batch import Batch
from foundation.data.logs import LogReader
from foundation.data.progress import progress as progress_bar
from foundation.training.checkpoint_files import point, prune, write_checkpoint
from foundation.training.evaluate import EvaluationConfig, evaluate
from foundation.training.metrics import LARGER_IS_BETTER, Results, pick
from foundation.training.nonfinite import culprits
from foundation.training.pipeline import device_batches
from foundation.training.rng import rng_state, untouched_rng
from foundation.training.run_log import RunLog, finite
from foundation.training.schedule import ScheduleConfig, rate_factor
from foundation.training.state import TrainState


class TrainingError(ValueError):
    """Training cannot go on; the message says why and what to try."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """When checkpoints are written, besides at the best evaluation and at the end.

    Args:
        every: steps between checkpoints; 0 writes none besides those.
        keep: newest checkpoints to keep; the best one is always kept.
    """

    every: int = 0
    keep: int = 2

    def __post_init__(self) -> None:
        if self.every < 0:
            raise ValueError(f"checkpoint.every: must not be negative, got {self.every}")
        if self.keep < 1:
            raise ValueError(f"checkpoint.keep: must be at least 1, got {self.keep}")


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopConfig:
    """What the loop is told.

    Args:
        steps: all steps of the run, those done before a resume included.
        schedule: learning rates.
        evaluation: when, and what is best.
        checkpoint: when.
        log_every: steps between lines of numbers.
        max_skipped: this many skipped steps in a row end the run.
    """

    steps: int
    schedule: ScheduleConfig
    evaluation: EvaluationConfig
    checkpoint: CheckpointConfig
    log_every: int
    max_skipped: int


@dataclass(kw_only=True)
class Loop:
    """A run in progress.

    Args:
        fabric: devices and precision.
        config: when to do what.
        state: what is trained; changed in place.
        reader: training batches of this rank, at the position to start from.
        validation: batches to evaluate on, or None.
        log: where numbers go.
        checkpoints: folder.
        manifest: what every checkpoint says besides progress and metrics.
        reset_tables: draws the tables of a state anew, in place, for an epoch; called at the start of each but the
            first. None leaves the tables alone.
        first_batch: called once, when the first batch is there.
    """

    fabric: Fabric
    config: LoopConfig
    state: TrainState
    reader: LogReader
    validation: LogReader | None
    log: RunLog
    checkpoints: Path
    manifest: dict[str, Any]
    reset_tables: Callable[[TrainState, int], None] | None = None
    first_batch: Callable[[], None] | None = None
    results: Results = field(default_factory=dict)
    _position: dict[str, Any] = field(default_factory=dict)
    _saved_at: int | None = None
    _window: _Window = field(default_factory=lambda: _Window())

    def run(self) -> str:
        """Trains until the last step or an early stop; returns which: "finished" or "stopped early".

        Raises:
            TrainingError: too many steps in a row had a loss or gradient that is not finite.
        """
        progress = self.state.progress
        stopped = self._out_of_patience()
        if stopped or progress.step >= self.config.steps:  # a run that had ended is resumed
            return "stopped early" if stopped else "finished"
        with self._bar() as advance:
            for batch, last_of_epoch in self._batches():
                self._step(batch)
                advance(1, self._window.describe())
                last = progress.step >= self.config.steps
                if last or progress.step % self.config.log_every == 0:
                    self._log_numbers()
                every = self.config.evaluation.every
                if last or (progress.step % every == 0 if every else last_of_epoch):
                    stopped = self._evaluate()
                every = self.config.checkpoint.every
                if every and progress.step % every == 0:
                    self._save()
                if stopped or last:
                    break
        self._save()
        return "stopped early" if stopped else "finished"

    def _batches(self) -> Iterator[tuple[Batch, bool]]:
        """Batches over the epochs, with a mark at the last one of each."""
        progress = self.state.progress
        while True:
            self.reader.set_epoch(progress.epoch)
            length = len(self.reader)
            if self.reset_tables and progress.epoch and not progress.epoch_step:
                self.reset_tables(self.state, progress.epoch)
            for batch, position in device_batches(self.reader, self.fabric.device):
                if self.first_batch:
                    self.first_batch()
                    self.first_batch = None
                self._position = position
                progress.epoch_step += 1
                last = progress.epoch_step >= length
                if last:
                    progress.epoch, progress.epoch_step = progress.epoch + 1, 0
                yield batch, last
            assert progress.epoch_step == 0, "the reader ended before the length it announced"

    def _step(self, batch: Batch) -> None:
        """One step on this rank's batch, together with the other ranks."""
        state, progress = self.state, self.state.progress
        factor = rate_factor(self.config.schedule, progress.step, self.config.steps)
        state.rates.scale(factor)  # before backward, where the tables are updated
        state.dense.scale(factor)
        state.model.train()
        with self.fabric.autocast():
            output = state.model(batch)
        losses = state.model.module.loss(output, batch)
        loss = losses.total * rank_share(batch)
        value = loss.item()
        usable, impressions = agree(math.isfinite(value), batch.num_impressions, self.fabric.device)
        norm = math.nan
        if usable:
            self.fabric.backward(loss)
            norm = state.dense.clip().item()
            if math.isfinite(norm):
                state.dense.step()
        state.dense.zero_grad()
        progress.step += 1
        progress.samples += impressions
        if not math.isfinite(norm):
            self._skipped("gradients are" if usable else "loss is", batch)
            return
        progress.skipped_in_a_row = 0
        if state.ema:
            state.ema.update(progress.step - progress.skipped)
        self._window.add(value, losses.per_task, batch, norm, impressions)

    def _skipped(self, what: str, batch: Batch) -> None:
        progress = self.state.progress
        progress.skipped += 1
        progress.skipped_in_a_row += 1
        found = culprits(batch, self.reader.dataset.schema, self.state.model)
        text = f"the {what} not finite, the step is skipped; not finite: {found}"
        self.log.note("skipped", progress.step, text)
        if progress.skipped_in_a_row >= self.config.max_skipped:
            raise TrainingError(
                f"step {progress.step}: {progress.skipped_in_a_row} steps in a row had a loss or gradient that is not "
                f"finite (max_skipped); in the last one, not finite: {found}. Check these columns with `opengem "
                "doctor`, or lower dense.lr and sparse.lr"
            )

    def _log_numbers(self) -> None:
        progress = self.state.progress
        factor = rate_factor(self.config.schedule, max(0, progress.step - 1), self.config.steps)
        numbers = self._window.numbers(self.reader.dataset.schema.task_names)
        numbers |= {"rate_factor": factor, "epoch": progress.epoch, "samples": progress.samples}
        self.log.numbers("train", progress.step, numbers)
        self._window = _Window()

    def _evaluate(self) -> bool:
        """Evaluates, keeps the best checkpoint, and says whether to stop early."""
        progress, config = self.state.progress, self.config.evaluation
        if self.validation is None or progress.evaluated_at == progress.step:
            return False
        averaged = self.state.ema.swapped() if self.state.ema else nullcontext()
        with averaged, untouched_rng(self.fabric.device):
            self.results = evaluate(
                self.state.model,
                self.validation,
                self.fabric.device,
                max_batches=config.max_batches,
                autocast=self.fabric.autocast,
            )
        value = pick(self.results, config.metric)
        sign = 1.0 if LARGER_IS_BETTER[config.metric.split("/")[-1]] else -1.0
        improved = math.isfinite(value) and (progress.best is None or sign * value > sign * progress.best)
        progress.evaluated_at = progress.step
        if improved:
            progress.best, progress.best_step, progress.evaluations_since_best = value, progress.step, 0
        else:
            progress.evaluations_since_best += 1
        self.log.evaluation(config.split, progress.step, self.results, value, improved)
        self.log.say(f"step {progress.step}: {config.split} {config.metric} {value:.5f}{' (best)' if improved else ''}")
        if improved:
            point(self.checkpoints, "best", self._save())
        self._window.restart_clock()
        return self._out_of_patience()

    def _out_of_patience(self) -> bool:
        patience = self.config.evaluation.patience
        return bool(patience) and self.state.progress.evaluations_since_best >= patience

    def _save(self) -> Path:
        """Writes a checkpoint of the current step, unless there is one."""
        progress = self.state.progress
        path = self.checkpoints / f"step-{progress.step:08d}"
        if self._saved_at != progress.step:
            rank_state = {"rng": rng_state(self.fabric.device), "reader": self._position}
            metrics = finite(self.results) if progress.evaluated_at == progress.step else {}
            manifest = {**self.manifest, "progress": progress.to_dict(), "metrics": metrics}
            path = write_checkpoint(self.checkpoints, progress.step, self.state.tensors(), rank_state, manifest)
            self._saved_at = progress.step
            self._window.restart_clock()
        prune(self.checkpoints, self.config.checkpoint.keep)
        return path

    def _bar(self) -> AbstractContextManager[Callable[..., None]]:
        if not self.fabric.is_global_zero:
            return nullcontext(lambda *_: None)
        return progress_bar("training", self.config.steps - self.state.progress.step)


def rank_share(batch: Batch) -> torch.Tensor | float:
    """What makes the mean over ranks of their losses the loss of the global batch; a collective call.

    A rank's loss is divided by the weight of its own impressions, which differs between ranks.

    Returns:
        The rank's share of the weight of all ranks' impressions, times the number of ranks.
    """
    if dist.get_world_size() == 1:
        return 1.0
    weight = batch.weight.sum()
    everywhere = weight.clone()
    dist.all_reduce(everywhere)
    return torch.where(everywhere > 0, weight / everywhere, 0.0) * dist.get_world_size()


def agree(finite: bool, impressions: int, device: torch.device) -> tuple[bool, int]:
    """Whether all ranks' losses are finite, and the impressions of all ranks."""
    if dist.get_world_size() == 1:
        return finite, impressions
    both = torch.tensor([not finite, impressions], dtype=torch.int64, device=device)
    dist.all_reduce(both)
    broken, everywhere = both.tolist()
    return not broken, everywhere


class _Window:
    """Sums since the last line of numbers. Rates leave out evaluations and checkpoints."""

    def __init__(self) -> None:
        self._loss = 0.0
        self._task_loss: torch.Tensor | None = None  # [2, K]: summed losses and weights of valid labels
        self._norm = 0.0
        self._steps = 0
        self._impressions = 0
        self._seconds = 0.0
        self._clock = time.perf_counter()

    def add(self, loss: float, per_task: torch.Tensor, batch: Batch, norm: float, impressions: int) -> None:
        """Adds a step that was not skipped; `per_task` `[K]` may be NaN where no label is valid."""
        weight = (batch.weight[:, None] * batch.label_valid).sum(0)
        sums = torch.stack([torch.where(weight > 0, per_task.detach() * weight, 0.0), weight])
        self._task_loss = sums if self._task_loss is None else self._task_loss + sums
        self._loss += loss
        self._norm += norm
        self._steps += 1
        self._impressions += impressions
        now = time.perf_counter()
        self._seconds += now - self._clock
        self._clock = now

    def restart_clock(self) -> None:
        """Leaves the time since the last step out."""
        self._clock = time.perf_counter()

    def numbers(self, task_names: tuple[str, ...]) -> dict[str, Any]:
        """Means over steps and ranks, and the speed over all ranks; a collective call."""
        if self._task_loss is None:
            return {}
        loss = self._task_loss.new_tensor(self._loss / self._steps)
        if dist.get_world_size() > 1:
            dist.all_reduce(loss)
            dist.all_reduce(self._task_loss)
        sums, weights = self._task_loss
        return {
            "loss": loss.item() / dist.get_world_size(),
            "task_loss": dict(zip(task_names, (sums / weights).tolist(), strict=True)),
            "gradient_norm": self._norm / self._steps,
            "samples_per_second": self._impressions / max(self._seconds, 1e-9),
        }

    def describe(self) -> str | None:
        """For the progress bar; None before the first step."""
        if not self._steps:
            return None
        rate = self._impressions / max(self._seconds, 1e-9)
        return f"training  loss {self._loss / self._steps:.4f}  {rate:,.0f} samples/s"
