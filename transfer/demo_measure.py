"""What the demo measures: the models on the test rows, beside the truth, and the server under real requests."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from foundation.data.dataset import Dataset
from foundation.data.encoding import model_inputs
from foundation.data.logs import LogReader, ReaderConfig
from foundation.data.progress import track
from foundation.data.requests import rank_body
from foundation.training.best_possible import best_possible
from foundation.training.metrics import Slice
from transfer.demo_server import RunningServer
from transfer.label_store import LabelStore
from value_models.student import Student, load_student, to_tensors

MODELS = ("teacher", "student alone", "student distilled", "best possible")
TOLERANCE = 1e-5
_IN_ORDER = ReaderConfig(batch_size=4096, shuffle_window=0, workers=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """One surface on its test rows.

    Args:
        metrics: task to model (`MODELS`) to `auc`, `ne`, `calibration`, `rows`.
        curves: `alone` and `distilled` to the training steps and validation NE of a student.
        clicks: model to the first task's `(probability [N], label [N])`.
    """

    metrics: dict[str, dict[str, Slice]]
    curves: dict[str, tuple[list[float], list[float]]]
    clicks: dict[str, tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """One surface's model behind the server.

    Args:
        requests: requests answered.
        rows: candidates whose served probabilities were compared with PyTorch's.
        max_abs_diff: the largest difference of a probability, `/rank` and `tritonclient` together.
        candidates: candidates of a request when latencies were measured.
        client_ms: latency of `/rank` as the client sees it, float64 [requests].
        server_ms: the same as the server reports it.
        example: a ranked request: `request` and `answer` of `/rank`, and `triton`, impression id to
            the scores by task that `tritonclient` got.
    """

    requests: int
    rows: int
    max_abs_diff: float
    candidates: int
    client_ms: np.ndarray
    server_ms: np.ndarray
    example: dict[str, Any]


def student_folder(out: Path, surface: str, kind: str) -> Path:
    """Where the demo keeps a student; `kind` is `alone` or `distilled`."""
    return out / "students" / f"{surface}-{kind}"


def measure_students(out: Path, surfaces: tuple[str, ...]) -> dict[str, Measured]:
    """Test metrics of teacher, students and truth, by surface; the first three come from the students' own reports."""
    dataset = Dataset.open(out / "dataset")
    truth = _truth(dataset)
    store = LabelStore.open(out / "labels")
    return {surface: _measure(out, dataset, truth, store, surface) for surface in surfaces}


def measure_served(
    server: RunningServer, out: Path, surface: str, *, requests: int, candidates: int, seed: int
) -> Served:
    """Asks the server about test requests, compares its scores with PyTorch's, and measures latencies.

    Args:
        server: serves the model of `surface`.
        out: the demo's folder.
        surface: name of surface and model.
        requests: number of requests for each of the two purposes.
        candidates: candidates of a request when latencies are measured, drawn from all items of the test rows.
        seed: for that draw.

    Raises:
        ServerError: the server refuses a request.
        ValueError: a served probability differs from PyTorch's by more than 1e-5.
    """
    dataset = Dataset.open(out / "dataset")
    schema = dataset.schema
    table = _test_table(dataset, surface)
    bodies = [rank_body(schema, rows, surface) for rows in _requests(table, schema.request_id, requests)]
    expected = _expected(load_student(student_folder(out, surface, "distilled")), dataset, surface)
    worst, compared, answers = 0.0, 0, []
    for body in track(bodies, f"{surface}: comparing scores"):
        answer = server.rank(body)
        answers.append(answer)
        for row in answer["ranked"]:
            served = np.array([row["probabilities"][task] for task in schema.task_names])
            worst = max(worst, float(np.abs(served - expected[row["id"]]).max()))
            compared += 1
    example, from_triton = _example(server, dataset, surface, bodies, answers)
    worst = max(worst, from_triton)
    if worst > TOLERANCE:
        raise ValueError(f"{surface}: served scores differ from PyTorch's by {worst:.1e}, more than {TOLERANCE:.0e}")
    client, reported = _latencies(server, bodies, candidates, seed, surface)
    return Served(
        requests=len(bodies) + len(client) + 1,
        rows=compared,
        max_abs_diff=worst,
        candidates=candidates,
        client_ms=client,
        server_ms=reported,
        example=example,
    )


def _measure(out: Path, dataset: Dataset, truth: pa.Table, store: LabelStore, surface: str) -> Measured:
    schema = dataset.schema
    students = {kind: load_student(student_folder(out, surface, kind)) for kind in ("alone", "distilled")}
    rows = truth.filter(pa.compute.equal(truth[schema.surface.column], surface))
    ids = rows[schema.impression_id].to_numpy()
    metrics: dict[str, dict[str, Slice]] = {}
    for task in schema.tasks:
        counted = np.ones(len(ids), bool) if task.given is None else rows[task.given].to_numpy() == 1
        metrics[task.name] = {
            "teacher": students["distilled"].metrics["teacher"]["test"][task.name][surface],
            "student alone": students["alone"].metrics["test"][task.name][surface],
            "student distilled": students["distilled"].metrics["test"][task.name][surface],
            "best possible": best_possible(
                rows[task.label].to_numpy()[counted],
                rows[f"true_{task.name}"].to_numpy()[counted],
                rows[schema.user].to_numpy()[counted],
            ),
        }
    first = schema.tasks[0]
    label = rows[first.label].to_numpy()
    logits, _, found = store.lookup(ids)
    clicks = {"teacher": (1 / (1 + np.exp(-logits[found, 0].astype(np.float64))), label[found])}
    for kind, student in students.items():
        scores = _expected(student, dataset, surface)
        clicks[f"student {kind}"] = (np.array([scores[i][0] for i in ids.tolist()]), label)
    curves = {
        kind: ([p["step"] for p in student.manifest["curve"]], [p["ne"] for p in student.manifest["curve"]])
        for kind, student in students.items()
    }
    return Measured(metrics=metrics, curves=curves, clicks=clicks)


