"""Faults of files and footers, each in a dataset of its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from foundation.data.doctor import examine
from foundation.data.files import sha256_file
from tests.foundation.data.sick_datasets import TEST, TRAIN, change, found, healthy, healthy_schema, put


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return healthy(tmp_path / "data")


def _cast(name: str, kind: pa.DataType) -> Callable[[pa.Table], pa.Table]:
    return lambda table: put(table, name, table[name].cast(kind))


def test_missing_column(folder: Path) -> None:
    change(folder, lambda t: t.drop_columns(["price"]), TEST)
    (fault,) = found(folder, "missing_column")
    assert (fault.severity, fault.file, fault.column) == ("error", TEST, "price")
    assert "'price' is missing" in fault.message


def test_all_missing_columns_of_a_file_are_named(folder: Path) -> None:
    change(folder, lambda t: t.drop_columns(["price", "click", "time_ms"]))
    assert {f.column for f in found(folder, "missing_column")} == {"price", "click", "time_ms"}


def test_reordered_and_extra_columns_are_fine(folder: Path) -> None:
    change(folder, lambda t: t.select(t.column_names[::-1]).append_column("extra", pa.array([{"a": 1}] * t.num_rows)))
    assert examine(folder).exit_code == 0


def test_repeated_column(folder: Path) -> None:
    change(folder, lambda t: t.append_column("price", t["price"]))
    (fault,) = found(folder, "column_type")
    assert fault.column == "price" and "more than once" in fault.message


@pytest.mark.parametrize(
    ("column", "values", "words"),
    [
        ("price", pa.array(["cheap"]), "string"),
        ("watched_item", pa.array([3]), "int64"),
        ("hour", pa.array([[3]]), "list"),
        ("age", pa.array([{"years": 3}]), "struct"),
        ("item_id", pa.array([b"x"]), "binary"),
        ("time_ms", pa.array(["2022-05-04"]), "string"),
        ("topics", pa.array([[("a", 1.0)]], pa.map_(pa.string(), pa.float64())), "map"),
    ],
)
def test_mistyped_column_is_named_with_its_type(folder: Path, column: str, values: pa.Array, words: str) -> None:
    change(folder, lambda t: put(t, column, pa.concat_arrays([values] * t.num_rows)))
    (fault,) = found(folder, "column_type")
    assert (fault.severity, fault.file, fault.column) == ("error", TRAIN, column)
    assert words in fault.message


@pytest.mark.parametrize(
    ("column", "kind"),
    [
        ("click", pa.bool_()),
        ("like", pa.int8()),
        ("hour", pa.uint16()),
        ("price", pa.decimal128(12, 2)),
        ("surface", pa.dictionary(pa.int32(), pa.string())),
        ("user_id", pa.large_string()),
        ("watched_item", pa.large_list(pa.int64())),
        ("watched_item", pa.list_(pa.field("element", pa.int64(), nullable=False))),
        ("watched_time", pa.list_(pa.timestamp("ms"))),
        ("time_ms", pa.timestamp("us")),
    ],
)
def test_types_of_other_writers_are_read_and_noted(folder: Path, column: str, kind: pa.DataType) -> None:
    def edit(table: pa.Table) -> pa.Table:
        if column == "time_ms":
            return put(table, column, table[column].cast(pa.timestamp("ms")).cast(kind))
        if column == "price":
            values = [None if v is None else Decimal(int(v)) for v in table[column].to_pylist()]
            return put(table, column, pa.array(values, kind))
        return put(table, column, table[column].cast(kind))

    for file in (TRAIN, "validation/part-00000.parquet", TEST):
        change(folder, edit, file)
    report = examine(folder)
    assert [f for f in report.findings if f.severity != "info"] == []
    notes = {f.file for f in report.findings if f.check == "type_note" and f.column == column}
    assert len(notes) == 3


def test_float_ids(folder: Path) -> None:
    change(folder, _cast("item_id", pa.float64()))
    (fault,) = found(folder, "float_ids")
    assert (fault.severity, fault.column) == ("warning", "item_id")


@pytest.mark.parametrize(("kind", "severity"), [(pa.float32(), "error"), (pa.float64(), "warning")])
def test_float_times(folder: Path, kind: pa.DataType, severity: str) -> None:
    change(folder, lambda t: put(t, "time_ms", t["time_ms"].cast(kind, safe=False)))
    (fault,) = found(folder, "float_time")
    assert (fault.severity, fault.column) == (severity, "time_ms")


def test_column_without_a_type(folder: Path) -> None:
    change(folder, lambda t: put(t, "age", pa.nulls(t.num_rows)), TEST)
    (fault,) = found(folder, "null_type")
    assert (fault.severity, fault.file, fault.column) == ("warning", TEST, "age")


def test_strings_in_one_file_and_integers_in_another(folder: Path) -> None:
    change(folder, lambda t: put(t, "item_id", [str(v) for v in t["item_id"].to_pylist()]), TEST)
    (fault,) = found(folder, "mixed_types")
    assert (fault.severity, fault.file, fault.column) == ("error", TEST, "item_id")


def test_int32_in_one_file_and_int64_in_another(folder: Path) -> None:
    change(folder, _cast("item_id", pa.int32()), TEST)
    (fault,) = found(folder, "mixed_widths")
    assert (fault.severity, fault.column) == ("warning", "item_id")
    assert "int32" in fault.message and "int64" in fault.message


def test_history_of_strings_beside_items_of_integers(folder: Path) -> None:
    def edit(table: pa.Table) -> pa.Table:
        return put(table, "watched_item", [[str(i) for i in items] for items in table["watched_item"].to_pylist()])

    for file in (TRAIN, "validation/part-00000.parquet", TEST):
        change(folder, edit, file)
    (fault,) = found(folder, "mixed_ids")
    assert fault.severity == "error" and "table item" in fault.message


def test_truncated_parquet(folder: Path) -> None:
    data = (folder / TEST).read_bytes()
    (folder / TEST).write_bytes(data[: len(data) // 2])
    (fault,) = found(folder, "unreadable_file")
    assert (fault.severity, fault.file) == ("error", TEST)
    assert "truncated" in fault.message


def test_damage_in_the_middle_of_a_file(folder: Path) -> None:
    data = bytearray((folder / TRAIN).read_bytes())
    data[4:2000] = bytes(1996)
    (folder / TRAIN).write_bytes(bytes(data))
    (fault,) = found(folder, "unreadable_file")
    assert (fault.severity, fault.file) == ("error", TRAIN)


def test_file_of_another_kind(folder: Path) -> None:
    (folder / TEST).write_text("user_id,click\n1,0\n")
    assert found(folder, "unreadable_file")[0].file == TEST


def test_missing_file(folder: Path) -> None:
    (folder / TEST).unlink()
    (fault,) = found(folder, "missing_file")
    assert (fault.severity, fault.file) == ("error", TEST)


def test_stray_file(folder: Path) -> None:
    (folder / "test/part-00001.parquet").write_bytes((folder / TEST).read_bytes())
    (fault,) = found(folder, "stray_file")
    assert (fault.severity, fault.file) == ("warning", "test/part-00001.parquet")
    assert examine(folder).exit_code == 0, "rows of a stray file are not read"


def test_a_copy_with_fewer_rows(folder: Path) -> None:
    change(folder, lambda t: t.slice(0, 100))
    (fault,) = found(folder, "row_count")
    assert (fault.severity, fault.file) == ("error", TRAIN) and "100 rows" in fault.message


def _with_checksums(folder: Path) -> None:
    manifest: dict[str, Any] = json.loads((folder / "dataset.json").read_text())
    for split in manifest["splits"].values():
        for entry in split["files"]:
            entry["sha256"] = sha256_file(folder / entry["path"])
    (folder / "dataset.json").write_text(json.dumps(manifest))


def test_a_copy_with_other_values(folder: Path) -> None:
    _with_checksums(folder)
    assert found(folder, "checksum") == []
    change(folder, lambda t: put(t, "hour", [5] * t.num_rows))
    (fault,) = found(folder, "checksum")
    assert (fault.severity, fault.file) == ("error", TRAIN)
    assert found(folder, "checksum", checksums=False) == []


def test_empty_file(folder: Path) -> None:
    change(folder, lambda t: t.slice(0, 0), TEST)
    (fault,) = found(folder, "empty_file")
    assert (fault.severity, fault.file) == ("warning", TEST)


def test_dataset_without_any_row(folder: Path) -> None:
    for file in (TRAIN, "validation/part-00000.parquet", TEST):
        change(folder, lambda t: t.slice(0, 0), file)
    report = examine(folder)
    assert report.exit_code == 1
    empty = {f.message: f.severity for f in report.findings if f.check == "empty_split"}
    assert empty["split train has no rows"] == "error"


def test_one_giant_row_group(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foundation.data.doctor_files.LARGE_GROUP_ROWS", 300)
    change(folder, lambda t: t, row_group_size=450)
    (fault,) = found(folder, "large_row_group")
    assert (fault.severity, fault.file) == ("warning", TRAIN) and "450 rows" in fault.message


def test_manifest_missing_or_broken(folder: Path) -> None:
    text = (folder / "dataset.json").read_text()
    (folder / "dataset.json").write_text(text[:100])
    assert found(folder, "manifest")[0].severity == "error"
    (folder / "dataset.json").unlink()
    assert "is missing" in found(folder, "manifest")[0].message
    assert found(folder, "label_null"), "the rows are checked nevertheless"


def test_schema_that_was_changed_afterwards(folder: Path) -> None:
    text = (folder / "schema.yaml").read_text()
    (folder / "schema.yaml").write_text(text.replace("max_length: 4", "max_length: 9"))
    (fault,) = found(folder, "hash")
    assert (fault.severity, fault.file) == ("error", "schema.yaml")
    assert found(folder, "encoder")[0].file == "encoder.npz"


def test_schema_with_a_fault_or_none(folder: Path) -> None:
    (folder / "schema.yaml").write_text("name: x\n")
    assert found(folder, "schema")[0].severity == "error"
    (folder / "schema.yaml").unlink()
    assert "no such schema file" in found(folder, "schema")[0].message


def test_broken_encoder(folder: Path) -> None:
    (folder / "encoder.npz").write_bytes(b"nothing")
    (fault,) = found(folder, "encoder")
    assert (fault.severity, fault.file) == ("error", "encoder.npz")


def test_another_schema_may_be_asked_about(folder: Path, tmp_path: Path) -> None:
    schema = healthy_schema()
    other = schema.to_dict()
    other["features"]["price"]["column"] = "cost"
    (tmp_path / "other.yaml").write_text(json.dumps(other))
    faults = found(folder, "missing_column", schema=tmp_path / "other.yaml")
    assert {f.column for f in faults} == {"cost"} and len(faults) == 3
