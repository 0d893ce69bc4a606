"""From tables in DuckDB to a dataset on disk: the part that all data sets share.

``arrange`` puts the log's rows in their final order: checked, duplicates dropped, cut in time. ``write_dataset``
then adds features and histories and writes the files. Memory stays bounded for logs of any length: users
are spread over buckets of about a million rows, each bucket is worked on alone, and the buckets' rows, each already in
order, are merged while they are written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ibis
import ibis.expr.types as ir
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from foundation.data.arrow_columns import column_roles, to_column
from foundation.data.column_types import normalized, refuse_values
from foundation.data.dataset import SPLITS
from foundation.data.dataset_writer import DatasetWriter
from foundation.data.encoder_fit import EncoderFit
from foundation.data.history import EventLog, History, with_histories
from foundation.data.progress import progress, track
from foundation.data.schema import Schema
from foundation.data.sources import INPUT, PrepareError
from foundation.data.wall_time import wall_text, wall_to_ms

# Working columns of arranged rows; a log's own columns never start so.
TIME, REQUEST_TIME, ROW, SPLIT, PLACE = "_time_ms", "_request_time_ms", "_row", "_split", "_place"

_EARLIEST, _LATEST = wall_to_ms("2000-01-01", "UTC", ""), wall_to_ms("2100-01-01", "UTC", "")
_BUCKET_ROWS_PER_GB = 500_000
_CHUNK_ROWS = 16_384
_RUN_ROWS = 2_048
_BUCKET = "bucket"


@dataclass(frozen=True, kw_only=True, slots=True)
class Arranged:
    """The log in its final order.

    ``rows`` has the log's columns and ``_time_ms`` int64, ``_request_time_ms`` (that of the request's earliest row),
    ``_place`` (0, 1, ..), ``_row`` (place in the dataset from 0; null for rows that only serve as history) and
    ``_split`` int8 (0 train, 1 validation, 2 test). ``counts`` says what was read and dropped. ``cuts`` are the two
    ends in ms, null without a split.
    """

    rows: ir.Table
    counts: dict[str, Any]
    cuts: tuple[int, int] | None
    time_range: tuple[int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class WriteOptions:
    """How the files are written and how much memory the work may take.

    Args:
        row_group_rows: rows of a Parquet row group.
        part_rows: rows of a Parquet file, about.
        memory_gb: what DuckDB may use; the process takes up to about twice that.
        threads: of DuckDB; all cores if null.
        bucket_rows: rows worked on at a time; follows from memory_gb if null.
    """

    row_group_rows: int = 16_384
    part_rows: int = 1_048_576
    memory_gb: float = 2.0
    threads: int | None = None
    bucket_rows: int | None = None

    def __post_init__(self) -> None:
        for key in ("row_group_rows", "part_rows", "memory_gb", "threads", "bucket_rows"):
            value = getattr(self, key)
            if value is not None and value <= 0:
                raise ValueError(f"{key} must be positive, is {value}")
        if self.row_group_rows > 65_536:
            raise ValueError(f"row_group_rows must be at most 65536, is {self.row_group_rows}")

    @property
    def rows_at_once(self) -> int:
        """Rows of a bucket."""
        return self.bucket_rows or max(1, int(self.memory_gb * _BUCKET_ROWS_PER_GB))


def arrange(
    connection: ibis.BaseBackend,
    log: ir.Table,
    schema: Schema,
    *,
    dedupe: Sequence[str] = (),
    rows_from: str | None = None,
) -> Arranged:
    """Checks the log, drops repeats of the ``dedupe`` columns (first kept) and sorts it.

    The order is time, then request, then the order of the input; without requests: time, user, the ``dedupe``
    columns, the order of the input. A request has the time of its earliest row.

    Args:
        log: the impressions, with their place in the files as ``_input``.
        rows_from: wall time of the first row; earlier ones only serve as history.

    Raises:
        PrepareError: a column is missing or has values that cannot be used.
    """
    _require_columns(log, [schema.user, schema.timestamp.column, *dedupe], "log")
    if schema.request_id is not None:
        _require_columns(log, [schema.request_id], "log")
    if not int(log.count().to_pyarrow().as_py()):
        raise PrepareError("log: there are no rows")
    # Histories are joined by user, so its type is the dataset's from the start.
    refuse_values(log, schema, [schema.user], "log: ")
    log = normalized(log, schema, [schema.user])
    table = log.mutate(**{TIME: _milliseconds(log, schema)})
    read = _check_rows(table, schema)
    counts: dict[str, Any] = {"rows_read": read, "duplicates_dropped": 0}
    if dedupe:
        first = ibis.row_number().over(ibis.window(group_by=list(dedupe), order_by=INPUT))
        table = table.mutate(_repeat=first).filter(lambda t: t["_repeat"] == 0).drop("_repeat")
    order = [TIME, schema.user, *dedupe, INPUT]
    table = table.mutate(**{REQUEST_TIME: table[TIME]})
    if schema.request_id is not None:
        whole = ibis.window(group_by=schema.request_id)
        table = table.mutate(**{REQUEST_TIME: table[TIME].min().over(whole)})
        order = [REQUEST_TIME, schema.request_id, TIME, INPUT]
    connection.create_table("arranged", table.order_by(list(dict.fromkeys(order))).drop(INPUT))
    rows = connection.table("arranged")
    kept = int(rows.count().to_pyarrow().as_py())
    counts["duplicates_dropped"] = read - kept
    low, high = _range(rows, REQUEST_TIME)
    if not _EARLIEST <= low <= high < _LATEST:
        odd = low if low < _EARLIEST else high
        raise PrepareError(
            f"log: column {schema.timestamp.column!r} has {wall_text(odd)}; is its unit really"
            f" {schema.timestamp.unit!r}? (schema key timestamp.unit)"
        )
    if schema.request_id is not None:
        _check_requests(rows, schema)
    if schema.impression_id in rows.columns:
        _check_impressions(rows, schema.impression_id)
    start, timezone = None, schema.split.timezone if schema.split else "UTC"
    if rows_from is not None:
        start = wall_to_ms(rows_from, timezone, "rows_from")
    history_only = int((rows[REQUEST_TIME] < start).sum().to_pyarrow().as_py() or 0) if start is not None else 0
    if history_only == kept:
        raise PrepareError(f"log: no row is left from {rows_from} on; the last is of {wall_text(high, timezone)}")
    counts |= {"history_only_rows": history_only}
    cuts = split_cuts(schema)
    split: ir.Value = ibis.literal(0, "int8")
    if cuts is not None:
        first_cut, second_cut = cuts
        split = (rows[REQUEST_TIME] >= first_cut).cast("int8") + (rows[REQUEST_TIME] >= second_cut).cast("int8")
    place = rows.rowid() - history_only
    numbered = {
        PLACE: rows.rowid(),
        ROW: (place >= 0).ifelse(place, ibis.null("int64")),
        SPLIT: split.cast("int8"),
    }
    rows = rows.mutate(**numbered)
    return Arranged(rows=rows, counts=counts, cuts=cuts, time_range=(low, high))


def split_cuts(schema: Schema) -> tuple[int, int] | None:
    """The two ends of the schema's split in ms, None without a split.

    Raises:
        ValueError: a date, or the time zone, that does not exist, or ends in the wrong order.
    """
    if schema.split is None:
        return None
    ends = (schema.split.train_until, schema.split.validation_until)
    first, second = (wall_to_ms(end, schema.split.timezone, "split") for end in ends)
    if first > second:
        raise PrepareError("split: train_until is after validation_until")
    return first, second


def write_dataset(
    folder: Path,
    schema: Schema,
    rows: ir.Table,
    arranged: Arranged,
    histories: Sequence[History],
    *,
    seed: ir.Table | None = None,
    seed_until: str | None = None,
    carry: Sequence[str] = (),
    facts: dict[str, Any] | None = None,
    options: WriteOptions,
) -> dict[str, Any]:
    """Adds histories, fits the encoder on the training rows and writes everything into ``folder``.

    Args:
        rows: ``arranged.rows`` with the features joined; history attributes come from its columns.
        histories: the sequences to build; their list columns are those of the schema.
        seed, seed_until: events from before the log, as in :class:`EventLog`.
        carry: further columns to keep.
        facts: further entries of ``dataset.json``.

    Returns:
        The content of ``dataset.json``.

    Raises:
        PrepareError: a column is missing or of a type that does not fit; there are no training rows.
    """
    builder = _Builder(schema, rows, histories, seed, seed_until, tuple(carry))
    total = int(arranged.counts["rows_read"] - arranged.counts["duplicates_dropped"])
    buckets = -(-total // options.rows_at_once)
    fit = EncoderFit(schema)
    roles = column_roles(schema)
    statistics = _HistoryStatistics(histories)
    writer = DatasetWriter(folder, schema, row_group_rows=options.row_group_rows, part_rows=options.part_rows)
    kept = total - arranged.counts["history_only_rows"]
    try:
        runs = builder.build_runs(folder, buckets)
        with progress("writing the dataset", kept) as advance:
            for table in builder.tables(runs):
                statistics.update(table)
                splits = table[SPLIT].to_numpy()
                table = table.drop_columns([ROW, SPLIT])
                ends = np.searchsorted(splits, [0, 1, 2, 3])  # rows come in time order, so splits ascend
                for split, start, end in zip(SPLITS, ends[:-1], ends[1:], strict=True):
                    part = table.slice(start, end - start)
                    if split == "train" and part.num_rows:
                        whole = part.combine_chunks()
                        fit.update({n: to_column(_array(whole[n]), role) for n, role in roles.items()})
                    writer.write(split, part)
                advance(table.num_rows)
        counts = arranged.counts | {"histories": statistics.result()}
        manifest = writer.finish(fit.finish(), counts, facts or {})
    finally:
        writer.abort()
    assert manifest["rows"] == kept, f"{manifest['rows']} rows written, {kept} expected"
    if not manifest["splits"]["train"]["rows"]:
        raise PrepareError("split: no row is before train_until, so there is nothing to train on")
    return manifest


@ibis.udf.scalar.builtin(name="hash")
def _hash(value) -> int:  # type: ignore[no-untyped-def,empty-body]
    """DuckDB's hash of any value, an unsigned number."""


