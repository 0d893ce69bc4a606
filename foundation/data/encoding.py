"""From raw columns to model inputs, in numpy: the one implementation that training and serving share.

``Encoder`` turns ids into embedding rows and numbers into standardised floats. ``encode_rows`` applies it to
all features of one side. ``model_inputs`` lays the result out as the named, padded inputs of a value model.

Legend: R requests, N impressions, K tasks, T events of one sequence.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from foundation.data.columns import (
    Column,
    EncodingError,
    as_floats,
    check_aligned,
    clip,
    column_of,
    offsets_of,
    select,
)
from foundation.data.ids import IdType, VocabularyIndex, as_id_type, canonical_ids, hash_rows, id_type, range_rows
from foundation.data.jagged import jagged_index, pad
from foundation.data.schema import FIRST_ROW, MISSING_ROW, UNKNOWN_ROW, Feature, Schema, Sequence

NO_TIME = -1
"""The time of an event whose time is not known."""

MS_PER_HOUR = 3_600_000

# Long columns are looked up in portions, so that what lies between raw id and row stays in the processor's cache.
_LOOKUP = 1 << 14


@dataclass(frozen=True, slots=True)
class EncodedRows:
    """The encoded inputs of one side, jagged where the source is.

    ``ids[key]`` int64 ``[sum(lengths[key])]``, ``lengths[key]`` int64 ``[rows]``, ``weights[key]`` float32,
    as long as ``ids[key]``, ``dense`` float32 ``[rows, U]`` in schema order, ``times[sequence]`` int64
    ``[T]`` in ms (``NO_TIME`` where unknown). A key is a feature's name or ``sequence.attribute``.
    """

    rows: int
    ids: dict[str, np.ndarray]
    lengths: dict[str, np.ndarray]
    weights: dict[str, np.ndarray]
    dense: np.ndarray
    times: dict[str, np.ndarray]

    def take(self, rows: np.ndarray) -> EncodedRows:
        """The rows with these numbers (int64 ``[n]``), in this order."""
        gathers: dict[str, np.ndarray] = {}
        lengths = {key: value[rows] for key, value in self.lengths.items()}
        for key, before in self.lengths.items():
            if len(self.ids[key]) == self.rows and bool((before == 1).all()):
                gathers[key] = rows
            else:
                starts = np.cumsum(before) - before
                gathers[key] = jagged_index(starts[rows], lengths[key])
        return EncodedRows(
            rows=len(rows),
            ids={key: value[gathers[key]] for key, value in self.ids.items()},
            lengths=lengths,
            weights={key: value[gathers[key]] for key, value in self.weights.items()},
            dense=self.dense[rows],
            times={name: value[gathers[_first_key(self, name)]] for name, value in self.times.items()},
        )


@dataclass(frozen=True, slots=True)
class EncodedBatch:
    """R requests with their N impressions, as numpy arrays.

    ``request_index`` int64 ``[N]`` ascending, ``request_time`` int64 ``[R]`` ms, ``user_id`` int64 ``[R]``,
    ``surface`` int64 ``[R]``, ``labels`` float32 ``[N, K]`` with ``label_valid`` bool ``[N, K]``, ``weight``
    and ``sampling_rate`` float32 ``[N]``, ``impression_id`` int64 ``[N]``.
    """

    request: EncodedRows
    item: EncodedRows
    request_index: np.ndarray
    request_time: np.ndarray
    user_id: np.ndarray
    surface: np.ndarray
    labels: np.ndarray
    label_valid: np.ndarray
    weight: np.ndarray
    sampling_rate: np.ndarray
    impression_id: np.ndarray


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, dtype and dims of a model input; a dim is ``"R"``, ``"N"`` or a number."""

    name: str
    dtype: Literal["int64", "float32"]
    dims: tuple[str | int, ...]


