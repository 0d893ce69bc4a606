"""The demo's results as tables on the terminal and as one report page."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from foundation.training import charts
from foundation.training.report import Page
from transfer.demo_measure import MODELS, Measured, Served

# Fits into 80 columns.
_TABLE: Any = {"box": box.SIMPLE_HEAD, "pad_edge": False, "collapse_padding": True}
_SHOWN_CANDIDATES = 8
_SHOWN_EVENTS = 3


def print_summary(measured: Mapping[str, Measured], served: Mapping[str, Served]) -> None:
    """Prints the models beside the best possible, latencies, and one ranked request."""
    console = Console(soft_wrap=True)
    table = Table(title="Test rows: NE (lower is better), AUC, calibration (1 is exact)", **_TABLE)
    for name in ("surface", "task", "model"):
        table.add_column(name, no_wrap=True)
    for name in ("NE", "AUC", "calib.", "p50 ms", "p99 ms"):
        table.add_column(name, justify="right", no_wrap=True)
    for cells in _metric_rows(measured, served):
        bold = "bold" if cells[2] == "student distilled" else None
        table.add_row(*cells, style=bold, end_section=cells[2] == MODELS[-1])
    console.print(table)
    surface, first = next(iter(served.items()))
    answer = first.example["answer"]
    columns = 3 + len(answer["ranked"][0]["probabilities"])
    ranked = Table(title=f"/rank: one request on {surface}, {len(answer['ranked'])} candidates", **_TABLE)
    for name in _ranked_columns(answer)[:columns]:
        ranked.add_column(name, justify="right", no_wrap=True)
    for row in _ranked_rows(first.example):
        ranked.add_row(*row[:columns])
    console.print(ranked)
    for name, one in served.items():
        console.print(
            f"{name}: {one.rows:,} served scores equal PyTorch's, and tritonclient's equal /rank's,"
            f" within {one.max_abs_diff:.1e}"
        )


def write_report(
    path: Path,
    stages: Sequence[tuple[str, str]],
    measured: Mapping[str, Measured],
    served: Mapping[str, Served],
    run: Path,
) -> None:
    """Writes the page.

    Args:
        path: HTML file.
        stages: name and details of each stage, for the picture of the pipeline.
        measured: by surface.
        served: by surface.
        run: the teacher's folder; its `metrics.jsonl` holds the curves.
    """
    page = Page("OpenGEM demo", "From the impression log of a synthetic world to ranked requests, in one run.")
    page.section("Pipeline", "Each box is a command of its own; under its name, what it made and how long it took.")
    page.figures((charts.pipeline(stages), "Every stage reads files and writes files."))
    _models(page, measured, served)
    _training(page, measured, run)
    _calibration(page, measured)
    _server(page, served)
    page.write(path, footer="Written by `opengem demo`.")


def _models(page: Page, measured: Mapping[str, Measured], served: Mapping[str, Served]) -> None:
    page.section(
        "Models on the test days",
        "The world knows the probability with which each label was drawn, so the best possible score is known too. "
        "Normalised entropy (NE) is the log loss over that of a constant; lower is better, 1 knows nothing.",
    )
    names = [f"{surface} · {task}" for surface, one in measured.items() for task in one.metrics]
    ne = {
        model: [one.metrics[task][model]["ne"] for one in measured.values() for task in one.metrics] for model in MODELS
    }
    page.figures((charts.dots(names, ne, x="normalised entropy", title="NE by surface and task"), "NE, test rows"))
    columns = ("surface", "task", "model", "NE", "AUC", "calibration", "p50 ms", "p99 ms")
    rows = _metric_rows(measured, served)
    strong = [index for index, row in enumerate(rows) if row[2] == "student distilled"]
    page.table(columns, rows, text_columns=3, strong=strong)


def _training(page: Page, measured: Mapping[str, Measured], run: Path) -> None:
    page.section("Training", "The foundation model learns from all surfaces; each student from its own.")
    loss, validation = teacher_curves(run / "metrics.jsonl")
    students = {f"{surface}, {kind}": curve for surface, one in measured.items() for kind, curve in one.curves.items()}
    page.figures(
        (charts.curves({"training loss": loss}, x="step", y="loss", title="Teacher loss"), "Teacher: training loss"),
        (charts.curves(validation, x="step", y="NE", title="Teacher validation NE"), "Teacher: validation NE by task"),
        (charts.curves(students, x="step", y="NE", title="Student validation NE"), "Students: validation NE"),
    )


def _calibration(page: Page, measured: Mapping[str, Measured]) -> None:
    page.section(
        "Calibration",
        "Clicks of the test rows in ten bins of equally many rows: a calibrated model lies on the dashed line. "
        "The students' calibration is part of the exported graph; the teacher's raw probabilities are shown.",
    )
    page.figures(
        *(
            (charts.reliability(one.clicks, title=f"Reliability {surface}"), f"{surface}: click")
            for surface, one in measured.items()
        )
    )


def _server(page: Page, served: Mapping[str, Served]) -> None:
    candidates = next(iter(served.values())).candidates
    page.section("Server", f"Requests of the test days through /rank; latencies with {candidates} candidates each.")
    page.facts(
        [("served scores compared", f"{sum(s.rows for s in served.values()):,}")]
        + [("largest difference to PyTorch", f"{max(s.max_abs_diff for s in served.values()):.1e}")]
        + [(f"{surface}: p50", f"{np.percentile(s.client_ms, 50):.1f} ms") for surface, s in served.items()]
        + [(f"{surface}: p99", f"{np.percentile(s.client_ms, 99):.1f} ms") for surface, s in served.items()]
    )
    page.figures(
        *(
            (
                charts.latencies({"client": s.client_ms, "server": s.server_ms}, title=f"Latency {surface}"),
                f"{surface}: /rank, {len(s.client_ms)} requests one after another",
            )
            for surface, s in served.items()
        )
    )
    surface, first = next(iter(served.items()))
    page.section(
        f"One ranked request on {surface}",
        f"The raw request as the server gets it (here with the latest {_SHOWN_EVENTS} events and two candidates only), "
        "and its candidates in order of value. The last columns are the scores that tritonclient gets for them.",
    )
    page.code(_short_json(first.example["request"]))
    page.table(_ranked_columns(first.example["answer"]), _ranked_rows(first.example), text_columns=0)


def _short_json(request: Mapping[str, Any]) -> str:
    """A request with a key per line, its histories cut to the latest events and its candidates to the first two."""
    history = {
        sequence: {name: values[-_SHOWN_EVENTS:] for name, values in events.items()}
        for sequence, events in request["history"].items()
    }
    shown = {**request, "history": history, "candidates": [*request["candidates"][:2], "..."]}
    lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in shown.items())
    return f"{{\n{lines}\n}}"


def teacher_curves(path: Path) -> tuple[charts.Points, dict[str, charts.Points]]:
    """Training loss and validation NE by task of a training run's `metrics.jsonl`, each as (steps, values)."""
    loss: tuple[list[float], list[float]] = ([], [])
    validation: dict[str, tuple[list[float], list[float]]] = {}
    for line in path.read_text().splitlines():
        record = json.loads(line)
        if record["kind"] == "train":
            loss[0].append(record["step"])
            loss[1].append(_number(record["loss"]))
        elif record["kind"] == "validation":
            for task, slices in record["metrics"].items():
                steps, values = validation.setdefault(task, ([], []))
                steps.append(record["step"])
                values.append(_number(slices["all"]["ne"]))
    return loss, dict(validation)


