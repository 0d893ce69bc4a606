from __future__ import annotations

import json
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection

from foundation.data.dataset import Dataset
from foundation.data.logs import ReaderConfig
from foundation.data.storage import DatasetError
from foundation.training.schedule import ScheduleConfig
from tests.transfer import tiny
from transfer import distill as distill_module
from transfer.distill import DistillConfig, distill
from transfer.label_store import LabelStoreError
from transfer.losses import DistillLossConfig
from transfer.sharing import SharingConfig, TableSharing, teacher_tables
from transfer.student_module import StudentOptimizerConfig, joint_ne
from value_models.model import ValueModelConfig
from value_models.student import load_student

MODEL = ValueModelConfig(
    event_dim=8, pooling_heads=1, target_heads=1, request_hidden=(16,), cross_rank=8, hidden=(32, 16), init_std=0.1
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return tiny.dataset(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, data: Dataset) -> Path:
    return tiny.store(tmp_path_factory.mktemp("stores") / "whole", data)


def config(data: Dataset, out: Path, **changes: Any) -> DistillConfig:
    values: dict[str, Any] = {
        "dataset": str(data.path),
        "surface": "feed",
        "out": out,
        "model": MODEL,
        "optimizer": StudentOptimizerConfig(lr=3e-3, table_lr=2e-2, ema_decay=0.9),
        "reader": ReaderConfig(batch_size=64, workers=0),
        "epochs": 12,
        "evaluations_per_epoch": 1,
        "patience": 3,
        "device": "cpu",
    }
    return DistillConfig(**values | changes)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, data: Dataset) -> Path:
    return distill(config(data, tmp_path_factory.mktemp("runs") / "alone")).out


def test_the_student_alone_learns_and_is_whole(alone: Path) -> None:
    student = load_student(alone)
    assert {p.name for p in alone.iterdir()} >= {"config.yaml", "metrics.json", "tensorboard"}
    click = student.metrics["test"]["click"]["feed"]
    assert set(student.metrics["test"]["click"]) == {"all", "feed"}
    assert click["ne"] < 0.99 and click["auc"] > 0.6
    assert student.manifest["teacher"] is None and student.manifest["teacher_rows"] == 0
    assert student.manifest["train_rows"] == 480
    assert "teacher" not in student.metrics


def test_a_good_teacher_makes_a_better_student(tmp_path: Path, data: Dataset, store: Path, alone: Path) -> None:
    loss = DistillLossConfig(auxiliary=1.0, adapter=1.0, direct=2.0)
    result = distill(config(data, tmp_path / "taught", store=store, loss=loss))
    own = load_student(alone).metrics["test"]["click"]["feed"]["ne"]
    taught = result.metrics["test"]["click"]["feed"]["ne"]
    teacher = result.metrics["teacher"]["test"]["click"]["feed"]["ne"]
    assert teacher < taught < own - 0.01
    assert result.train_rows == result.teacher_rows == 480


def test_heads_alone_transfer_through_the_shared_network(
    tmp_path: Path, data: Dataset, store: Path, alone: Path
) -> None:
    loss = DistillLossConfig(auxiliary=4.0, adapter=0.0)
    taught = distill(config(data, tmp_path / "taught", store=store, loss=loss)).metrics
    own = load_student(alone).metrics["test"]["click"]["feed"]["ne"]
    assert taught["test"]["click"]["feed"]["ne"] < own


def test_rows_without_a_teacher_are_counted(tmp_path: Path, data: Dataset, capsys: pytest.CaptureFixture[str]) -> None:
    partial = tiny.store(tmp_path / "partial", data, keep=0.5)
    result = distill(config(data, tmp_path / "student", store=partial, epochs=1))
    assert 0.35 * 480 < result.teacher_rows < 0.65 * 480
    assert f"{480 - result.teacher_rows} of 480 training rows" in capsys.readouterr().err
    assert result.metrics["teacher"]["test"]["click"]["feed"]["rows"] < 800


