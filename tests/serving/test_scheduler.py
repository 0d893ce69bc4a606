"""The scheduler, on a clock that the tests move."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from serving.errors import Reason, ServingError
from serving.scheduler import Scheduler


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def make(capacity: int = 3) -> tuple[Scheduler, Clock]:
    clock = Clock()
    return Scheduler(0, capacity, clock), clock


def taking(clock: Clock, seconds: float, result: Any = "done") -> Callable[[float], Any]:
    def work(waited: float) -> Any:
        clock.now += seconds
        return result

    return work


def reason_of(call: Callable[[], Any]) -> Reason:
    with pytest.raises(ServingError) as caught:
        call()
    return caught.value.reason


def test_jobs_run_in_order_and_learn_how_long_they_waited() -> None:
    scheduler, clock = make()
    waits: list[float] = []
    for _ in range(2):
        scheduler.submit("m", clock.now + 10, lambda waited: (waits.append(waited), taking(clock, 1.0)(0))[1])
    while scheduler.step():
        pass
    assert waits == [0.0, 1.0] and scheduler.waiting == scheduler.running == 0


def test_a_deadline_already_past_is_not_admitted() -> None:
    scheduler, clock = make()
    assert reason_of(lambda: scheduler.submit("m", clock.now, taking(clock, 0))) is Reason.DEADLINE_ADMIT
    assert scheduler.waiting == 0


def test_a_full_queue_refuses_at_once() -> None:
    scheduler, clock = make(capacity=2)
    futures = [scheduler.submit("m", clock.now + 1, taking(clock, 0)) for _ in range(2)]
    assert reason_of(lambda: scheduler.submit("m", clock.now + 1, taking(clock, 0))) is Reason.QUEUE_FULL
    while scheduler.step():
        pass
    assert [future.result() for future in futures] == ["done", "done"]


def test_a_full_queue_first_drops_what_nobody_waits_for() -> None:
    scheduler, clock = make(capacity=2)
    expired = scheduler.submit("m", clock.now + 1, taking(clock, 0))
    gone = scheduler.submit("m", clock.now + 9, taking(clock, 0))
    gone.cancel()
    clock.now += 2
    fresh = scheduler.submit("m", clock.now + 1, taking(clock, 0))
    assert reason_of(expired.result) is Reason.DEADLINE_QUEUE
    assert scheduler.waiting == 1 and scheduler.step()
    assert fresh.result() == "done"


def test_an_expired_job_is_dropped_at_dequeue_and_its_work_never_runs() -> None:
    scheduler, clock = make()
    ran: list[int] = []
    future = scheduler.submit("m", clock.now + 1, lambda waited: ran.append(1))
    clock.now += 1.5
    assert scheduler.step()
    assert reason_of(future.result) is Reason.DEADLINE_QUEUE and not ran


def test_a_late_result_is_withheld() -> None:
    scheduler, clock = make()
    future = scheduler.submit("m", clock.now + 1, taking(clock, 1.25))
    scheduler.step()
    assert reason_of(future.result) is Reason.DEADLINE_RESPONSE
    assert "250.0 ms after the deadline" in str(future.exception())


def test_a_cancelled_job_never_runs() -> None:
    scheduler, clock = make()
    ran: list[int] = []
    future = scheduler.submit("m", clock.now + 1, lambda waited: ran.append(1))
    assert future.cancel() and scheduler.step()
    assert not ran and scheduler.running == 0


def test_work_that_cannot_be_reached_in_time_is_refused() -> None:
    scheduler, clock = make(capacity=9)
    scheduler.submit("m", clock.now + 9, taking(clock, 1.0))
    scheduler.step()
    assert scheduler.service_seconds("m") == 1.0
    scheduler.submit("m", clock.now + 1.5, taking(clock, 1.0))  # nothing waits: admitted
    assert reason_of(lambda: scheduler.submit("m", clock.now + 1.5, taking(clock, 1.0))) is Reason.WOULD_EXPIRE
    scheduler.submit("m", clock.now + 2.5, taking(clock, 1.0))
    scheduler.submit("quick", clock.now + 2.5, taking(clock, 0.1))  # unknown keys are expected to be quick


def test_an_idle_scheduler_admits_whatever_the_mean_says() -> None:
    """One slow job must not lock everybody out for ever."""
    scheduler, clock = make()
    scheduler.submit("m", clock.now + 99, taking(clock, 50.0))
    scheduler.step()
    future = scheduler.submit("m", clock.now + 1, taking(clock, 0.5))
    scheduler.step()
    assert future.result() == "done" and scheduler.service_seconds("m") < 50


def test_an_error_reaches_the_waiter_and_the_scheduler_goes_on() -> None:
    scheduler, clock = make()

    def broken(waited: float) -> None:
        raise KeyError("x")

    first = scheduler.submit("m", clock.now + 1, broken)
    second = scheduler.submit("m", clock.now + 1, taking(clock, 0))
    scheduler.step()
    scheduler.step()
    assert isinstance(first.exception(), KeyError) and second.result() == "done"


def test_close_refuses_new_jobs_and_fails_those_that_wait() -> None:
    scheduler, clock = make()
    future = scheduler.submit("m", clock.now + 1, taking(clock, 0))
    scheduler.close()
    assert reason_of(future.result) is Reason.DRAINING
    assert reason_of(lambda: scheduler.submit("m", clock.now + 1, taking(clock, 0))) is Reason.DRAINING


def test_under_overload_the_work_done_is_work_that_counts() -> None:
    """Twice the load that one worker can take, for 20 s: nearly all the time goes into answers in time."""
    scheduler, clock = make(capacity=100)
    in_time = 0
    next_arrival, service, budget = clock.now, 0.1, 0.5
    futures = []
    end = clock.now + 20
    while clock.now < end:
        while next_arrival <= clock.now:
            moment = next_arrival
            next_arrival += service / 2
            try:
                futures.append(scheduler.submit("m", moment + budget, taking(clock, service)))
            except ServingError as error:
                assert error.reason in (Reason.WOULD_EXPIRE, Reason.DEADLINE_ADMIT)
        if not scheduler.step():
            clock.now = next_arrival
    in_time = sum(future.done() and future.exception() is None for future in futures)
    assert in_time >= 0.95 * 20 / service


def test_threads_run_jobs_and_close_drains_them() -> None:
    scheduler = Scheduler(workers=2, capacity=50)
    release = threading.Event()
    futures = [
        scheduler.submit("m", scheduler.clock() + 60, lambda waited: release.wait(30) and threading.get_ident())
        for _ in range(10)
    ]
    closing = threading.Thread(target=scheduler.close, args=(30,))
    closing.start()
    release.set()
    closing.join(30)
    assert not closing.is_alive()
    assert all(isinstance(future.result(timeout=1), int) for future in futures)


@pytest.mark.parametrize(("workers", "capacity"), [(-1, 1), (1, 0)])
def test_sizes_are_checked(workers: int, capacity: int) -> None:
    with pytest.raises(ValueError, match="workers must be >= 0 and capacity >= 1"):
        Scheduler(workers, capacity)
