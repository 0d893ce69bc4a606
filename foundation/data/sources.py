"""Raw files into DuckDB tables: Parquet, CSV and ORC, by path or glob, in the order of the names.

Rows keep the order of the files, so "the first of two duplicates" means what a reader of the files would say.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import ibis
import ibis.expr.types as ir
import pyarrow as pa
import pyarrow.parquet as pq
from ibis.common.exceptions import IbisError
from pyarrow import orc

from foundation.data.csv_files import read_csv
from foundation.data.files import FULL

PARQUET = (".parquet", ".pq")
CSV = (".csv", ".csv.gz", ".csv.zst", ".tsv", ".tsv.gz")
ORC = (".orc",)
INPUT = "_input"


class PrepareError(ValueError):
    """Raw data that cannot become a dataset; the message names the file or column and what to do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SideTable:
    """A table with one row per user or item, joined to the log.

    Args:
        path: file or glob.
        key: its id column, with distinct values.
        log_key: the log's id column, when it has another name than `key`.
    """

    path: str
    key: str
    log_key: str | None = None

    @property
    def log_column(self) -> str:
        """The column of the log that holds the key."""
        return self.log_key or self.key


@contextmanager
def duckdb_errors() -> Iterator[None]:
    """Turns errors of DuckDB and Ibis into PrepareError or, where the disk or memory is full, OSError."""
    try:
        yield
    except (duckdb.OutOfMemoryException, duckdb.IOException) as error:
        _raise_full_disk(error)
        raise OSError(f"{_first_line(error)}; raise memory_gb or free disk space where the output goes") from error
    except (duckdb.Error, IbisError) as error:
        _raise_full_disk(error)
        raise PrepareError(_first_line(error)) from error


def connect(work: Path, memory_gb: float, threads: int | None) -> ibis.BaseBackend:
    """A DuckDB database in the folder ``work``, where it also spills what does not fit into memory."""
    if "?" in str(work):  # DuckDB takes what follows for settings, in the name of one of its files
        raise PrepareError("out: there must be no ? in its path; choose another")
    settings: dict[str, Any] = {"memory_limit": f"{memory_gb}GB", "temp_directory": str(work / "spill")}
    if threads is not None:
        settings["threads"] = threads
    connection = ibis.duckdb.connect(str(work / "work.duckdb"), **settings)
    connection.raw_sql("SET preserve_insertion_order = true")
    connection.raw_sql("SET enable_progress_bar = false")
    return connection


def expand(paths: Sequence[str | Path], key: str) -> list[str]:
    """The files that paths and globs stand for, without repeats. Raises PrepareError naming ``key``."""
    files: list[str] = []
    for path in paths:
        magic = glob.has_magic(str(path)) and not os.path.lexists(path)  # a file may be named like a pattern
        found = sorted(glob.glob(str(path), recursive=True)) if magic else [str(path)]
        folder = next((f for f in found if Path(f).is_dir()), None)
        if folder is not None:
            raise PrepareError(f"{key}: {folder}: is a folder; name its files, such as {Path(folder) / '*.parquet'}")
        if not found or not all(Path(f).is_file() for f in found):
            missing = next((f for f in found if not Path(f).is_file()), str(path))
            raise PrepareError(f"{key}: {missing}: no such file")
        files += found
    if not files:
        raise PrepareError(f"{key}: is empty; name at least one file")
    kinds = {_kind(f, key) for f in files}
    if len(kinds) > 1:
        raise PrepareError(f"{key}: files of one format are needed, got {', '.join(sorted(kinds))}")
    return list(dict.fromkeys(files))


def load(
    connection: ibis.BaseBackend,
    name: str,
    paths: Sequence[str | Path],
    key: str,
    *,
    columns: Sequence[str] | None = None,
    types: Mapping[str, str] | None = None,
) -> ir.Table:
    """Reads files into the table ``name``, and adds the column ``_input``: the position of a row in the files.

    Args:
        key: the setting that named the files, for messages.
        columns: the columns wanted (all if not given); those that no file has are left out.
        types: DuckDB types of CSV columns, so that they are not guessed.

    Raises:
        PrepareError: a file is missing, truncated or of another format, or files do not fit together.
    """
    files = expand(paths, key)
    kind = _kind(files[0], key)
    if kind == "orc":
        files = [_orc_to_parquet(f, connection, f"{name}-{i}") for i, f in enumerate(files)]
    if kind == "csv":
        table = _read_csv(connection, files, key, columns, types)
    else:
        _check_footers(files, columns)
        with _naming(files, key):
            table = connection.read_parquet([glob.escape(f) for f in files], union_by_name=True)
    if columns is not None:
        table = table.select(*[c for c in dict.fromkeys(columns) if c in table.columns])
    stored = store(connection, name, table, files, key)
    return stored.mutate(**{INPUT: stored.rowid()})


def store(
    connection: ibis.BaseBackend, name: str, table: ir.Table, files: Sequence[str] = (), key: str = ""
) -> ir.Table:
    """Writes an expression into a table of the database, in the expression's order."""
    empty = [c for c, t in table.schema().items() if t.is_null() or t.is_unknown()]
    table = table.mutate(**{c: table[c].cast("int64") for c in empty})
    with _naming(files, key):
        return connection.create_table(name, table)