def test_an_empty_store_gives_the_student_alone(tmp_path: Path, data: Dataset, alone: Path) -> None:
    nothing = tiny.store(tmp_path / "nothing", data, keep=0.0)
    student = distill(config(data, tmp_path / "student", store=nothing)).out
    ours, theirs = load_student(student).model.state_dict(), load_student(alone).model.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_same_seed_same_student_other_seed_another(tmp_path: Path, data: Dataset, alone: Path) -> None:
    weights = [
        load_student(distill(config(data, tmp_path / str(seed), seed=seed)).out).model.state_dict() for seed in (0, 1)
    ]
    before = load_student(alone).model.state_dict()
    assert all(torch.equal(weights[0][name], before[name]) for name in before)
    assert not torch.equal(weights[1]["heads.weight"], before["heads.weight"])


def test_the_best_validation_is_kept_and_training_stops_early(tmp_path: Path, data: Dataset) -> None:
    optimizer = StudentOptimizerConfig(lr=2e-2, table_lr=0.1, ema_decay=0.0, schedule=ScheduleConfig(decay="constant"))
    result = distill(config(data, tmp_path / "student", optimizer=optimizer, epochs=60, patience=2))
    student = load_student(result.out)
    curve = student.manifest["curve"]
    best = min(curve, key=lambda point: point["ne"])
    assert result.best_step == best["step"] and len(curve) == curve.index(best) + 3 < 60
    uncalibrated = student.metrics["uncalibrated"]["validation"]
    slices = {name: uncalibrated[name]["feed"] for name in ("click", "conversion")}
    assert joint_ne(slices, {"click": 1.0, "conversion": 1.0}) == pytest.approx(best["ne"], abs=1e-6)


def test_calibration_is_fitted_on_validation_rows(alone: Path) -> None:
    student = load_student(alone)
    validation = student.metrics["validation"]["click"]["feed"]
    assert validation["calibration"] == pytest.approx(1.0, abs=1e-3)
    assert validation["ne"] <= student.metrics["uncalibrated"]["validation"]["click"]["feed"]["ne"]
    assert student.calibration.tasks["click"].rows == validation["rows"]


def test_all_surfaces_and_weights_of_others(tmp_path: Path, data: Dataset) -> None:
    every = distill(config(data, tmp_path / "all", surface="all", epochs=1))
    assert set(every.metrics["test"]["click"]) == {"all", "feed", "reels"} and every.train_rows == 720
    mixed = distill(config(data, tmp_path / "mixed", other_surfaces_weight=0.3, epochs=1))
    assert mixed.train_rows == 720 and set(mixed.metrics["test"]["click"]) == {"all", "feed"}


def test_small_surfaces_get_more_passes(tmp_path: Path, data: Dataset) -> None:
    result = distill(config(data, tmp_path / "student", epochs=1, min_steps=20, patience=50))
    assert result.steps == 3 * 8  # 480 rows in batches of 64: 8 steps a pass


def test_config_is_saved_with_the_student(alone: Path) -> None:
    saved = yaml.safe_load((alone / "config.yaml").read_text())
    assert saved["surface"] == "feed" and saved["model"]["hidden"] == [32, 16] and saved["store"] is None


def test_sample_holds_real_rows(alone: Path) -> None:
    sample = load_student(alone).sample
    assert len(sample["user_id"]) == 8 and len(sample["request_index"]) == 32
    assert sorted(set(sample["request_index"].tolist())) == list(range(8))


class TeacherModel(torch.nn.Module):
    """Tables of the dataset's sizes, as the foundation model holds them: one collection per dim."""

    def __init__(self, rows: dict[str, int]) -> None:
        super().__init__()
        self.collections = torch.nn.ModuleList(
            EmbeddingCollection(
                tables=[EmbeddingConfig(num_embeddings=rows[name], embedding_dim=dim, name=name, feature_names=[name])]
            )
            for name, dim in (("user", 8), ("item", 16))
        )


class FakeTeacher:
    """What ``load_model`` gives."""

    def __init__(self, data: Dataset) -> None:
        torch.manual_seed(3)
        self.encoder = data.encoder
        self.schema = data.schema
        self.model = TeacherModel(data.encoder.table_rows)


