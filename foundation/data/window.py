"""One window of a split in memory: read, checked, encoded, shuffled, and handed out as batches.

The request side is encoded once per request, whatever the number of its impressions. Ids wait as int32 (no table
has more rows), which halves the memory of a window; batches have int64.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from foundation.data.arrow_columns import Role, surface_codes, to_column
from foundation.data.encoding import (
    Column,
    EncodedBatch,
    EncodedRows,
    Encoder,
    as_floats,
    encode_rows,
    jagged_index,
)
from foundation.data.ids import canonical_ids, id_hash
from foundation.data.index import SplitIndex
from foundation.data.parquet_rows import RowReader
from foundation.data.plan import Piece, PlanSettings, Unit, batch_cuts, window_requests
from foundation.data.schema import Schema
from foundation.data.storage import DatasetError

NO_USER = np.iinfo(np.int64).min
"""The user id of rows without one."""

Counts = dict[str, dict[str, int]]


def label_columns(schema: Schema, tasks: Sequence[str]) -> set[str]:
    """The label columns that decide about these tasks: their own and those of the tasks they are ``given``."""
    return {schema.task(name).label for name in _with_given(schema, tasks)}


class Window:
    """The rows of a unit in the order of use, cut into batches.

    Args:
        whole: all rows; ids may be int32.
        cuts: row positions between batches, int64 ``[batches + 1]``.
    """

    def __init__(self, whole: EncodedBatch, cuts: np.ndarray) -> None:
        self._whole = whole
        self._cuts = cuts
        self._request = _Rows(whole.request)
        self._item = _Rows(whole.item)

    def batch(self, number: int) -> EncodedBatch:
        """Batch ``number``, R requests with N impressions; views of the window where types allow."""
        whole = self._whole
        start, stop = int(self._cuts[number]), int(self._cuts[number + 1])
        first, last = 0, 0
        if stop > start:
            first, last = int(whole.request_index[start]), int(whole.request_index[stop - 1]) + 1
        return EncodedBatch(
            request=self._request.slice(first, last),
            item=self._item.slice(start, stop),
            request_index=whole.request_index[start:stop] - first,
            request_time=whole.request_time[first:last],
            user_id=whole.user_id[first:last],
            surface=whole.surface[first:last],
            labels=whole.labels[start:stop],
            label_valid=whole.label_valid[start:stop],
            weight=whole.weight[start:stop],
            sampling_rate=whole.sampling_rate[start:stop],
            impression_id=whole.impression_id[start:stop],
        )


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

    def load(self, unit: Unit) -> Window:
        """Reads a window. Raises DatasetError naming file, column and row for values that cannot be used."""
        chunks = [chunk for piece in unit.pieces for chunk in self._piece(piece)]
        if not chunks:
            empty = empty_batch(self.schema, self.encoder)
            return Window(empty, np.zeros(unit.batches + 1, dtype=np.int64))
        sizes, order = window_requests(self.index, unit)
        cuts = batch_cuts(sizes[order], self.settings, unit.batches)
        return Window(_join(chunks, sizes, None if unit.seed is None else order), cuts)

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

    def _piece(self, piece: Piece) -> Iterator[EncodedBatch]:
        """The wanted rows of a piece, one small encoded portion after another.

        A request that goes on in the next portion counts with the portion in which it begins: only the request
        sides and the items of portions are joined later, so ``request_index`` stays empty here.
        """
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
            items = None if rows is None else np.flatnonzero(rows[row - start : row - start + len(batch)])
            try:
                yield self._encode(batch, requests, items, row, file)
            except (ValueError, pa.ArrowException) as error:
                if isinstance(error, DatasetError):
                    raise
                raise DatasetError(f"{file}: rows {row} to {row + len(batch) - 1}: {error}") from None

    def _encode(
        self, batch: pa.RecordBatch, requests: np.ndarray, items: np.ndarray | None, row: int, file: str
    ) -> EncodedBatch:
        schema = self.schema
        every = len(requests) == len(batch)
        request = self._columns(batch, self._request_columns, None if every else requests)
        item = self._columns(batch, self._item_columns, items)
        item_rows = np.arange(len(batch)) if items is None else items
        place = _Place(file, row, item_rows)
        self._count_truncated(request, item)
        labels, label_valid = self._labels(item, place)
        surface = _taken(batch, schema.surface.column, None if every else requests)
        moments = self._time(request, batch, _Place(file, row, requests))
        encoded = encode_rows(self.encoder, schema.request_features, schema.sequences, request, len(requests), moments)
        return EncodedBatch(
            request=_narrow(encoded),
            item=_narrow(encode_rows(self.encoder, schema.item_features, (), item, len(item_rows))),
            request_index=np.zeros(0, dtype=np.int64),
            request_time=moments,
            user_id=self._user(request[schema.user]),
            surface=surface_codes(surface, schema),
            labels=labels,
            label_valid=label_valid,
            weight=_positive(item, schema.weight, place, "must not be negative", 0.0, np.inf),
            sampling_rate=_positive(
                item, schema.sampling_rate, place, "must be above 0 and at most 1", np.nextafter(0.0, 1.0), 1.0
            ),
            impression_id=_whole(item[schema.impression_id], schema.impression_id, place),
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


class _Rows:
    """Encoded rows with offsets at hand, so that a slice costs no more than its own size."""

    def __init__(self, rows: EncodedRows) -> None:
        self._rows = rows
        self._offsets: dict[str, np.ndarray] = {}
        shared: dict[int, np.ndarray] = {}
        for key, lengths in rows.lengths.items():
            if len(rows.ids[key]) != rows.rows or not bool((lengths == 1).all()):
                # The attributes of a sequence have one array of lengths.
                if id(lengths) not in shared:
                    shared[id(lengths)] = np.concatenate([[0], np.cumsum(lengths)])
                self._offsets[key] = shared[id(lengths)]

    def slice(self, start: int, stop: int) -> EncodedRows:
        """Rows ``start .. stop - 1`` with int64 ids."""
        rows = self._rows
        bounds = {key: self._bounds(key, start, stop) for key in rows.ids}
        firsts = {key.split(".", 1)[0]: bound for key, bound in bounds.items()}
        return EncodedRows(
            rows=stop - start,
            ids={key: value[slice(*bounds[key])].astype(np.int64) for key, value in rows.ids.items()},
            lengths={key: value[start:stop] for key, value in rows.lengths.items()},
            weights={key: value[slice(*bounds[key])] for key, value in rows.weights.items()},
            dense=rows.dense[start:stop],
            times={name: value[slice(*firsts[name])] for name, value in rows.times.items()},
        )

    def _bounds(self, key: str, start: int, stop: int) -> tuple[int, int]:
        offsets = self._offsets.get(key)
        return (start, stop) if offsets is None else (int(offsets[start]), int(offsets[stop]))


def _taken(batch: pa.RecordBatch, name: str, rows: np.ndarray | None) -> pa.Array:
    column = batch.column(batch.schema.get_field_index(name))
    return column if rows is None else column.take(pa.array(rows))


def _narrow(rows: EncodedRows) -> EncodedRows:
    """With int32 ids where they fit, and one array of lengths for keys of equal lengths."""
    ids = {}
    for key, value in rows.ids.items():
        fits = not len(value) or int(value.max()) <= np.iinfo(np.int32).max
        ids[key] = value.astype(np.int32) if fits else value
    return EncodedRows(rows.rows, ids, rows.lengths, rows.weights, rows.dense, rows.times)


def _join(chunks: list[EncodedBatch], sizes: np.ndarray, order: np.ndarray | None) -> EncodedBatch:
    """All portions of a window as one, with requests in the given order. Empties ``chunks``.

    Args:
        sizes: rows of each request, int64 ``[r]``, in file order. order: int64 ``[r]`` or ``None``.
    """
    used = sizes if order is None else sizes[order]
    requests, rows = len(sizes), int(sizes.sum())
    items: np.ndarray | None = None
    if order is not None:
        items = order if rows == requests else jagged_index((np.cumsum(sizes) - sizes)[order], used)
    request_fields = ("request_time", "user_id", "surface")
    request = {name: _pick([getattr(c, name) for c in chunks], order) for name in request_fields}
    item_fields = ("labels", "label_valid", "weight", "sampling_rate", "impression_id")
    item = {name: _pick([getattr(c, name) for c in chunks], items) for name in item_fields}
    request_parts = [c.request for c in chunks]
    item_parts = [c.item for c in chunks]
    chunks.clear()
    return EncodedBatch(
        request=_join_rows(request_parts, order, requests),
        item=_join_rows(item_parts, items, rows),
        request_index=np.repeat(np.arange(requests, dtype=np.int64), used),
        **request,
        **item,
    )


def _join_rows(parts: list[EncodedRows], order: np.ndarray | None, rows: int) -> EncodedRows:
    """One key after another, so that only one of them is in memory twice. Empties the parts."""
    assert sum(part.rows for part in parts) == rows
    first = parts[0]
    lengths: dict[str, np.ndarray] = {}
    gathers: dict[str, np.ndarray | None] = {}
    groups: dict[str, str] = {}
    for key in first.lengths:
        # Attributes of one sequence lie alike, so the first of them serves for all.
        leader = groups.setdefault(key.split(".", 1)[0], key)
        if leader == key:
            before = np.concatenate([part.lengths[key] for part in parts])
            lengths[key] = before if order is None else before[order]
            if order is None or bool((before == 1).all()):
                gathers[key] = order
            else:
                gathers[key] = jagged_index((np.cumsum(before) - before)[order], lengths[key])
        else:
            lengths[key], gathers[key] = lengths[leader], gathers[leader]
    ids = {key: _pick([part.ids.pop(key) for part in parts], gathers[key]) for key in list(first.ids)}
    weights = {key: _pick([part.weights.pop(key) for part in parts], gathers[key]) for key in list(first.weights)}
    times = {name: _pick([part.times.pop(name) for part in parts], gathers[groups[name]]) for name in list(first.times)}
    dense = _pick([part.dense for part in parts], order)
    return EncodedRows(rows, ids, lengths, weights, dense, times)


def _pick(parts: list[np.ndarray], index: np.ndarray | None) -> np.ndarray:
    joined = np.concatenate(parts) if len(parts) > 1 else parts[0]
    return joined if index is None else joined[index]


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
