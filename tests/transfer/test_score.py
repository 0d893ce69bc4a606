"""Scoring with a real teacher: trained for a few steps, read back row by row."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from foundation.data.batch import Batch
from foundation.data.dataset import Dataset
from foundation.data.logs import LogReader, ReaderConfig
from foundation.model.gem import GEMConfig
from foundation.training.checkpoint import load_model
from foundation.training.train import TrainConfig, train
from tests.foundation.data.builders import write_dataset
from tests.transfer import tiny
from transfer import score as score_module
from transfer.distill import DistillConfig, distill
from transfer.label_store import LabelStore, LabelStoreError
from transfer.score import ScoreConfig, score
from transfer.sharing import SharingConfig, TableSharing
from value_models.model import ValueModelConfig
from value_models.student import load_student

READER = ReaderConfig(batch_size=128, workers=0)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return tiny.dataset(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, data: Dataset) -> Path:
    out = tmp_path_factory.mktemp("runs") / "teacher"
    model = GEMConfig(width=8, layers=1)
    train(TrainConfig(dataset=str(data.path), out=out, model=model, reader=READER, device="cpu", epochs=2))
    return out


def config(data: Dataset, run: Path, out: Path) -> ScoreConfig:
    return ScoreConfig(run=run, dataset=str(data.path), out=out, reader=READER, device="cpu")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, data: Dataset, run: Path) -> Path:
    return score(config(data, run, tmp_path_factory.mktemp("stores") / "store")).out


def test_every_row_gets_what_the_teacher_says(data: Dataset, run: Path, store: Path) -> None:
    opened = LabelStore.open(store, embedding=True)
    teacher = load_model(run)
    assert opened.info.rows == data.manifest.rows == 2400 and opened.info.teacher == teacher.version
    opened.require(data.schema.hash, data.encoder.hash, data.schema.task_names)
    for split in ("train", "validation", "test"):
        for encoded in LogReader(data, split, replace(READER, batch_size=57)):
            with torch.no_grad():
                output = teacher.model(Batch.from_encoded(encoded, data.schema))
            logits, embedding, found = opened.lookup(encoded.impression_id)
            assert found.all() and embedding is not None
            np.testing.assert_allclose(logits, output.logits.numpy(), rtol=0, atol=1e-5)
            np.testing.assert_allclose(embedding, output.embedding.numpy(), rtol=2e-3, atol=2e-3)


def test_scoring_again_gives_the_same_rows(data: Dataset, run: Path, store: Path, tmp_path: Path) -> None:
    again = score(config(data, run, tmp_path / "again")).out
    first, second = LabelStore.open(store), LabelStore.open(again)
    ids = np.arange(100_000, 100_480)
    np.testing.assert_array_equal(first.lookup(ids)[0], second.lookup(ids)[0])
    with pytest.raises(FileExistsError, match="overwrite"):
        score(config(data, run, tmp_path / "again"))


def test_only_some_splits(data: Dataset, run: Path, tmp_path: Path) -> None:
    result = score(replace(config(data, run, tmp_path / "store"), splits=("validation",)))
    assert result.rows == 480
    assert LabelStore.open(result.out).info.splits == ("validation",)


def test_another_schema_is_refused(run: Path, tmp_path: Path) -> None:
    changed = tiny.SCHEMA | {"name": "changed"}
    schema = tiny.Schema.from_dict(changed)
    other = write_dataset(tmp_path / "data", {"train/part-00000.parquet": tiny.table(20, 0, 0)[0]}, schema)
    with pytest.raises(LabelStoreError, match="schema"):
        score(config(other, run, tmp_path / "store"))
    assert not (tmp_path / "store").exists()


def test_a_teacher_that_is_not_finite_writes_nothing(
    data: Dataset, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object) -> object:
        teacher = load_model(run)
        for parameter in teacher.model.dense_parameters():
            torch.nn.init.constant_(parameter, float("nan"))
        return teacher

    monkeypatch.setattr(score_module, "load_model", broken)
    with pytest.raises(LabelStoreError, match="logit is not finite"):
        score(config(data, run, tmp_path / "store"))
    assert not list(tmp_path.iterdir())


def test_a_student_takes_store_and_tables(data: Dataset, run: Path, store: Path, tmp_path: Path) -> None:
    sharing = SharingConfig(tables={"user": TableSharing(), "item": TableSharing(how="project", tune=False)})
    result = distill(
        DistillConfig(
            dataset=str(data.path),
            surface="reels",
            out=tmp_path / "student",
            store=store,
            teacher=run,
            sharing=sharing,
            model=ValueModelConfig(event_dim=8, hidden=(16, 8), request_hidden=(8,), table_dims={"item": 4}),
            reader=READER,
            epochs=1,
            device="cpu",
        )
    )
    student = load_student(result.out)
    assert result.teacher_rows == result.train_rows == 240
    assert student.manifest["teacher"]["version"] == load_model(run).version
    assert student.model.tables.weight("item").shape == (32, 4)
    assert 0 < student.manifest["teacher"]["shared"]["item"]["kept"] < 1


@pytest.mark.parametrize(
    ("values", "key"),
    [({"splits": ("tests",)}, "splits"), ({"splits": ()}, "splits"), ({"rows_per_file": 0}, "rows_per_file"),
     ({"device": "tpu"}, "device")],
)  # fmt: skip
def test_config_errors_name_the_key(values: dict[str, object], key: str) -> None:
    with pytest.raises(ValueError, match=key):
        ScoreConfig(run=Path("r"), dataset="d", out=Path("o"), **values)  # type: ignore[arg-type]