class Encoder:
    """Raw ids to embedding rows, raw numbers to floats.

    Args:
        schema: the dataset's schema.
        vocabularies: sorted distinct ids of each ``vocabulary`` table, int64 or unicode.
        statistics: mean and standard deviation of each standardised dense feature.
        hash_ids: whether the training rows had integers or strings in each ``hash`` table. 7 and "7" are different
            ids with different rows; a table left out takes both.
    """

    def __init__(
        self,
        schema: Schema,
        vocabularies: Mapping[str, np.ndarray],
        statistics: Mapping[str, tuple[float, float]],
        hash_ids: Mapping[str, IdType],
    ) -> None:
        self.schema = schema
        self.vocabularies = dict(vocabularies)
        self.statistics = dict(statistics)
        self.hash_ids = dict(hash_ids)
        self.counters: dict[str, dict[str, int]] = defaultdict(lambda: {"missing": 0, "unknown": 0})
        self._tables = {t.name: t for t in schema.tables}
        self._index = {name: VocabularyIndex(v) for name, v in self.vocabularies.items()}
        for table in schema.tables:
            if table.kind == "vocabulary" and table.name not in self._index:
                raise EncodingError(f"table {table.name}: the encoder holds no vocabulary for it")

    def id_type(self, table: str) -> IdType | None:
        """The type of a table's ids; None where there were no training rows to tell."""
        kind = self._tables[table].kind
        if kind == "vocabulary":
            return id_type(self.vocabularies[table]) if len(self.vocabularies[table]) else None
        return "integer" if kind == "range" else self.hash_ids.get(table)

    @property
    def table_rows(self) -> dict[str, int]:
        """Rows of each table, the two reserved ones included."""
        return {
            t.name: len(self.vocabularies[t.name]) + FIRST_ROW if t.kind == "vocabulary" else int(t.rows or 0)
            for t in self.schema.tables
        }

    @property
    def hash(self) -> str:
        """16 hex digits that change with any vocabulary, statistic, type of ids or the schema."""
        digest = hashlib.sha256(self.schema.hash.encode())
        for name in sorted(self.vocabularies):
            digest.update(name.encode() + b"\0")
            values = self.vocabularies[name]
            digest.update(values.tobytes() if values.dtype.kind == "i" else "\0".join(values).encode())
        digest.update(json.dumps([self.statistics, self.hash_ids], sort_keys=True).encode())
        return digest.hexdigest()[:16]

    def save(self, path: str | Path) -> None:
        """Writes vocabularies, statistics and types of ids as an ``.npz`` file without pickled objects."""
        facts = {"schema_hash": self.schema.hash, "statistics": self.statistics, "hash_ids": self.hash_ids}
        meta = json.dumps(facts, sort_keys=True)
        arrays: dict[str, Any] = {f"vocabulary.{name}": v for name, v in self.vocabularies.items()}
        with open(path, "wb") as file:
            np.savez_compressed(file, meta=np.frombuffer(meta.encode(), dtype=np.uint8), **arrays)

    @staticmethod
    def load(path: str | Path, schema: Schema) -> Encoder:
        """Reads what :meth:`save` wrote. Raises EncodingError for a foreign, broken or mismatched file."""
        try:
            with np.load(path, allow_pickle=False) as stored:
                arrays = {name: stored[name] for name in stored.files}
            meta = json.loads(arrays.pop("meta").tobytes())
            made_for, hash_ids = str(meta["schema_hash"]), dict(meta["hash_ids"])
            statistics = {name: (float(pair[0]), float(pair[1])) for name, pair in meta["statistics"].items()}
        except FileNotFoundError:
            raise EncodingError(f"{path}: no such encoder file") from None
        except Exception as error:  # zip, numpy and json each have their own errors for a broken file
            raise EncodingError(f"{path}: not an encoder file, or a damaged one: {error!r}") from None
        if made_for != schema.hash:
            raise EncodingError(
                f"{path}: made for schema {made_for}, not {schema.hash} ({schema.source}); "
                "prepare the dataset again or use the schema saved beside the encoder"
            )
        vocabularies = {name.removeprefix("vocabulary."): values for name, values in arrays.items()}
        return Encoder(schema, vocabularies, statistics, hash_ids)

    def encode_ids(self, table_name: str, column: Column, key: str, out: np.ndarray | None = None) -> np.ndarray:
        """Embedding rows of a column's values; missing and unknown ids are counted under ``key``.

        Args:
            out: where to write them, as long as the values, of an integer type that holds the table's rows; by
                default a new int64 array.
        """
        rows = np.empty(len(column.values), dtype=np.int64) if out is None else out
        self.encode_together([(table_name, column, key, rows, None)])
        return rows

    def encode_together(self, parts: list[tuple[str, Column, str, np.ndarray, np.ndarray | None]]) -> None:
        """Does :meth:`encode_ids` for columns with equally many values, portion by portion.

        Rows that lie side by side in memory are so written while that is in the cache.

        Args:
            parts: table, column, key, where to write the rows, and which values to take as they are (bool;
                ``None``: all); the others become "missing".
        """
        known = {
            key: self._rows_of(table, column.dictionary, key)
            for table, column, key, *_ in parts
            if column.dictionary is not None
        }
        for start in range(0, max((len(out) for *_, out, _ in parts), default=0), _LOOKUP):
            portion = slice(start, start + _LOOKUP)
            for table, column, key, out, shown in parts:
                valid = None if column.valid is None else column.valid[portion]
                rows = self._look_up(table, column.values[portion], valid, known.get(key), key)
                if shown is not None:
                    # Row 0 is "missing"; a product is several times faster than an assignment by mask.
                    rows *= shown[portion]
                out[portion] = rows

    def _look_up(
        self, table_name: str, values: np.ndarray, valid: np.ndarray | None, known: np.ndarray | None, key: str
    ) -> np.ndarray:
        """Rows of ids, or of positions in a dictionary whose rows are ``known``; counts them."""
        counter = self.counters[key]
        if valid is not None and known is None and values.dtype.kind == "i" and valid.any():
            # Faster than picking the valid ones: what lies under a null is some integer.
            rows = self._rows_of(table_name, values, key) * valid
            counter["missing"] += int(len(values) - np.count_nonzero(valid))
        elif valid is not None and not valid.all():
            rows = np.full(len(values), MISSING_ROW, dtype=np.int64)
            present = values[valid]
            rows[valid] = self._rows_of(table_name, present, key) if known is None else known[present]
            counter["missing"] += int(len(values) - np.count_nonzero(valid))
        else:
            rows = self._rows_of(table_name, values, key) if known is None else known[values]
        counter["unknown"] += int(np.count_nonzero(rows == UNKNOWN_ROW))
        return rows

    def _rows_of(self, table_name: str, values: np.ndarray, key: str) -> np.ndarray:
        if not len(values):
            return np.zeros(0, dtype=np.int64)
        table = self._tables[table_name]
        ids = as_id_type(canonical_ids(values, key), self.id_type(table_name), key, table_name)
        if table.kind == "hash":
            return hash_rows(ids, int(table.rows or 0), table.seed)
        if table.kind == "range":
            return range_rows(ids, int(table.rows or 0))
        return self._index[table_name].rows(ids)

    def encode_dense(self, feature: Feature, column: Column) -> np.ndarray:
        """Transformed numbers, float32 ``[rows, dim]``; null, NaN and infinite values become 0, counted."""
        values = as_floats(column.values, feature.column)
        good = np.isfinite(values) if column.valid is None else column.valid & np.isfinite(values)
        if feature.kind == "embedding":
            return self._encode_embedding(feature, column, values, good)
        self.counters[feature.name]["missing"] += int(len(values) - np.count_nonzero(good))
        values = transform_dense(feature, np.where(good, values, 0.0))
        if feature.name in self.statistics:
            mean, deviation = self.statistics[feature.name]
            values = (values - mean) / deviation
        return np.where(good, values, 0.0).astype(np.float32)[:, None]

    def _encode_embedding(self, feature: Feature, column: Column, values: np.ndarray, good: np.ndarray) -> np.ndarray:
        if column.offsets is None:
            raise EncodingError(f"{feature.column}: an embedding feature needs a list column")
        lengths = np.diff(column.offsets)
        odd = (lengths != feature.dim) & (lengths != 0)
        if odd.any():
            row = int(np.flatnonzero(odd)[0])
            raise EncodingError(f"{feature.column}: expected {feature.dim} numbers, got {lengths[row]} in row {row}")
        out = np.zeros((len(lengths), feature.dim), dtype=np.float32)
        out[lengths > 0] = np.where(good, values, 0.0).reshape(-1, feature.dim)
        self.counters[feature.name]["missing"] += int(np.count_nonzero(lengths == 0))
        return out


