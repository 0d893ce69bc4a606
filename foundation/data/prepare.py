"""`opengem prepare logs`: raw logs and a schema to a dataset with point-in-time histories.

One row of the log is one impression with its labels. Tables of users and items add their columns by key. Histories
are built from the log itself: for each row, earlier events of its user that meet a condition.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ibis
import ibis.expr.types as ir

from foundation.data.build import REQUEST_TIME, Arranged, WriteOptions, arrange, split_cuts, write_dataset
from foundation.data.dataset import MANIFEST
from foundation.data.expressions import condition, names_in
from foundation.data.files import atomic_dir
from foundation.data.history import History
from foundation.data.progress import progress
from foundation.data.schema import Schema
from foundation.data.settings import preset, save, show
from foundation.data.sources import (
    INPUT,
    PrepareError,
    SideTable,
    blank,
    connect,
    duckdb_errors,
    load,
    require_unique,
)
from foundation.data.wall_time import PARTS, calendar_part, offsets


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceSource:
    """Where the events of one sequence come from.

    Args:
        attributes: attribute of the schema's sequence to the column of the log or of the items that holds it.
        where: condition on an event, such as `click == 1`; all events if null.
    """

    attributes: dict[str, str]
    where: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class EarlierHistory:
    """Events from before the log, without times: one row per event.

    Args:
        path: file or glob. It holds the user column and event columns under the log's names; others are null.
        position: integer column, ascending from a user's oldest event to the newest.
        until: column with the time of the user's last such event; rows at or before it do not see them.
    """

    path: str
    position: str = "position"
    until: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareConfig:
    """What to read and what to make of it.

    Args:
        schema: YAML file of the dataset's schema, or the name of a preset.
        log: files or globs of impressions (Parquet, CSV or ORC).
        out: folder to write.
        users: table with one row per user.
        items: table with one row per item.
        sequences: where each of the schema's sequences comes from; those left out are list columns of the log.
        earlier: events from before the log.
        where: condition on rows of the log; others are dropped and counted.
        missing: column to the values that mean "not known" (they become null, counted); `*` is every column.
        calendar: new column to `hour` or `weekday` (0 is Monday) of the row's time in the split's time zone.
        dedupe: columns that tell rows apart; of rows that agree in all of them the first is kept.
        rows_from: wall time of the first row of the dataset; earlier ones only serve as history.
        carry: further columns to keep in the dataset.
        write: sizes of files and memory.
        overwrite: replace `out` if it exists.
    """

    schema: str
    log: list[str]
    out: Path
    users: SideTable | None = None
    items: SideTable | None = None
    sequences: dict[str, SequenceSource] = field(default_factory=dict)
    earlier: EarlierHistory | None = None
    where: str | None = None
    missing: dict[str, list[int | float | str]] = field(default_factory=dict)
    calendar: dict[str, str] = field(default_factory=dict)
    dedupe: list[str] = field(default_factory=list)
    rows_from: str | None = None
    carry: list[str] = field(default_factory=list)
    write: WriteOptions = field(default_factory=WriteOptions)
    overwrite: bool = False

    def __post_init__(self) -> None:
        if not self.log:
            raise ValueError("log: is empty; name at least one file")
        for column, part in self.calendar.items():
            if part not in PARTS:
                raise ValueError(f"calendar.{column}: must be one of {', '.join(PARTS)}, is {part!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareResult:
    """What was written. `manifest` is the content of `dataset.json`."""

    out: Path
    manifest: dict[str, Any]

    @property
    def rows(self) -> dict[str, int]:
        """Rows per split."""
        return {name: int(split["rows"]) for name, split in self.manifest["splits"].items()}


def prepare(config: PrepareConfig) -> PrepareResult:
    """Makes a dataset of raw logs.

    Raises:
        PrepareError, SchemaError: naming the file, column or setting that does not fit.
        FileExistsError: `out` exists and `overwrite` is false.
        OSError: the disk is full; nothing is left behind.
    """
    show(config, "prepare logs")
    schema = Schema.load(preset(config.schema, "schema", "datasets"))
    histories = sequence_histories(schema, config.sequences)
    split_cuts(schema)  # before hours of reading
    tables = [table.path for table in (config.users, config.items, config.earlier) if table]
    finished = atomic_dir(config.out, overwrite=config.overwrite, inputs=[config.schema, *config.log, *tables])
    with finished as folder, working_folder(folder) as work:
        connection = connect(work, config.write.memory_gb, config.write.threads)
        try:
            with duckdb_errors():
                manifest = _prepare(config, schema, histories, connection, folder)
        finally:
            connection.disconnect()
        save(config, folder / "prepare.yaml")
    report(config.out, manifest)
    return PrepareResult(out=config.out, manifest=manifest)


def _prepare(
    config: PrepareConfig, schema: Schema, histories: list[History], connection: ibis.BaseBackend, folder: Path
) -> dict[str, Any]:
    missing: dict[str, int] = {}
    seen: set[str] = set()

    def read(name: str, paths: Sequence[str]) -> ir.Table:
        loaded = load(connection, name, paths, name)
        seen.update(c for c in loaded.columns if c != INPUT)
        table, found = blank(loaded, config.missing)
        missing.update({f"{name}.{column}": count for column, count in found.items()})
        advance(1)
        return table

    with progress("reading", 4) as advance:
        log = read("log", config.log)
        filtered = 0
        if config.where is not None:
            before = int(log.count().to_pyarrow().as_py())
            log = log.filter(condition(log, config.where, "where"))
            filtered = before - int(log.count().to_pyarrow().as_py())
        users = read("users", [config.users.path]) if config.users else None
        items = read("items", [config.items.path]) if config.items else None
        earlier = read("earlier", [config.earlier.path]) if config.earlier else None
    for column in config.missing:
        if column != "*" and column not in seen:
            raise PrepareError(f"missing.{column}: no file has this column; columns are {', '.join(sorted(seen))}")
    with progress("sorting", None):
        arranged = arrange(connection, log, schema, dedupe=config.dedupe, rows_from=config.rows_from)
    arranged.counts.update(filtered_out=filtered, missing_values=missing)
    rows = arranged.rows
    for table, side in ((users, config.users), (items, config.items)):
        if table is not None and side is not None:
            name = "users" if side is config.users else "items"
            require_unique(table, side.key, name)
            rows = join_side(rows, table, side, name)
            if earlier is not None and side.log_column in earlier.columns:
                earlier = join_side(earlier, table, side, name)
    rows = with_calendar(rows, arranged, config.calendar, schema)
    if earlier is not None and config.earlier is not None:
        earlier = _renamed_position(earlier, config.earlier)
    return write_dataset(
        folder,
        schema,
        rows,
        arranged,
        histories,
        seed=earlier,
        seed_until="until" if config.earlier is not None and config.earlier.until else None,
        carry=config.carry,
        options=config.write,
    )


def _renamed_position(earlier: ir.Table, source: EarlierHistory) -> ir.Table:
    wanted = {"position": source.position} | ({"until": source.until} if source.until else {})
    for name in wanted.values():
        if name not in earlier.columns or not earlier[name].type().is_integer():
            raise PrepareError(f"earlier: needs an integer column {name!r}; columns are {', '.join(earlier.columns)}")
    return earlier.mutate(**{new: earlier[old] for new, old in wanted.items()})


def sequence_histories(schema: Schema, sources: Mapping[str, SequenceSource]) -> list[History]:
    """The histories to build for the schema's sequences. Raises PrepareError naming sequence and attribute."""
    known = {s.name for s in schema.sequences}
    histories = []
    for name, source in sources.items():
        if name not in known:
            raise PrepareError(f"sequences.{name}: the schema's sequences are {', '.join(sorted(known)) or 'none'}")
        sequence = schema.sequence(name)
        columns = {a.name: a.column for a in sequence.attributes}
        for attribute in {*columns} ^ {*source.attributes}:
            kind = "is missing" if attribute in columns else "is no attribute of the schema's sequence"
            raise PrepareError(f"sequences.{name}.attributes.{attribute}: {kind}")
        if sequence.keep != "latest":
            raise PrepareError(f"sequences.{name}: only the latest events are kept; set keep: latest in the schema")
        late = {t.label for t in schema.tasks if t.delay_hours} & names_in(source.where or "")
        if late:
            raise PrepareError(
                f"sequences.{name}.where: {min(late)!r} is known only hours after the event, so it cannot choose events"
            )
        histories.append(
            History(
                name=name,
                attributes={columns[a]: column for a, column in source.attributes.items()},
                timestamp=sequence.timestamp,
                max_length=sequence.max_length,
                where=source.where,
            )
        )
    return histories


