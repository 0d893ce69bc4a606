"""Files that cannot be read as they are: one clear error each, or a counted repair; the same with workers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from foundation.data.dataset import Dataset
from foundation.data.encoding import EncodedBatch
from foundation.data.logs import LogReader, ReaderConfig
from foundation.data.storage import DatasetError
from foundation.data.window_loader import NO_USER
from tests.foundation.data.builders import fit, small_schema, small_table, train_parts, write_dataset

SIZES = [2, 1, 3, 1, 2]
ROWS = sum(SIZES)
FILE = "train/part-00000.parquet"


def replaced(table: pa.Table, name: str, values: list[Any] | pa.Array, kind: pa.DataType | None = None) -> pa.Table:
    """A table with another column in place of one."""
    array = values if isinstance(values, pa.Array) else pa.array(values, kind)
    return table.set_column(table.schema.get_field_index(name), name, array)


def changed(table: pa.Table, name: str, row: int, value: Any) -> pa.Table:
    """A table with one other value."""
    values = table[name].to_pylist()
    values[row] = value
    kind = None if isinstance(value, str) else table.schema.field(name).type
    return replaced(table, name, values, kind)


def dataset_of(folder: Path, *tables: pa.Table, **schema: Any) -> Dataset:
    """A dataset of these tables, with an encoder fitted on sound rows."""
    made = small_schema(**schema)
    sound = small_table(SIZES)
    for name in made.columns():
        if name not in sound.schema.names:
            sound = sound.append_column(name, pa.array(np.ones(ROWS)))
    return write_dataset(folder, train_parts(*tables), made, row_group_size=4, encoder=fit(made, sound))


def batches_of(dataset: Dataset, workers: int = 0) -> list[EncodedBatch]:
    return list(LogReader(dataset, "train", ReaderConfig(batch_size=4, shuffle_window=0, workers=workers)))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("name", "row", "value", "message"),
    [
        ("click", 5, 2, r"column 'click': row 5: the label 2 of task click is not 0 or 1"),
        ("like", 3, -1, r"column 'like': row 3: the label -1 of task like is not 0 or 1"),
        ("impression_id", 4, None, r"column 'impression_id': row 4: is null; this column may not be"),
        ("time_ms", 7, None, r"column 'time_ms': row 7: is null"),
        ("watched_time", 0, [1, 2, 3, 4, 5, 6, 7, 8, 9], r"rows 0 to 3: watched_time: row 0 has 9 events"),
        ("image", 6, [1.0], r"rows 6 to 7: image: expected 3 numbers, got 1"),
    ],
)
def test_values_that_cannot_be_used(
    tmp_path: Path, name: str, row: int, value: Any, message: str, workers: int
) -> None:
    dataset = dataset_of(tmp_path, changed(small_table(SIZES), name, row, value))
    with pytest.raises(DatasetError, match=f"{FILE}: {message}"):
        batches_of(dataset, workers)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("weight", -0.5, "must not be negative, got -0.5"),
        ("weight", None, "must not be negative, got null"),
        ("weight", float("inf"), "must not be negative, got inf"),
        ("sampling_rate", 0.0, "must be above 0 and at most 1, got 0"),
        ("sampling_rate", 1.5, "must be above 0 and at most 1, got 1.5"),
    ],
)
def test_weights_out_of_range(tmp_path: Path, key: str, value: float | None, message: str) -> None:
    values = [1.0] * ROWS
    values[7] = value  # type: ignore[call-overload]
    table = small_table(SIZES).append_column("w", pa.array(values, pa.float64()))
    with pytest.raises(DatasetError, match=f"{FILE}: column 'w': row 7: {message}"):
        batches_of(dataset_of(tmp_path, table, **{key: "w"}))


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("item_id", ["a"] * ROWS, "item_id: table item holds integer ids, got the string 'a'"),
        ("user_id", [7] * ROWS, "user_id: table user holds string ids, got the integer 7"),
        ("hour", ["ten"] * ROWS, "hour: table hour holds integer ids, got the string 'ten'"),
        ("item_id", [2**63 + 5] * ROWS, "item_id: id 9223372036854775813 does not fit into int64"),
        ("item_id", [1.5] * ROWS, "item_id: ids must be whole numbers or strings, got 1.5"),
    ],
)
def test_ids_that_do_not_fit_the_table(tmp_path: Path, name: str, values: list[Any], message: str) -> None:
    kind = pa.uint64() if values[0] == 2**63 + 5 else None
    dataset = dataset_of(tmp_path, replaced(small_table(SIZES), name, values, kind))
    with pytest.raises(DatasetError, match=f"{FILE}: rows 0 to 3: {message}"):
        batches_of(dataset)


def test_null_labels_are_invalid_and_counted(tmp_path: Path) -> None:
    labels = [1.0, None, float("nan"), 0.0, 1.0, 1.0, 0.0, None, 1.0]
    reader = LogReader(
        dataset_of(tmp_path, replaced(small_table(SIZES), "click", labels, pa.float64())),
        "train",
        ReaderConfig(batch_size=99, shuffle_window=0, workers=0),
    )
    (batch,) = reader
    assert batch.label_valid[:, 0].tolist() == [True, False, False, True, True, True, True, False, True]
    assert batch.labels[:, 0].tolist() == [1, 0, 0, 0, 1, 1, 0, 0, 1]
    assert not (batch.label_valid[:, 2] & ~(batch.label_valid[:, 0] & (batch.labels[:, 0] == 1))).any()
    assert reader.counters["click"]["null"] == 3


def test_null_and_unknown_ids_are_counted(tmp_path: Path) -> None:
    table = replaced(small_table(SIZES), "item_id", [None, 999, *range(7)], pa.int32())
    reader = LogReader(dataset_of(tmp_path, table), "train", ReaderConfig(shuffle_window=0, workers=0))
    (batch,) = reader
    assert batch.item.ids["item_id"][:2].tolist() == [0, 1]
    assert reader.counters["item_id"]["missing"] == 1
    assert reader.counters["item_id"]["unknown"] == 1 + int((batch.item.ids["item_id"][2:] == 1).sum())


def test_rows_without_a_user_share_one_id(tmp_path: Path) -> None:
    users = ["u", "u", None, "v", "v", "v", None, "u", "u"]
    dataset = dataset_of(tmp_path, replaced(small_table(SIZES), "user_id", users))
    users_found = np.concatenate([b.user_id for b in batches_of(dataset)])
    assert (users_found == NO_USER).tolist() == [False, True, False, True, False]


def test_null_request_ids_are_requests_of_their_own(tmp_path: Path) -> None:
    ids = ["a", "a", None, None, "b", "b", "b", "c", "c"]
    dataset = dataset_of(tmp_path, replaced(small_table(SIZES), "request_id", ids))
    assert dataset.split("train").requests == 5
    assert [n for b in batches_of(dataset) for n in np.bincount(b.request_index).tolist()] == [2, 1, 1, 3, 2]


def test_files_that_differ_in_types_and_order_of_columns(tmp_path: Path) -> None:
    first, second = small_table(SIZES), small_table(SIZES, seed=1, first_id=100)
    expected = batches_of(write_dataset(tmp_path / "same", train_parts(first, second)))
    for name in ("item_id", "click", "hour", "watched_action"):
        kind = pa.list_(pa.int8()) if name == "watched_action" else pa.int16()
        second = replaced(second, name, second[name].combine_chunks().cast(kind))
    second = replaced(second, "watched_item", second["watched_item"].combine_chunks().cast(pa.large_list(pa.int32())))
    second = replaced(second, "user_id", second["user_id"].combine_chunks().cast(pa.large_string()))
    second = second.select(second.schema.names[::-1]).replace_schema_metadata({"origin": "elsewhere"})
    encoder = fit(small_schema(), first, small_table(SIZES, seed=1, first_id=100))
    mixed = write_dataset(tmp_path / "mixed", train_parts(first, second), encoder=encoder)
    found = batches_of(mixed)
    for left, right in zip(expected, found, strict=True):
        assert left.impression_id.tolist() == right.impression_id.tolist()
        assert left.user_id.tolist() == right.user_id.tolist()
        for key, ids in left.item.ids.items():
            assert ids.tolist() == right.item.ids[key].tolist()
        for key, ids in left.request.ids.items():
            assert ids.tolist() == right.request.ids[key].tolist()


def test_columns_without_any_value(tmp_path: Path) -> None:
    table = small_table(SIZES)
    for name in ("item_id", "age", "likes", "watched_item", "watched_action", "watched_time", "like"):
        table = replaced(table, name, pa.nulls(ROWS))
    batches = batches_of(dataset_of(tmp_path, table))
    assert all((b.item.ids["item_id"] == 0).all() and not b.label_valid[:, 1].any() for b in batches)
    assert all(not b.request.lengths["watched.item"].any() and not b.request.dense.any() for b in batches)


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-200])


def _overwrite_middle(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[4:400] = b"\0" * 396
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_truncate, "not a readable Parquet file; it may be truncated"),
        (lambda path: path.write_bytes(b""), "not a readable Parquet file"),
        (lambda path: path.unlink(), "no such file"),
        (lambda path: pq.write_table(small_table([1]), path), r"has 1 rows, but dataset\.json says 9"),
        (lambda path: pq.write_table(small_table(SIZES).drop_columns(["price"]), path), "column 'price' is missing"),
    ],
)
def test_damaged_files_are_found_before_reading(tmp_path: Path, damage: Callable[[Path], object], message: str) -> None:
    dataset = write_dataset(tmp_path, train_parts(small_table([1]), small_table(SIZES, 1, 100)))
    damage(tmp_path / "train/part-00001.parquet")
    with pytest.raises(DatasetError, match=f"train/part-00001.parquet: {message}"):
        LogReader(dataset, "train", ReaderConfig(workers=0))


@pytest.mark.parametrize("workers", [0, 1])
def test_damaged_pages_are_named_while_reading(tmp_path: Path, workers: int) -> None:
    table = small_table(SIZES)
    dataset = write_dataset(tmp_path, train_parts(table.select(["user_id", *set(table.schema.names) - {"user_id"}])))
    _overwrite_middle(tmp_path / FILE)
    with pytest.raises(DatasetError, match=f"{FILE}: cannot be read; the file may be damaged"):
        batches_of(dataset, workers)


def test_a_split_without_rows(tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path, train_parts(small_table([1])))
    with pytest.raises(DatasetError, match="split 'test' has no rows"):
        LogReader(dataset, "test", ReaderConfig())
    feed_only = replaced(small_table([2]), "surface", ["feed", "feed"])
    dataset = write_dataset(tmp_path / "feed", train_parts(feed_only))
    with pytest.raises(DatasetError, match="split 'train' has no rows of surface 'reels'"):
        LogReader(dataset, "train", ReaderConfig(), surface="reels")


def test_empty_row_groups_and_files_are_skipped(tmp_path: Path) -> None:
    table = small_table(SIZES)
    folder = tmp_path / "train"
    folder.mkdir()
    pq.write_table(table.slice(0, 0), folder / "part-00000.parquet")
    with pq.ParquetWriter(folder / "part-00001.parquet", table.schema) as writer:
        for part in (table.slice(0, 0), table.slice(0, 4), table.slice(0, 0), table.slice(4)):
            writer.write_table(part)
    from foundation.data.dataset import write_manifest

    write_manifest(tmp_path, small_schema(), fit(small_schema(), table))
    dataset = Dataset.open(tmp_path)
    assert [i for b in batches_of(dataset) for i in b.impression_id.tolist()] == list(range(ROWS))