@ibis.udf.scalar.builtin(name="getvariable")
def _variable(variable: str) -> int:  # type: ignore[empty-body]
    """The value of a DuckDB variable."""


class _Builder:
    """Runs the query of each bucket and yields the dataset's rows in their final order."""

    def __init__(
        self,
        schema: Schema,
        rows: ir.Table,
        histories: Sequence[History],
        seed: ir.Table | None,
        seed_until: str | None,
        carry: tuple[str, ...],
    ) -> None:
        self.schema, self.rows, self.histories = schema, rows, histories
        self.seed, self.seed_until = seed, seed_until
        built = {c for h in histories for c in (*h.attributes, *([h.timestamp] if h.timestamp else []))}
        self._backend = rows.get_backend()
        self.columns = [*schema.columns(), *[c for c in carry if c not in schema.columns()]]
        self.own = [c for c in self.columns if c not in built]
        if schema.impression_id not in rows.columns:
            self.rows = rows.mutate(**{schema.impression_id: rows[ROW]})
        _require_columns(self.rows, self.own, "log, users and items together")
        refuse_values(self.rows, schema, self.own)

    def tables(self, runs: Sequence[Path]) -> Iterator[pa.Table]:
        """Tables of the dataset's columns, ``_row`` and ``_split``, with ``_row`` ascending throughout.

        Args:
            runs: what :meth:`build_runs` wrote. They are removed.
        """
        if not runs:
            yield from equal_chunks(self._backend.con.sql(self._query(1)).to_arrow_reader(_CHUNK_ROWS), _CHUNK_ROWS)
            return
        yield from merge_runs(runs, ROW, _CHUNK_ROWS)
        for path in runs:
            path.unlink()

    def build_runs(self, folder: Path, buckets: int) -> list[Path]:
        """One Arrow stream per bucket of users, in the order of ``_row``; none for a single bucket."""
        if buckets <= 1:
            return []
        runs = [folder / f"run-{bucket:05d}.arrow" for bucket in range(buckets)]
        query = self._query(buckets)
        compressed = pa.ipc.IpcWriteOptions(compression="lz4")
        for bucket, path in enumerate(track(runs, "building histories")):
            self._backend.raw_sql(f"SET VARIABLE {_BUCKET} = {bucket}")
            reader = self._backend.con.sql(query).to_arrow_reader(_RUN_ROWS)
            with pa.ipc.new_stream(str(path), reader.schema, options=compressed) as writer:
                for batch in reader:
                    writer.write_batch(batch)
        return runs

    def _query(self, buckets: int) -> str:
        """SQL of the dataset's rows; of several buckets, those of the bucket that a DuckDB variable names."""
        rows, seed, user = self.rows, self.seed, self.schema.user
        if buckets > 1:
            wanted = _variable(_BUCKET)
            rows = rows.filter(_hash(rows[user]) % buckets == wanted)
            if seed is not None:
                seed = seed.filter(_hash(seed[user].cast(rows[user].type())) % buckets == wanted)
        log = EventLog(events=rows, user=user, time=TIME, order=(PLACE,), seed=seed, seed_until=self.seed_until)
        asked = rows.filter(rows[ROW].notnull())
        asked = normalized(asked.select(*self.own, REQUEST_TIME, ROW, SPLIT), self.schema, self.own)
        result = with_histories(asked, log, self.histories, user=user, time=REQUEST_TIME)
        result = normalized(result, self.schema, [c for c in self.columns if c not in self.own])
        result = result.order_by(ROW).select(*self.columns, ROW, SPLIT)
        return str(self._backend.compile(result))