def encode_rows(
    encoder: Encoder,
    features: Iterable[Feature],
    sequences: Iterable[Sequence],
    columns: Mapping[str, Column],
    rows: int,
    request_time: np.ndarray | None = None,
    room: Callable[[str, int], np.ndarray] | None = None,
) -> EncodedRows:
    """Encodes the given features and sequences of ``rows`` rows.

    Args:
        columns: raw columns by column name; each has ``rows`` rows.
        request_time: int64 ``[rows]`` ms; needed where a sequence has attributes that are known only later.
        room: gives the array for so many ids of a key, in the order of keys; by default they are new, of int64.

    Raises:
        EncodingError: a column is absent, of a type that does not fit, or list columns are not aligned.
    """
    ids: dict[str, np.ndarray] = {}
    lengths: dict[str, np.ndarray] = {}
    weights: dict[str, np.ndarray] = {}
    dense: list[np.ndarray] = []
    for feature in features:
        column = column_of(columns, feature.column)
        if feature.kind in ("dense", "embedding"):
            dense.append(encoder.encode_dense(feature, column))
            continue
        assert feature.table is not None
        if feature.kind == "multi":
            column, index = clip(column, feature.column, feature.max_length, "earliest")
            if feature.weights is not None:
                weights[feature.name] = _aligned(columns, feature.weights, index, column)
            lengths[feature.name] = np.diff(offsets_of(column, feature.column))
        else:
            lengths[feature.name] = np.ones(rows, dtype=np.int64)
        out = None if room is None else room(feature.name, len(column.values))
        ids[feature.name] = encoder.encode_ids(feature.table, column, feature.name, out)
    stacked = np.concatenate(dense, axis=1) if dense else np.zeros((rows, 0), dtype=np.float32)
    encoded = EncodedRows(rows=rows, ids=ids, lengths=lengths, weights=weights, dense=stacked, times={})
    for sequence in sequences:
        _encode_sequence(encoder, sequence, columns, encoded, request_time, room)
    return encoded


