from __future__ import annotations

import errno
import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import ibis
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import orc

from foundation.data.sources import PrepareError, _naming, blank, connect, duckdb_errors, expand, load, require_unique

TABLE = pa.table(
    {"id": [3, 1, 2, 9, 5], "name": ["c", None, "UNKNOWN", "d", "e"], "x": [1.5, float("nan"), -124.0, 2.0, 0.0]}
)


@pytest.fixture
def connection(tmp_path: Path) -> Iterator[ibis.BaseBackend]:
    work = tmp_path / "work"
    work.mkdir()
    connection = connect(work, 1.0, 1)
    yield connection
    connection.disconnect()


def write(path: Path, table: pa.Table = TABLE) -> str:
    text = "\n".join([",".join(table.column_names)] + [
        ",".join("" if v is None else str(v) for v in row.values()) for row in table.to_pylist()
    ]) + "\n"  # fmt: skip
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=2)
    elif path.suffix == ".orc":
        orc.write_table(table, path, stripe_size=64)
    elif path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return str(path)


def rows(table: ibis.Table) -> list[dict[str, Any]]:
    return table.order_by("_input").to_pyarrow().to_pylist()


@pytest.mark.parametrize("name", ["a.parquet", "a.csv", "a.csv.gz", "a.orc"])
def test_every_format_keeps_rows_and_their_order(connection: ibis.BaseBackend, tmp_path: Path, name: str) -> None:
    found = rows(load(connection, "log", [write(tmp_path / name)], "log"))
    assert [r["id"] for r in found] == [3, 1, 2, 9, 5]
    assert [r["name"] for r in found] == TABLE["name"].to_pylist()
    assert [r["_input"] for r in found] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("name", ["p[0].parquet", "p[0].csv", "p[0].orc"])
def test_a_name_that_looks_like_a_pattern_is_a_name(connection: ibis.BaseBackend, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "new [1] *" / "it's"
    for place, rows_of in ((folder, TABLE), (tmp_path / "new 1 x" / "it's", TABLE.slice(4))):
        place.mkdir(parents=True)
        write(place / name, rows_of)
        write(place / name.replace("[0]", "0"), rows_of.slice(0, 0))
    assert len(rows(load(connection, "log", [str(folder / name)], "log"))) == 5


def test_files_come_in_the_order_of_their_names(connection: ibis.BaseBackend, tmp_path: Path) -> None:
    write(tmp_path / "b.parquet", TABLE.slice(2))
    write(tmp_path / "a.parquet", TABLE.slice(0, 2))
    found = rows(load(connection, "log", [str(tmp_path / "*.parquet")], "log", columns=["id", "other"]))
    assert [r["id"] for r in found] == [3, 1, 2, 9, 5] and set(found[0]) == {"id", "_input"}


def test_sentinels_and_nan_become_null_and_are_counted(connection: ibis.BaseBackend, tmp_path: Path) -> None:
    table, counts = blank(
        load(connection, "log", [write(tmp_path / "a.parquet")], "log"), {"*": (-124, "UNKNOWN"), "id": (9,)}
    )
    assert [r["id"] for r in rows(table)] == [3, 1, 2, None, 5]
    assert [r["name"] for r in rows(table)] == ["c", None, None, "d", "e"]
    assert [r["x"] for r in rows(table)] == [1.5, None, None, 2.0, 0.0]
    assert counts == {"id": 1, "name": 2, "x": 2}


@pytest.mark.parametrize(
    ("paths", "problem"),
    [
        (["gone.parquet"], "log: gone.parquet: no such file"),
        (["*.gone"], "log: *.gone: no such file"),
        ([], "log: is empty"),
        (["a.txt"], "unknown format"),
        (["a.csv", "a.parquet"], "files of one format are needed, got csv, parquet"),
    ],
)
def test_paths_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, paths: list[str], problem: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.csv", "a.parquet", "a.txt"):
        write(Path(name))
    with pytest.raises(PrepareError) as error:
        expand(paths, "log")
    assert problem in str(error.value)


def test_a_file_named_twice_is_read_once(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv")
    assert expand([path, str(tmp_path / "*.csv")], "log") == [path]


@pytest.mark.parametrize("name", ["a.parquet", "a.orc", "a.csv.gz"])
def test_a_truncated_file_is_named(connection: ibis.BaseBackend, tmp_path: Path, name: str) -> None:
    table = pa.table({"id": list(range(5000)), "name": [str(i * 7919 % 10007) for i in range(5000)]})
    path = Path(write(tmp_path / name, table))
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])
    with pytest.raises((PrepareError, OSError)) as error, duckdb_errors():
        load(connection, "log", [path], "log")
    assert name in str(error.value)


def test_files_of_different_columns(connection: ibis.BaseBackend, tmp_path: Path) -> None:
    write(tmp_path / "a.parquet")
    write(tmp_path / "b.parquet", TABLE.drop_columns(["x"]))
    with pytest.raises(PrepareError, match=r"b\.parquet: column 'x' is missing, but .*a\.parquet has it"):
        load(connection, "log", [str(tmp_path / "*.parquet")], "log")
    assert len(rows(load(connection, "some", [str(tmp_path / "*.parquet")], "log", columns=["id", "name"]))) == 10


