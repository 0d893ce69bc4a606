"""The tables of the KuaiRand study, as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from statistics import mean, stdev
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class StudentRow:
    """One surface and seed: test NE and AUC by kind of student and task, the teacher's NE by task, and parity.

    ``auc_torch`` and ``auc_onnx`` are of the first task over all ``rows`` of the surface; one pair of a positive and
    a negative row weighs ``pair`` of them. ``served_diff`` is the largest difference between a served and an exported
    probability over ``served_rows`` rows.
    """

    ne: dict[str, dict[str, float | None]]
    auc: dict[str, dict[str, float | None]]
    teacher: dict[str, float | None]
    rows: int
    auc_torch: float
    auc_onnx: float
    pair: float
    served_rows: int
    served_diff: float

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def results_page(results: Mapping[str, Any]) -> str:
    """All tables of a study: `teacher`, `students` and `pooled`, each by seed."""
    teacher, students = results["teacher"], results["students"]
    seeds = list(teacher)
    return "\n\n".join(
        [
            f"Teacher, test rows, mean ± standard deviation over {len(seeds)} seeds",
            _teacher(teacher),
            "Teacher by surface, first task: AUC / NE",
            _teacher_surfaces(teacher),
            "Students, NE on the test rows of their surface (calibrated on validation)",
            _students(students),
            "Exported and served, first task; a pair is one positive and one negative row, in AUC",
            _parity(students),
            "Exported, first task, test rows of all surfaces together: AUC",
            _pooled(results["pooled"]),
        ]
    )


def _teacher(teacher: Mapping[Any, Any]) -> str:
    tasks = next(iter(teacher.values()))
    lines = ["| task | AUC | GAUC | NE | calibration |", "|---|---|---|---|---|"]
    for task in tasks:
        cells = [
            _spread(s[task]["all"][name] for s in teacher.values()) for name in ("auc", "gauc", "ne", "calibration")
        ]
        lines.append(f"| {task} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _teacher_surfaces(teacher: Mapping[Any, Any]) -> str:
    task, slices = next(iter(next(iter(teacher.values())).items()))
    names = [name for name in slices if name != "all"]
    cells = [
        f"{_spread(s[task][name]['auc'] for s in teacher.values())} / "
        f"{_spread(s[task][name]['ne'] for s in teacher.values())}"
        for name in names
    ]
    return "\n".join([f"| {' | '.join(names)} |", "|---" * len(names) + "|", f"| {' | '.join(cells)} |"])


def _students(students: Mapping[Any, Mapping[str, StudentRow]]) -> str:
    first = next(iter(students.values()))
    lines = ["| surface | task | alone | distilled | gain | teacher |", "|---|---|---|---|---|---|"]
    for surface, row in first.items():
        for task in row.ne["alone"]:
            alone = _known(s[surface].ne["alone"][task] for s in students.values())
            distilled = _known(s[surface].ne["distilled"][task] for s in students.values())
            teacher = _known(s[surface].teacher[task] for s in students.values())
            if not len(alone) == len(distilled) == len(teacher) == len(students):  # one class in the test rows
                continue
            gain, own = _spread(a - d for a, d in zip(alone, distilled, strict=True)), _spread(teacher)
            lines.append(f"| {surface} | {task} | {_spread(alone)} | {_spread(distilled)} | {gain} | {own} |")
    return "\n".join(lines)


def _parity(students: Mapping[Any, Mapping[str, StudentRow]]) -> str:
    lines = [
        "| seed | surface | test rows | AUC PyTorch | AUC ONNX | difference | a pair | served rows | served diff. |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for seed, rows in students.items():
        for surface, r in rows.items():
            lines.append(
                f"| {seed} | {surface} | {r.rows:,} | {r.auc_torch:.8f} | {r.auc_onnx:.8f} "
                f"| {abs(r.auc_torch - r.auc_onnx):.1e} | {r.pair:.1e} | {r.served_rows:,} | {r.served_diff:.1e} |"
            )
    return "\n".join(lines)


def _pooled(pooled: Mapping[Any, Mapping[str, float]]) -> str:
    lines = ["| seed | PyTorch | ONNX | difference |", "|---|---|---|---|"]
    for seed, auc in pooled.items():
        difference = abs(auc["torch"] - auc["onnx"])
        lines.append(f"| {seed} | {auc['torch']:.8f} | {auc['onnx']:.8f} | {difference:.1e} |")
    return "\n".join(lines)


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _spread(values: Iterable[float]) -> str:
    found = list(values)
    return f"{mean(found):.4f}" + (f" ± {stdev(found):.4f}" if len(found) > 1 else "")
