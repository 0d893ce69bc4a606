"""A bounded queue in front of worker threads, in which every job carries a deadline.

A job is refused at once when the queue is full or when the work ahead of it would use up its time; it is
dropped at dequeue when its time has passed or its client has gone; its result is withheld when it comes too
late. So under overload the workers spend their time on answers that somebody still waits for. The order is
first in, first out.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from serving.errors import Reason, ServingError

_SMOOTHING = 0.1  # weight of the newest service time in the running mean


@dataclass(eq=False, slots=True)
class Job:
    """Work with a deadline. `work` gets the seconds that it waited; `future` gets its result or error."""

    key: str
    deadline: float
    work: Callable[[float], Any]
    submitted: float
    estimate: float
    future: Future[Any] = field(default_factory=Future)


class Scheduler:
    """See the module's text.

    Args:
        workers: number of threads; 0 starts none and leaves the work to calls of :meth:`step`.
        capacity: jobs that may wait; one more is refused with `queue_full`.
        clock: seconds on a clock that never goes back; deadlines are moments on it.
    """

    def __init__(self, workers: int, capacity: int, clock: Callable[[], float] = time.monotonic) -> None:
        if workers < 0 or capacity < 1:
            raise ValueError(f"workers must be >= 0 and capacity >= 1, got {workers} and {capacity}")
        self.clock = clock
        self._capacity = capacity
        self._queue: deque[Job] = deque()
        self._backlog = 0.0  # expected seconds of all queued jobs
        self._service: dict[str, float] = {}  # key -> running mean of seconds per job
        self._running = 0
        self._closing = False
        self._changed = threading.Condition()
        self._lanes = max(workers, 1)
        self._threads = [
            threading.Thread(target=self._loop, name=f"serving-worker-{i}", daemon=True) for i in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def waiting(self) -> int:
        """Jobs in the queue now."""
        return len(self._queue)

    @property
    def running(self) -> int:
        """Jobs being worked on now."""
        return self._running

    def service_seconds(self, key: str) -> float:
        """Running mean of the seconds that a job of `key` takes; 0 before the first one."""
        return self._service.get(key, 0.0)

    def submit(self, key: str, deadline: float, work: Callable[[float], Any]) -> Future[Any]:
        """Puts work into the queue.

        Args:
            key: jobs of one key take about the same time, e.g. a model's name and version.
            deadline: the moment after which nobody wants the result.

        Raises:
            ServingError: `draining`, `deadline_admit`, `queue_full` or `would_expire`.
        """
        with self._changed:
            now = self.clock()
            if self._closing:
                raise ServingError(Reason.DRAINING, "the server is shutting down")
            if now >= deadline:
                raise ServingError(Reason.DEADLINE_ADMIT, "the deadline had passed when the request arrived")
            if len(self._queue) >= self._capacity:
                self._drop_expired(now)
            if len(self._queue) >= self._capacity:
                raise ServingError(Reason.QUEUE_FULL, f"the queue is full: {self._capacity} requests wait")
            estimate = self._service.get(key, 0.0)
            wait = self._backlog / self._lanes
            # An empty queue always admits: else one slow job could keep the mean high for ever.
            if self._queue and now + wait + estimate > deadline:
                raise ServingError(
                    Reason.WOULD_EXPIRE,
                    f"{len(self._queue)} requests wait, about {wait * 1e3:.0f} ms of work, and "
                    f"{(deadline - now) * 1e3:.0f} ms are left",
                )
            job = Job(key=key, deadline=deadline, work=work, submitted=now, estimate=estimate)
            self._queue.append(job)
            self._backlog += estimate
            self._changed.notify()
            return job.future

    def step(self) -> bool:
        """Takes the oldest job and finishes it, one way or another. False when none waits."""
        with self._changed:
            job = self._take()
        if job is None:
            return False
        self._run(job)
        return True

    def close(self, drain_seconds: float = 0.0) -> None:
        """Refuses new jobs, gives those admitted `drain_seconds` to finish, fails the rest, ends the threads.
        With no threads, jobs in the queue fail at once."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            if self._threads:
                self._changed.wait_for(lambda: not self._queue and not self._running, drain_seconds)
            while (job := self._take()) is not None:
                if job.future.set_running_or_notify_cancel():
                    job.future.set_exception(ServingError(Reason.DRAINING, "the server is shutting down"))
                self._running -= 1
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(timeout=max(drain_seconds, 0.1))

    def _take(self) -> Job | None:
        if not self._queue:
            return None
        job = self._queue.popleft()
        self._backlog = max(0.0, self._backlog - job.estimate) if self._queue else 0.0
        self._running += 1
        return job

    def _drop_expired(self, now: float) -> None:
        """Makes room: jobs that are cancelled or past their deadline leave the queue."""
        kept = []
        for job in self._queue:
            if job.future.cancelled():
                continue
            if now >= job.deadline and job.future.set_running_or_notify_cancel():
                job.future.set_exception(_expired_in_queue(now - job.submitted))
                continue
            kept.append(job)
        self._queue = deque(kept)
        self._backlog = sum(job.estimate for job in kept)

    def _loop(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._queue) or self._closing)
                job = self._take()
            if job is None:
                return
            self._run(job)

    def _run(self, job: Job) -> None:
        try:
            if not job.future.set_running_or_notify_cancel():
                return
            started = self.clock()
            if started >= job.deadline:
                job.future.set_exception(_expired_in_queue(started - job.submitted))
                return
            try:
                result = job.work(started - job.submitted)
            except BaseException as error:  # a worker outlives any job; the waiter gets the error
                job.future.set_exception(error)
                return
            finished = self.clock()
            self._learn(job.key, finished - started)
            if finished > job.deadline:
                late = f"the answer came {(finished - job.deadline) * 1e3:.1f} ms after the deadline"
                job.future.set_exception(ServingError(Reason.DEADLINE_RESPONSE, late))
            else:
                job.future.set_result(result)
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def _learn(self, key: str, seconds: float) -> None:
        with self._changed:
            mean = self._service.get(key)
            self._service[key] = seconds if mean is None else mean + _SMOOTHING * (seconds - mean)


def _expired_in_queue(waited: float) -> ServingError:
    return ServingError(Reason.DEADLINE_QUEUE, f"the deadline passed after {waited * 1e3:.1f} ms in the queue")
