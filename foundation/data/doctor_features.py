"""The doctor's look at features and histories, batch by batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from foundation.data.doctor_findings import Findings, Severity
from foundation.data.encoding import Column, Encoder
from foundation.data.schema import FIRST_ROW, UNKNOWN_ROW, Feature, Schema, Sequence
from foundation.data.wall_time import wall_to_ms

MANY_UNKNOWN = 0.5
MANY_COLLISIONS = 0.2


@dataclass
class _Ids:
    """Values, missing and unknown ids of one input in one split."""

    values: int = 0
    missing: int = 0
    unknown: int = 0


@dataclass
class FeatureChecks:
    """Checks the columns of features and sequences. ``encoder`` may be missing: unknown ids are not counted then."""

    schema: Schema
    encoder: Encoder | None
    findings: Findings
    _ids: dict[tuple[str, str, str], _Ids] = field(default_factory=dict)
    _empty: dict[str, list[int]] = field(default_factory=dict)
    _used: dict[str, np.ndarray] = field(default_factory=dict)
    _present: dict[tuple[str, str], list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._low = wall_to_ms("2000-01-01", "UTC", "")
        self._tables = {t.name: t for t in self.schema.tables}
        for table in self.schema.tables:
            if table.kind == "hash":
                self._used[table.name] = np.zeros(int(table.rows or 0), dtype=bool)

    def update(self, split: str, file: str, columns: Mapping[str, Column], rows: int, time: np.ndarray) -> None:
        """Adds a batch; ``time`` int64 ``[rows]`` ms."""
        for feature in self.schema.features:
            column = columns[feature.column]
            self._presence(split, feature.column, column, rows)
            if feature.kind == "dense":
                self._dense(feature, file, column)
            elif feature.kind == "embedding":
                self._embedding(feature, file, column)
            else:
                assert feature.table is not None
                self._count_ids(split, file, feature.table, feature.column, feature.name, column)
                if feature.kind == "multi":
                    self._multi(feature, file, column, columns)
        for sequence in self.schema.sequences:
            self._sequence(sequence, split, file, columns, time)

    def finish(self) -> None:
        """Reports what only the whole dataset shows."""
        for (split, name), (present, rows) in self._present.items():
            if not present:
                message = f"is null in all {rows} rows of {split}"
                self.findings.add("all_null", "warning", message, column=name, rows=rows, detail=split)
            else:
                self.findings.add(
                    "nulls", "info", "is null; such rows take the missing row of its table, or the mean", column=name,
                    rows=rows - present,
                )  # fmt: skip
        for (split, column, table), ids in self._ids.items():
            share = ids.unknown / max(ids.values - ids.missing, 1)
            if self._tables[table].kind != "vocabulary" or not ids.unknown:
                continue
            severity: Severity = "warning" if share > MANY_UNKNOWN else "info"
            advice = "; were the ids made in the same way as for the training rows?" if severity == "warning" else ""
            self.findings.add(
                "unknown_ids", severity,
                f"{share:.1%} of its ids in {split} are not in the vocabulary of table {table}{advice}",
                column=column, rows=ids.unknown, detail=split,
            )  # fmt: skip
        for name, used in self._used.items():
            self._collisions(name, used)
        for name, (empty, rows) in self._empty.items():
            self.findings.add(
                "empty_history", "info", f"sequence {name} is empty in {empty / max(rows, 1):.1%} of the rows",
                column=name, rows=empty,
            )  # fmt: skip

    def _presence(self, split: str, name: str, column: Column, rows: int) -> None:
        state = self._present.setdefault((split, name), [0, 0])
        if column.offsets is not None:
            state[0] += rows  # an empty list is a value
        else:
            state[0] += rows if column.valid is None else int(column.valid.sum())
        state[1] += rows

    def _dense(self, feature: Feature, file: str, column: Column) -> None:
        values = column.values.astype(np.float64)
        valid = np.ones(len(values), bool) if column.valid is None else column.valid
        odd = int((valid & ~np.isfinite(values)).sum())
        self.findings.add(
            "not_finite",
            "warning",
            "is NaN or infinite; counted as missing",
            file=file,
            column=feature.column,
            rows=odd,
        )
        if feature.transform in ("log1p", "log1p_standardize"):
            with np.errstate(invalid="ignore"):
                negative = valid & np.isfinite(values) & (values < 0)
            self.findings.add(
                "negative", "warning", "is negative, but its transform is a logarithm; counted as 0", file=file,
                column=feature.column, rows=int(negative.sum()),
            )  # fmt: skip

    def _embedding(self, feature: Feature, file: str, column: Column) -> None:
        if column.offsets is None:
            return
        lengths = np.diff(column.offsets)
        odd = (lengths != feature.dim) & (lengths != 0)
        self.findings.add(
            "embedding_dim", "error", f"does not have {feature.dim} numbers", file=file, column=feature.column,
            rows=int(odd.sum()),
        )  # fmt: skip
        odd_values = int((~np.isfinite(column.values.astype(np.float64))).sum())
        self.findings.add(
            "not_finite",
            "warning",
            "is NaN or infinite; counted as 0",
            file=file,
            column=feature.column,
            rows=odd_values,
        )

    def _multi(self, feature: Feature, file: str, column: Column, columns: Mapping[str, Column]) -> None:
        if column.offsets is None:
            return
        lengths = np.diff(column.offsets)
        self.findings.add(
            "long_list", "info", f"has more than {feature.max_length} ids; the first {feature.max_length} are used",
            file=file, column=feature.column, rows=int((lengths > feature.max_length).sum()),
        )  # fmt: skip
        if feature.weights is None:
            return
        weights = columns[feature.weights]
        if weights.offsets is None or len(weights.offsets) != len(column.offsets):
            return
        apart = int((np.diff(weights.offsets) != lengths).sum())
        self.findings.add(
            "weights_length", "error", f"has another length than {feature.column}", file=file, column=feature.weights,
            rows=apart,
        )  # fmt: skip

    def _count_ids(self, split: str, file: str, table: str, column: str, key: str, ids: Column) -> None:
        if ids.values.dtype.kind == "f":
            valid = ids.values if ids.valid is None else ids.values[ids.valid]
            fraction = int((valid != np.floor(valid)).sum())
            self.findings.add(
                "fractional_ids", "error", "has ids with a fraction; ids are whole numbers or strings", file=file,
                column=column, rows=fraction,
            )  # fmt: skip
            if fraction:
                return
        if self.encoder is None:
            return
        count = self._ids.setdefault((split, column, table), _Ids())
        try:
            rows = self.encoder.encode_ids(table, ids, key)
        except ValueError as error:
            self.findings.add("id_type", "error", str(error), file=file, column=column)
            return
        unknown = int((rows == UNKNOWN_ROW).sum())
        count.values += len(rows)
        count.missing += 0 if ids.valid is None else int((~ids.valid).sum())
        count.unknown += unknown
        kind = self._tables[table]
        if kind.kind == "range":
            self.findings.add(
                "id_out_of_range", "error",
                f"has ids outside table {table}, which holds 0 to {int(kind.rows or 0) - FIRST_ROW - 1};"
                " give it more rows, or a vocabulary (they count as unknown until then)",
                file=file, column=column, rows=unknown,
            )  # fmt: skip
        elif kind.kind == "hash":
            self._used[table][rows] = True

    def _collisions(self, name: str, used: np.ndarray) -> None:
        """The share of ids that share a row, estimated from the share of rows in use (linear counting)."""
        rows, taken = len(used) - FIRST_ROW, int(used[FIRST_ROW:].sum())
        if not taken:
            return
        ids = -rows * np.log(max(1 - taken / rows, 0.5 / rows))
        share = max(0.0, 1 - taken / ids)
        severity: Severity = "warning" if share > MANY_COLLISIONS else "info"
        advice = "; give it more rows" if severity == "warning" else ""
        self.findings.add(
            "hash_collisions", severity,
            f"table {name}: about {ids:,.0f} ids in {rows:,} rows, so about {share:.1%} of them share a row{advice}",
            detail=name,
        )  # fmt: skip

    def _sequence(
        self, sequence: Sequence, split: str, file: str, columns: Mapping[str, Column], time: np.ndarray
    ) -> None:
        first = columns[sequence.attributes[0].column]
        if first.offsets is None:
            return
        lengths = np.diff(first.offsets)
        empty = self._empty.setdefault(sequence.name, [0, 0])
        empty[0] += int((lengths == 0).sum())
        empty[1] += len(lengths)
        others = [a.column for a in sequence.attributes[1:]] + ([sequence.timestamp] if sequence.timestamp else [])
        for name in others:
            offsets = columns[name].offsets
            apart = len(lengths) if offsets is None else int((np.diff(offsets) != lengths).sum())
            self.findings.add(
                "unaligned", "error", f"has another number of events than {sequence.attributes[0].column}", file=file,
                column=name, rows=apart,
            )  # fmt: skip
            if apart:
                return
        self.findings.add(
            "long_history", "info",
            f"has more than {sequence.max_length} events; the {sequence.keep} {sequence.max_length} are used",
            file=file, column=sequence.attributes[0].column, rows=int((lengths > sequence.max_length).sum()),
        )  # fmt: skip
        for attribute in sequence.attributes:
            key = sequence.key(attribute.name)
            self._count_ids(split, file, attribute.table, attribute.column, key, columns[attribute.column])
        if sequence.timestamp is not None:
            self._event_times(sequence.timestamp, file, columns[sequence.timestamp], lengths, time)

    def _event_times(self, name: str, file: str, events: Column, lengths: np.ndarray, time: np.ndarray) -> None:
        row = np.repeat(np.arange(len(lengths)), lengths)
        known = np.ones(len(row), bool) if events.valid is None else events.valid
        values = np.nan_to_num(events.values).astype(np.int64)
        row, values = row[known], values[known]
        self.findings.add(
            "event_time_unit", "error", "has event times before 2000; they must be in milliseconds since 1970",
            file=file, column=name, rows=_rows(row[values < self._low]),
        )  # fmt: skip
        self.findings.add(
            "future_history", "error",
            "has events at or after the row's own time: the label would leak; build histories with prepare",
            file=file, column=name, rows=_rows(row[values >= time[row]]),
        )  # fmt: skip
        backwards = (np.diff(values) < 0) & (np.diff(row) == 0)
        self.findings.add(
            "unsorted_history", "error", "is not in time order, oldest first; sort it, or build it with prepare",
            file=file, column=name, rows=_rows(row[1:][backwards]),
        )  # fmt: skip


def _rows(rows: np.ndarray) -> int:
    """Number of different rows."""
    return len(np.unique(rows))
