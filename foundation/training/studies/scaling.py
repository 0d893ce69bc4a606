"""How quality grows with computation: one preset in several sizes on a synthetic world, beside the best possible.

    python -m foundation.training.studies.scaling --config studies/scaling --dataset DATASET --out OUT

The dataset is one that `opengem prepare logs` made of a synthetic world, whose test rows say with which probability
each label was drawn (`true_TASK`). Normalised entropy (NE) is put against the useful floating point operations of the
whole training; the slope is that of a straight line through NE against log10 of the operations. How much of the gap a
size closes is `(NE of the DNN - its NE) / (NE of the DNN - best possible NE)`, where the DNN is the variant `dnn`,
which sees no history. Prints a table; writes `OUT/results.md`, `results.json` and `scaling.svg`.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from foundation.data.commands import run_command
from foundation.data.dataset import Dataset
from foundation.data.files import atomic_write
from foundation.data.options import parse_config
from foundation.data.settings import show
from foundation.model.flops import TRAINING
from foundation.training.best_possible import best_possible
from foundation.training.charts import curves
from foundation.training.run_log import finite
from foundation.training.studies.ablations import Difference
from foundation.training.studies.runs import Outcome, StudyConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingConfig(StudyConfig):
    """What to train; the dataset is one of a synthetic world.

    Args:
        sizes: by name, smallest first, what each changes in the preset; at least two.
        dnn: what makes the preset a plain network without history.
        task: whose NE counts; its label column's truth is `true_TASK`.
    """

    sizes: dict[str, dict[str, Any]]
    dnn: dict[str, Any]
    task: str = "click"
    seeds: list[int] = field(default_factory=lambda: [0])

    def __post_init__(self) -> None:
        StudyConfig.__post_init__(self)  # super() knows no class with slots
        if len(self.sizes) < 2 or "dnn" in self.sizes:
            raise ValueError("sizes: expected at least two, none of them named dnn")


@dataclass(frozen=True, slots=True)
class Line:
    """NE = intercept + slope * log10(operations), by least squares; `error` is the slope's, NaN for two points."""

    slope: float
    intercept: float
    error: float

    @staticmethod
    def through(operations: Sequence[float], ne: Sequence[float]) -> Line:
        """Fits the line."""
        x, y = np.log10(np.asarray(operations, float)), np.asarray(ne, float)
        slope, intercept = np.polyfit(x, y, 1)
        free = len(x) - 2
        left = float(np.sum((y - intercept - slope * x) ** 2))
        error = math.sqrt(left / free / float(np.sum((x - x.mean()) ** 2))) if free > 0 else math.nan
        return Line(float(slope), float(intercept), error)


def scaling(config: ScalingConfig) -> dict[str, Any]:
    """Trains what is missing; returns and writes the numbers.

    Raises:
        ValueError: a config that cannot be used, or a dataset that does not tell the truth about its labels.
    """
    show(config, "scaling")
    best = _best(Dataset.open(config.dataset), config)
    outcomes = config.run({"dnn": config.dnn, **config.sizes})
    if not all(any(name == run for run, _ in outcomes) for name in ("dnn", *config.sizes)):
        raise ValueError(f"{config.out}: every size and the DNN need at least one result")
    numbers = _numbers(outcomes, config, best)
    atomic_write(config.out / "results.json", json.dumps(finite(numbers), indent=1) + "\n")
    page = table(numbers)
    atomic_write(config.out / "results.md", page)
    atomic_write(config.out / "scaling.svg", picture(numbers))
    print(page)
    return numbers


