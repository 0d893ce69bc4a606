from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from foundation.data.dataset import Dataset
from foundation.data.dataset_writer import DatasetWriter, request_starts
from foundation.data.files import sha256_file
from foundation.data.schema import Schema
from tests.foundation.data.builders import fit, small_schema, small_table

SIZES = [1, 3, 2, 5, 1, 9, 2, 1, 1, 4, 30, 2]


def write(
    folder: Path, pieces: list[pa.Table], schema: Schema, *, row_group_rows: int = 8, part_rows: int = 20
) -> dict:
    folder.mkdir()
    writer = DatasetWriter(folder, schema, row_group_rows=row_group_rows, part_rows=part_rows)
    for piece in pieces:
        writer.write("train", piece)
    writer.write("test", pieces[0].slice(0, 0))
    return writer.finish(fit(schema, *pieces), {"dropped": 3}, {"fact": 1})


def test_row_groups_and_parts_end_where_requests_end(tmp_path: Path) -> None:
    table = small_table(SIZES)
    manifest = write(tmp_path / "d", [table.slice(i, 4) for i in range(0, table.num_rows, 4)], small_schema())
    seen: list[str] = []
    rows = []
    for entry in manifest["splits"]["train"]["files"]:
        file = pq.ParquetFile(tmp_path / "d" / entry["path"])
        assert entry["rows"] == file.metadata.num_rows and entry["row_groups"] == file.num_row_groups
        assert entry["sha256"] == sha256_file(tmp_path / "d" / entry["path"])
        for number in range(file.num_row_groups):
            group = file.read_row_group(number)
            rows.append(group.num_rows)
            ids = list(dict.fromkeys(group["request_id"].to_pylist()))
            assert not set(ids) & set(seen), "a request lies in two row groups"
            seen += ids
    assert sum(rows) == table.num_rows
    assert {r for r in rows if r > 8} == {9, 30}, "only requests that are larger make a larger row group"
    assert len(manifest["splits"]["train"]["files"]) == 3
    assert manifest["splits"]["train"]["requests"] == len(SIZES)
    assert manifest["splits"]["test"] == {"rows": 0, "requests": 0, "time_range": None, "files": []}


def test_content_comes_back_in_order_whatever_the_pieces(tmp_path: Path) -> None:
    table = small_table(SIZES)
    first = write(tmp_path / "a", [table], small_schema())
    second = write(tmp_path / "b", [table.slice(i, 1) for i in range(table.num_rows)], small_schema())
    sums = [[f["sha256"] for f in m["splits"]["train"]["files"]] for m in (first, second)]
    assert sums[0] == sums[1]
    files = sorted((tmp_path / "a" / "train").iterdir())
    assert pa.concat_tables([pq.read_table(f) for f in files]).equals(table)


def test_without_requests_every_row_counts_as_one(tmp_path: Path) -> None:
    manifest = write(tmp_path / "d", [small_table([5] * 5)], small_schema(request_id=None))
    assert manifest["splits"]["train"]["requests"] == manifest["splits"]["train"]["rows"] == 25
    assert [f["row_groups"] for f in manifest["splits"]["train"]["files"]] == [3, 1]


def test_the_reader_opens_it(tmp_path: Path) -> None:
    write(tmp_path / "d", [small_table(SIZES)], small_schema())
    dataset = Dataset.open(tmp_path / "d")
    assert dataset.manifest.rows == sum(SIZES) and dataset.manifest.counts == {"dropped": 3}
    data = json.loads((tmp_path / "d/dataset.json").read_text())
    assert data["fact"] == 1 and data["splits"]["train"]["time_range"] == [1_000_000, 1_011_000]


@pytest.mark.parametrize(
    ("ids", "starts"),
    [([], []), (["a"], [0]), (["a", "a", "b", "b", "a"], [0, 2, 4]), ([None, None, "a", "a", None], [0, 1, 2, 4])],
)
def test_request_starts(ids: list[str | None], starts: list[int]) -> None:
    assert request_starts(pa.chunked_array([pa.array(ids, pa.string())])).tolist() == starts
    pieces = pa.chunked_array([pa.array([i], pa.string()) for i in ids], pa.string())
    assert request_starts(pieces).tolist() == starts
