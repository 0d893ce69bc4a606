"""The efficiency ledger of a run: where every second went, written as it goes.

    RUN/ledger.jsonl   one line when a process starts, one per interval between log lines, one per evaluation

Rank 0 writes. Its own clock is the ledger's; what other ranks say of themselves is gathered once per interval. The line
of the current interval is written over at every step, so that a process that is killed has accounted for all steps that
it did. A run that is resumed goes on with the same file.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from foundation.data.json_shape import Each, require_shape
from foundation.training.energy import EnergyMeter
from foundation.training.phases import (
    CLOCKED,
    COMMUNICATION,
    COMPILE,
    COMPUTE,
    DATA,
    FIRST_BATCH,
    OPTIMIZER,
    OTHER,
    PHASES,
    REPEATED,
    STEP,
    PhaseClock,
)
from foundation.training.waits import DeviceTimes, Waits, cuda_marker, split_by_device

LEDGER = "ledger.jsonl"
FORMAT = 1
SLOW = 1.25
"""A rank is called slow when its own time per step is so many times the median of the others."""
_MOST_STEPS = 512
_STARTING = (FIRST_BATCH, COMPILE)
_FIXED = 5  # what an interval gathers of each rank before its tokens by step


class Slow(NamedTuple):
    """The slowest rank of an interval; seconds per step, without waits for other ranks.

    Args:
        rank: which.
        own: what it took itself.
        others: median of what the others took.
        data: how much of `own` it waited for batches.
    """

    rank: int
    own: float
    others: float
    data: float

    def __str__(self) -> str:
        lag = (self.own - self.others) * 1e3
        return (
            f"rank {self.rank} is slow: its own work takes {self.own * 1e3:.1f} ms per step, {lag:.1f} ms more than "
            f"that of the others (median {self.others * 1e3:.1f} ms); {self.data * 1e3:.1f} ms of it are data wait"
        )


class Ledger:
    """Follows one process of a run.

    It begins with the process, before ranks and device are known; :meth:`open` tells it those.

    Args:
        start: `time.perf_counter()` from which on time belongs to the run; now by default.
    """

    def __init__(self, start: float | None = None) -> None:
        self.clock = PhaseClock(start)
        self.waits: Waits | None = None
        self._device: DeviceTimes | None = None
        self._meter: EnergyMeter | None = None
        self._torch_device = torch.device("cpu")
        self._file: int | None = None
        self._path: Path | None = None
        self._epoch = 0.0  # what makes times of day of `time.perf_counter()`
        self._offset = self._length = 0
        self._furthest = 0
        self._before = dict.fromkeys(CLOCKED, 0.0)  # seconds by phase when the interval began
        # Of this rank in this interval: events by step and together, useful operations, steps, those done before.
        self._by_step: list[float] = []
        self._tokens = self._flops = 0.0
        self._steps = self._repeated = self._step = 0
        self._told: int | None = None

    def phase(self, name: str) -> Any:
        """A context in which time is charged to a phase of `foundation.training.phases`."""
        return self.clock.phase(name)

    def open(self, path: Path | None, device: torch.device, facts: Mapping[str, Any]) -> Waits:
        """Says where the ledger is and on what the run runs; returns what sees the waits for other ranks.

        Args:
            path: the file, on rank 0; None on others.
            device: of this rank.
            facts: what the first line says: `world`, `step` and `samples` (at which this process goes on), `device`
                (name), `peak` (FLOP/s of a device, or None), `precision`, `metric`.
        """
        self._torch_device = device
        self._meter = EnergyMeter(device)
        if device.type == "cuda":
            self._device = DeviceTimes(cuda_marker)
        self.waits = waits = Waits(self.clock, self._device)
        steps = [0]
        if path is not None:
            try:
                lines = whole_lines(path)
            except ValueError:  # training does not depend on its ledger
                os.replace(path, path.with_suffix(".damaged"))
                lines = []
            steps += [line["step"] for line in lines if line["kind"] == "interval"]
            self._start_file(path, facts)
        if dist.get_world_size() > 1:
            shared = [max(steps)]
            dist.broadcast_object_list(shared)
            steps = shared
        self._furthest = max(steps)
        return waits

    @property
    def starting(self) -> bool:
        """The first step of this process is not done."""
        return self.clock.steps_are in _STARTING

    def compiling(self) -> None:
        """The first batch is there: until the first step is done, steps' time is start-up."""
        if self.clock.steps_are == FIRST_BATCH:
            self.clock.charge()
            self.clock.steps_are = COMPILE

    @property
    def pending(self) -> bool:
        """Steps have been done since the last interval."""
        return self._steps > 0

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around one step."""
        with self.clock.phase(COMPUTE):
            if self._device and self.clock.steps_are is None:
                self._device.switch(COMPUTE)
            try:
                yield
            finally:
                if self._device and self._device.open:
                    self._device.switch("")

    @contextmanager
    def optimizer(self) -> Iterator[None]:
        """Around what a step does with its gradients."""
        with self.clock.phase(OPTIMIZER):
            if self._device and self._device.open:
                self._device.switch(OPTIMIZER)
            yield
            if self._device and self._device.open:
                self._device.switch(COMPUTE)

    def step_done(self, step: int, tokens: int, flops: float) -> None:
        """Counts a step and makes it durable.

        Args:
            step: its number, from 1.
            tokens: events of this rank's batch.
            flops: useful operations of it, 0 where they are not counted.
        """
        self._steps, self._step = self._steps + 1, step
        self._repeated += step <= self._furthest
        self._tokens += tokens
        if len(self._by_step) < _MOST_STEPS:
            self._by_step.append(float(tokens))
        self._flops += flops
        self.clock.charge()
        if self.clock.steps_are == COMPILE:
            self.clock.base(OTHER)
        self.clock.steps_are = REPEATED if step < self._furthest else None
        if self._device:
            self._device.fold()
        if self._file is not None:
            self._write_interval(step)

    def interval(self, step: int, samples: int, padding: float | None = None) -> Slow | None:
        """Ends an interval, on a device that is idle; a collective call.

        Args:
            step: steps of the run so far.
            samples: impressions of the run so far, over all ranks.
            padding: useful operations over those of the same batch with padded histories.

        Returns:
            A rank that is slow and was not called so in the interval before.
        """
        self.clock.charge()
        seconds = self._since()
        if self._device:
            split = split_by_device(seconds, self._device.read())
            for name, value in split.items():
                seconds[name] = value + (seconds[OTHER] if name == OTHER else 0.0)
            for name, value in seconds.items():
                self.clock.seconds[name] = self._before[name] + value
        count = max(1, self._steps)
        own = sum(seconds[name] for name in STEP if name != COMMUNICATION) / count
        joules = self._meter.joules() if self._meter else None
        mine = (own, seconds[DATA] / count, self._tokens, self._flops, math.nan if joules is None else joules)
        ranks = self._gather([*mine, *self._by_step])
        slow = self._slowest(ranks[:, :2].tolist())
        if self._file is not None:
            more = {"samples": samples, "padding": padding, "slow": slow and slow._asdict(), **_of_ranks(ranks)}
            self._write_interval(step, more)
        self._before = dict(self.clock.seconds)
        self._by_step, self._tokens, self._flops, self._steps, self._repeated = [], 0.0, 0.0, 0, 0
        new = slow is not None and slow.rank != self._told
        self._told = slow.rank if slow else None
        return slow if new else None

    def evaluated(self, step: int, split: str, ne: float, chosen: float) -> None:
        """Notes an evaluation: normalised entropy over all tasks and surfaces, and the metric that chooses."""
        if self._file is not None:
            self.clock.charge()
            numbers = {"ne": ne, "chosen": chosen}
            values = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
            self._write({"kind": "evaluation", "step": step, "split": split, **values}, whole=True, timed=False)
            self._write_interval(step)

    def sync(self, step: int) -> None:
        """Flushes the ledger to disk; until then a crash of the machine, not of the process, may lose lines."""
        if self._file is not None:
            self.clock.charge()
            self._write_interval(step)
            os.fsync(self._file)

    def close(self, ended: str) -> None:
        """Writes the last line."""
        if self._file is not None:
            self.clock.charge()
            if self._steps:  # of an interval that an error cut off
                self._write_interval(self._step, {})
                self._before = dict(self.clock.seconds)
            self._write({"kind": "end", "ended": ended}, whole=True)
            os.fsync(self._file)
            os.close(self._file)
            self._file = None

    def _start_file(self, path: Path, facts: Mapping[str, Any]) -> None:
        self._offset = path.read_bytes().rfind(b"\n") + 1 if path.exists() else 0  # before a line that was cut off
        self._path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        os.ftruncate(self._file, self._offset)
        self._epoch = time.time() - time.perf_counter()
        restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        first = {"kind": "start", "format": FORMAT, "started": self._epoch + self.clock.start, "restarts": restarts}
        self.clock.charge()
        self._write({**first, **facts, "energy_unknown": self._meter.unknown if self._meter else ""}, whole=True)
        self._before = dict(self.clock.seconds)

    def _since(self) -> dict[str, float]:
        return {name: value - self._before[name] for name, value in self.clock.seconds.items()}

    def _write_interval(self, step: int, more: dict[str, Any] | None = None) -> None:
        """Writes over the interval's line; what is said of all ranks ends it."""
        line = {"kind": "interval", "step": step, "steps": self._steps, "repeated": self._repeated}
        self._write({**line, **(more or {})}, whole=more is not None)

    def _write(self, line: dict[str, Any], whole: bool = False, timed: bool = True) -> None:
        """Writes over the current line, which is done when `whole`; phases go with it when `timed`."""
        assert self._file is not None
        seconds = {name: round(value, 6) for name, value in self._since().items() if value > 0.0 and timed}
        at = self._epoch + self.clock.charged_at  # what the seconds go up to, however long ago that was
        text = json.dumps({**line, "at": round(at, 6), "seconds": seconds})
        data = f"{text.ljust(self._length - 1)}\n".encode()  # spaces, where the line that it replaces was longer
        self._put(data)
        self._length = len(data)
        if whole:
            self._offset, self._length = self._offset + len(data), 0

    def _put(self, data: bytes) -> None:
        assert self._file is not None
        done = 0
        try:
            while done < len(data):
                done += os.pwrite(self._file, data[done:], self._offset + done)
        except OSError as error:  # one of a write has no path
            raise OSError(error.errno, error.strerror, str(self._path)) from None

    def _gather(self, mine: list[float]) -> torch.Tensor:
        """`[ranks, values]` float64 on the host."""
        own = torch.tensor(mine, dtype=torch.float64)
        if dist.get_world_size() == 1:
            return own[None]
        own = own.to(self._torch_device)
        everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, own)
        return torch.stack(everyone).cpu()

    def _slowest(self, ranks: list[list[float]]) -> Slow | None:
        if len(ranks) < 2 or not self._steps:
            return None
        slowest = max(range(len(ranks)), key=lambda rank: ranks[rank][0])
        own, data = ranks[slowest]
        others = statistics.median(row[0] for rank, row in enumerate(ranks) if rank != slowest)
        return Slow(slowest, own, others, data) if own > SLOW * others else None