def test_shared_tables(tmp_path: Path, data: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeTeacher(data)
    patch_teacher(monkeypatch, fake)
    sharing = SharingConfig(tables={"user": TableSharing(tune=False), "item": TableSharing(how="project", tune=True)})
    result = distill(config(data, tmp_path / "student", teacher=Path("run"), sharing=sharing, epochs=2))
    student = load_student(result.out)
    torch.testing.assert_close(student.model.tables.weight("user"), teacher_tables(fake.model)["user"])
    report = student.manifest["teacher"]["shared"]
    assert report["user"]["how"] == "copy" and report["item"]["teacher_dim"] == 16


def patch_teacher(monkeypatch: pytest.MonkeyPatch, fake: FakeTeacher) -> None:
    monkeypatch.setattr(distill_module, "load_model", lambda run, which, device: fake)


def test_refusals_come_before_training(tmp_path: Path, data: Dataset, store: Path) -> None:
    out = tmp_path / "student"
    with pytest.raises(ValueError, match="surface 'shorts' is not one of feed, reels, other"):
        distill(config(data, out, surface="shorts"))
    with pytest.raises(DatasetError, match="'other'"):
        distill(config(data, out, surface="other"))
    other = tiny.store(tmp_path / "store", data, schema_hash="0" * 16)
    with pytest.raises(LabelStoreError, match="schema_hash"):
        distill(config(data, out, store=other))
    with pytest.raises(ValueError, match="teacher and sharing go together"):
        config(data, out, teacher=Path("run"))
    assert not out.exists()
    (out / "x").mkdir(parents=True)
    with pytest.raises(FileExistsError, match="overwrite"):
        distill(config(data, out))


def test_validation_rows_of_one_class_are_an_error_that_leaves_nothing(
    tmp_path: Path, data: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transfer import batches

    original = batches.student_batch
    monkeypatch.setattr(
        batches, "student_batch", lambda *a: original(*a)._replace(labels=torch.zeros_like(original(*a).labels))
    )
    with pytest.raises(ValueError, match="no task has both classes"):
        distill(config(data, tmp_path / "student"))
    assert not list(tmp_path.iterdir())


def test_ctrl_c_leaves_nothing_and_stays_an_interrupt(
    tmp_path: Path, data: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transfer import batches

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(batches, "student_batch", interrupted)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        distill(config(data, tmp_path / "student"))
    assert signal.getsignal(signal.SIGINT) is before
    assert not list(tmp_path.iterdir())


def test_a_student_that_diverges_says_so(tmp_path: Path, data: Dataset) -> None:
    optimizer = StudentOptimizerConfig(lr=1e30, table_lr=1e30, clip_norm=0.0)
    with pytest.raises(ValueError, match=r"logits are not finite; lower optimizer\.lr"):
        distill(config(data, tmp_path / "student", optimizer=optimizer))
    assert not list(tmp_path.iterdir())


def test_metrics_are_plain_json(alone: Path) -> None:
    text = (alone / "metrics.json").read_text()
    assert "NaN" not in text and json.loads(text)["test"]["click"]["feed"]["rows"] > 0


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"epochs": 0}, "epochs"),
        ({"patience": 0}, "patience"),
        ({"min_steps": -1}, "min_steps"),
        ({"other_surfaces_weight": -1.0}, "other_surfaces_weight"),
        ({"device": "tpu"}, "device"),
    ],
)
def test_config_errors_name_the_key(values: dict[str, Any], key: str) -> None:
    base = DistillConfig(dataset="d", surface="s", out=Path("o"))
    with pytest.raises(ValueError, match=key):
        replace(base, **values)


def test_joint_ne_by_hand() -> None:
    def slice_(ne: float, rows: int, positives: int) -> dict[str, float]:
        return {"ne": ne, "rows": rows, "positives": positives}

    slices = {"a": slice_(0.9, 100, 50), "b": slice_(float("nan"), 100, 0), "c": slice_(0.6, 50, 10)}
    first, third = 100 * np.log(2), 2.0 * 50 * -(0.2 * np.log(0.2) + 0.8 * np.log(0.8))
    expected = (0.9 * first + 0.6 * third) / (first + third)
    assert joint_ne(slices, {"a": 1.0, "b": 1.0, "c": 2.0}) == pytest.approx(expected)
    with pytest.raises(ValueError, match="no task has both classes"):
        joint_ne({"b": slices["b"]}, {"b": 1.0})