def equal_chunks(batches: Iterable[pa.RecordBatch], size: int) -> Iterator[pa.Table]:
    """The rows of ``batches`` in tables of ``size`` rows each, but for the last.

    Sums of floats depend on how rows are grouped; groups that depend on nothing else make them the same each time.
    """
    pending: list[pa.RecordBatch] = []
    for batch in batches:
        pending.append(batch)
        while sum(b.num_rows for b in pending) >= size:
            whole = pa.Table.from_batches(pending)
            yield whole.slice(0, size).combine_chunks()
            pending = [b for b in whole.slice(size).to_batches() if b.num_rows]
    if pending:
        yield pa.Table.from_batches(pending).combine_chunks()


def merge_runs(runs: Sequence[Path], key: str, size: int) -> Iterator[pa.Table]:
    """Merges Arrow streams, each ascending in ``key``, into tables of ``size`` keys with ``key`` ascending.

    The keys of all runs together are the numbers from 0, each once.
    """
    with ExitStack() as stack:
        readers = [_Run(stack.enter_context(pa.ipc.open_stream(stack.enter_context(pa.OSFile(str(r)))))) for r in runs]
        end = 0
        while any(reader.pending is not None for reader in readers):
            end += size
            parts = [part for reader in readers for part in reader.until(key, end)]
            whole = pa.concat_tables(parts).combine_chunks()
            yield whole.take(pc.sort_indices(whole[key]))


