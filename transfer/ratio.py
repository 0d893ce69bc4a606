"""The transfer ratio: how much of the teacher's advantage a student keeps.

    ratio = (NE of the student alone - NE of the distilled student) / (NE of the student alone - NE of the teacher)

on the same rows, all three calibrated in the same way; 1 means that the student became as good as the teacher
(LoopFM, arXiv 2605.29280, writes it as the student's NE change over the teacher's).
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from foundation.data.files import atomic_write
from foundation.data.settings import show
from value_models.student import MANIFEST, METRICS, StudentError


@dataclass(frozen=True, kw_only=True, slots=True)
class RatioConfig:
    """Which students to compare.

    Attributes:
        alone: folders of students trained without a teacher, one per seed.
        distilled: folders of the same students trained with the teacher.
        split: the split to compare on.
        out: JSON file to write; None only prints.
    """

    alone: list[Path]
    distilled: list[Path]
    split: str = "test"
    out: Path | None = None

    def __post_init__(self) -> None:
        if not self.alone or not self.distilled:
            raise ValueError("alone and distilled must each name at least one student folder")


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferRatio:
    """The comparison for one surface and task; NE are means over seeds.

    ``gain`` is the distilled student's NE below the student alone, ``gain_error`` its standard error over seeds
    (None with one seed each), ``ratio`` None where the teacher is no better than the student alone.
    """

    surface: str
    task: str
    rows: int
    ne_alone: float
    ne_distilled: float
    ne_teacher: float
    gain: float
    gain_error: float | None
    ratio: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class RatioResult:
    """All comparisons, by surface and task."""

    ratios: tuple[TransferRatio, ...] = field(default_factory=tuple)


def ratio(config: RatioConfig) -> RatioResult:
    """Compares students of one or several surfaces, prints a table, and writes it as JSON if asked.

    Raises:
        StudentError: a folder has no readable metrics, or was distilled without a label store.
        ValueError: the folders do not cover the same surfaces or test rows.
    """
    show(config, "ratio")
    alone, distilled = _by_surface(config.alone), _by_surface(config.distilled)
    if set(alone) != set(distilled):
        raise ValueError(
            f"alone covers surfaces {sorted(alone)}, distilled {sorted(distilled)}; give the same for both"
        )
    found = [
        _compare(surface, task, alone[surface], distilled[surface], config.split)
        for surface in alone
        for task in alone[surface][0][1]["uncalibrated"]["validation"]
    ]
    ratios = tuple(entry for entry in found if entry is not None)
    print(table(ratios))
    if config.out is not None:
        atomic_write(config.out, json.dumps([asdict(entry) for entry in ratios], indent=1))
    return RatioResult(ratios=ratios)


def table(ratios: tuple[TransferRatio, ...]) -> str:
    """The comparisons as a Markdown table."""
    lines = [
        "| surface | task | rows | NE alone | NE distilled | NE teacher | gain | transfer ratio |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in ratios:
        error = "" if r.gain_error is None else f" ±{r.gain_error:.4f}"
        share = "teacher no better" if r.ratio is None else f"{r.ratio:.2f}"
        lines.append(
            f"| {r.surface} | {r.task} | {r.rows:,} | {r.ne_alone:.4f} | {r.ne_distilled:.4f} | {r.ne_teacher:.4f} "
            f"| {r.gain:+.4f}{error} | {share} |"
        )
    return "\n".join(lines)


def _by_surface(folders: list[Path]) -> dict[str, list[tuple[Path, dict[str, Any]]]]:
    found: dict[str, list[tuple[Path, dict[str, Any]]]] = {}
    for folder in folders:
        try:
            surface = str(json.loads((folder / MANIFEST).read_text())["surface"])
            metrics = json.loads((folder / METRICS).read_text())
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StudentError(f"{folder}: not a student with metrics: {error}") from None
        found.setdefault(surface, []).append((folder, metrics))
    return found


def _compare(
    surface: str,
    task: str,
    alone: list[tuple[Path, dict[str, Any]]],
    distilled: list[tuple[Path, dict[str, Any]]],
    split: str,
) -> TransferRatio | None:
    """The comparison of one task; None where some NE is not defined (one class)."""
    own = [_slice(folder, metrics, split, task, surface) for folder, metrics in alone]
    taught = [_slice(folder, metrics, split, task, surface) for folder, metrics in distilled]
    teacher = [_slice(folder, metrics.get("teacher"), split, task, surface) for folder, metrics in distilled]
    rows = {entry["rows"] for entry in (*own, *taught, *teacher)}
    if len(rows) > 1:
        raise ValueError(
            f"surface {surface}, task {task}: metrics are over {sorted(rows)} rows; the label store must hold every "
            f"row of {split}, and all students must be of one dataset"
        )
    if any(entry["ne"] is None for entry in (*own, *taught, *teacher)):
        return None
    ne_alone, ne_taught, ne_teacher = (mean(e["ne"] for e in entries) for entries in (own, taught, teacher))
    errors = [stdev(e["ne"] for e in entries) ** 2 / len(entries) for entries in (own, taught) if len(entries) > 1]
    return TransferRatio(
        surface=surface,
        task=task,
        rows=rows.pop(),
        ne_alone=ne_alone,
        ne_distilled=ne_taught,
        ne_teacher=ne_teacher,
        gain=ne_alone - ne_taught,
        gain_error=math.sqrt(sum(errors)) if len(errors) == 2 else None,
        ratio=(ne_alone - ne_taught) / (ne_alone - ne_teacher) if ne_teacher < ne_alone else None,
    )


def _slice(folder: Path, metrics: dict[str, Any] | None, split: str, task: str, surface: str) -> dict[str, Any]:
    try:
        assert metrics is not None
        entry: dict[str, Any] = metrics[split][task][surface]
    except (AssertionError, KeyError):
        raise StudentError(
            f"{folder}: no metrics of student and teacher for {split}, {task}, {surface}; "
            "a distilled student needs a label store that holds these rows"
        ) from None
    return entry
