"""Learning rate over the run: one factor in [0, 1] for the dense optimizer and the tables alike."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleConfig:
    """Linear warm-up, then decay over the rest of the run.

    Args:
        warmup_steps: steps until the full rate.
        warmup_share: the same as a share of all steps, in [0, 1); give one of the two.
        decay: shape after warm-up.
        final: factor at the end of the run, where there is decay; 0 decays to nothing.
    """

    warmup_steps: int = 0
    warmup_share: float = 0.0
    decay: Literal["constant", "linear", "cosine"] = "cosine"
    final: float = 0.0

    def __post_init__(self) -> None:
        if self.warmup_steps < 0:
            raise ValueError(f"schedule.warmup_steps: must not be negative, got {self.warmup_steps}")
        if not 0 <= self.warmup_share < 1:
            raise ValueError(f"schedule.warmup_share: must be in [0, 1), got {self.warmup_share}")
        if self.warmup_steps and self.warmup_share:
            raise ValueError("schedule.warmup_steps: give either warmup_steps or warmup_share, not both")
        if self.decay not in ("constant", "linear", "cosine"):
            raise ValueError(f"schedule.decay: must be constant, linear or cosine, got {self.decay!r}")
        if not 0 <= self.final <= 1:
            raise ValueError(f"schedule.final: must be in [0, 1], got {self.final}")


def rate_factor(config: ScheduleConfig, step: int, total: int) -> float:
    """What learning rates are multiplied with in one step.

    Args:
        config: the schedule.
        step: 0 for the first step of the run.
        total: steps of the whole run; later steps keep the last factor.

    Returns:
        `(step + 1) / warmup` during warm-up, then from 1 down to `final`, which the step after the last would reach.
    """
    warmup = config.warmup_steps or round(config.warmup_share * total)
    if step < warmup:
        return (step + 1) / warmup
    if config.decay == "constant":
        return 1.0
    done = min(1.0, (step - warmup) / max(1, total - warmup))
    shape = 1.0 - done if config.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return config.final + (1.0 - config.final) * shape
