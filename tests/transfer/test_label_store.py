from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from foundation.data.dataset import Dataset
from tests.transfer import tiny
from transfer.label_store import LabelStore, LabelStoreError, PartWriter


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return tiny.dataset(tmp_path_factory.mktemp("data"))


@pytest.fixture
def folder(tmp_path: Path, data: Dataset) -> Path:
    return tiny.store(tmp_path / "store", data, keep=0.8)


def test_round_trip_with_missing_ids(folder: Path, tmp_path: Path, data: Dataset) -> None:
    whole = LabelStore.open(tiny.store(tmp_path / "whole", data), embedding=True)
    store = LabelStore.open(folder, embedding=True)
    ids = np.random.default_rng(0).permutation(np.concatenate([np.arange(720), np.arange(-5, 0), [10**9]]))
    logits, embedding, found = store.lookup(ids)
    expected, _, known = whole.lookup(ids)
    assert known.sum() == 720 and 0.7 * 720 < found.sum() < 0.9 * 720 and not (found & ~known).any()
    np.testing.assert_array_equal(logits[found], expected[found])
    assert embedding is not None
    np.testing.assert_array_equal(embedding[found], np.repeat((ids[found] % 7)[:, None], 4, axis=1))
    assert not logits[~found].any() and not embedding[~found].any()
    _, truth = tiny.table(180, 0, 0)
    np.testing.assert_array_equal(expected[known], truth[ids[known]])


def test_splits_into_parts_and_skips_embeddings_unless_asked(folder: Path) -> None:
    store = LabelStore.open(folder)
    assert len(store.info.files) >= 3
    assert store.lookup(np.array([0]))[1] is None
    assert sum(pq.read_metadata(folder / name).num_rows for name in store.info.files) == store.info.rows


def test_an_empty_store_finds_nothing(tmp_path: Path, data: Dataset) -> None:
    store = LabelStore.open(tiny.store(tmp_path / "none", data, keep=0.0))
    logits, _, found = store.lookup(np.array([3, 4]))
    assert logits.shape == (2, 2) and not found.any()


@pytest.mark.parametrize(
    ("changes", "key"),
    [({"schema_hash": "0"}, "schema_hash"), ({"encoder_hash": "0"}, "encoder_hash"), ({"tasks": ("a", "b")}, "tasks")],
)
def test_a_store_of_another_dataset_is_refused(
    tmp_path: Path, data: Dataset, changes: dict[str, object], key: str
) -> None:
    folder = tiny.store(tmp_path / "other", data)
    info = json.loads((folder / "store.json").read_text())
    store = LabelStore.open(folder)
    store.require(data.schema.hash, data.encoder.hash, data.schema.task_names)
    wanted = {"schema_hash": info["schema_hash"], "encoder_hash": info["encoder_hash"], "tasks": tuple(info["tasks"])}
    with pytest.raises(LabelStoreError, match=f"{key} of the label store"):
        store.require(**wanted | changes)  # type: ignore[arg-type]


def test_broken_stores_name_the_file(folder: Path) -> None:
    part = folder / "part-00001.parquet"
    content = part.read_bytes()
    part.write_bytes(content[: len(content) // 2])
    with pytest.raises(LabelStoreError, match=r"part-00001\.parquet: cannot be read"):
        LabelStore.open(folder)
    part.unlink()
    with pytest.raises(LabelStoreError, match=r"part-00001\.parquet: is missing"):
        LabelStore.open(folder)
    (folder / "store.json").write_text("{")
    with pytest.raises(LabelStoreError, match=r"store\.json: not JSON"):
        LabelStore.open(folder)
    (folder / "store.json").unlink()
    with pytest.raises(LabelStoreError, match="not a label store"):
        LabelStore.open(folder)


def test_another_format_and_wrong_counts_are_refused(folder: Path) -> None:
    info = json.loads((folder / "store.json").read_text())
    (folder / "store.json").write_text(json.dumps(info | {"rows": info["rows"] + 1}))
    with pytest.raises(LabelStoreError, match="rows is"):
        LabelStore.open(folder)
    (folder / "store.json").write_text(json.dumps(info | {"format": 2}))
    with pytest.raises(LabelStoreError, match="format 1"):
        LabelStore.open(folder)
    for key, value in (("rows", "7"), ("tasks", "click"), ("files", {"a": None}), ("embedding_dim", 1.5)):
        (folder / "store.json").write_text(json.dumps(info | {key: value}))
        with pytest.raises(LabelStoreError, match=rf"store\.json: store\.{key}.*: expected "):
            LabelStore.open(folder)
    info.pop("teacher")
    (folder / "store.json").write_text(json.dumps(info))
    with pytest.raises(LabelStoreError, match="teacher"):
        LabelStore.open(folder)


@pytest.mark.parametrize(
    ("ids", "logit", "message"),
    [([1, 2, 1], 0.5, "impression id 1 occurs twice"), ([1, 2, 3], np.nan, "6 logits are not finite")],
)
def test_ids_are_unique_and_logits_finite(folder: Path, ids: list[int], logit: float, message: str) -> None:
    info = json.loads((folder / "store.json").read_text())
    writer = PartWriter(folder, ("click", "conversion"), 4, rows_per_file=10)
    writer.write(np.array(ids), np.full((3, 2), logit, np.float32), np.zeros((3, 4)))
    writer.close()
    (folder / "store.json").write_text(json.dumps(info | {"rows": 3, "files": writer.files}))
    with pytest.raises(LabelStoreError, match=message):
        LabelStore.open(folder)
