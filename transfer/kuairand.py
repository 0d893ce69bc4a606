"""The pipeline on KuaiRand, with several seeds: teacher, students alone and distilled, exported and served.

    python -m transfer.kuairand --source DIR --out OUT [--seeds [0,1,2]]

Every stage runs as its command would; what is already there from an earlier call is kept, so a call that was cut off
goes on where it stopped. At the end it prints the tables of `docs/benchmarks.md` and writes them to `OUT/results.md`
and `OUT/results.json`. The teacher's predictions for the test rows are in `OUT/seed-S/predictions.parquet`.

    OUT/ dataset/  seed-0/ teacher/ predictions.parquet labels/ students/TAB/{alone,distilled}/ models/TAB/1/
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from foundation.data.dataset import Dataset
from foundation.data.files import atomic_write
from foundation.data.kuairand import KuaiRandConfig, prepare_kuairand
from foundation.data.logs import LogReader, ReaderConfig
from foundation.data.options import parse_config
from foundation.data.progress import track
from foundation.data.requests import rank_body
from foundation.data.settings import quiet, show
from foundation.training.launch import Device
from foundation.training.metrics import Slice, auc, measure
from foundation.training.predict import PredictConfig, predict
from foundation.training.train import TrainConfig, train
from transfer.batches import StudentBatches
from transfer.demo_server import running_server
from transfer.distill import DistillConfig, distill
from transfer.kuairand_tables import StudentRow, results_page
from transfer.score import ScoreConfig, score
from value_models.export import ExportConfig, Session, export, torch_scorer
from value_models.student import load_student

STUDENTS = ("alone", "distilled")


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyConfig:
    """What to run.

    Args:
        source: folder with KuaiRand's files.
        out: folder to write; stages that are there already are not run again.
        seeds: one whole pipeline per seed.
        surfaces: tabs that get a value model.
        teacher: preset of `train`.
        student: preset of `distill`.
        transfer: preset of what the distilled students get besides.
        served: test rows per tab that are asked of the server, spread over the test days.
        device: where the teacher is trained: auto, cpu or cuda.
    """

    source: Path
    out: Path
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2])
    surfaces: list[str] = field(default_factory=lambda: ["1", "0", "4", "6"])
    teacher: str = "foundation/kuairand"
    student: str = "value_models/kuairand"
    transfer: str = "transfer/kuairand"
    served: int = 200
    device: Device = "auto"


def study(config: StudyConfig) -> dict[str, Any]:
    """Runs what is missing and returns the results: by seed the teacher's metrics and the students' rows."""
    show(config, "kuairand")
    dataset = config.out / "dataset"
    _unless(dataset / "dataset.json", lambda: prepare_kuairand(KuaiRandConfig(source=config.source, out=dataset)))
    results: dict[str, Any] = {"teacher": {}, "students": {}, "pooled": {}}
    for seed in config.seeds:
        folder = config.out / f"seed-{seed}"
        with quiet():
            _build(config, dataset, folder, seed)
        results["teacher"][seed] = teacher_metrics(Dataset.open(dataset), folder / "predictions.parquet")
        results["students"][seed], results["pooled"][seed] = _students(config, Dataset.open(dataset), folder)
    atomic_write(config.out / "results.json", json.dumps(_plain(results), indent=1))
    page = results_page(results)
    atomic_write(config.out / "results.md", page)
    print(page)
    return results


def _build(config: StudyConfig, dataset: Path, folder: Path, seed: int) -> None:
    """Every stage of one seed, up to the exported models."""
    run, labels, table = folder / "teacher", folder / "labels", folder / "predictions.parquet"
    common = ["--dataset", str(dataset), "--seed", str(seed)]

    def teacher() -> None:
        options = ["--config", config.teacher, *common, "--out", str(run), "--device", config.device]
        train(parse_config(TrainConfig, [*options, "--overwrite", "true"], name="train"))

    _unless(run / "manifest.json", teacher)
    _unless(table, lambda: predict(PredictConfig(run=run, dataset=str(dataset), out=table, device=config.device)))
    _unless(labels, lambda: score(ScoreConfig(run=run, dataset=str(dataset), out=labels, device=config.device)))
    for surface in config.surfaces:
        for kind in STUDENTS:
            student = _student(folder, surface, kind)
            options = ["--config", config.student, *common, "--surface", surface, "--out", str(student)]
            if kind == "distilled":
                options += ["--config", config.transfer, "--store", str(labels), "--teacher", str(run)]
            _unless(student, lambda o=options: distill(parse_config(DistillConfig, o, name="distill")))  # type: ignore[misc]
        settings = ExportConfig(student=_student(folder, surface, "distilled"), out=folder / "models", version=1)
        _unless(folder / "models" / surface / "1", lambda s=settings: export(s))  # type: ignore[misc]


def teacher_metrics(dataset: Dataset, predictions: Path) -> dict[str, dict[str, Slice]]:
    """`{task: {"all" or surface: metrics}}` of a file that `opengem predict` wrote for the test rows."""
    schema = dataset.schema
    columns = [schema.user, schema.surface.column, *(t.label for t in schema.tasks)]
    rows = pa.concat_tables([pq.read_table(file, columns=columns) for file in dataset.files("test")])
    table = pq.read_table(predictions, columns=["task", "prediction"])
    users, surfaces = rows[schema.user].to_numpy(), rows[schema.surface.column].cast(pa.string()).to_pylist()
    found: dict[str, dict[str, Slice]] = {}
    for task in schema.tasks:
        chosen = table.filter(pa.compute.equal(table["task"], task.name))["prediction"].to_numpy()
        if len(chosen) != rows.num_rows:
            raise ValueError(f"{predictions}: {len(chosen)} predictions of {task.name} for {rows.num_rows} test rows")
        logits = _logit(chosen)
        labels = rows[task.label].to_numpy()
        found[task.name] = {"all": measure(logits, labels, users)}
        for name in schema.surface.values:
            keep = np.array([s == name for s in surfaces])
            found[task.name][name] = measure(logits[keep], labels[keep], users[keep])
    return found


def _students(config: StudyConfig, dataset: Dataset, folder: Path) -> tuple[dict[str, StudentRow], dict[str, float]]:
    """Metrics of every surface's students, and how far exported and served scores are from PyTorch's.

    Besides them the AUC of the first task over the rows of all surfaces, by the students and by their exported models.
    """
    rows, pooled = {}, []
    with running_server(folder / "models", folder / "serve.log") as server:
        for surface in config.surfaces:
            students = {kind: load_student(_student(folder, surface, kind)) for kind in STUDENTS}
            session = Session(folder / "models" / surface / "1" / "model.onnx")
            scorer = torch_scorer(students["distilled"].calibrated())
            batches = StudentBatches(LogReader(dataset, "test", _IN_ORDER, surface=surface), None)
            torch_scores, exported, labels = [], [], []
            for batch in track(batches, f"tab {surface}: scoring the test rows"):
                inputs = {name: value.numpy() for name, value in batch.inputs.items()}
                torch_scores.append(scorer(inputs))
                exported.append(session(inputs))
                labels.append(batch.labels.numpy())
            ours, onnx, label = (np.concatenate(x).astype(np.float64) for x in (torch_scores, exported, labels))
            table = _surface_rows(dataset, surface)
            chosen = np.unique(np.linspace(0, table.num_rows - 1, min(config.served, table.num_rows)).astype(int))
            worst = 0.0
            for index in track(chosen.tolist(), f"tab {surface}: asking the server"):
                answer = server.rank(rank_body(dataset.schema, table.slice(index, 1), surface))
                probabilities = answer["ranked"][0]["probabilities"]
                served = np.array([probabilities[task] for task in dataset.schema.task_names])
                worst = max(worst, float(np.abs(served - onnx[index]).max()))
            pooled.append((ours[:, 0], onnx[:, 0], label[:, 0]))
            metrics = {kind: s.metrics["test"] for kind, s in students.items()}
            rows[surface] = StudentRow(
                ne={kind: {t: m[t][surface]["ne"] for t in m} for kind, m in metrics.items()},
                auc={kind: {t: m[t][surface]["auc"] for t in m} for kind, m in metrics.items()},
                teacher={t: v[surface]["ne"] for t, v in students["distilled"].metrics["teacher"]["test"].items()},
                rows=len(label),
                auc_torch=auc(ours[:, 0], label[:, 0]),
                auc_onnx=auc(onnx[:, 0], label[:, 0]),
                pair=1 / float(label[:, 0].sum() * (1 - label[:, 0]).sum()),
                served_rows=len(chosen),
                served_diff=worst,
            )
    all_ours, all_onnx, all_labels = map(np.concatenate, zip(*pooled, strict=True))
    return rows, {"torch": auc(all_ours, all_labels), "onnx": auc(all_onnx, all_labels)}


_IN_ORDER = ReaderConfig(batch_size=2048, shuffle_window=0, workers=0)


def _surface_rows(dataset: Dataset, surface: str) -> pa.Table:
    columns = list(dataset.schema.columns())
    table = pa.concat_tables([pq.read_table(file, columns=columns) for file in dataset.files("test")])
    return table.filter(pa.compute.equal(table[dataset.schema.surface.column].cast(pa.string()), surface))


def _student(folder: Path, surface: str, kind: str) -> Path:
    return folder / "students" / surface / kind


def _unless(there: Path, stage: Callable[[], Any]) -> None:
    if not there.exists():
        print(f"{there}", file=sys.stderr, flush=True)
        stage()


def _logit(probability: np.ndarray) -> np.ndarray:
    p = np.clip(probability.astype(np.float64), 1e-9, 1 - 1e-9)
    return np.asarray(np.log(p) - np.log1p(-p))


def _plain(value: Any) -> Any:
    if isinstance(value, StudentRow):
        return value.to_dict()
    return {str(k): _plain(v) for k, v in value.items()} if isinstance(value, dict) else value


def main() -> None:
    """Runs the study from the command line."""
    study(parse_config(StudyConfig, sys.argv[1:], name="kuairand"))


if __name__ == "__main__":
    main()