def _truth(dataset: Dataset) -> pa.Table:
    """Keys, labels and true probabilities of the test rows."""
    schema = dataset.schema
    columns = [schema.impression_id, schema.user, schema.surface.column]
    columns += [name for task in schema.tasks for name in (task.label, f"true_{task.name}")]
    return pa.concat_tables([pq.read_table(file, columns=columns) for file in dataset.files("test")])


def _test_table(dataset: Dataset, surface: str) -> pa.Table:
    """The test rows of a surface with all columns of the schema, in order."""
    columns = list(dataset.schema.columns())
    table = pa.concat_tables([pq.read_table(file, columns=columns) for file in dataset.files("test")])
    return table.filter(pa.compute.equal(table[dataset.schema.surface.column], surface))


def _requests(table: pa.Table, request_id: str | None, count: int) -> list[pa.Table]:
    """The rows of `count` requests, spread evenly over the table; every row is one without a request id."""
    if request_id is None:
        starts = np.arange(table.num_rows)
    else:
        ids = table[request_id].to_numpy()
        starts = np.flatnonzero(np.concatenate([[True], ids[1:] != ids[:-1]]))
    ends = np.append(starts[1:], table.num_rows)
    chosen = np.unique(np.linspace(0, len(starts) - 1, min(count, len(starts))).astype(int))
    return [table.slice(starts[i], ends[i] - starts[i]) for i in chosen]


@torch.no_grad()
def _expected(student: Student, dataset: Dataset, surface: str) -> dict[int, np.ndarray]:
    """Impression id to the calibrated probabilities [K] of the PyTorch student, for a surface's test rows."""
    model = student.calibrated()
    scores: dict[int, np.ndarray] = {}
    for batch in LogReader(dataset, "test", _IN_ORDER, surface=surface):
        inputs = model_inputs(dataset.schema, batch.request, batch.item, batch.request_index, batch.request_time)
        probabilities = model(to_tensors(inputs)).numpy().astype(np.float64)
        scores.update(zip(batch.impression_id.tolist(), probabilities, strict=True))
    return scores


def _example(
    server: RunningServer,
    dataset: Dataset,
    surface: str,
    bodies: list[dict[str, Any]],
    answers: list[dict[str, Any]],
) -> tuple[dict[str, Any], float]:
    """One request through both doors: what was asked and answered, and the largest difference between them.

    The request with the most candidates among those with some history.
    """
    chosen = max(
        range(len(bodies)),
        key=lambda i: (any(_events(bodies[i])), len(bodies[i]["candidates"])),
    )
    body, answer = bodies[chosen], answers[chosen]
    ids = [candidate["id"] for candidate in body["candidates"]]
    schema = dataset.schema
    for batch in LogReader(dataset, "test", _IN_ORDER, surface=surface):
        rows = np.flatnonzero(np.isin(batch.impression_id, ids))
        if len(rows) == 0:
            continue
        request = np.unique(batch.request_index[rows])
        inputs = model_inputs(
            schema,
            batch.request.take(request),
            batch.item.take(rows),
            np.zeros(len(rows), np.int64),
            batch.request_time[request],
        )
        scores = server.infer(surface, inputs, schema.task_names)
        ranked = {row["id"]: row["probabilities"] for row in answer["ranked"]}
        found = batch.impression_id[rows].tolist()
        worst = max(abs(float(scores[task][i]) - ranked[key][task]) for i, key in enumerate(found) for task in scores)
        triton = {key: {task: float(scores[task][i]) for task in scores} for i, key in enumerate(found)}
        return {"request": body, "answer": answer, "triton": triton}, worst
    raise AssertionError(f"{surface}: request {ids} is not among the test rows")


def _events(body: dict[str, Any]) -> list[int]:
    return [len(values) for sequence in body["history"].values() for values in sequence.values()]


def _latencies(
    server: RunningServer, bodies: list[dict[str, Any]], candidates: int, seed: int, surface: str
) -> tuple[np.ndarray, np.ndarray]:
    """Milliseconds of `/rank` with `candidates` candidates each, seen by the client and reported by the server."""
    rng = np.random.default_rng(seed)
    pool = list({json.dumps({**c, "id": None}): c for body in bodies for c in body["candidates"]}.values())
    client, reported = [], []
    for body in track(bodies, f"{surface}: latencies with {candidates} candidates"):
        chosen = rng.choice(len(pool), candidates, replace=len(pool) < candidates)
        asked = {**body, "candidates": [{**pool[i], "id": n} for n, i in enumerate(chosen)]}
        start = time.perf_counter()
        answer = server.rank(asked)
        client.append((time.perf_counter() - start) * 1e3)
        reported.append(float(answer["latency_ms"]))
    return np.array(client), np.array(reported)