def _metric_rows(measured: Mapping[str, Measured], served: Mapping[str, Served]) -> list[tuple[str, ...]]:
    rows = []
    for surface, one in measured.items():
        p50, p99 = (f"{np.percentile(served[surface].client_ms, q):.1f}" for q in (50, 99))
        for task, models in one.metrics.items():
            for model in MODELS:
                values = models[model]
                numbers = (f"{_number(values[key]):.4f}" for key in ("ne", "auc"))
                latency = (p50, p99) if model == "student distilled" else ("", "")
                rows.append((surface, task, model, *numbers, f"{_number(values['calibration']):.3f}", *latency))
    return rows


def _number(value: float | None) -> float:
    """Metrics files hold null where a metric has no answer."""
    return float("nan") if value is None else float(value)


def _ranked_columns(answer: Mapping[str, Any]) -> list[str]:
    tasks = list(answer["ranked"][0]["probabilities"])
    return ["rank", "id", "value", *tasks, *(f"{task} (triton)" for task in tasks)]


def _ranked_rows(example: Mapping[str, Any]) -> list[list[str]]:
    rows = []
    for row in example["answer"]["ranked"][:_SHOWN_CANDIDATES]:
        scores = [f"{value:.4f}" for value in row["probabilities"].values()]
        triton = [f"{example['triton'][row['id']][task]:.4f}" for task in row["probabilities"]]
        rows.append([str(row["rank"]), str(row["id"]), f"{row['value']:.4f}", *scores, *triton])
    return rows
