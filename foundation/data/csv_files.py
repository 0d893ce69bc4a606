"""CSV files into DuckDB, with the header read as it stands.

DuckDB guesses delimiter, quotes and where the rows begin, and takes what fits best: a file whose last line is cut
becomes one column of text, one with a stray line loses the rows before it. So names and delimiter come from the first
line, and a file of which DuckDB makes something else is read again without guesses, which names the line at fault.
"""

from __future__ import annotations

import csv
import glob
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import duckdb
import ibis
import ibis.expr.types as ir
import pyarrow as pa

DELIMITERS = ",;\t|"
_HEAD_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Header:
    """The first line of a file: its delimiter and its names, spaces around them left out."""

    delimiter: str
    names: tuple[str, ...]


def read_header(file: str) -> Header | None:
    """The first line of a CSV file, compressed or not; None if the file is empty.

    Raises:
        ValueError: a name is there twice (capital letters do not tell names apart), or the compression is broken.
        OSError: the system does not open it.
    """
    try:
        with pa.input_stream(file, compression="detect") as stream:
            text = stream.read(_HEAD_BYTES).decode("utf-8-sig", errors="replace").lstrip("\r\n")
    except OSError as error:
        if error.errno is not None:
            raise
        raise ValueError(f"{file}: not a readable CSV file; it may be truncated ({error})") from error
    if not text.strip():
        return None
    first = text.splitlines()[0]
    delimiter = max(DELIMITERS, key=lambda mark: len(next(csv.reader([first], delimiter=mark))))
    names = tuple(name.strip() for name in next(csv.reader([first], delimiter=delimiter)))
    folded = [name.casefold() for name in names]
    twice = [name for name, fold in zip(names, folded, strict=True) if name and folded.count(fold) > 1]
    if twice:
        raise ValueError(f"{file}: column {twice[0]!r} is there more than once; rename or drop one")
    return Header(delimiter, names)


def read_csv(
    connection: ibis.BaseBackend, files: Sequence[str], columns: Sequence[str] | None, types: Mapping[str, str] | None
) -> ir.Table:
    """All rows of the files, in their order. A file without a byte has no rows.

    Args:
        columns: the columns that every file must have if the first has them; all if not given.
        types: DuckDB types of columns, so that they are not guessed.

    Raises:
        ValueError: no file has a header, or one lacks a column or has it twice; the message begins with the file.
        duckdb.Error: a line of another number of fields, or a value that does not fit.
    """
    found = {file: read_header(file) for file in files}
    headers = {file: header for file, header in found.items() if header is not None}
    if not headers:
        raise ValueError(f"{files[0]}: is empty; the first line of a CSV file names its columns")
    first = next(iter(headers))
    for file, header in headers.items():
        wanted = [n for n in headers[first].names if n and (columns is None or n in columns)]
        absent = [n for n in wanted if n not in header.names]
        if absent:
            raise ValueError(f"{file}: column {absent[0]!r} is missing, but {first} has it; it has {_list(header)}")
    names = {name for header in headers.values() for name in header.names if name}
    known = {c: t for c, t in (types or {}).items() if c in headers[first].names}
    marks = {header.delimiter for header in headers.values()}
    delimiter = {"delim": marks.pop()} if len(marks) == 1 else {}
    try:
        table = connection.read_csv(
            [glob.escape(file) for file in headers],
            header=True,
            union_by_name=True,
            skip=0,
            types=known or None,
            **delimiter,
        )
    except duckdb.Error:
        for file, header in headers.items():
            _read_plainly(connection, file, header)
        raise
    if not names <= set(table.columns):
        for file, header in headers.items():
            _read_plainly(connection, file, header)
        raise ValueError(
            f"{first}: its first line has {_list(headers[first])}, but the rows seem to have {', '.join(table.columns)}"
        )
    return table


def _read_plainly(connection: ibis.BaseBackend, file: str, header: Header) -> None:
    """Reads every line as text, without guesses; raises duckdb.Error with the line that does not fit."""
    kinds = ", ".join(f"'{i}': 'VARCHAR'" for i in range(len(header.names)))
    quoted = glob.escape(file).replace("'", "''")
    connection.raw_sql(
        f"SELECT count(*) FROM read_csv('{quoted}', auto_detect = false, header = true, delim = '{header.delimiter}',"
        f" quote = '\"', escape = '\"', columns = {{{kinds}}})"
    ).fetchall()


def _list(header: Header) -> str:
    return ", ".join(header.names)
