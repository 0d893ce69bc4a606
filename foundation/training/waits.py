"""Times the waits for collectives: on Gloo those of the thread, on CUDA those of the stream, by events read late."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from foundation.training.phases import COMMUNICATION, COMPUTE, DATA, OPTIMIZER, OTHER, STEP, PhaseClock

Marker = Callable[[], Any]
"""Records a mark on the computing stream; marks have `elapsed_time(later)` in ms, as `torch.cuda.Event` has."""


class DeviceTimes:
    """What a device did in the steps since the last reading, from marks that are put between its work.

    Nothing here waits for the device.

    Args:
        marker: makes marks.
    """

    def __init__(self, marker: Marker) -> None:
        self._marker = marker
        self._marks: list[tuple[str, Any, Any]] = []  # of the current step: phase, from, until
        self._waits: list[tuple[str, Any, Any]] = []
        self._steps: deque[tuple[list[tuple[str, Any, Any]], list[tuple[str, Any, Any]]]] = deque()
        self._sums = {COMPUTE: 0.0, COMMUNICATION: 0.0, OPTIMIZER: 0.0}
        self._phase, self._since = "", None

    @property
    def open(self) -> bool:
        """Inside of a step."""
        return bool(self._phase)

    def switch(self, phase: str) -> None:
        """What is queued from now on belongs to another phase; "" ends the step."""
        mark = self._marker()
        if self._phase:
            self._marks.append((self._phase, self._since, mark))
        self._phase, self._since = phase, mark
        if not phase:
            self._steps.append((self._marks, self._waits))
            self._marks, self._waits = [], []

    def wait_from(self) -> Any:
        """A wait begins."""
        return self._marker()

    def wait_until(self, since: Any) -> None:
        """The wait that began there is over."""
        self._waits.append((self._phase, since, self._marker()))

    def fold(self) -> None:
        """Sums up the steps that the device has done; their marks are let go."""
        while self._steps and self._steps[0][0][-1][2].query():
            marks, waits = self._steps.popleft()
            for phase, since, until in marks:
                self._sums[phase] += since.elapsed_time(until) / 1e3
            for phase, since, until in waits:
                waited = since.elapsed_time(until) / 1e3
                self._sums[COMMUNICATION] += waited
                self._sums[phase] -= waited

    def read(self) -> dict[str, float]:
        """Seconds by phase since the last reading, waits under `COMMUNICATION`, of all steps."""
        if self._steps:
            self._steps[-1][0][-1][2].synchronize()  # the mark alone: the steps' outcomes have been read
        self.fold()
        sums, self._sums = self._sums, dict.fromkeys(self._sums, 0.0)
        return sums


def split_by_device(host: dict[str, float], device: dict[str, float]) -> dict[str, float]:
    """Time of steps by what the device did, in place of what the host did meanwhile.

    The host runs ahead of the device: its own phases say how long it queued work, not how long the work took. The sum
    stays the host's. What the device did not work is `DATA` as far as the host waited for batches, else `OTHER`.

    Args:
        host: seconds by phase of an interval; only those of `STEP` are looked at.
        device: from `DeviceTimes.read`, of the same steps.

    Returns:
        Seconds of the phases of `STEP`, and what is to be added to `OTHER`.
    """
    whole = sum(host[name] for name in STEP)
    busy = sum(device.values())
    scale = min(1.0, whole / busy) if busy > 0 else 0.0
    idle = whole - busy * scale
    data = min(host[DATA], idle)
    worked = {name: device[name] * scale for name in (COMPUTE, COMMUNICATION, OPTIMIZER)}
    return {DATA: data, **worked, OTHER: idle - data}


class Waits:
    """Charges waits for collectives to `COMMUNICATION`.

    Seen are waits for `torch.distributed` work from Python, on CUDA also the computing stream's waits for other streams
    (FSDP2), and the end of the backward pass, in which DDP and FSDP2 wait for their last reductions. A collective
    inside of a compiled region or of a `DTensor` operation counts as computation.

    Args:
        clock: of the training thread, which makes this object.
        device: on CUDA, its times.
    """

    def __init__(self, clock: PhaseClock, device: DeviceTimes | None) -> None:
        self._clock, self._device = clock, device
        self._thread = threading.get_ident()
        self._stream = torch.cuda.current_stream() if device else None
        self._waiting = False
        self._tail: Any = None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """While the block runs, waits are seen; afterwards torch is as it was."""
        work_wait, stream_wait = dist.Work.wait, torch.cuda.Stream.wait_event
        waits = self

        def wait(work: Any, *args: Any, **options: Any) -> Any:
            with waits.waiting():
                return work_wait(work, *args, **options)

        def wait_event(stream: Any, event: Any) -> None:
            if waits._stream is None or stream != waits._stream:
                return stream_wait(stream, event)
            with waits.waiting():
                return stream_wait(stream, event)

        patched: Any = (dist.Work, torch.cuda.Stream)
        patched[0].wait, patched[1].wait_event = wait, wait_event
        try:
            yield
        finally:
            patched[0].wait, patched[1].wait_event = work_wait, stream_wait

    def waiting(self) -> AbstractContextManager[None]:
        """A context that holds a wait for other ranks, if it is one of a training step."""
        if self._waiting or not self._in_step():
            return nullcontext()
        return self._timed()

    @contextmanager
    def _timed(self) -> Iterator[None]:
        self._waiting = True
        since = self._begin()
        try:
            yield
        finally:
            self._end(since)
            self._waiting = False

    @contextmanager
    def backward(self, loss: Tensor) -> Iterator[None]:
        """Around the backward pass of a loss: sees the waits at its end."""
        if dist.get_world_size() == 1:
            yield
            return
        hook = loss.register_hook(self._at_the_end)
        try:
            yield
        finally:
            hook.remove()
            if self._tail is not None:
                self._end(self._tail)
                self._tail, self._waiting = None, False

    def _at_the_end(self, gradient: Tensor) -> None:
        # Called when the backward pass begins, so that this callback runs before those of DDP and FSDP2.
        torch.autograd.Variable._execution_engine.queue_callback(self._all_computed)

    def _all_computed(self) -> None:
        if not self._waiting and self._in_step():
            self._waiting, self._tail = True, self._begin()

    def _in_step(self) -> bool:
        if self._device is not None:
            # Autograd has threads of its own, one per device; a thread that writes a checkpoint is none of these.
            own = threading.get_ident() == self._thread or torch._C._current_graph_task_id() != -1
            return own and self._device.open and torch.cuda.current_stream() == self._stream
        return threading.get_ident() == self._thread and self._clock.now in STEP

    def _begin(self) -> Any:
        if self._device is not None:
            return self._device.wait_from()
        self._clock.enter(COMMUNICATION)
        return True

    def _end(self, since: Any) -> None:
        if self._device is not None:
            self._device.wait_until(since)
        else:
            self._clock.leave()


def cuda_marker() -> torch.cuda.Event:
    """A mark on the current CUDA stream."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
