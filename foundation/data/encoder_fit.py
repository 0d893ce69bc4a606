"""Learning an Encoder (vocabularies, means and deviations) from the training rows, chunk by chunk."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import numpy as np

from foundation.data.encoding import Column, Encoder, EncodingError, as_floats, transform_dense
from foundation.data.ids import IdType, canonical_ids
from foundation.data.schema import FIRST_ROW, Feature, Schema


class EncoderFit:
    """Learns vocabularies and statistics from the training rows, chunk by chunk.

    A vocabulary counts the ids of the features that use its table; only a table that no feature uses counts
    the ids of sequences. Ids seen less than ``min_count`` times stay unknown.
    """

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        self._counts: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        self._moments: dict[str, tuple[int, float, float]] = {}
        self._sources = _vocabulary_sources(schema)
        self._hashed = _hash_sources(schema)
        self._hash_ids: dict[str, tuple[IdType, str]] = {}

    def update(self, columns: Mapping[str, Column]) -> None:
        """Adds the rows of one chunk; ``columns`` is keyed by column name."""
        for table, names in self._sources.items():
            for name in names:
                self._count(table, columns[name], name)
        for name, table in self._hashed:
            self._note_type(table, columns[name], name)
        for feature in self.schema.features:
            if feature.transform in ("standardize", "log1p_standardize"):
                self._moments[feature.name] = _merge_moments(
                    self._moments.get(feature.name, (0, 0.0, 0.0)), feature, columns[feature.column]
                )

    def finish(self) -> Encoder:
        """The fitted encoder."""
        vocabularies: dict[str, np.ndarray] = {}
        for table in self.schema.tables:
            if table.kind == "vocabulary":
                values, counts = self._counts.get(table.name, (np.zeros(0, np.int64), np.zeros(0, np.int64)))
                vocabularies[table.name] = self._limit(values, counts, table.min_count, table.rows)
        statistics = {}
        for name, (count, mean, squares) in self._moments.items():
            deviation = float(np.sqrt(squares / count)) if count else 0.0
            statistics[name] = (mean, deviation if deviation > 1e-9 * abs(mean) else 1.0)
        return Encoder(self.schema, vocabularies, statistics, {t: kind for t, (kind, _) in self._hash_ids.items()})

    @staticmethod
    def _limit(values: np.ndarray, counts: np.ndarray, min_count: int, rows: int | None) -> np.ndarray:
        """The ids seen often enough; with ``rows``, the most frequent that fit (smaller id first on ties)."""
        keep = counts >= min_count
        values, counts = values[keep], counts[keep]
        if rows is not None and len(values) > rows - FIRST_ROW:
            order = np.lexsort((np.arange(len(values)), -counts))[: rows - FIRST_ROW]
            values = values[np.sort(order)]
        return values

    def _note_type(self, table: str, column: Column, name: str) -> None:
        """Remembers whether the ids of a hash table are integers or strings."""
        if not len(column.values) or (column.valid is not None and not column.valid.any()):
            return
        kind: IdType = "string" if column.dictionary is not None or column.values.dtype.kind in "OUS" else "integer"
        known, first = self._hash_ids.setdefault(table, (kind, name))
        if known != kind:
            raise EncodingError(
                f"{name}: has {kind} ids, but {first} has {known} ids in the same table {table}, where 7 and '7' are "
                "different ids; cast one of the columns, or give it a table of its own"
            )

    def _count(self, table: str, column: Column, name: str) -> None:
        values = column.values if column.valid is None else column.values[column.valid]
        if not len(values):
            return
        new, counts = np.unique(values if column.dictionary is not None else _ids(values, name), return_counts=True)
        if column.dictionary is not None:
            # Each string once; a dictionary may hold one twice.
            words = _ids(column.dictionary[new], name)
            new, place = np.unique(words, return_inverse=True)
            counts = np.bincount(place, weights=counts).astype(np.int64)
        if table in self._counts:
            old, old_counts = self._counts[table]
            if (old.dtype.kind == "i") != (new.dtype.kind == "i"):
                raise EncodingError(f"{name}: table {table} would hold both integers and strings")
            both, place = np.unique(np.concatenate([old, new]), return_inverse=True)
            counts = np.bincount(place, weights=np.concatenate([old_counts, counts])).astype(np.int64)
            new = both
        self._counts[table] = (new, counts)


def _ids(values: np.ndarray, name: str) -> np.ndarray:
    """Canonical ids, int64 or unicode."""
    return canonical_ids(values, name).astype(str if values.dtype.kind in "OUS" else np.int64)


def _vocabulary_sources(schema: Schema) -> dict[str, list[str]]:
    """The columns whose ids make up each vocabulary."""
    wanted = {t.name for t in schema.tables if t.kind == "vocabulary"}
    sources: dict[str, list[str]] = defaultdict(list)
    for feature in schema.features:
        if feature.table in wanted:
            sources[str(feature.table)].append(feature.column)
    for sequence in schema.sequences:
        for attribute in sequence.attributes:
            if attribute.table in wanted and attribute.table not in {f.table for f in schema.features}:
                sources[attribute.table].append(attribute.column)
    return {table: list(dict.fromkeys(names)) for table, names in sources.items()}


def _hash_sources(schema: Schema) -> list[tuple[str, str]]:
    """Each column whose ids are hashed, with its table."""
    uses = [(f.column, str(f.table)) for f in schema.features if f.table is not None]
    uses += [(a.column, a.table) for s in schema.sequences for a in s.attributes]
    return [(column, table) for column, table in dict.fromkeys(uses) if schema.table(table).kind == "hash"]


def _merge_moments(before: tuple[int, float, float], feature: Feature, column: Column) -> tuple[int, float, float]:
    """Count, mean and sum of squared deviations after one more chunk (Chan et al., 1983)."""
    values = as_floats(column.values, feature.column)
    good = np.isfinite(values) if column.valid is None else column.valid & np.isfinite(values)
    values = transform_dense(feature, values[good])
    if not len(values):
        return before
    count, mean, squares = before
    total = count + len(values)
    gap = float(values.mean()) - mean
    return (
        total,
        mean + gap * len(values) / total,
        squares + float(values.var()) * len(values) + gap * gap * count * len(values) / total,
    )