def _best(dataset: Dataset, config: ScalingConfig) -> float:
    """NE of the true probabilities."""
    tasks = {task.name: task for task in dataset.schema.tasks}
    if config.task not in tasks:
        raise ValueError(f"task: {dataset.schema.source} has no task {config.task!r}; known: {', '.join(tasks)}")
    task, truth = tasks[config.task], f"true_{config.task}"
    if task.given is not None:
        raise ValueError(f"task: {config.task} is not asked of every row; choose one that is")
    parts = []
    for file in dataset.files(config.split):
        if truth not in pq.read_schema(file).names:
            raise ValueError(f"{file}: has no column {truth!r}; the dataset must come from `opengem world`")
        parts.append(pq.read_table(file, columns=[task.label, truth]))
    rows = pa.concat_tables(parts)
    return float(best_possible(rows[task.label].to_numpy(), rows[truth].to_numpy())["ne"])


def _numbers(outcomes: Mapping[tuple[str, int], Outcome], config: ScalingConfig, best: float) -> dict[str, Any]:
    def runs(name: str) -> list[Outcome]:
        return [outcomes[name, seed] for seed in config.seeds if (name, seed) in outcomes]

    def ne(name: str) -> list[float]:
        return [run.metrics[config.task]["all"]["ne"] for run in runs(name)]

    dnn = float(np.mean(ne("dnn")))
    sizes: dict[str, Any] = {}
    for name in ("dnn", *config.sizes):
        run, values = runs(name)[0], Difference.of(ne(name))
        sizes[name] = {
            "dense": run.dense,
            "flops_per_impression": run.flops,
            "training_flops": TRAINING * run.flops * run.samples,
            "ne": values.mean,
            "error": values.error,
            "gap_closed": (dnn - values.mean) / (dnn - best),
            "seconds": float(np.mean([run.seconds for run in runs(name)])),
        }
    points = [(sizes[name]["training_flops"], sizes[name]["ne"]) for name in config.sizes]
    line = Line.through([x for x, _ in points], [y for _, y in points])
    fitted = {"slope": line.slope, "error": line.error, "intercept": line.intercept}
    return {"task": config.task, "best": best, "sizes": sizes, "line": fitted}


def table(numbers: Mapping[str, Any]) -> str:
    """Markdown."""
    lines = [
        "| size | dense parameters | MFLOP per impression | training TFLOP | NE | gap closed |",
        "|---|---|---|---|---|---|",
    ]
    for name, size in numbers["sizes"].items():
        error = "" if math.isnan(size["error"]) else f" ± {size['error']:.4f}"
        lines.append(
            f"| {name} | {size['dense'] / 1e6:,.2f} M | {size['flops_per_impression'] / 1e6:,.2f} |"
            f" {size['training_flops'] / 1e12:,.2f} | {size['ne']:.4f}{error} | {size['gap_closed']:.1%} |"
        )
    line = numbers["line"]
    error = "" if math.isnan(line["error"]) else f" ± {line['error']:.4f}"
    lines += [
        f"| best possible | | | | {numbers['best']:.4f} | 100.0% |",
        "",
        f"NE of {numbers['task']} falls by {-line['slope']:.4f}{error} for ten times the operations.",
    ]
    return "\n".join(lines) + "\n"


def picture(numbers: Mapping[str, Any]) -> str:
    """NE against log10 of the training's operations, with the line, the DNN and the best possible."""
    sizes = {name: size for name, size in numbers["sizes"].items() if name != "dnn"}
    x = np.log10([size["training_flops"] for size in sizes.values()])
    ends = np.array([x.min(), x.max()])
    line, dnn = numbers["line"], numbers["sizes"]["dnn"]["ne"]
    series = {
        "sizes": (x, np.array([size["ne"] for size in sizes.values()])),
        f"slope {line['slope']:.4f}": (ends, line["intercept"] + line["slope"] * ends),
        "DNN without history": (ends, np.array([dnn, dnn])),
        "best possible": (ends, np.array([numbers["best"]] * 2)),
    }
    return curves(
        series, x="log10 of training operations", y=f"NE of {numbers['task']}", title="NE against training operations"
    )


def main(arguments: list[str]) -> None:
    """The command."""
    scaling(parse_config(ScalingConfig, arguments, name="python -m foundation.training.studies.scaling"))


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