def test_files_of_different_types(connection: ibis.BaseBackend, tmp_path: Path) -> None:
    write(tmp_path / "a.parquet")
    write(tmp_path / "b.parquet", TABLE.set_column(0, "id", TABLE["id"].cast(pa.int32())))
    assert len(rows(load(connection, "log", [str(tmp_path / "*.parquet")], "log"))) == 10
    write(tmp_path / "c.parquet", TABLE.set_column(0, "id", TABLE["id"].cast(pa.string())))
    with pytest.raises(PrepareError, match=r"c\.parquet: column 'id' is string, but int64 in"):
        load(connection, "more", [str(tmp_path / "*.parquet")], "log")


def test_a_csv_value_of_the_wrong_type_is_named(connection: ibis.BaseBackend, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("id,x\n1,2\nthree,4\n")
    with pytest.raises(PrepareError, match=r"log: .*a\.csv: cannot be read") as error:
        load(connection, "log", [tmp_path / "a.csv"], "log", types={"id": "BIGINT", "absent": "BIGINT"})
    assert "three" in str(error.value)


LINES = "id,name,x\n" + "".join(f"{i},n{i},0.5\n" for i in range(60))


@pytest.mark.parametrize(
    ("texts", "problem"),
    [
        ((LINES, "id,name\n1,a\n"), r"b\.csv: column 'x' is missing, but .*a\.csv has it; it has id, name"),
        (("id,name,ID\n1,a,2\n",), r"a\.csv: column 'id' is there more than once"),
        (("", "\n"), r"a\.csv: is empty; the first line of a CSV file names its columns"),
        ((LINES + "61,n",), r"a\.csv: cannot be read: .*Line: 62: .*61,n: Expected Number of Columns: 3 Found: 2"),
        ((LINES + "61,n,1,4,5,6\n62,n,1,4,5,6\n",), r"a\.csv: cannot be read: .*Line: 62: .*61,n,1,4,5,6"),
        ((LINES, LINES + "61,n,1,4\n"), r"b\.csv: cannot be read: .*61,n,1,4: Expected Number of Columns: 3 Found: 4"),
        (("id,name,x\n1,2\n" + LINES[10:],), r"a\.csv: cannot be read: .*Line: 2: .*: Expected Number of Columns: 3"),
    ],
)
def test_a_broken_csv_names_file_and_line(
    connection: ibis.BaseBackend, tmp_path: Path, texts: tuple[str, ...], problem: str
) -> None:
    for name, text in zip("abc", texts, strict=False):
        (tmp_path / f"{name}.csv").write_text(text)
    with pytest.raises(PrepareError, match=rf"log: .*{problem}"):
        load(connection, "log", [str(tmp_path / "*.csv")], "log")


@pytest.mark.parametrize(
    "text",
    [
        LINES,
        LINES.replace(",", ";"),
        LINES.replace(",", "\t"),
        LINES.replace("\n", "\r\n"),
        "\ufeff" + LINES,
        LINES.replace("id,name,x", "id , name, x "),
        'id,name,x\n0,"n, ""0""\nsecond line",0.5\n' + LINES.split("\n", 2)[2],
    ],
)
def test_every_dialect_of_csv_gives_the_same_columns(connection: ibis.BaseBackend, tmp_path: Path, text: str) -> None:
    (tmp_path / "a.csv").write_text(text, newline="")
    (tmp_path / "b.csv").write_text("")  # an empty part, as jobs leave them, has no rows
    found = rows(load(connection, "log", [str(tmp_path / "*.csv")], "log"))
    assert [(r["id"], r["x"]) for r in found] == [(i, 0.5) for i in range(60)]


def test_a_question_mark_in_the_output_is_refused(tmp_path: Path) -> None:
    """DuckDB would take what follows for settings, and write elsewhere."""
    work = tmp_path / "is it?so"
    work.mkdir()
    with pytest.raises(PrepareError, match=r"^out: there must be no \? in its path; choose another$"):
        connect(work, 1.0, 1)
    assert not list(work.iterdir())


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(PrepareError, match=rf"log: {tmp_path}: is a folder; name its files, such as"):
        expand([tmp_path], "log")


def test_a_parquet_column_that_is_there_twice(connection: ibis.BaseBackend, tmp_path: Path) -> None:
    pq.write_table(pa.table([[1], [2]], names=["id", "id"]), tmp_path / "a.parquet")
    with pytest.raises(PrepareError, match=r"a\.parquet: column 'id' is there more than once"):
        load(connection, "log", [str(tmp_path / "*.parquet")], "log")


def test_side_tables_have_one_row_per_id(connection: ibis.BaseBackend, tmp_path: Path) -> None:
    table = load(connection, "users", [write(tmp_path / "a.parquet")], "users")
    require_unique(table, "id", "users")
    with pytest.raises(PrepareError, match="users: 1 rows have a null 'name' or repeat one"):
        require_unique(table, "name", "users")
    with pytest.raises(PrepareError, match=r"users\.key: no column 'uid'; columns are id, name, x"):
        require_unique(table, "uid", "users")


@pytest.mark.parametrize("kind", [duckdb.TransactionException, duckdb.IOException, duckdb.OutOfMemoryException])
def test_a_full_disk_is_no_fault_of_the_log(kind: type[Exception]) -> None:
    full = kind('Could not write file "/out/work.duckdb.wal": No space left on device')
    with pytest.raises(OSError, match=r"No space left on device$") as error, duckdb_errors(), _naming(["a.csv"], "log"):
        raise full
    assert error.value.errno == errno.ENOSPC
    quota = kind('Could not write file "/out/work.duckdb.wal": Disk quota exceeded')
    with pytest.raises(OSError, match=r"Disk quota exceeded$"), duckdb_errors(), _naming(["a.csv"], "log"):
        raise quota