def _of_ranks(ranks: torch.Tensor) -> dict[str, Any]:
    """What an interval's line says of all ranks: sums, and the heaviest over the mean."""
    own, _, tokens, flops, joules = ranks[:, :_FIXED].T
    by_step = ranks[:, _FIXED:]  # tokens [ranks, steps]
    mean = by_step.mean(0)
    uneven = (by_step.max(0).values[mean > 0] / mean[mean > 0]).mean().item() if bool((mean > 0).any()) else None
    known = not bool(torch.isnan(joules).any())
    return {
        "tokens": tokens.sum().item(),
        "flops": flops.sum().item(),
        "joules": joules.sum().item() if known else None,
        "token_imbalance": uneven,
        "time_imbalance": (own.max() / own.mean()).item() if own.mean() > 0 else None,
        "own": [round(value, 6) for value in own.tolist()] if len(own) <= 64 else None,
    }


_NUMBER = int | float
_LINE = {"kind": str, "at": _NUMBER, "seconds": Each(_NUMBER)}
_OF_KIND: dict[str, dict[str, Any]] = {
    "start": {
        "format": int,
        "started": _NUMBER,
        "restarts": int,
        "world": int,
        "step": int,
        "samples": int,
        "device": str,
        "peak": _NUMBER | None,
        "precision": str,
        "energy_unknown": str,
    },
    "interval": {"step": int, "steps": int, "repeated": int},
    "evaluation": {"ne": _NUMBER | None},
    "end": {"ended": str},
}
"""What each kind of line holds, as far as it is read back."""
_WHOLE = {
    "interval": {
        "samples": int,
        "tokens": _NUMBER,
        "flops": _NUMBER,
        "padding": _NUMBER | None,
        "joules": _NUMBER | None,
        "slow": dict | None,
        "token_imbalance": _NUMBER | None,
        "time_imbalance": _NUMBER | None,
    }
}
"""And an interval that has ended."""


def whole_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a ledger, without a last one that a kill cut off; none if there is no file.

    Raises:
        ValueError: a line before the last is damaged, or the file is of another format.
    """
    if not path.is_file():
        return []
    lines = []
    texts = path.read_bytes().split(b"\n")
    for number, text in enumerate(texts, 1):
        if not text:
            continue
        try:
            line = json.loads(text)
            require_shape(line, _LINE, "line")
            require_shape(line, _OF_KIND.get(line["kind"], {}), line["kind"])
            if "samples" in line:
                require_shape(line, _WHOLE.get(line["kind"], {}), line["kind"])
            if foreign := line["seconds"].keys() - set(PHASES):
                raise ValueError(f"seconds: no phase is called {min(foreign)}")
        except ValueError as error:
            if number == len(texts):
                break
            why = "not JSON" if isinstance(error, UnicodeDecodeError | json.JSONDecodeError) else error
            raise ValueError(f"{path}: line {number} is damaged ({why}); remove it, or the file") from None
        lines.append(line)
    if lines and (lines[0]["kind"] != "start" or lines[0].get("format") != FORMAT):
        raise ValueError(f"{path}: is not a ledger of format {FORMAT}")
    return lines