def model_signature(schema: Schema) -> list[TensorSpec]:
    """The inputs of a value model, in order; :func:`model_inputs` makes them."""
    specs: list[TensorSpec] = []
    for rows, features in (("R", schema.request_features), ("N", schema.item_features)):
        for f in features:
            if f.kind == "categorical":
                specs.append(TensorSpec(f.name, "int64", (rows,)))
            elif f.kind == "multi":
                specs.append(TensorSpec(f.name, "int64", (rows, f.max_length)))
                specs.append(TensorSpec(f"{f.name}.length", "int64", (rows,)))
                if f.weights is not None:
                    specs.append(TensorSpec(f"{f.name}.weight", "float32", (rows, f.max_length)))
        width = sum(f.dim for f in features if f.kind in ("dense", "embedding"))
        if width:
            specs.append(TensorSpec("dense.request" if rows == "R" else "dense.item", "float32", (rows, width)))
    for s in schema.sequences:
        specs += [TensorSpec(s.key(a.name), "int64", ("R", s.max_length)) for a in s.attributes]
        specs.append(TensorSpec(f"{s.name}.length", "int64", ("R",)))
        if s.timestamp is not None:
            specs.append(TensorSpec(f"{s.name}.age", "float32", ("R", s.max_length)))
    specs.append(TensorSpec("request_index", "int64", ("N",)))
    return specs


def model_inputs(
    schema: Schema,
    request: EncodedRows,
    item: EncodedRows,
    request_index: np.ndarray,
    request_time: np.ndarray,
) -> dict[str, np.ndarray]:
    """The named, padded inputs of a value model, as :func:`model_signature` lists them.

    Args:
        request: R rows. item: N rows. request_index: int64 ``[N]``. request_time: int64 ``[R]`` ms.
    """
    inputs: dict[str, np.ndarray] = {}
    for side, features, name in (
        (request, schema.request_features, "dense.request"),
        (item, schema.item_features, "dense.item"),
    ):
        for f in features:
            if f.kind == "categorical":
                inputs[f.name] = side.ids[f.name]
            elif f.kind == "multi":
                lengths = side.lengths[f.name]
                inputs[f.name] = pad(side.ids[f.name], lengths, f.max_length)
                inputs[f"{f.name}.length"] = lengths
                if f.weights is not None:
                    inputs[f"{f.name}.weight"] = pad(side.weights[f.name], lengths, f.max_length)
        if side.dense.shape[1]:
            inputs[name] = side.dense
    for s in schema.sequences:
        lengths = request.lengths[s.key(s.attributes[0].name)]
        for a in s.attributes:
            inputs[s.key(a.name)] = pad(request.ids[s.key(a.name)], lengths, s.max_length)
        inputs[f"{s.name}.length"] = lengths
        if s.timestamp is not None:
            age = log_age(request.times[s.name], np.repeat(request_time, lengths))
            inputs[f"{s.name}.age"] = pad(age, lengths, s.max_length)
    inputs["request_index"] = request_index
    return inputs


