"""What a run tells: `metrics.jsonl`, TensorBoard, lines on the console, the table at the end."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

from lightning.fabric import Fabric
from rich.console import Console
from rich.table import Table

from foundation.data.files import atomic_write
from foundation.training.metrics import Results, table_rows

METRICS = ("auc", "gauc", "ne", "calibration")


class RunLog:
    """Writes on rank 0, does nothing on other ranks.

    `metrics.jsonl` holds one JSON object per line with at least `kind` (`train`, `skipped`, or the name of the
    evaluated split) and `step`. Numbers that are not finite are null.

    Args:
        path: `metrics.jsonl`.
        fabric: whose loggers get the numbers too.
        start: step the run goes on from; lines of later steps, left by a run that was killed, are removed; a
            damaged file is put aside as `metrics.damaged`.
    """

    def __init__(self, path: Path, fabric: Fabric, start: int) -> None:
        self._fabric = fabric
        self._active = fabric.is_global_zero
        self._path = path
        if self._active:
            try:
                kept = [line for line in _lines(path) if json.loads(line)["step"] <= start]
            except (ValueError, KeyError, TypeError):  # as with a ledger, training does not depend on it
                aside = path.with_suffix(".damaged")
                os.replace(path, aside)
                self.say(f"{path}: is damaged; it is now {aside.name}, and a new one begins at step {start}")
                kept = []
            atomic_write(path, "".join(f"{line}\n" for line in kept))

    def numbers(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """One line of numbers, which may be nested one level; also to TensorBoard as `kind/name`."""
        flat: dict[str, float] = {}
        for name, value in values.items():
            for inner, number in value.items() if isinstance(value, dict) else [("", value)]:
                flat[f"{kind}/{name}/{inner}".rstrip("/")] = number
        self._write({"kind": kind, "step": step, **values})
        self._tensorboard(flat, step)

    def evaluation(self, split: str, step: int, results: Results, chosen: float, improved: bool) -> None:
        """All metrics of an evaluation, and the one that chooses the best checkpoint."""
        self._write({"kind": split, "step": step, "chosen": chosen, "improved": improved, "metrics": results})
        flat = {
            f"{split}/{task}/{surface}/{name}": slice_[name]
            for task, surface, slice_ in table_rows(results)
            for name in METRICS
        }
        self._tensorboard(flat, step)

    def note(self, kind: str, step: int, text: str) -> None:
        """A line of text that must not go unseen; also on the console."""
        self._write({"kind": kind, "step": step, "note": text})
        self.say(f"step {step}: {text}")

    def say(self, text: str) -> None:
        """A line on stderr."""
        if self._active:
            Console(stderr=True, highlight=False, soft_wrap=True).print(text, markup=False)

    def _tensorboard(self, flat: dict[str, float], step: int) -> None:
        if self._active:
            self._fabric.log_dict({name: value for name, value in flat.items() if math.isfinite(value)}, step)

    def _write(self, line: dict[str, Any]) -> None:
        if not self._active:
            return
        try:
            with open(self._path, "a") as file:
                file.write(json.dumps(finite(line)) + "\n")
        except OSError as error:  # one of a write has no path
            raise OSError(error.errno, error.strerror, str(self._path)) from None


def print_summary(title: str, results: Results, lines: list[str]) -> None:
    """Prints an evaluation as a table, one row per task and surface, and some lines below it, to stdout."""
    table = Table(title=title, title_justify="left")
    for name in ("task", "surface"):
        table.add_column(name, no_wrap=True)
    for name in ("rows", "positives", "AUC", "GAUC", "NE", "calibration"):
        table.add_column(name, justify="right", no_wrap=True)
    for task, surface, slice_ in table_rows(results):
        numbers = ["" if math.isnan(slice_[name]) else f"{slice_[name]:.4f}" for name in METRICS]
        table.add_row(task, surface, f"{slice_['rows']:,}", f"{slice_['positives']:,}", *numbers)
    console = Console(file=sys.stdout, highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 120)
    if table.row_count:
        console.print(table)
    for line in lines:
        console.print(line, markup=False)


def finite(value: Any) -> Any:
    """The value with NaN and infinities replaced by None, since JSON has neither."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def with_nan(metrics: Results) -> Results:
    """Metrics of tasks and surfaces that went through :func:`finite`, None made NaN again."""
    return {
        task: {
            surface: {key: math.nan if value is None else value for key, value in slice_.items()}
            for surface, slice_ in surfaces.items()
        }
        for task, surfaces in metrics.items()
    }


def _lines(path: Path) -> list[str]:
    """Whole lines of a file; the last one may have been cut off by a kill."""
    if not path.is_file():
        return []
    lines = path.read_text().split("\n")
    return [line for line in lines[:-1] if line]
