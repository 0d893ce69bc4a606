"""Values that `prepare` takes whatever their type, and those that it refuses with their column and count."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from foundation.data.prepare import prepare
from foundation.data.sources import PrepareError, SideTable
from tests.foundation.data.test_prepare import ITEMS, SCHEMA, START, USERS, config, raw_log, sums, write_source


def test_ids_of_every_type_of_number_give_the_dataset_of_int64(tmp_path: Path) -> None:
    log = raw_log(30)
    numbers = pa.array([int(u[1:]) for u in log["user_id"].to_pylist()])
    users = pa.table({"user_id": list(range(11)), "city": USERS["city"]})
    made = {}
    for kind in (pa.int64(), pa.int8(), pa.uint64(), pa.float64(), pa.decimal128(20, 0)):
        source = tmp_path / str(kind)
        source.mkdir()
        changed = log.set_column(log.column_names.index("user_id"), "user_id", numbers.cast(kind))
        changed = changed.set_column(log.column_names.index("item_id"), "item_id", log["item_id"].cast(kind))
        write_source(source, changed)
        pq.write_table(users, source / "users.parquet")
        made[kind] = sums(prepare(config(source)))
    assert all(found == made[pa.int64()] for found in made.values())


@pytest.mark.parametrize(
    ("column", "values", "problem"),
    [
        ("price", ["1.5", "free", "2"], "column 'price' has 2 values that are no numbers; write them as numbers"),
        ("click", ["", "", ""], "log: label column 'click' has no value in any row; leave its task out"),
    ],
)
def test_words_and_nothing_in_a_csv(tmp_path: Path, column: str, values: list[str], problem: str) -> None:
    source = write_source(tmp_path, raw_log())
    names = ["user_id", "request_id", "time_ms", "place", "item_id", "click", "buy", "price"]
    rows = [dict.fromkeys(names, "0") | {"user_id": f"u{i}", "request_id": i, "time_ms": START + i} for i in range(6)]
    for i, row in enumerate(rows):
        row[column] = values[i % 3]
    text = [",".join(names)] + [",".join(str(row[n]) for n in names) for row in rows]
    (source / "log.csv").write_text("\n".join(text) + "\n")
    with pytest.raises(PrepareError) as error:
        prepare(config(source, log=[str(source / "log.csv")], items=None, calendar={"hour": "hour"}))
    assert problem in str(error.value)
    assert not (source / "out").exists()


def test_a_list_in_brackets_is_no_list_of_values(tmp_path: Path) -> None:
    tags = {"side": "item", "kind": "multi", "table": "city", "max_length": 3}
    features = {**SCHEMA["features"], "tags": tags}
    source = write_source(tmp_path, raw_log(60), features=features)
    pq.write_table(ITEMS.append_column("tags", pa.array(['["a","b"]'] * 40)), source / "items.parquet")
    with pytest.raises(PrepareError, match=r"column 'tags' has 158 lists in brackets; write a list as its values with"):
        prepare(config(source, missing={}))


def test_a_side_table_without_rows(tmp_path: Path) -> None:
    source = write_source(tmp_path, raw_log(60))
    (source / "users.csv").write_text("user_id,city\n")
    with pytest.raises(PrepareError, match="users: there are no rows"):
        prepare(config(source, users=SideTable(path=str(source / "users.csv"), key="user_id")))


@pytest.mark.parametrize(
    ("split", "problem"),
    [
        ({"timezone": "Mars"}, "split timezone: 'Mars' is not a time zone"),
        ({"train_until": "2023-11-31"}, "split: '2023-11-31' is not a date"),
        ({"validation_until": "2023-11-01"}, "split: train_until is after validation_until"),
    ],
)
def test_a_wrong_split_is_told_before_anything_is_read(tmp_path: Path, split: dict[str, str], problem: str) -> None:
    source = write_source(tmp_path, raw_log(60), split={**SCHEMA["split"], **split})
    (source / "log.parquet").unlink()
    with pytest.raises(ValueError, match=problem):
        prepare(config(source))
