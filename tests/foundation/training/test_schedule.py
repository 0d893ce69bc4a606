from __future__ import annotations

from typing import Any

import pytest

from foundation.training.schedule import ScheduleConfig, rate_factor


def factors(config: ScheduleConfig, total: int) -> list[float]:
    return [rate_factor(config, step, total) for step in range(total + 2)]


def test_warm_up_rises_in_a_line_then_cosine_falls_to_zero() -> None:
    got = factors(ScheduleConfig(warmup_steps=4), 14)
    assert got[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])
    assert got[9] == pytest.approx(0.5)
    assert got[14:] == pytest.approx([0.0, 0.0])
    assert got[4:15] == sorted(got[4:15], reverse=True)


def test_linear_falls_to_the_final_factor_and_constant_stays() -> None:
    got = factors(ScheduleConfig(decay="linear", final=0.2), 10)
    assert got[:11] == pytest.approx([1.0 - 0.08 * i for i in range(11)])
    assert set(factors(ScheduleConfig(decay="constant"), 5)) == {1.0}


def test_warm_up_as_a_share() -> None:
    by_share = ScheduleConfig(warmup_share=0.1, decay="constant")
    assert factors(by_share, 100) == factors(ScheduleConfig(warmup_steps=10, decay="constant"), 100)


def test_a_run_that_is_all_warm_up_does_not_divide_by_zero() -> None:
    assert factors(ScheduleConfig(warmup_steps=5), 5) == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0, 0.0])


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"warmup_steps": -1}, "warmup_steps"),
        ({"warmup_share": 1.0}, "warmup_share"),
        ({"warmup_steps": 3, "warmup_share": 0.1}, "not both"),
        ({"decay": "step"}, "decay"),
        ({"final": 2.0}, "final"),
    ],
)
def test_config_names_the_wrong_key(settings: dict[str, Any], key: str) -> None:
    with pytest.raises(ValueError, match=key):
        ScheduleConfig(**settings)
