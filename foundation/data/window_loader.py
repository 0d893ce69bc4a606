"""Reads windows of a split: rows are checked and encoded portion by portion as they stream from the files.

The request side is encoded once per request, whatever the number of its impressions.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from foundation.data.arrow_columns import Role, int_array, surface_codes, to_column
from foundation.data.encoding import (
    Column,
    EncodedBatch,
    Encoder,
    as_floats,
    encode_rows,
)
from foundation.data.ids import canonical_ids, id_hash
from foundation.data.index import SplitIndex
from foundation.data.parquet_rows import RowReader
from foundation.data.plan import Piece, PlanSettings, Unit, window_batches, window_requests
from foundation.data.schema import Schema
from foundation.data.storage import DatasetError
from foundation.data.window import Window, WindowStore

NO_USER = np.iinfo(np.int64).min
"""The user id of rows without one."""

Counts = dict[str, dict[str, int]]


def label_columns(schema: Schema, tasks: Sequence[str]) -> set[str]:
    """The label columns that decide about these tasks: their own and those of the tasks they are ``given``."""
    return {schema.task(name).label for name in _with_given(schema, tasks)}


class WindowLoader:
    """Reads the windows of a split.

    Args:
        tasks: names of the tasks whose labels are used; the labels of others are invalid.
        roles: the columns the files must have.
    """

    def __init__(
        self,
        index: SplitIndex,
        schema: Schema,
        encoder: Encoder,
        settings: PlanSettings,
        tasks: Sequence[str],
        roles: Mapping[str, Role],
    ) -> None:
        self.index = index
        self.schema = schema
        self.encoder = copy.copy(encoder)
        self.settings = settings
        self.tasks = tuple(tasks)
        self._read = _with_given(schema, tasks)
        self._reset_counts()
        item = {f.column for f in schema.item_features} | {f.weights for f in schema.item_features if f.weights}
        per_row = {schema.impression_id, schema.weight, schema.sampling_rate, *(t.label for t in schema.tasks)}
        request = {schema.user, schema.timestamp.column, schema.surface.column}
        for feature in schema.request_features:
            request |= {feature.column} | ({feature.weights} if feature.weights else set())
        for sequence in schema.sequences:
            request |= {a.column for a in sequence.attributes}
            request |= {sequence.timestamp} if sequence.timestamp else set()
        self._item_columns = [c for c in roles if c in item | per_row]
        self._request_columns = [c for c in roles if c in request]
        # Request ids have done their work in the index.
        self._roles = {name: role for name, role in roles.items() if name in item | per_row | request}
        self._rows = RowReader(index.files, self._roles)

    def read_ahead(self) -> None:
        """From now on, decodes the next rows in a thread while the last ones are encoded."""
        self._rows.ahead = True

    def new_store(self) -> WindowStore:
        """Memory for the rows of a window; :meth:`load` can use it again and again."""
        return WindowStore(self.schema, self.encoder.table_rows)

    def load(self, unit: Unit, store: WindowStore) -> Window:
        """Reads a window into ``store``, over what was there.

        Raises:
            DatasetError: values that cannot be used; the message names file, column and row.
        """
        assert unit.pieces
        sizes, order = window_requests(self.index, unit)
        store.clear(len(sizes), int(sizes.sum()))
        for piece in unit.pieces:
            self._add_piece(piece, store)
        order, cuts = window_batches(sizes, order, store.events(), self.settings, unit)
        window = Window(store, sizes, order, cuts)
        if self.settings.max_tokens:
            cut = window.limit(self.settings.max_tokens, self.settings.copies, range(unit.first, unit.stop))
            if cut:
                self._counts["histories"]["cut to max_tokens"] += cut
        return window

    def take_counts(self) -> Counts:
        """What was counted since the last call: missing and unknown ids, truncated lists, null labels."""
        counts = {key: dict(value) for key, value in self.encoder.counters.items() if any(value.values())}
        for key, value in self._counts.items():
            counts.setdefault(key, {}).update(value)
        self._reset_counts()
        return counts

    def close(self) -> None:
        """Closes the files."""
        self._rows.close()

    def _reset_counts(self) -> None:
        self.encoder.counters = defaultdict(lambda: {"missing": 0, "unknown": 0})
        self._counts: Counts = defaultdict(lambda: defaultdict(int))

    def _add_piece(self, piece: Piece, store: WindowStore) -> None:
        """Adds the wanted rows of a piece, one small portion after another."""
        group = self.index.groups[piece.group]
        sizes = group.request_sizes(piece.first, piece.stop)
        wanted = group.request_selected(piece.first, piece.stop)
        start = group.row_of(piece.first)
        begins = start + np.cumsum(sizes) - sizes
        stop = start + int(sizes.sum())
        begins = begins[wanted]
        rows = None if wanted.all() else np.repeat(wanted, sizes)
        file = self.index.files[group.file]
        for row, batch in self._rows.read(group.file, start, stop):
            low, high = np.searchsorted(begins, [row, row + len(batch)])
            requests = begins[low:high] - row
            wanted_rows = None if rows is None else np.flatnonzero(rows[row - start : row - start + len(batch)])
            try:
                self._add(store, batch, requests, wanted_rows, _Place(file, row, requests))
            except (ValueError, pa.ArrowException) as error:
                if isinstance(error, DatasetError):
                    raise
                raise DatasetError(f"{file}: rows {row} to {row + len(batch) - 1}: {error}") from None

    def _add(
        self, store: WindowStore, batch: pa.RecordBatch, requests: np.ndarray, items: np.ndarray | None, place: _Place
    ) -> None:
        """Checks, encodes and adds the requests that begin in a record batch, and the given items of it."""
        schema = self.schema
        begins = None if len(requests) == len(batch) else requests
        request = self._columns(batch, self._request_columns, begins)
        item = self._columns(batch, self._item_columns, items)
        item_place = _Place(place.file, place.row, np.arange(len(batch)) if items is None else items)
        self._count_truncated(request, item)
        labels, label_valid = self._labels(item, item_place)
        surface = _taken(batch, schema.surface.column, begins)
        moments = self._time(request, batch, place)
        fields = {
            "request_time": moments,
            "user_id": self._user(request[schema.user]),
            "surface": surface_codes(surface, schema),
            "labels": labels,
            "label_valid": label_valid,
            "weight": _positive(item, schema.weight, item_place, "must not be negative", 0.0, np.inf),
            "sampling_rate": _positive(
                item, schema.sampling_rate, item_place, "must be above 0 and at most 1", np.nextafter(0.0, 1.0), 1.0
            ),
            "impression_id": _whole(item[schema.impression_id], schema.impression_id, item_place),
        }
        store.begin(len(requests), len(item_place.rows))
        store.add(
            encode_rows(
                self.encoder,
                schema.request_features,
                schema.sequences,
                request,
                len(requests),
                moments,
                store.request.room,
            ),
            encode_rows(self.encoder, schema.item_features, (), item, len(item_place.rows), room=store.item.room),
            fields,
        )

    def _columns(self, batch: pa.RecordBatch, names: Sequence[str], rows: np.ndarray | None) -> dict[str, Column]:
        columns = {}
        for name in names:
            try:
                columns[name] = to_column(_taken(batch, name, rows), self._roles[name])
            except pa.ArrowException as error:
                raise ValueError(f"column {name!r}: {error}") from None
        return columns

    def _count_truncated(self, request: Mapping[str, Column], item: Mapping[str, Column]) -> None:
        for sequence in self.schema.sequences:
            self._count_longer(sequence.name, request[sequence.attributes[0].column], sequence.max_length)
        for features, columns in (
            (self.schema.request_features, request),
            (self.schema.item_features, item),
        ):
            for feature in features:
                if feature.kind == "multi":
                    self._count_longer(feature.name, columns[feature.column], feature.max_length)

    def _count_longer(self, key: str, column: Column, limit: int) -> None:
        assert column.offsets is not None
        longer = int(np.count_nonzero(np.diff(column.offsets) > limit))
        if longer:
            self._counts[key]["truncated"] += longer

    def _labels(self, item: Mapping[str, Column], place: _Place) -> tuple[np.ndarray, np.ndarray]:
        tasks = self.schema.tasks
        labels = np.zeros((len(place.rows), len(tasks)), dtype=np.float32)
        valid = np.zeros(labels.shape, dtype=bool)
        for k, task in enumerate(tasks):
            if task.name not in self._read:
                continue
            column = item[task.label]
            values = as_floats(column.values, task.label)
            known = ~np.isnan(values) if column.valid is None else column.valid & ~np.isnan(values)
            wrong = known & (values != 0) & (values != 1)
            if wrong.any():
                raise place.error(
                    task.label, wrong, f"the label {values[wrong][0]:g} of task {task.name} is not 0 or 1"
                )
            nulls = int(np.count_nonzero(~known))
            if nulls:
                self._counts[task.name]["null"] += nulls
            labels[:, k] = np.where(known, values, 0)
            valid[:, k] = known
            if task.given is not None:
                given = self.schema.task_names.index(task.given)
                valid[:, k] &= valid[:, given] & (labels[:, given] == 1)
        for k, task in enumerate(tasks):
            if task.name not in self.tasks:
                labels[:, k], valid[:, k] = 0, False
        return labels, valid

    def _time(self, request: Mapping[str, Column], batch: pa.RecordBatch, place: _Place) -> np.ndarray:
        name = self.schema.timestamp.column
        times = _whole(request[name], name, place)
        kind = batch.schema.field(name).type
        plain = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)
        return times * 1000 if plain and self.schema.timestamp.unit == "s" else times

    def _user(self, column: Column) -> np.ndarray:
        name = self.schema.user
        if column.dictionary is not None:
            users = id_hash(column.dictionary, name)[column.values]
        else:
            users = id_hash(column.values, name).copy()
        if column.valid is not None:
            self._counts[f"user ({name})"]["null"] += int(np.count_nonzero(~column.valid))
            users = np.where(column.valid, users, NO_USER)
        return users


def empty_batch(schema: Schema, encoder: Encoder) -> EncodedBatch:
    """A batch of no requests and no impressions, with every key of the schema."""
    encoder = copy.copy(encoder)
    encoder.counters = defaultdict(lambda: {"missing": 0, "unknown": 0})
    none = np.zeros(0, dtype=np.int64)
    one, many = Column(none), Column(none, offsets=np.zeros(1, dtype=np.int64))
    columns: dict[str, Column] = {}
    for feature in schema.features:
        columns[feature.column] = many if feature.kind in ("multi", "embedding") else one
        if feature.weights is not None:
            columns[feature.weights] = many
    for sequence in schema.sequences:
        columns |= {a.column: many for a in sequence.attributes}
        if sequence.timestamp is not None:
            columns[sequence.timestamp] = many
    tasks = len(schema.tasks)
    return EncodedBatch(
        request=encode_rows(encoder, schema.request_features, schema.sequences, columns, 0, none),
        item=encode_rows(encoder, schema.item_features, (), columns, 0),
        request_index=none,
        request_time=none,
        user_id=none,
        surface=none,
        labels=np.zeros((0, tasks), dtype=np.float32),
        label_valid=np.zeros((0, tasks), dtype=bool),
        weight=np.zeros(0, dtype=np.float32),
        sampling_rate=np.zeros(0, dtype=np.float32),
        impression_id=none,
    )


def _with_given(schema: Schema, tasks: Sequence[str]) -> set[str]:
    """The tasks and those they are given, and so on."""
    names = set(tasks)
    for task in reversed(schema.tasks):
        if task.name in names and task.given is not None:
            names.add(task.given)
    return names


@dataclass(frozen=True, slots=True)
class _Place:
    """Where rows lie in a file: row ``row + rows[i]``."""

    file: str
    row: int
    rows: np.ndarray

    def error(self, column: str, wrong: np.ndarray, problem: str) -> DatasetError:
        """Names the first of the rows marked in ``wrong``."""
        row = self.row + int(self.rows[np.flatnonzero(wrong)[0]])
        return DatasetError(f"{self.file}: column {column!r}: row {row}: {problem}")


def _taken(batch: pa.RecordBatch, name: str, rows: np.ndarray | None) -> pa.Array:
    column = batch.column(batch.schema.get_field_index(name))
    return column if rows is None else column.take(int_array(rows))


def _whole(column: Column, name: str, place: _Place) -> np.ndarray:
    """A column of integers without nulls, int64."""
    if column.valid is not None and not column.valid.all():
        raise place.error(name, ~column.valid, "is null; this column may not be")
    return canonical_ids(column.values, name).astype(np.int64)


def _positive(
    item: Mapping[str, Column], name: str | None, place: _Place, rule: str, low: float, high: float
) -> np.ndarray:
    """An optional column of numbers in a range, float32; 1 where there is no such column."""
    if name is None:
        return np.ones(len(place.rows), dtype=np.float32)
    column = item[name]
    values = as_floats(column.values, name)
    good = (values >= low) & (values <= high) & np.isfinite(values)
    if column.valid is not None:
        good &= column.valid
    if not good.all():
        found = "null" if column.valid is not None and not column.valid[~good][0] else f"{values[~good][0]:g}"
        raise place.error(name, ~good, f"{rule}, got {found}")
    return values.astype(np.float32)
