"""The demo runs every stage on a tiny world, and its report says what happened."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from foundation.data.dataset import Dataset
from transfer.demo import DemoConfig, DemoResult, demo
from transfer.demo_measure import MODELS
from transfer.demo_report import teacher_curves
from transfer.demo_server import ServerError, running_server
from transfer.label_store import LabelStore

SURFACES = ("reels", "stories")
SETTINGS = """
model: {width: 8, layers: 1}
reader: {workers: 0}
log_every: 5
epochs: 1
"""
STUDENT = """
model: {event_dim: 8, pooling_heads: 1, target_heads: 1, request_hidden: [16], cross_rank: 4, hidden: [16]}
reader: {workers: 0}
epochs: 1
evaluations_per_epoch: 1
"""


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> DemoResult:
    folder = tmp_path_factory.mktemp("demo")
    (folder / "teacher.yaml").write_text(SETTINGS)
    (folder / "student.yaml").write_text(STUDENT)
    return demo(
        DemoConfig(
            out=folder / "out",
            rows=12_000,
            surfaces=SURFACES,
            teacher=str(folder / "teacher.yaml"),
            student=str(folder / "student.yaml"),
            requests=20,
            candidates=30,
        )
    )


def test_every_stage_left_its_output(done: DemoResult) -> None:
    out = done.report.parent
    stages = ["world", "prepare", "doctor", "train", "score", "distill", "export", "serve", "report"]
    assert list(done.seconds) == stages
    dataset = Dataset.open(out / "dataset")
    assert dataset.manifest.rows == 12_000
    assert LabelStore.open(out / "labels").info.rows == 12_000
    for surface in SURFACES:
        assert (out / "models" / surface / "1" / "model.onnx").is_file()
        for kind in ("alone", "distilled"):
            manifest = json.loads((out / "students" / f"{surface}-{kind}" / "manifest.json").read_text())
            assert (manifest["teacher_rows"] > 0) == (kind == "distilled")
    assert not list(out.glob("*.tmp-*"))


def test_best_possible_is_the_truth_of_the_test_rows(done: DemoResult) -> None:
    table = pq.read_table(done.report.parent / "dataset" / "test")
    for surface in SURFACES:
        rows = table.filter(np.array(table["surface"].to_pylist()) == surface)
        best = done.measured[surface].metrics["click"]["best possible"]
        assert best["rows"] == rows.num_rows
        p, y = rows["true_click"].to_numpy().astype(float), rows["click"].to_numpy()
        loss, rate = -np.mean(np.where(y == 1, np.log(p), np.log1p(-p))), y.mean()
        entropy = -(rate * np.log(rate) + (1 - rate) * np.log1p(-rate))
        assert best["ne"] == pytest.approx(loss / entropy, rel=1e-6)
        for model in MODELS:
            assert done.measured[surface].metrics["click"][model]["rows"] == rows.num_rows


def test_report_is_one_page_with_everything(done: DemoResult) -> None:
    html = done.report.read_text()
    assert html.count("<svg") == html.count("<figure>") >= 9
    for text in ("best possible", "student distilled", "student alone", "teacher", "p99", "Calibration", "/rank"):
        assert text in html
    for marker in ("http://", "https://", "<script", "<link", "<img"):
        assert marker not in html.replace("http://www.w3.org", ""), marker


def test_curves_come_from_the_teachers_log(done: DemoResult) -> None:
    (steps, loss), validation = teacher_curves(done.report.parent / "teacher" / "metrics.jsonl")
    assert len(steps) == len(loss) > 0 and list(steps) == sorted(steps)
    assert set(validation) == {"click", "like", "conversion"}


def test_an_earlier_demo_is_not_overwritten_unasked(done: DemoResult) -> None:
    before = done.report.stat().st_mtime_ns
    with pytest.raises(FileExistsError, match="overwrite"):
        demo(DemoConfig(out=done.report.parent))
    assert done.report.stat().st_mtime_ns == before


def test_server_is_gone_after_the_block_even_after_an_error(done: DemoResult, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), running_server(done.report.parent / "models", tmp_path / "log") as server:
        address = server.http
        raise RuntimeError
    host, port = address.rsplit(":", 1)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)), timeout=5)
    assert [path.name for path in tmp_path.iterdir()] == ["log"]


def test_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ServerError, match="ended with status 2: "), running_server(tmp_path / "empty", tmp_path / "l"):
        pytest.fail("there is nothing to serve")


def test_refused_request_names_the_field(done: DemoResult, tmp_path: Path) -> None:
    with running_server(done.report.parent / "models", tmp_path / "log") as server:
        with pytest.raises(ServerError, match=r"answered 4\d\d: .*candidates"):
            server.rank({"model": "reels", "candidates": "none"})
        with pytest.raises(ServerError, match="reels"):
            server.infer("reels", {"user_id": np.zeros(1, np.int64)}, ("click",))


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"surfaces": ("feed", "feed")}, "at least two different surfaces"), ({"requests": 0}, "requests must be")],
)
def test_config_is_checked(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DemoConfig(**settings)
