"""Opening datasets: what belongs together, what does not, and where they may lie."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest

from foundation.data.dataset import Dataset, Manifest, write_manifest
from foundation.data.encoding import EncodingError
from foundation.data.logs import LogReader, ReaderConfig
from foundation.data.schema import Schema, SchemaError
from foundation.data.storage import DatasetError
from tests.foundation.data.builders import fit, small_schema, small_table, train_parts, write_dataset


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    files = train_parts(small_table([1, 2, 3]), small_table([2], 1, 100))
    files["test/part-00000.parquet"] = small_table([4], 2, 200)
    write_dataset(tmp_path / "set", files, row_group_size=4)
    return tmp_path / "set"


def test_manifest_says_what_is_there(folder: Path) -> None:
    dataset = Dataset.open(folder)
    assert dataset.manifest.rows == 12
    train, test = dataset.split("train"), dataset.split("test")
    assert (train.rows, train.requests, train.time_range) == (8, 4, (1_000_000, 1_002_000))
    assert [(f.path, f.rows, f.row_groups) for f in train.files] == [
        ("train/part-00000.parquet", 6, 2),
        ("train/part-00001.parquet", 2, 1),
    ]
    assert (test.rows, dataset.split("validation").rows, dataset.split("validation").files) == (4, 0, ())
    assert Manifest.from_json(dataset.manifest.to_json(), "here") == dataset.manifest
    assert dataset.files("test") == (f"{folder}/test/part-00000.parquet",)
    assert dataset.encoder.hash == dataset.manifest.encoder_hash


def test_counts_are_kept(tmp_path: Path) -> None:
    write_manifest(tmp_path, small_schema(), fit(small_schema(), small_table([1])), {"duplicates_dropped": 3})
    assert Dataset.open(tmp_path).manifest.counts == {"duplicates_dropped": 3}


def test_unknown_split(folder: Path) -> None:
    with pytest.raises(DatasetError, match="no split 'dev'; there are: train, validation, test"):
        LogReader(Dataset.open(folder), "dev", ReaderConfig(workers=0))


def _edit(key: str, value: object) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        data = json.loads((folder / "dataset.json").read_text())
        data[key] = value
        (folder / "dataset.json").write_text(json.dumps(data))

    return apply


def _drop(key: str) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        data = json.loads((folder / "dataset.json").read_text())
        del data[key]
        (folder / "dataset.json").write_text(json.dumps(data))

    return apply


def _other_schema(folder: Path) -> None:
    small_schema(name="other").save(folder / "schema.yaml")


def _other_encoder(folder: Path) -> None:
    fit(Schema.load(folder / "schema.yaml"), small_table([9], seed=4)).save(folder / "encoder.npz")


@pytest.mark.parametrize(
    ("damage", "kind", "message"),
    [
        (lambda f: (f / "dataset.json").unlink(), DatasetError, r"dataset\.json: no such file"),
        (lambda f: (f / "dataset.json").write_text("{"), DatasetError, r"dataset\.json: not a JSON file"),
        (lambda f: (f / "dataset.json").write_text("[]"), DatasetError, r"dataset\.json: format is None, expected 1"),
        (_edit("format", 9), DatasetError, r"dataset\.json: format is 9, expected 1; prepare the dataset again"),
        (_edit("splits", 3), DatasetError, r"dataset\.json: not a dataset manifest"),
        (_drop("rows"), DatasetError, r"dataset\.json: key 'rows' is missing"),
        (lambda f: (f / "schema.yaml").unlink(), SchemaError, r"schema\.yaml: no such schema file"),
        (lambda f: (f / "encoder.npz").write_bytes(b"PK"), EncodingError, r"encoder\.npz: not an encoder file"),
        (_edit("schema_hash", "0" * 16), DatasetError, r"schema\.yaml: its hash is .*, but dataset\.json says 0000"),
        (_edit("encoder_hash", "0" * 16), DatasetError, r"encoder\.npz: its hash is .*, but dataset\.json says 0000"),
        (_other_schema, EncodingError, r"encoder\.npz: made for schema"),
        (_other_encoder, DatasetError, r"encoder\.npz: its hash is .*the file was changed after"),
    ],
)
def test_damage_is_named(folder: Path, damage: Callable[[Path], object], kind: type[Exception], message: str) -> None:
    damage(folder)
    with pytest.raises(kind, match=message):
        Dataset.open(folder)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"nowhere: no such dataset folder; make one with `opengem prepare`"):
        Dataset.open(tmp_path / "nowhere")


@pytest.mark.parametrize("workers", [0, 2])
def test_any_fsspec_url(folder: Path, workers: int) -> None:
    memory = fsspec.filesystem("memory")
    memory.put(str(folder), "/sets/small", recursive=True)
    try:
        remote = Dataset.open("memory://sets/small")
        assert remote.manifest == Dataset.open(folder).manifest
        local = LogReader(Dataset.open(folder), "train", ReaderConfig(batch_size=3, workers=0))
        reader = LogReader(remote, "train", ReaderConfig(batch_size=3, workers=workers))
        assert [b.impression_id.tolist() for b in reader] == [b.impression_id.tolist() for b in local]
        with pytest.raises(DatasetError, match=r"memory://sets/none/dataset\.json: no such file"):
            Dataset.open("memory://sets/none")
    finally:
        memory.rm("/sets", recursive=True)
