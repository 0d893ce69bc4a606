"""Many steps in a row: ``python -m foundation.training.benchmarks.endurance --step.preset foundation/small``.

Batches of many different lengths go through the training loop's own step. Every so many steps a line says what memory
is held and was held at most since the line before, the mean and the highest loss, and how many steps were not finite.
Labels are drawn anew for every step, so there is nothing to learn by heart and the loss stays at their entropy. Ends
with code 1 if a step was skipped, or if the last line holds more memory, or has more loss, than the one at a tenth of
the steps.
"""

from __future__ import annotations

import json
import math
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch

from foundation.data.commands import run_command
from foundation.data.options import parse_config
from foundation.training.benchmarks.step import Bench, StepConfig, prepared
from foundation.training.window import LogWindow


@dataclass(frozen=True, kw_only=True, slots=True)
class EnduranceConfig:
    """What to run.

    Args:
        step: model, batches and precision; its `steps`, `local` and `top` are not used.
        steps: in all.
        every: steps between lines.
        tolerance: growth of memory that is called drift, as a share.
        loss_tolerance: the same of the loss.
        ones: share of labels that are 1; 0: each batch keeps its own, which are learnt by heart.
        out: JSON file with all lines; empty: none.
    """

    step: StepConfig = field(
        default_factory=lambda: StepConfig(
            preset="foundation/small", requests=64, impressions=8, mean=256, longest=2048, most_rows=100_000, batches=64
        )
    )
    steps: int = 10_000
    every: int = 500
    tolerance: float = 0.01
    loss_tolerance: float = 0.05
    ones: float = 0.25
    out: str = ""


class Losses(LogWindow):
    """Keeps the loss of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def done(self, loss: float, norm: float, impressions: int) -> None:
        """As in the class above."""
        super().done(loss, norm, impressions)
        self.losses.append(loss)


def run(config: EnduranceConfig) -> list[dict[str, float]]:
    """Does the steps; a line every so many of them."""
    lines: list[dict[str, float]] = []
    process = psutil.Process()
    with prepared(config.step) as (bench, _):
        bench.settled_loss()  # of the steps before
        window = bench.loop._window = Losses()
        bench.fresh_labels = config.ones
        if config.ones:
            print(f"entropy of the labels of an impression {floor(config, bench):.4f}", flush=True)
        start = time.perf_counter()
        for number in range(config.steps):
            bench.step(number)
            if (number + 1) % config.every:
                continue
            loss, highest = bench.settled_loss(), max(window.losses, default=math.nan)
            window = bench.loop._window = Losses()
            line = {
                "step": number + 1,
                "seconds": time.perf_counter() - start,
                "host_gb": process.memory_info().rss / 1e9,
                "loss": loss,
                "highest_loss": highest,
                "skipped": bench.loop.state.progress.skipped,
            }
            if bench.cuda:
                line["held_gb"] = torch.cuda.memory_allocated() / 1e9
                line["most_gb"] = torch.cuda.max_memory_allocated() / 1e9
                line["reserved_gb"] = torch.cuda.memory_reserved() / 1e9
                torch.cuda.reset_peak_memory_stats()
            lines.append(line)
            print(", ".join(f"{key} {value:.6g}" for key, value in line.items()), flush=True)
            if config.out:
                Path(config.out).write_text(json.dumps(lines, indent=1) + "\n")
    return lines


def floor(config: EnduranceConfig, bench: Bench) -> float:
    """The loss of a model that says `ones` for every label: entropy times what an impression's valid labels weigh."""
    share, weights = config.ones, bench.model.task_weights.cpu()
    entropy = -(share * math.log(share) + (1 - share) * math.log(1 - share))
    valid = [float((b.weight[:, None] * b.label_valid * weights).sum() / b.weight.sum()) for b in bench.batches]
    return entropy * sum(valid) / len(valid)


def verdict(lines: list[dict[str, float]], tolerance: float, loss_tolerance: float) -> str:
    """What is wrong; empty if nothing is."""
    if lines[-1]["skipped"] or not all(math.isfinite(line["loss"]) for line in lines):
        return f"{lines[-1]['skipped']:.0f} steps were not finite"
    early = lines[len(lines) // 10]
    for key in ("held_gb", "most_gb"):
        if key in early and lines[-1][key] > early[key] * (1 + tolerance):
            return f"{key} grew from {early[key]:.4f} at step {early['step']:.0f} to {lines[-1][key]:.4f}"
    if lines[-1]["loss"] > early["loss"] * (1 + loss_tolerance):
        return f"loss grew from {early['loss']:.4f} at step {early['step']:.0f} to {lines[-1]['loss']:.4f}"
    return ""


def main(arguments: list[str]) -> None:
    """Runs and judges."""
    config: EnduranceConfig = parse_config(
        EnduranceConfig, arguments, name="python -m foundation.training.benchmarks.endurance"
    )
    lines = run(config)
    wrong = verdict(lines, config.tolerance, config.loss_tolerance)
    print(wrong or f"{config.steps} steps: no drift of memory or loss, all finite")
    if wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