def log_age(event_time: np.ndarray, request_time: np.ndarray) -> np.ndarray:
    """``log(1 + seconds from event to request)`` float32; 0 where the event's time is unknown."""
    seconds = np.maximum(request_time - event_time, 0) / 1000.0
    return np.where(event_time == NO_TIME, 0.0, np.log1p(seconds)).astype(np.float32)


def transform_dense(feature: Feature, values: np.ndarray) -> np.ndarray:
    """The part of a dense transform that needs no statistics; negatives count as 0 under a logarithm."""
    if feature.transform in ("log1p", "log1p_standardize"):
        return np.log1p(np.maximum(values, 0.0))
    return values


def _encode_sequence(
    encoder: Encoder,
    sequence: Sequence,
    columns: Mapping[str, Column],
    rows: EncodedRows,
    request_time: np.ndarray | None,
    room: Callable[[str, int], np.ndarray] | None,
) -> None:
    first = sequence.attributes[0].column
    whole = offsets_of(column_of(columns, first), first)
    events, index = clip(columns[first], first, sequence.max_length, sequence.keep)
    lengths = np.diff(offsets_of(events, first))
    if sequence.timestamp is not None:
        column = column_of(columns, sequence.timestamp)
        check_aligned(offsets_of(column, sequence.timestamp), whole, sequence.timestamp, first)
        column = select(column, index)
        values = np.nan_to_num(column.values) if column.values.dtype.kind == "f" else column.values
        moments = canonical_ids(values, sequence.timestamp)
        rows.times[sequence.name] = moments if column.valid is None else np.where(column.valid, moments, NO_TIME)
    shown = _past(sequence, rows.times.get(sequence.name), lengths, request_time)
    parts = []
    for attribute in sequence.attributes:
        column = column_of(columns, attribute.column)
        check_aligned(offsets_of(column, attribute.column), whole, attribute.column, first)
        column = events if attribute.column == first else select(column, index)
        key, count = sequence.key(attribute.name), len(column.values)
        rows.ids[key] = np.empty(count, dtype=np.int64) if room is None else room(key, count)
        rows.lengths[key] = lengths
        parts.append((attribute.table, column, key, rows.ids[key], shown.get(attribute.known_after_hours)))
    encoder.encode_together(parts)


def _past(
    sequence: Sequence, moments: np.ndarray | None, lengths: np.ndarray, request_time: np.ndarray | None
) -> dict[float, np.ndarray]:
    """For each delay of the sequence's outcomes, which events have one that is known at request time.

    The others become "missing"; events of unknown time keep theirs.
    """
    delays = {attribute.known_after_hours for attribute in sequence.attributes if attribute.known_after_hours}
    if not delays:
        return {}
    assert request_time is not None, f"{sequence.name} needs request times to hide pending outcomes"
    assert moments is not None
    age = np.repeat(request_time, lengths) - moments
    timeless = moments == NO_TIME
    return {delay: timeless | (age >= delay * MS_PER_HOUR) for delay in delays}


def _aligned(columns: Mapping[str, Column], name: str, index: np.ndarray | None, ids: Column) -> np.ndarray:
    """The float32 weights that go with the values of a multi-valued feature."""
    column = column_of(columns, name)
    selected = select(column, index)
    if len(selected.values) != len(ids.values):
        raise EncodingError(f"{name}: {len(column.values)} weights do not go with the ids of its feature")
    values = as_floats(selected.values, name)
    good = np.isfinite(values) if selected.valid is None else selected.valid & np.isfinite(values)
    return np.where(good, values, 0.0).astype(np.float32)


def _first_key(rows: EncodedRows, sequence: str) -> str:
    return next(key for key in rows.ids if key.startswith(f"{sequence}."))