def require_unique(table: ir.Table, key: str, name: str) -> None:
    """Raises PrepareError unless a side table has rows, whose ids differ and none of which is null."""
    if key not in table.columns:
        own = [c for c in table.columns if c != INPUT]
        raise PrepareError(f"{name}.key: no column {key!r}; columns are {', '.join(own)}")
    counts = table.aggregate(rows=table.count(), distinct=table[key].nunique()).to_pyarrow().to_pylist()[0]
    if not counts["rows"]:
        raise PrepareError(f"{name}: there are no rows")
    if counts["rows"] != counts["distinct"]:
        raise PrepareError(
            f"{name}: {counts['rows'] - counts['distinct']} rows have a null {key!r} or repeat one; keep one row per id"
        )


def blank(table: ir.Table, sentinels: Mapping[str, Sequence[int | float | str]]) -> tuple[ir.Table, dict[str, int]]:
    """Sentinel values and NaN as null, and how many missing values each column has then (if any).

    Args:
        sentinels: column to the values that mean "not known"; the key ``*`` stands for every column.
    """
    tests: dict[str, ir.BooleanValue] = {}
    for column, kind in table.schema().items():
        value = table[column]
        tests[column] = value.isnull()
        if kind.is_floating():
            tests[column] |= value.isnan().fill_null(False)
        fitting = [
            s
            for s in (*sentinels.get("*", ()), *sentinels.get(column, ()))
            if (kind.is_string() if isinstance(s, str) else kind.is_numeric())
        ]
        if fitting:
            tests[column] |= value.isin(fitting).fill_null(False)
    counted = table.aggregate(**{c: t.sum() for c, t in tests.items()}).to_pyarrow().to_pylist()[0]
    found = {c: int(n) for c, n in counted.items() if n}
    blanked = {c: tests[c].ifelse(ibis.null(table[c].type()), table[c]) for c in found}
    return (table.mutate(**blanked) if blanked else table), found


def _kind(path: str, key: str) -> str:
    name = path.lower()
    for kind, endings in (("parquet", PARQUET), ("csv", CSV), ("orc", ORC)):
        if name.endswith(endings):
            return kind
    raise PrepareError(f"{key}: {path}: unknown format; files end in {', '.join(PARQUET + CSV + ORC)}")


def _read_csv(
    connection: ibis.BaseBackend,
    files: list[str],
    key: str,
    columns: Sequence[str] | None,
    types: Mapping[str, str] | None,
) -> ir.Table:
    with _naming(files, key):
        try:
            return read_csv(connection, files, columns, types)
        except (ValueError, pa.ArrowException) as error:
            raise PrepareError(f"{key}: {error}") from None


def _check_footers(files: Sequence[str], columns: Sequence[str] | None) -> None:
    """Every Parquet file can be opened and has the columns that the first one has."""
    first: pa.Schema | None = None
    for file in files:
        try:
            schema = pq.read_schema(file)
        except (pa.ArrowException, OSError) as error:
            raise PrepareError(f"{file}: not a readable Parquet file; it may be truncated ({error})") from None
        first = first if first is not None else schema
        twice = [c for c in schema.names if schema.names.count(c) > 1 and (columns is None or c in columns)]
        if twice:
            raise PrepareError(f"{file}: column {twice[0]!r} is there more than once; rename or drop one")
        wanted = [c for c in first.names if columns is None or c in columns]
        absent = [c for c in wanted if c not in schema.names]
        if absent:
            raise PrepareError(f"{file}: column {absent[0]!r} is missing, but {files[0]} has it")
        for column in wanted:
            one, other = first.field(column).type, schema.field(column).type
            if _family(one) != _family(other):
                raise PrepareError(f"{file}: column {column!r} is {other}, but {one} in {files[0]}")


def _family(kind: pa.DataType) -> str:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if pa.types.is_null(kind):
        return "number"
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        return "number"
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return "string"
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return f"list of {_family(kind.value_type)}"
    return str(kind)


def _orc_to_parquet(file: str, connection: ibis.BaseBackend, name: str) -> str:
    """A Parquet copy of an ORC file in the database's folder, stripe by stripe."""
    database = connection.raw_sql("SELECT path FROM duckdb_databases() WHERE database_name = 'work'").fetchone()
    target = Path(database[0]).with_name(f"{name}.parquet")
    try:
        source = orc.ORCFile(file)
        with pq.ParquetWriter(target, source.schema) as writer:
            for stripe in range(source.nstripes):
                writer.write_batch(source.read_stripe(stripe))
    except (pa.ArrowException, OSError) as error:
        _raise_full_disk(error)
        raise PrepareError(f"{file}: not a readable ORC file; it may be truncated ({error})") from None
    return str(target)


@contextmanager
def _naming(files: Sequence[str], key: str) -> Iterator[None]:
    """Puts the files' names into DuckDB's complaint about them."""
    try:
        yield
    except duckdb.OutOfMemoryException:
        raise
    except duckdb.Error as error:
        line = _first_line(error)
        _raise_full_disk(error)
        named = [f for f in files if f in str(error)] or list(files[:1])
        prefix = f"{key}: {named[0]}: " if named else ""
        if isinstance(error, duckdb.IOException) and not named:
            raise
        raise PrepareError(f"{prefix}cannot be read: {line}") from error


def _raise_full_disk(error: Exception) -> None:
    """A full disk is not a fault of the file that is read. DuckDB and Arrow say it in words only."""
    for code in FULL:
        if os.strerror(code) in str(error):
            raise OSError(code, os.strerror(code)) from error


def _first_line(error: Exception) -> str:
    """What DuckDB says, without its hints; of a CSV file also the line it stumbled over."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return ": ".join(lines[:3] if "CSV Error" in lines[0] else lines[:1])
