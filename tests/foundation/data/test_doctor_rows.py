"""Faults of rows: keys, times, requests, labels, features, histories; each in a dataset of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from foundation.data.doctor import examine
from tests.foundation.data.builders import SCHEMA
from tests.foundation.data.sick_datasets import (
    DAY,
    START,
    TEST,
    TRAIN,
    change,
    found,
    healthy,
    healthy_schema,
    put,
    put_rows,
)

Edit = Callable[[pa.Table], pa.Table]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return healthy(tmp_path / "data")


def rows(column: str, changes: dict[int, Any]) -> Edit:
    return lambda table: put_rows(table, column, changes)


def each(column: str, function: Callable[[Any], Any]) -> Edit:
    """The column with a function over its values."""
    return lambda table: put(table, column, [function(v) for v in table[column].to_pylist()])


def lists(column: str, function: Callable[[list[Any], int], list[Any]], least: int = 0) -> Edit:
    """The list column with a function over lists that have at least ``least`` values, and their row's time."""

    def edit(table: pa.Table) -> pa.Table:
        times = table["time_ms"].to_pylist()
        values = table[column].to_pylist()
        new = [function(v, t) if len(v) >= least else v for v, t in zip(values, times, strict=True)]
        return put(table, column, pa.array(new, table[column].type))

    return edit


def long_rows(column: str, least: int, folder: Path) -> int:
    import pyarrow.parquet as pq

    return sum(len(v) >= least for v in pq.read_table(folder / TRAIN)[column].to_pylist())


