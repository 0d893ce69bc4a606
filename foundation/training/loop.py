"""The training loop, in plain sight: what happens in a step, and when a run evaluates, saves and stops."""

from __future__ import annotations

import math
from collections import deque
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
from foundation.training.bundle import FailedStep, write_bundle
from foundation.training.checkpoint_writer import CheckpointConfig, CheckpointWriter
from foundation.training.evaluate import EvaluationConfig, evaluate
from foundation.training.guard import TableGuard
from foundation.training.ledger import Ledger
from foundation.training.metrics import LARGER_IS_BETTER, Results, pick
from foundation.training.nonfinite import NOTHING, culprits_of_all
from foundation.training.phases import CHECKPOINT, COMPUTE, DATA, EVALUATION, OTHER
from foundation.training.pipeline import Delivered, device_batches
from foundation.training.rng import rng_state, untouched_rng
from foundation.training.run_log import RunLog, finite
from foundation.training.schedule import ScheduleConfig, rate_factor
from foundation.training.state import TrainState
from foundation.training.window import LogWindow

RUN_AHEAD = 2
"""Steps that the host may be ahead of a CUDA device before it reads what became of them."""


class TrainingError(ValueError):
    """Training cannot go on; the message says why and what to try."""


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
        accumulate: batches, each a step here, of which one step of the dense optimizer is made. A group ends early
            with an epoch and before an evaluation or a checkpoint, and is left out if one of its batches is skipped.
    """

    steps: int
    schedule: ScheduleConfig
    evaluation: EvaluationConfig
    checkpoint: CheckpointConfig
    log_every: int
    max_skipped: int
    accumulate: int = 1


@dataclass(slots=True)
class _Outcome:
    """What became of a step, on its way from the device: whether it was usable, loss, gradient norm, impressions."""

    step: int
    batch: Batch
    values: torch.Tensor
    arrived: torch.cuda.Event | None
    rng: dict[str, Any] | None  # before the step, where the run may end with it

    @staticmethod
    def send(step: int, batch: Batch, values: list[torch.Tensor], rng: dict[str, Any] | None) -> _Outcome:
        """Starts the copy of the scalars to the host."""
        stacked = torch.stack([value.detach().to(torch.float64) for value in values])
        if not stacked.is_cuda:
            return _Outcome(step, batch, stacked, None, rng)
        arrived = torch.cuda.Event()
        here = stacked.to("cpu", non_blocking=True)
        arrived.record()
        return _Outcome(step, batch, here, arrived, rng)

    def read(self) -> list[float]:
        """The scalars, once they are there."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.values.tolist()


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
        prepare: called once after it, with that batch, before the first step; every line of numbers repeats what it
            returns.
        flops: useful operations of a step on a batch in main memory, for the log; None leaves them out.
        peak_flops: of one device, for MFU; None leaves it out.
        overlap: send the ids of the next batch out while the current one is computed.
        ledger: where the time goes.
        padding: useful operations of a batch over those with padded histories, for the ledger; None leaves it out.
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
    prepare: Callable[[Batch], dict[str, Any]] | None = None
    flops: Callable[[Batch], float] | None = None
    peak_flops: float | None = None
    overlap: bool = False
    ledger: Ledger = field(default_factory=Ledger)
    padding: Callable[[Batch], float | None] | None = None
    results: Results = field(default_factory=dict)
    _position: dict[str, Any] = field(default_factory=dict)
    _repeated: dict[str, Any] = field(default_factory=dict)
    _saved_at: int | None = None
    _rng_before: dict[str, Any] | None = None  # the batch whose ids are out drew anything for them
    _window: LogWindow = field(default_factory=LogWindow)
    _pending: deque[_Outcome] = field(default_factory=deque)
    _group: list[torch.Tensor] = field(default_factory=list)  # which batches are usable whose gradients are held

    def __post_init__(self) -> None:
        # Where the host need not wait to learn what became of a step, it does so at once.
        self._run_ahead = RUN_AHEAD if self.fabric.device.type == "cuda" else 0
        self._guard = TableGuard(self.state.model) if self._run_ahead else None
        self.writer = CheckpointWriter(self.checkpoints, self.config.checkpoint)
        self._waits = self.ledger.waits or self.ledger.open(None, self.fabric.device, {})

    def run(self) -> str:
        """Trains until the last step or an early stop; returns which: "finished" or "stopped early".

        Raises:
            TrainingError: too many steps in a row had a loss or gradient that is not finite.
        """
        progress = self.state.progress
        stopped = self._out_of_patience()
        if stopped or progress.step >= self.config.steps:  # a run that had ended is resumed
            return "stopped early" if stopped else "finished"
        self.writer.reserve(self.state.tensors())
        with self.writer, self._bar() as advance, self._waits.watched():
            for delivered, last_of_epoch in self._batches():
                self._step(delivered)
                self._settle(0 if self.ledger.starting else self._run_ahead)
                self.ledger.step_done(progress.step, delivered.work.tokens, delivered.work.flops)
                advance(1, self._window.describe())
                last = progress.step >= self.config.steps
                if last or progress.step % self.config.log_every == 0:
                    with self.ledger.phase(OTHER):
                        self._log_numbers()
                    self._account(delivered.batch)
                every = self.config.evaluation.every
                if last or (progress.step % every == 0 if every else last_of_epoch):
                    stopped = self._evaluate()
                every = self.config.checkpoint.every
                if every and progress.step % every == 0:
                    self._checkpoint()
                if stopped or last:
                    break
            self.state.model.lookups.drop()
            if self.ledger.pending:
                self._account(delivered.batch)
            self._checkpoint()
            with self.ledger.phase(CHECKPOINT):
                self.writer.wait()
        return "stopped early" if stopped else "finished"

    def _batches(self) -> Iterator[tuple[Delivered, bool]]:
        """Batches over the epochs, with a mark at the last one of each."""
        progress = self.state.progress
        while True:
            self.reader.set_epoch(progress.epoch)
            length = len(self.reader)
            if self.reset_tables and progress.epoch and not progress.epoch_step:
                self.state.model.gather_tables()
                self.reset_tables(self.state, progress.epoch)
            stream = self.state.model.lookups.stream
            batches = device_batches(self.reader, self.fabric.device, self.flops, ahead=self.overlap, copies=stream)
            for delivered in self._timed(batches):
                if self.first_batch:
                    self.first_batch()
                    self.first_batch = None
                if self.prepare:
                    with self.ledger.phase(COMPUTE):
                        self._repeated = self.prepare(delivered.batch)
                    self.prepare = None
                self._position = delivered.position
                progress.epoch_step += 1
                last = progress.epoch_step >= length
                if last:
                    progress.epoch, progress.epoch_step = progress.epoch + 1, 0
                yield delivered, last
            assert progress.epoch_step == 0, "the reader ended before the length it announced"

    def _timed(self, batches: Iterator[Delivered]) -> Iterator[Delivered]:
        """The batches; what passes until each is there is data wait."""
        while True:
            with self.ledger.phase(DATA):
                delivered = next(batches, None)
            if delivered is None:
                return
            self.ledger.compiling()
            yield delivered

    def _step(self, delivered: Delivered) -> None:
        """One step on this rank's batch, together with the other ranks."""
        with self.ledger.step():
            self._queue(delivered)

    def _queue(self, delivered: Delivered) -> None:
        """On CUDA the host only queues a step: one that is not usable is left out by the device."""
        state, progress, batch = self.state, self.state.progress, delivered.batch
        may_end = progress.skipped_in_a_row + self._run_ahead + 1 >= self.config.max_skipped
        rng = (self._rng_before or rng_state(self.fabric.device)) if may_end else None
        factor = rate_factor(self.config.schedule, progress.step, self.config.steps)
        state.rates.scale(factor)  # before backward, where the tables are updated
        state.dense.scale(factor)
        state.model.train()
        lookups = state.model.lookups
        following = delivered.following if progress.step + 1 < self.config.steps else None
        if following is not None:
            lookups.announce(following)
        with self.fabric.autocast():
            output = state.model(batch)
        # The next batch is not trained on yet: a checkpoint knows nothing of it.
        self._rng_before = rng_state(self.fabric.device) if following is not None and lookups.draws else None
        lookups.send()
        losses = state.model.module.loss(output, batch)
        with self._waits.waiting():
            loss = losses.total * rank_share(batch)
            usable, impressions = agree(torch.isfinite(loss.detach()), batch.num_impressions)
        self._group.append(usable)
        ends = self._group_ends()
        norm = loss.new_full((), math.nan) if ends else loss.new_zeros(())
        if self._guard:
            self._guard.allow(usable)
        if self._run_ahead or usable:
            with self._waits.backward(loss):
                self.fabric.backward(loss)
            state.model.average_tables()
        else:
            state.model.settle_tables()
        with self.ledger.optimizer():
            taken = usable
            if ends:
                whole = usable if len(self._group) == 1 else torch.stack(self._group).all()
                if self._run_ahead or whole:
                    norm = state.dense.clip(len(self._group))
                taken = whole & torch.isfinite(norm)
                state.dense.step(taken)
                state.dense.zero_grad()
                self._group.clear()
            progress.step += 1
            if state.ema and ends and (self._run_ahead or taken):
                state.ema.update(progress.step - progress.skipped)
        self._window.queued(losses.per_task, batch, taken, delivered)
        self._pending.append(_Outcome.send(progress.step, batch, [usable, loss, norm, impressions], rng))

    def _group_ends(self) -> bool:
        """Whether the dense optimizer takes its step after this batch."""
        done, progress = self.state.progress.step + 1, self.state.progress
        before = (self.config.evaluation.every, self.config.checkpoint.every)
        return (
            len(self._group) >= self.config.accumulate
            or done >= self.config.steps
            or progress.epoch_step == 0
            or any(every and done % every == 0 for every in before)
        )

    def _settle(self, ahead: int = 0) -> None:
        """Reads what became of steps, until at most so many of the latest are not read."""
        progress = self.state.progress
        while len(self._pending) > ahead:
            outcome = self._pending.popleft()
            with self.ledger.phase(COMPUTE):
                usable, loss, norm, impressions = outcome.read()
            progress.samples += int(impressions)
            if usable and math.isfinite(norm):
                progress.skipped_in_a_row = 0
                self._window.done(loss, norm, int(impressions))
            else:
                self._skipped("gradients are" if usable else "loss is", outcome, loss)

    def _skipped(self, what: str, outcome: _Outcome, loss: float) -> None:
        progress = self.state.progress
        progress.skipped += 1
        progress.skipped_in_a_row += 1
        self.state.model.gather_tables()
        found = culprits_of_all(outcome.batch, self.reader.dataset.schema, self.state.model)
        text = f"the {what} not finite, the step is skipped; not finite: {found}"
        self.log.note("skipped", outcome.step, text)
        if progress.skipped_in_a_row >= self.config.max_skipped:
            kept = self._bundle(f"the {what} not finite", found, outcome, loss)
            why = f"not finite: {found}. Check these columns with `opengem doctor`, or lower dense.lr and sparse.lr"
            if found == NOTHING:  # what is finite overflowed on its way
                why = f"{NOTHING} is not finite, so a value overflowed: lower dense.lr and sparse.lr"
            raise TrainingError(
                f"step {outcome.step}: {progress.skipped_in_a_row} steps in a row had a loss or gradient that is not "
                f"finite (max_skipped); in the last one, {why}. {kept}"
            )

    def _bundle(self, reason: str, found: str, outcome: _Outcome, loss: float) -> str:
        """Leaves what is needed to do the step again; a collective call. Returns how, or why that is not possible."""
        assert outcome.rng is not None
        later = self.state.progress.step - outcome.step
        failed = FailedStep(
            step=outcome.step,
            reason=reason,
            found=found,
            loss=loss,
            batch=outcome.batch,
            rng=outcome.rng,
            later=later,
        )
        try:
            run = self.checkpoints.parent
            folder = write_bundle(run, failed, self.state, self.manifest, self.reader.dataset)
        except (OSError, ValueError) as error:
            return f"The step could not be kept: {error}"
        return f"To do the step again: python -m foundation.training.reproduce --bundle {folder}"

    def _log_numbers(self) -> None:
        self._settle()
        progress = self.state.progress
        factor = rate_factor(self.config.schedule, max(0, progress.step - 1), self.config.steps)
        numbers = self._window.numbers(self.reader.dataset.schema.task_names, self.peak_flops)
        numbers |= {"rate_factor": factor, "epoch": progress.epoch, "samples": progress.samples, **self._repeated}
        self.log.numbers("train", progress.step, numbers)
        self._window = LogWindow()

    def _account(self, batch: Batch) -> None:
        """Ends an interval of the ledger; a collective call."""
        with self.ledger.phase(OTHER):
            self._settle()
            padding = self.padding(batch) if self.padding else None
            slow = self.ledger.interval(self.state.progress.step, self.state.progress.samples, padding)
        if slow is not None:
            self.log.say(f"step {self.state.progress.step}: {slow}")

    def _evaluate(self) -> bool:
        """Evaluates, keeps the best checkpoint, and says whether to stop early."""
        with self.ledger.phase(EVALUATION):
            return self._evaluated()

    def _evaluated(self) -> bool:
        self._settle()
        progress, config = self.state.progress, self.config.evaluation
        if self.validation is None or progress.evaluated_at == progress.step:
            return False
        self.state.model.settle_tables()
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
        self.ledger.evaluated(progress.step, config.split, pick(self.results, "mean/all/ne"), value)
        self.log.say(f"step {progress.step}: {config.split} {config.metric} {value:.5f}{' (best)' if improved else ''}")
        if improved:
            self._checkpoint(best=True)
        self._window.restart_clock()
        return self._out_of_patience()

    def _out_of_patience(self) -> bool:
        patience = self.config.evaluation.patience
        return bool(patience) and self.state.progress.evaluations_since_best >= patience

    def _checkpoint(self, best: bool = False) -> None:
        """Saves; how long the training thread had to wait for it is in the ledger."""
        with self.ledger.phase(CHECKPOINT):
            self._save(best)
            self.ledger.sync(self.state.progress.step)

    def _save(self, best: bool = False) -> None:
        """Saves the current step, unless it is already; as the best one if that is said when it is first saved."""
        self._settle()
        progress = self.state.progress
        if self._saved_at == progress.step:
            return
        rank_state = {"rng": self._rng_before or rng_state(self.fabric.device), "reader": self._position}
        self.state.model.settle_tables()
        metrics = finite(self.results) if progress.evaluated_at == progress.step else {}
        manifest = {**self.manifest, "progress": progress.to_dict(), "metrics": metrics}
        self.writer.save(progress.step, self.state.tensors(), rank_state, manifest, best=best)
        self._saved_at = progress.step
        self._window.restart_clock()

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


def agree(finite: torch.Tensor, impressions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Whether all ranks' losses are finite, and the impressions of all ranks: scalars on the device; a collective call.

    Args:
        finite: bool scalar, whether this rank's loss is.
        impressions: of this rank.
    """
    count = finite.new_full((), impressions, dtype=torch.int64)
    if dist.get_world_size() == 1:
        return finite, count
    both = torch.stack([finite.logical_not().to(torch.int64), count])
    dist.all_reduce(both)
    return both[0] == 0, both[1]
