"""A clock that charges every second of a process to exactly one phase of a training run."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from types import TracebackType

IMPORTS = "start-up: imports"
PROCESS_GROUP = "start-up: process group"
DATASET = "start-up: dataset"
MODEL = "start-up: model and plan"
RESTORE = "start-up: restore"
FIRST_BATCH = "start-up: first batch"
COMPILE = "start-up: compile"
START_OTHER = "start-up: other"
DATA = "data wait"
COMPUTE = "compute"
COMMUNICATION = "exposed communication"
OPTIMIZER = "optimizer"
CHECKPOINT = "checkpoint stall"
EVALUATION = "evaluation"
REPEATED = "repeated work"
OTHER = "idle and other"
DOWN = "down"
AWAY = "away"

CLOCKED = {
    IMPORTS: "from the start of the process to the call of training: the interpreter and its modules",
    PROCESS_GROUP: "ranks find each other",
    DATASET: "the dataset and its readers are opened",
    MODEL: "the model is built, tables are planned and sharded, optimizers are made",
    RESTORE: "a checkpoint is read to go on from it",
    FIRST_BATCH: "until the first batch is there: workers start and fill their window",
    COMPILE: "the first step of the process, in which graphs and kernels are compiled",
    START_OTHER: "the rest until the first step",
    DATA: "a step had to wait for its batch",
    COMPUTE: "forward and backward pass, tables included, which are updated in the backward pass",
    COMMUNICATION: "waits for collectives that no computation hid",
    OPTIMIZER: "clipping, the optimizer of the dense part, averages",
    CHECKPOINT: "the training thread waited for a checkpoint",
    EVALUATION: "the model was evaluated",
    REPEATED: "steps done again after a failure, up to the furthest step that had been done",
    OTHER: "log lines, and what no other phase has",
}
"""The phases of a process that runs, in the order in which they are shown, and what each holds."""

BETWEEN = {
    DOWN: "between a failure and the restart by the launcher, which kept the machines",
    AWAY: "between the end of a process and a later start by hand",
}
"""Time in which no process ran."""

PHASES = {**CLOCKED, **BETWEEN}
STEP = (DATA, COMPUTE, COMMUNICATION, OPTIMIZER)
"""What a training step is made of."""


class PhaseClock:
    """A stack of phases on one thread: the innermost gets the time. No second is lost, none counts twice.

    Args:
        start: `time.perf_counter()` at which the clock starts; now by default.
    """

    def __init__(self, start: float | None = None) -> None:
        self.seconds = dict.fromkeys(CLOCKED, 0.0)
        """By phase, up to the last change of phase."""
        self.steps_are: str | None = FIRST_BATCH
        """A phase that all of `STEP` is charged to for now; None charges each to itself."""
        self._stack = [START_OTHER]
        self._contexts = {name: _Phase(self, name) for name in CLOCKED}
        self.start = time.perf_counter() if start is None else start
        self.charged_at = self.start
        """`time.perf_counter()` of that change."""

    def phase(self, name: str) -> _Phase:
        """A context in which the time is the phase's."""
        return self._contexts[name]

    @property
    def now(self) -> str:
        """The innermost phase, before `steps_are`."""
        return self._stack[-1]

    def enter(self, name: str) -> None:
        """Begins a phase inside of the current one."""
        self.charge()
        self._stack.append(name)

    def leave(self) -> None:
        """Ends the phase begun last."""
        self.charge()
        self._stack.pop()

    def charge(self) -> None:
        """Brings `seconds` up to now."""
        now = time.perf_counter()
        name = self._stack[-1]
        if self.steps_are is not None and name in STEP:
            name = self.steps_are
        self.seconds[name] += now - self.charged_at
        self.charged_at = now

    def move(self, name: str) -> None:
        """Charges everything so far to one phase."""
        self.charge()
        whole = sum(self.seconds.values())
        self.seconds = dict.fromkeys(CLOCKED, 0.0) | {name: whole}

    def base(self, name: str) -> None:
        """Makes another phase the outermost one."""
        self.charge()
        self._stack[0] = name


class _Phase:
    __slots__ = ("_clock", "_name")

    def __init__(self, clock: PhaseClock, name: str) -> None:
        self._clock, self._name = clock, name

    def __enter__(self) -> None:
        self._clock.enter(self._name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._clock.leave()


def process_age() -> float:
    """Seconds since this process was started, to about 10 ms, from `/proc`."""
    fields = Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")


def command_start() -> float | None:
    """`time.perf_counter()` at the start of this process, if the process is the command `opengem train`.

    Elsewhere (a notebook, a test, a pipeline of several stages) what came before belongs to something else: None.
    """
    if Path(sys.argv[0]).stem != "opengem" or "train" not in sys.argv[1:2] or not Path("/proc/self/stat").exists():
        return None
    return time.perf_counter() - process_age()
