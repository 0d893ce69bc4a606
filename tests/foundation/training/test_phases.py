from __future__ import annotations

import random
import subprocess
import sys
import time
from typing import ClassVar

import pytest

from foundation.training import phases
from foundation.training.phases import (
    CLOCKED,
    COMMUNICATION,
    COMPILE,
    COMPUTE,
    EVALUATION,
    OPTIMIZER,
    OTHER,
    STEP,
    PhaseClock,
    process_age,
)
from foundation.training.waits import DeviceTimes, split_by_device


class Time:
    """Stands for the module `time`: moves when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock_time(monkeypatch: pytest.MonkeyPatch) -> Time:
    fake = Time()
    monkeypatch.setattr(phases, "time", fake)
    return fake


def test_the_innermost_phase_gets_the_time(clock_time: Time) -> None:
    clock = PhaseClock(start=97.0)
    clock.steps_are = None
    with clock.phase(COMPUTE):
        clock_time.now += 5
        with clock.phase(COMMUNICATION):
            clock_time.now += 2
        with pytest.raises(KeyError), clock.phase(OPTIMIZER):
            clock_time.now += 1
            raise KeyError
        clock_time.now += 4
    clock.base(OTHER)
    clock_time.now += 8
    clock.charge()
    taken = {name: seconds for name, seconds in clock.seconds.items() if seconds}
    assert taken == {phases.START_OTHER: 3.0, COMPUTE: 9.0, COMMUNICATION: 2.0, OPTIMIZER: 1.0, OTHER: 8.0}


def test_steps_can_be_charged_to_one_phase_and_no_second_is_lost(clock_time: Time) -> None:
    draw = random.Random(0)
    clock = PhaseClock()
    depth = 0
    for _ in range(2000):
        clock_time.now += draw.randrange(64) / 8  # exact in binary
        what = draw.randrange(4)
        if what == 0 and depth:
            clock.leave()
            depth -= 1
        elif what == 1:
            clock.steps_are = draw.choice([None, COMPILE])
        else:
            clock.enter(draw.choice(list(CLOCKED)))
            depth += 1
    clock.charge()
    assert sum(clock.seconds.values()) == clock_time.now - 100.0
    clock.move(EVALUATION)
    assert clock.seconds[EVALUATION] == clock_time.now - 100.0
    before = dict(clock.seconds)
    clock.steps_are = COMPILE
    for name in STEP:
        clock.enter(name)
        clock_time.now += 1
        clock.leave()
    assert clock.seconds[COMPILE] - before[COMPILE] == len(STEP)


def test_the_age_of_a_process_is_since_its_start() -> None:
    code = "import time; time.sleep(0.3); from foundation.training.phases import process_age; print(process_age())"
    start = time.perf_counter()
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 0.3 <= float(answer.stdout) <= time.perf_counter() - start + 0.02
    assert process_age() > float(answer.stdout)


class Mark:
    """A mark on a device that gets there when `synchronize` is called on any mark."""

    made: ClassVar[list[Mark]] = []

    def __init__(self, at: float) -> None:
        self.at, self.done = at, False
        Mark.made.append(self)

    def elapsed_time(self, later: Mark) -> float:
        assert self.done and later.done, "read before the device got there"
        return (later.at - self.at) * 1e3

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        for mark in Mark.made:
            mark.done = True


def test_times_of_a_device_are_read_late_and_waits_are_taken_out() -> None:
    now = [0.0]
    device = DeviceTimes(lambda: Mark(now[0]))

    def step() -> None:
        device.switch(COMPUTE)
        now[0] += 3
        since = device.wait_from()
        now[0] += 1
        device.wait_until(since)
        device.switch(OPTIMIZER)
        now[0] += 2
        since = device.wait_from()
        now[0] += 0.5
        device.wait_until(since)
        device.switch("")
        now[0] += 7  # between steps

    step()
    device.fold()  # nothing is done, nothing is read
    Mark.made[-1].synchronize()
    step()
    device.fold()
    assert device.read() == pytest.approx({COMPUTE: 6.0, COMMUNICATION: 3.0, OPTIMIZER: 4.0})
    assert device.read() == {COMPUTE: 0.0, COMMUNICATION: 0.0, OPTIMIZER: 0.0}


@pytest.mark.parametrize(
    ("host", "device", "expected"),
    [
        # The host ran ahead: it queued for 2 s and waited 7 s for the device, which worked all the time.
        ((1.0, 9.0, 0.0, 0.0), (6.0, 2.0, 2.0), (0.0, 6.0, 2.0, 2.0, 0.0)),
        # The device had nothing to do while the host waited for a batch, and 1 s more while it queued.
        ((4.0, 6.0, 0.0, 0.0), (4.0, 0.0, 1.0), (4.0, 4.0, 0.0, 1.0, 1.0)),
        # Marks of a device may say a little more than the host's clock.
        ((0.0, 10.0, 0.0, 0.0), (10.0, 5.0, 5.0), (0.0, 5.0, 2.5, 2.5, 0.0)),
        ((0.0, 0.0, 0.0, 0.0), (0.0, 0.0, 0.0), (0.0, 0.0, 0.0, 0.0, 0.0)),
    ],
)
def test_time_of_steps_is_split_by_what_the_device_did(
    host: tuple[float, ...], device: tuple[float, ...], expected: tuple[float, ...]
) -> None:
    names = (COMPUTE, COMMUNICATION, OPTIMIZER)
    found = split_by_device(dict(zip(STEP, host, strict=True)), dict(zip(names, device, strict=True)))
    assert found == pytest.approx(dict(zip((*STEP, OTHER), expected, strict=True)))
    assert sum(found.values()) == pytest.approx(sum(host))
