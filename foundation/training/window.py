"""Sums since the last line of numbers: losses, speeds, and how much of the time went into waiting for data."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from foundation.data.batch import Batch
from foundation.training.pipeline import Delivered


class LogWindow:
    """The steps of a line. Rates leave out evaluations and checkpoints.

    Sums of what is on the device stay there until the line is written.
    """

    def __init__(self) -> None:
        self._loss = 0.0
        self._task_loss: torch.Tensor | None = None  # [2, K]: summed losses and weights of valid labels
        self._norm = 0.0
        self._norms = 0
        self._steps = 0
        self._impressions = 0
        self._seconds = 0.0
        self._clock = time.perf_counter()
        self._delivered = 0
        self._waited = 0.0
        self._own = [0.0, 0.0, 0.0]  # of this rank: impressions, tokens, useful operations

    def queued(self, per_task: torch.Tensor, batch: Batch, taken: torch.Tensor, delivered: Delivered) -> None:
        """Adds what the host knows of a step that it has queued; nothing here waits for the device.

        Args:
            per_task: `[K]`, NaN where no label is valid.
            batch: of the step.
            taken: bool scalar on the device: the step is not skipped.
            delivered: the batch as it came.
        """
        weight = (batch.weight[:, None] * batch.label_valid).sum(0)
        sums = torch.stack([torch.where(weight > 0, per_task.detach() * weight, 0.0), weight])
        sums = torch.where(taken, sums, 0.0)
        self._task_loss = sums if self._task_loss is None else self._task_loss + sums
        self._delivered += 1
        self._waited += delivered.waited
        work = delivered.work
        self._own = [a + b for a, b in zip(self._own, (work.impressions, work.tokens, work.flops), strict=True)]

    def done(self, loss: float, norm: float, impressions: int) -> None:
        """Adds a step that is done and was not skipped; `impressions` are those of all ranks."""
        self._loss += loss
        self._norm += norm
        self._norms += norm > 0  # a batch that waits for others has none
        self._steps += 1
        self._impressions += impressions
        now = time.perf_counter()
        self._seconds += now - self._clock
        self._clock = now

    def restart_clock(self) -> None:
        """Leaves the time since the last step out."""
        self._clock = time.perf_counter()

    def numbers(self, task_names: tuple[str, ...], peak_flops: float | None = None) -> dict[str, Any]:
        """Means over steps and ranks, and the speed over all ranks; a collective call.

        Returns:
            loss, task_loss, gradient_norm; samples_per_second and tokens_per_second (events of histories) of all
            ranks; data_wait, seconds per step in which this rank read and encoded a batch or waited for one;
            loader_samples_per_second, this rank's impressions over those seconds; where operations are counted,
            tflops (useful operations per second and device) and, where the device's peak is known, mfu. Empty without
            a step that was not skipped.
        """
        if self._task_loss is None or not self._steps:
            return {}
        loss = self._task_loss.new_tensor(self._loss / self._steps)
        work = torch.tensor(self._own, dtype=torch.float64).to(loss.device)
        if dist.get_world_size() > 1:
            dist.all_reduce(loss)
            dist.all_reduce(self._task_loss)
            dist.all_reduce(work)
        sums, weights = self._task_loss
        seconds = max(self._seconds, 1e-9)
        _, tokens, flops = work.tolist()
        numbers = {
            "loss": loss.item() / dist.get_world_size(),
            "task_loss": dict(zip(task_names, (sums / weights).tolist(), strict=True)),
            "gradient_norm": self._norm / max(1, self._norms),
            "samples_per_second": self._impressions / seconds,
            "tokens_per_second": tokens / seconds,
            "data_wait": self._waited / self._delivered,
            "loader_samples_per_second": self._own[0] / max(self._waited, 1e-9),
        }
        if flops:
            rate = flops / seconds / dist.get_world_size()
            numbers["tflops"] = rate / 1e12
            if peak_flops:
                numbers["mfu"] = rate / peak_flops
        return numbers

    def describe(self) -> str | None:
        """For the progress bar; None before the first step."""
        if not self._steps:
            return None
        rate = self._impressions / max(self._seconds, 1e-9)
        return f"training  loss {self._loss / self._steps:.4f}  {rate:,.0f} samples/s"