class _Run:
    """One sorted stream, read a batch at a time."""

    def __init__(self, reader: pa.ipc.RecordBatchStreamReader) -> None:
        self._batches = iter(reader)
        self.pending: pa.Table | None = None
        self._advance()

    def until(self, key: str, end: int) -> Iterator[pa.Table]:
        """The next rows with a key below ``end``."""
        while self.pending is not None:
            keys = self.pending[key].to_numpy()
            count = int(np.searchsorted(keys, end))
            if count:
                yield self.pending.slice(0, count)
            if count < len(keys):
                self.pending = self.pending.slice(count)
                return
            self._advance()

    def _advance(self) -> None:
        batch = next(self._batches, None)
        self.pending = None if batch is None else pa.Table.from_batches([batch])


class _HistoryStatistics:
    """Lengths of the histories: rows without any event, rows at the greatest length, events."""

    def __init__(self, histories: Sequence[History]) -> None:
        self._histories = histories
        self._counts: dict[str, Counter[str]] = {h.name: Counter() for h in histories}

    def update(self, table: pa.Table) -> None:
        for history in self._histories:
            lengths = pc.list_value_length(table[next(iter(history.attributes))])
            counts = self._counts[history.name]
            counts["events"] += int(pc.sum(lengths).as_py() or 0)
            counts["empty_rows"] += int(pc.sum(pc.equal(lengths, 0)).as_py() or 0)
            counts["full_rows"] += int(pc.sum(pc.equal(lengths, history.max_length)).as_py() or 0)

    def result(self) -> dict[str, dict[str, int]]:
        return {name: dict(sorted(counts.items())) for name, counts in self._counts.items()}


def _array(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)


def _require_columns(table: ir.Table, names: Sequence[str], where: str) -> None:
    absent = [n for n in names if n not in table.columns]
    if absent:
        own = [c for c in table.columns if not c.startswith("_")]
        raise PrepareError(f"{where}: no column {absent[0]!r}; columns are {', '.join(own)}")


