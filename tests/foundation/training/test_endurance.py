"""What the benchmark of many steps calls drift."""

from __future__ import annotations

import math

import pytest

from foundation.training.benchmarks.endurance import verdict


def lines(**last: float) -> list[dict[str, float]]:
    found = [{"step": 10.0 * n, "loss": 0.5, "skipped": 0, "held_gb": 1.0, "most_gb": 2.0} for n in range(1, 21)]
    found[0] |= {"held_gb": 0.5, "most_gb": 1.0}  # what the first steps allocate is no drift
    found[-1] |= last
    return found


def test_a_flat_run_passes() -> None:
    assert verdict(lines(), 0.01, 0.05) == ""


@pytest.mark.parametrize(
    ("last", "word"),
    [
        ({"held_gb": 1.02}, "held_gb"),
        ({"most_gb": 2.05}, "most_gb"),
        ({"loss": math.nan}, "finite"),
        ({"loss": 0.53}, "loss grew"),
        ({"skipped": 1}, "1 steps were not finite"),
    ],
)
def test_drift_and_steps_that_are_not_finite_are_named(last: dict[str, float], word: str) -> None:
    assert word in verdict(lines(**last), 0.01, 0.05)
