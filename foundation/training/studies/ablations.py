"""What each choice is worth: variants of a preset beside it, with standard errors over seeds.

    python -m foundation.training.studies.ablations --config studies/kuairand --dataset DATASET --out OUT

Seeds are paired: a difference is taken between two runs of the same seed, its standard error over the seeds. Prints
a table and writes it to `OUT/results.md`, with all numbers in `OUT/results.json`.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from foundation.data.commands import run_command
from foundation.data.dataset import Dataset
from foundation.data.files import atomic_write
from foundation.data.options import parse_config
from foundation.data.settings import show
from foundation.training.run_log import finite
from foundation.training.studies.runs import Outcome, StudyConfig

METRICS = ("auc", "gauc", "ne")


@dataclass(frozen=True, kw_only=True, slots=True)
class AblationsConfig(StudyConfig):
    """What to compare.

    Args:
        variants: by name, what each changes in the preset.
        against: variant that the others are compared with.
        tasks: tasks of the table; empty: all.
    """

    variants: dict[str, dict[str, Any]]
    against: str
    tasks: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        StudyConfig.__post_init__(self)  # super() knows no class with slots
        if self.against not in self.variants:
            raise ValueError(f"against: {self.against!r} is not among the variants: {', '.join(self.variants)}")


@dataclass(frozen=True, slots=True)
class Difference:
    """Mean over seeds and its standard error, NaN with one seed."""

    mean: float
    error: float

    @staticmethod
    def of(values: Sequence[float]) -> Difference:
        """Of the differences of the seeds."""
        spread = float(np.std(values, ddof=1)) if len(values) > 1 else math.nan
        return Difference(float(np.mean(values)), spread / math.sqrt(len(values)))


def ablations(config: AblationsConfig) -> dict[str, Any]:
    """Runs what is missing; returns and writes the numbers.

    Raises:
        ValueError: a config that cannot be used, a task that the dataset lacks, a result that is not of this study.
    """
    show(config, "ablations")
    known = Dataset.open(config.dataset).schema.task_names
    if unknown := [task for task in config.tasks if task not in known]:
        raise ValueError(f"tasks: the dataset has no task {unknown[0]!r}; known: {', '.join(known)}")
    outcomes = config.run(config.variants)
    seeds = {
        name: [s for s in config.seeds if {(name, s), (config.against, s)} <= outcomes.keys()]
        for name in config.variants
    }
    if not seeds[config.against]:
        raise ValueError(f"{config.out}: there is no result of {config.against!r}, which the others are compared with")
    tasks = config.tasks or list(known)
    numbers = {name: _numbers(outcomes, name, config.against, own, tasks) for name, own in seeds.items() if own}
    atomic_write(config.out / "results.json", json.dumps(finite(numbers), indent=1) + "\n")
    page = table(numbers, config.against, tasks)
    atomic_write(config.out / "results.md", page)
    print(page)
    return numbers


def _numbers(
    outcomes: Mapping[tuple[str, int], Outcome], name: str, against: str, seeds: Sequence[int], tasks: Sequence[str]
) -> dict[str, Any]:
    runs = [outcomes[name, seed] for seed in seeds]
    reference = [outcomes[against, seed] for seed in seeds]

    def values(of: Sequence[Outcome], task: str, metric: str) -> list[float]:
        return [run.metrics[task]["all"][metric] for run in of]

    found: dict[str, Any] = {"flops": runs[0].flops, "dense": runs[0].dense, "seeds": list(seeds), "tasks": {}}
    for task in tasks:
        found["tasks"][task] = {}
        for metric in METRICS:
            own, other = values(runs, task, metric), values(reference, task, metric)
            change = Difference.of([a - b for a, b in zip(own, other, strict=True)])
            found["tasks"][task][metric] = {
                "mean": float(np.mean(own)),
                "change": change.mean,
                "error": change.error,
            }
    return found


def table(numbers: Mapping[str, Any], against: str, tasks: Sequence[str]) -> str:
    """Markdown: the reference's metrics, the others' differences to it with their standard errors."""
    head = [f"{task} {metric.upper()}" for task in tasks for metric in METRICS]
    lines = ["| variant | MFLOP | seeds | " + " | ".join(head) + " |", "|---" * (len(head) + 3) + "|"]
    order = [against, *(name for name in numbers if name != against)]
    for name in order:
        cells = [name, f"{numbers[name]['flops'] / 1e6:,.2f}", str(len(numbers[name]["seeds"]))]
        for task in tasks:
            for metric in METRICS:
                value = numbers[name]["tasks"][task][metric]
                if name == against:
                    cells.append(f"{value['mean']:.4f}")
                else:
                    error = "" if math.isnan(value["error"]) else f" ± {value['error']:.4f}"
                    cells.append(f"{value['change']:+.4f}{error}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> None:
    """The command."""
    ablations(parse_config(AblationsConfig, arguments, name="python -m foundation.training.studies.ablations"))


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