@pytest.mark.parametrize(
    ("edit", "check", "severity", "column", "count"),
    [
        (rows("user_id", {0: None, 1: None, 2: None}), "null_key", "error", "user_id", 3),
        (rows("time_ms", {7: None}), "null_key", "error", "time_ms", 1),
        (rows("impression_id", {7: None, 9: None}), "null_key", "error", "impression_id", 2),
        (rows("request_id", {7: None}), "null_request", "warning", "request_id", 1),
        (rows("impression_id", {7: 8, 9: 8}), "repeated_impression", "error", "impression_id", 1),
        (each("time_ms", lambda t: t // 1000), "time_unit", "error", "time_ms", 450),
        (each("time_ms", lambda t: t * 1000), "time_unit", "error", "time_ms", 450),
        (each("time_ms", lambda t: 22050412), "time_unit", "error", "time_ms", 450),
        (lambda t: t.take([*range(t.num_rows - 3, -1, -3), 0]), "row_order", "warning", "time_ms", None),
        (rows("user_id", {4: "user-99"}), "request_users", "error", "user_id", 2),
        (rows("surface", {5: "nowhere"}), "request_surfaces", "error", "surface", 1),
        (rows("hour", {5: 23, 8: 23}), "request_features", "warning", "request_id", None),
        (lambda t: pa.concat_tables([t.slice(0, 4), t.slice(6, 3), t.slice(4, 2), t.slice(9)]),
         "scattered_request", "error", "request_id", 1),
        (rows("click", {3: 2, 5: -1, 9: 7}), "label_value", "error", "click", 3),
        (rows("click", {3: None, 5: None}), "label_null", "info", "click", 2),
        (each("click", lambda v: 0), "one_class", "error", "click", 450),
        (each("like", lambda v: None), "label_null", "info", "like", 450),
        (each("age", lambda v: None), "all_null", "warning", "age", 450),
        (rows("price", {3: float("nan"), 4: float("inf"), 5: float("-inf")}), "not_finite", "warning", "price", 3),
        (rows("price", {3: -1.0, 4: -0.5}), "negative", "warning", "price", 2),
        (rows("image", {3: [1.0, 2.0], 4: [1.0, 2.0, 3.0, 4.0]}), "embedding_dim", "error", "image", 2),
        (rows("image", {3: [1.0, float("nan"), 3.0]}), "not_finite", "warning", "image", 1),
        (rows("topic_weights", {3: [0.5] * 9}), "weights_length", "error", "topic_weights", 1),
        (rows("topics", {3: list("abc"), 4: list("abcd")}), "long_list", "info", "topics", None),
        (rows("hour", {3: 24, 4: 24, 5: 24}), "id_out_of_range", "error", "hour", 3),
        (rows("hour", {3: -1, 4: -1, 5: -1}), "id_out_of_range", "error", "hour", 3),
        (rows("hour", {3: 2**62, 4: 2**62, 5: 2**62}), "id_out_of_range", "error", "hour", 3),
        (rows("hour", {3: 23, 4: 23, 5: 23}), "id_out_of_range", "error", "hour", 0),
        (lambda t: put(t, "item_id", [v + 0.5 for v in t["item_id"].to_pylist()]),
         "fractional_ids", "error", "item_id", 450),
        (lambda t: put(t, "watched_action", [v[:-1] for v in t["watched_action"].to_pylist()]),
         "unaligned", "error", "watched_action", None),
    ],
)  # fmt: skip
def test_fault_is_reported_with_file_column_and_count(
    folder: Path, edit: Edit, check: str, severity: str, column: str, count: int | None
) -> None:
    change(folder, edit)
    faults = [f for f in found(folder, check) if f.column == column and f.file in (TRAIN, None)]
    if count == 0:
        assert faults == []
        return
    assert [f.severity for f in faults] == [severity]
    if count is not None:
        assert faults[0].rows == count


@pytest.mark.parametrize(
    ("function", "severity", "message", "count"),
    [
        (lambda v: v.upper(), "warning", "in 100.0% of the rows of train, such as 'FEED'", 450),
        (lambda v: 7, "warning", "in 100.0% of the rows of train, such as 7;", 450),
        (lambda v: None, "warning", "in 100.0% of the rows of train, such as null", 450),
    ],
)
def test_surfaces_that_the_schema_does_not_list(
    folder: Path, function: Callable[[Any], Any], severity: str, message: str, count: int
) -> None:
    change(folder, each("surface", function))
    other = [f for f in found(folder, "other_surface") if "of train" in f.message]
    assert [(f.severity, f.column, f.rows) for f in other] == [(severity, "surface", count)]
    assert message in other[0].message
    empty = found(folder, "empty_surface")
    assert [f.message.split()[1] for f in empty] == [repr(name) for name in healthy_schema().surface.values]


def test_a_few_rows_of_another_surface_are_worth_knowing(folder: Path) -> None:
    before = sum(f.rows or 0 for f in found(folder, "other_surface") if "of train" in f.message)
    change(folder, rows("surface", {0: "nowhere", 1: "nowhere", 2: "nowhere"}))
    other = [f for f in found(folder, "other_surface") if "of train" in f.message]
    assert [f.severity for f in other] == ["info"] and before < (other[0].rows or 0) <= before + 3
    assert not found(folder, "empty_surface")


def test_future_history(folder: Path) -> None:
    affected = long_rows("watched_time", 1, folder)
    change(folder, lists("watched_time", lambda v, time: [*v[:-1], time + 5], least=1))
    (fault,) = found(folder, "future_history")
    assert (fault.severity, fault.file, fault.column, fault.rows) == ("error", TRAIN, "watched_time", affected)


def test_history_at_the_rows_own_time_is_future_too(folder: Path) -> None:
    affected = long_rows("watched_time", 1, folder)
    change(folder, lists("watched_time", lambda v, time: [*v[:-1], time], least=1))
    assert [f.rows for f in found(folder, "future_history")] == [affected]
    change(folder, lists("watched_time", lambda v, time: [*v[:-1], time - 1], least=1))
    assert found(folder, "future_history") == []


def test_unsorted_history(folder: Path) -> None:
    affected = long_rows("watched_time", 2, folder)
    change(folder, lists("watched_time", lambda v, time: [START + 9 - i for i in range(len(v))], least=2))
    (fault,) = found(folder, "unsorted_history")
    assert (fault.severity, fault.file, fault.column, fault.rows) == ("error", TRAIN, "watched_time", affected)


def test_event_times_in_seconds(folder: Path) -> None:
    change(folder, lists("watched_time", lambda v, time: [t // 1000 for t in v]))
    (fault,) = found(folder, "event_time_unit")
    assert fault.severity == "error" and fault.rows == long_rows("watched_time", 1, folder)


def test_unknown_event_times_and_empty_histories_are_valid(folder: Path) -> None:
    change(folder, lists("watched_time", lambda v, time: [None] * len(v)))
    for name in ("watched_item", "watched_action", "watched_time"):
        change(folder, lists(name, lambda v, time: []), TEST)
    report = examine(folder)
    assert [f for f in report.findings if f.severity != "info"] == []
    (fact,) = [f for f in report.findings if f.check == "empty_history"]
    assert fact.rows is not None and fact.rows >= 240


def test_long_histories_are_counted(folder: Path) -> None:
    (fact,) = [f for f in found(folder, "long_history") if f.file == TRAIN]
    assert fact.severity == "info" and fact.rows == long_rows("watched_item", 5, folder)


def test_splits_that_overlap_in_time(folder: Path) -> None:
    change(folder, each("time_ms", lambda t: t - 2 * DAY + 1000), TEST)
    change(folder, lists("watched_time", lambda v, time: []), TEST)
    (fault,) = found(folder, "split_overlap")
    assert fault.severity == "error" and "test begins at" in fault.message


def test_repeated_rows_with_new_impression_ids(folder: Path) -> None:
    def edit(table: pa.Table) -> pa.Table:
        both = pa.concat_tables([table.slice(0, 3), table])
        return put(both, "impression_id", list(range(10**6, 10**6 + both.num_rows)))

    change(folder, edit)
    (fault,) = found(folder, "repeated_rows")
    assert (fault.severity, fault.file, fault.rows) == ("warning", TRAIN, 3)


def test_one_class_surface_names_surface_and_split(folder: Path) -> None:
    def edit(table: pa.Table) -> pa.Table:
        pairs = zip(table["click"].to_pylist(), table["surface"].to_pylist(), strict=True)
        return put(table, "click", [0 if surface == "reels" else click for click, surface in pairs])

    change(folder, edit)
    faults = [f for f in found(folder, "one_class_surface") if f.column == "click"]
    assert [f.severity for f in faults] == ["warning"]
    assert "surface reels in train" in faults[0].message


def test_rare_class(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foundation.data.doctor_rows.RARE", 0.01)
    change(folder, lambda t: put(t, "click", [1] * 2 + [0] * (t.num_rows - 2)))
    (fact,) = [f for f in found(folder, "rare_class") if f.column == "click"]
    assert fact.severity == "info" and fact.rows == 2


def test_conversion_without_a_click(folder: Path) -> None:
    change(folder, lambda t: put_rows(put_rows(t, "click", {3: 0, 4: None}), "conversion", {3: 1, 4: 1}))
    (fault,) = found(folder, "label_given")
    assert (fault.severity, fault.file, fault.column, fault.rows) == ("warning", TRAIN, "conversion", 2)


def test_label_that_is_the_opposite_of_another(folder: Path) -> None:
    def edit(table: pa.Table) -> pa.Table:
        return put(table, "like", [1 - v for v in table["click"].to_pylist()])

    for file in (TRAIN, "validation/part-00000.parquet", TEST):
        change(folder, edit, file)
    (fault,) = found(folder, "inverted_label")
    assert (fault.severity, fault.column) == ("warning", "like") and "click" in fault.message


def test_ids_of_another_preprocessor(folder: Path) -> None:
    change(folder, each("item_id", lambda v: v + 10**12), TEST)
    faults = [f for f in found(folder, "unknown_ids") if f.severity == "warning"]
    assert [(f.column, f.rows) for f in faults] == [("item_id", 240)]
    assert "100.0% of its ids in test" in faults[0].message


def test_one_id_after_the_vocabulary_is_unknown(folder: Path) -> None:
    assert found(folder, "unknown_ids") == []
    change(folder, rows("item_id", {0: 30}), TEST)
    (fact,) = found(folder, "unknown_ids")
    assert (fact.severity, fact.column, fact.rows) == ("info", "item_id", 1)


def test_hash_table_that_is_too_small(tmp_path: Path) -> None:
    tables = {**SCHEMA["tables"], "user": {"kind": "hash", "rows": 12, "dim": 4}}
    folder = healthy(tmp_path / "data", healthy_schema(tables=tables))
    (fault,) = found(folder, "hash_collisions")
    assert fault.severity == "warning" and "table user" in fault.message


@pytest.mark.parametrize(
    ("key", "values", "count"),
    [
        ("sampling_rate", [1.0, 0.5, 0.0, 1.5, None, float("nan")], 4),
        ("weight", [1.0, 0.0, 7.0, -1.0, None, float("inf")], 3),
    ],
)
def test_weights_and_sampling_rates(tmp_path: Path, key: str, values: list[float | None], count: int) -> None:
    schema = healthy_schema(**{key: "factor"})
    folder = tmp_path / "data"
    healthy(folder)
    schema.save(folder / "schema.yaml")
    for file in (TRAIN, "validation/part-00000.parquet", TEST):
        change(folder, lambda t: t.append_column("factor", pa.array([1.0] * t.num_rows)), file)
    change(folder, lambda t: put(t, "factor", values + [1.0] * (t.num_rows - len(values))))
    (fault,) = found(folder, "weights")
    assert (fault.severity, fault.file, fault.column, fault.rows) == ("error", TRAIN, "factor", count)


def test_seconds_are_fine_where_the_schema_says_so(tmp_path: Path) -> None:
    schema = healthy_schema(timestamp={"column": "time_ms", "unit": "s"})
    folder = healthy(tmp_path / "data")
    schema.save(folder / "schema.yaml")
    for file in (TRAIN, "validation/part-00000.parquet", TEST):
        change(folder, each("time_ms", lambda t: t // 1000), file)
    assert found(folder, "time_unit") == []
    assert found(folder, "future_history") == []