def join_side(rows: ir.Table, side: ir.Table, source: SideTable, name: str) -> ir.Table:
    """Adds a side table's columns to rows; a column that is in both keeps the rows' values."""
    if source.log_column not in rows.columns:
        raise PrepareError(f"{name}.log_key: the log has no column {source.log_column!r}")
    new = [c for c in side.columns if c not in rows.columns and c not in (source.key, INPUT)]
    one, other = rows[source.log_column].type(), side[source.key].type()
    for kind, where in ((one, f"log: column {source.log_column!r}"), (other, f"{name}: key {source.key!r}")):
        if not (kind.is_string() or kind.is_numeric()):
            raise PrepareError(f"{where} is {kind}; ids are integers or strings")
    if one.is_string() != other.is_string():
        raise PrepareError(
            f"{name}: key {source.key!r} is {other}, but the log's {source.log_column!r} is {one};"
            " use one type of id in all files"
        )
    table = side.select(*new, _side_key=side[source.key])
    return rows.left_join(table, rows[source.log_column] == table["_side_key"]).drop("_side_key")


def with_calendar(rows: ir.Table, arranged: Arranged, parts: Mapping[str, str], schema: Schema) -> ir.Table:
    """Adds hour or weekday columns of the row's wall time in the split's time zone."""
    if not parts:
        return rows
    there = [column for column in parts if column in rows.columns]
    if there:
        raise PrepareError(f"calendar.{there[0]}: the files have a column of this name; choose another")
    timezone = schema.split.timezone if schema.split else "UTC"
    low, high = arranged.time_range
    changes = offsets(low, high, timezone)
    return rows.mutate(**{column: calendar_part(rows[REQUEST_TIME], part, changes) for column, part in parts.items()})


@contextmanager
def working_folder(folder: Path) -> Iterator[Path]:
    """A folder below ``folder`` for the database and its spill; it is gone when the block ends."""
    work = folder / ".work"
    work.mkdir()
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def report(out: Path, manifest: Mapping[str, Any]) -> None:
    """Prints where the dataset is and how many rows it has."""
    rows = ", ".join(f"{name} {split['rows']:,}" for name, split in manifest["splits"].items())
    dropped = manifest["counts"]["duplicates_dropped"]
    print(f"{out}: {rows} rows; {dropped:,} duplicates dropped; details in {out / MANIFEST}")