def _milliseconds(log: ir.Table, schema: Schema) -> ir.IntegerValue:
    """The row's time in ms. Whole numbers only: a float cannot hold milliseconds exactly."""
    name = schema.timestamp.column
    kind = log[name].type()
    if not kind.is_integer():
        raise PrepareError(f"log: column {name!r} is {kind}; store times as int64 {schema.timestamp.unit} since 1970")
    return log[name].cast("int64") * (1000 if schema.timestamp.unit == "s" else 1)


def _check_rows(table: ir.Table, schema: Schema) -> int:
    """Number of rows; refuses null keys and labels that are not 0, 1 or null."""
    never_null = [c for c in (schema.user, schema.timestamp.column, schema.request_id) if c]
    labels = [t.label for t in schema.tasks]
    _require_columns(table, labels, "log")
    for name in labels:
        kind = table[name].type()
        if kind.is_string() and not int(table[name].count().to_pyarrow().as_py()):
            raise PrepareError(f"log: label column {name!r} has no value in any row; leave its task out of the schema")
        if not (kind.is_numeric() or kind.is_boolean()):
            raise PrepareError(f"log: label column {name!r} is {kind}; labels are 0 or 1")
    odd = {f"odd_{i}": (~table[c].cast("float64").isin([0.0, 1.0])).fill_null(False) for i, c in enumerate(labels)}
    found = table.aggregate(
        rows=table.count(),
        **{f"null_{i}": table[c].isnull().sum() for i, c in enumerate(never_null)},
        **{name: test.sum() for name, test in odd.items()},
        **{f"value_{i}": table[c].cast("float64").max(where=odd[f"odd_{i}"]) for i, c in enumerate(labels)},
    ).to_pyarrow().to_pylist()[0]  # fmt: skip
    for i, name in enumerate(never_null):
        if found[f"null_{i}"]:
            raise PrepareError(
                f"log: column {name!r} is null in {found[f'null_{i}']} rows; drop them with `where: {name} is not None`"
            )
    for i, name in enumerate(labels):
        if found[f"odd_{i}"]:
            raise PrepareError(
                f"log: label column {name!r} has {found[f'odd_{i}']} values that are not 0 or 1,"
                f" such as {found[f'value_{i}']:g}; make it a 0/1 column"
            )
    return int(found["rows"])


def _check_impressions(rows: ir.Table, name: str) -> None:
    """Impression ids are integers, none null, none twice."""
    if not rows[name].type().is_integer():
        raise PrepareError(f"log: column {name!r} is {rows[name].type()}; impression ids are integers")
    groups = rows.group_by(name).aggregate(rows=rows.count())
    bad = groups.filter((groups["rows"] > 1) | groups[name].isnull())
    sample = bad.order_by(name).limit(1).to_pyarrow().to_pylist()
    if sample:
        raise PrepareError(
            f"log: impression id {sample[0][name]} (column {name!r}) is in {sample[0]['rows']} rows; ids must differ"
            " and not be null. Leave the column out to have the rows numbered"
        )


def _check_requests(rows: ir.Table, schema: Schema) -> None:
    """A request has one user and one surface."""
    assert schema.request_id is not None
    names = {"user": schema.user, "surface": schema.surface.column}
    _require_columns(rows, list(names.values()), "log")
    groups = rows.group_by(schema.request_id).aggregate(
        **{key: rows[column].nunique() for key, column in names.items()}
    )
    bad = groups.filter((groups["user"] > 1) | (groups["surface"] > 1))
    sample = bad.order_by(schema.request_id).limit(1).to_pyarrow().to_pylist()
    if sample:
        key = "user" if sample[0]["user"] > 1 else "surface"
        raise PrepareError(
            f"log: request {sample[0][schema.request_id]!r} (column {schema.request_id!r}) has {sample[0][key]}"
            f" different values of {names[key]!r}; {int(bad.count().to_pyarrow().as_py())} requests are so"
        )


def _range(rows: ir.Table, column: str) -> tuple[int, int]:
    ends = rows.aggregate(low=rows[column].min(), high=rows[column].max()).to_pyarrow().to_pylist()[0]
    return int(ends["low"]), int(ends["high"])
