"""A dataset without any fault, and ways to put one fault into one of its files."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from foundation.data.doctor import examine
from foundation.data.doctor_findings import Finding
from foundation.data.schema import Schema
from tests.foundation.data.builders import SCHEMA, small_schema, small_table, write_dataset

START = 1_700_000_000_000
DAY = 86_400_000
TRAIN = "train/part-00000.parquet"
TEST = "test/part-00000.parquet"

# The files of the dataset, once it was made.
_CONTENT: dict[str, bytes] = {}


def healthy_schema(**changes: Any) -> Schema:
    """The small schema with a user table large enough for its users."""
    tables = copy.deepcopy(SCHEMA["tables"])
    tables["user"]["rows"] = 5000
    split = {"train_until": "2023-11-15", "validation_until": "2023-11-16"}
    return small_schema(**{"tables": tables, "split": split} | changes)


def healthy(folder: Path, schema: Schema | None = None) -> Path:
    """Writes a dataset in which the doctor finds no error and no warning."""
    if schema is None and _CONTENT:
        for name, data in _CONTENT.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
        return folder
    files, first = {}, 0
    for day, (split, requests) in enumerate((("train", 150), ("validation", 80), ("test", 80))):
        table = small_table([3] * requests, seed=day, first_id=first)
        first += table.num_rows
        shift = START + day * DAY
        table = put(table, "time_ms", [t + shift for t in table["time_ms"].to_pylist()])
        histories = [[t + shift for t in times] for times in table["watched_time"].to_pylist()]
        table = put(table, "watched_time", histories)
        table = put(table, "item_id", [7 * i % 30 for i in table["impression_id"].to_pylist()])
        files[f"{split}/part-00000.parquet"] = table
    write_dataset(folder, files, schema or healthy_schema(), row_group_size=100)
    if schema is None:
        written = (path for path in folder.rglob("*") if path.is_file())
        _CONTENT.update({str(path.relative_to(folder)): path.read_bytes() for path in written})
    return folder


def put(table: pa.Table, name: str, values: Any) -> pa.Table:
    """The table with a column replaced, in its place."""
    array = values if isinstance(values, pa.Array | pa.ChunkedArray) else pa.array(values)
    return table.set_column(table.column_names.index(name), name, array)


def put_rows(table: pa.Table, name: str, changes: dict[int, Any]) -> pa.Table:
    """The table with single values of a column replaced."""
    values = table[name].to_pylist()
    for row, value in changes.items():
        values[row] = value
    return put(table, name, pa.array(values, table[name].type))


def change(folder: Path, edit: Callable[[pa.Table], pa.Table], file: str = TRAIN, **options: Any) -> Path:
    """Rewrites one file of a dataset."""
    table = pq.read_table(folder / file)
    pq.write_table(edit(table), folder / file, **{"row_group_size": 100} | options)
    return folder


def found(folder: Path, check: str, **options: Any) -> list[Finding]:
    """What the doctor finds of one check."""
    return [f for f in examine(folder, **options).findings if f.check == check]
