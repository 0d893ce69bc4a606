"""The doctor's pass over the rows: keys, times, requests, labels, surfaces. One batch is in memory at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa

from foundation.data.arrow_columns import Role, column_roles, surface_codes, to_column
from foundation.data.dataset import SPLITS
from foundation.data.doctor_features import FeatureChecks
from foundation.data.doctor_files import Opened
from foundation.data.doctor_findings import Findings, Severity
from foundation.data.encoding import Column
from foundation.data.ids import id_hash, xxhash64_int64
from foundation.data.progress import progress
from foundation.data.schema import Schema
from foundation.data.storage import DatasetError, open_parquet
from foundation.data.wall_time import wall_text, wall_to_ms

BATCH_ROWS = 8192
RARE = 1e-3
_PRIME = np.uint64(0x9E3779B185EBCA87)


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch of rows: raw columns, keys as int64 (strings hashed), time in ms, surface index."""

    split: str
    file: str
    rows: int
    columns: Mapping[str, Column]
    surface: np.ndarray
    time: np.ndarray
    user: np.ndarray
    request: np.ndarray | None


def check_rows(opened: Opened, findings: Findings) -> None:
    """Reads all rows of all files once, in order, and reports what is wrong with them.

    A file that turns out to be damaged is taken off ``opened.files``.
    """
    schema = opened.schema
    assert schema is not None
    total = 0
    for split in SPLITS:
        for name in opened.files[split]:
            with open_parquet(opened.folder / name) as file:
                total += file.metadata.num_rows
    keys, labels = _KeyChecks(schema, findings), _LabelChecks(schema, findings)
    features = FeatureChecks(schema, opened.encoder, findings)
    with progress("checking rows", total) as advance:
        for batch in _batches(opened, schema, findings):
            keys.update(batch)
            labels.update(batch)
            features.update(batch.split, batch.file, batch.columns, batch.rows, batch.time)
            advance(batch.rows)
    keys.finish()
    labels.finish()
    features.finish()


def _batches(opened: Opened, schema: Schema, findings: Findings) -> Iterator[Batch]:
    roles = column_roles(schema)
    for split in SPLITS:
        for name in tuple(opened.files[split]):
            try:
                with open_parquet(opened.folder / name) as file:
                    for record in file.iter_batches(BATCH_ROWS, columns=list(roles), use_threads=False):
                        if len(record):
                            yield _batch(split, name, record, schema, roles)
            except (DatasetError, pa.ArrowException, OSError, ValueError) as error:
                message = f"cannot be read to its end; it may be damaged ({error})"
                findings.add("unreadable_file", "error", message, file=name)
                opened.files[split].remove(name)


def _batch(split: str, name: str, record: pa.RecordBatch, schema: Schema, roles: Mapping[str, Role]) -> Batch:
    columns = {c: to_column(record.column(record.schema.get_field_index(c)), role) for c, role in roles.items()}
    time = columns[schema.timestamp.column].values
    kind = record.schema.field(schema.timestamp.column).type
    temporal = pa.types.is_timestamp(kind) or pa.types.is_date(kind)
    scale = 1000 if schema.timestamp.unit == "s" and not temporal else 1
    with np.errstate(invalid="ignore"):
        milliseconds = (time * scale).astype(np.int64)
    surface = surface_codes(record.column(record.schema.get_field_index(schema.surface.column)), schema)
    request = None if schema.request_id is None else hashed(columns[schema.request_id], schema.request_id)
    user = hashed(columns[schema.user], schema.user)
    return Batch(split, name, len(record), columns, surface, milliseconds, user, request)


def hashed(column: Column, name: str) -> np.ndarray:
    """A stable int64 per value of a plain column; 0 where it is missing."""
    values = column.values
    if column.dictionary is not None:
        values = id_hash(column.dictionary, name)[column.values] if len(column.dictionary) else column.values
    elif values.dtype.kind == "f":
        values = values.astype(np.float64).view(np.int64)
    values = values.astype(np.int64)
    return values if column.valid is None else np.where(column.valid, values, 0)


def request_runs(files: list[Path], name: str, *, runs: bool) -> Iterator[pa.RecordBatch]:
    """The ids of one column as int64 (strings hashed) in batches of one column ``id``; nulls are left out.

    Args:
        runs: only the first of neighbouring equal ids.
    """
    last: int | None = None
    for path in files:
        with open_parquet(path) as file:
            for record in file.iter_batches(BATCH_ROWS, columns=[name], use_threads=False):
                column = to_column(record.column(0), Role("id"))
                ids = hashed(column, name)
                if runs and len(ids):
                    previous = ids[0] - 1 if last is None else last
                    last = int(ids[-1])
                    keep = np.diff(ids, prepend=previous) != 0
                    keep = keep if column.valid is None else keep & column.valid
                else:
                    keep = np.ones(len(ids), bool) if column.valid is None else column.valid
                yield pa.record_batch({"id": pa.array(ids[keep], pa.int64())})


@dataclass
class _Previous:
    """The last row of the batch before, within a split."""

    time: int | None = None
    request: int | None = None
    user: int = 0
    surface: int = 0
    features: int = 0


@dataclass
class _KeyChecks:
    schema: Schema
    findings: Findings
    previous: dict[str, _Previous] = field(default_factory=lambda: {s: _Previous() for s in SPLITS})
    ranges: dict[str, tuple[int, int]] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    # [split] -> rows by surface, the last one "other"; what a row of "other" has
    surfaces: dict[str, np.ndarray] = field(default_factory=dict)
    others: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.surfaces = {split: np.zeros(len(self.schema.surface_names), np.int64) for split in SPLITS}
        self.low, self.high = wall_to_ms("2000-01-01", "UTC", ""), wall_to_ms("2100-01-01", "UTC", "")

    def update(self, batch: Batch) -> None:
        self.rows[batch.split] += batch.rows
        self._nulls(batch)
        self._surfaces(batch)
        self._times(batch)
        self._order(batch)
        self._repeats(batch)
        self._sampling(batch)

    def finish(self) -> None:
        for split in SPLITS:
            if not self.rows[split]:
                severity: Severity = "error" if split == "train" else "warning"
                self.findings.add("empty_split", severity, f"split {split} has no rows")
            self._finish_surfaces(split)
        known = [(split, self.ranges[split]) for split in SPLITS if split in self.ranges]
        for (one, first), (two, second) in pairwise(known):
            if second[0] < first[1] and self.schema.split is not None:
                self.findings.add(
                    "split_overlap", "error",
                    f"{two} begins at {wall_text(second[0])}, before {one} ends at {wall_text(first[1])} (UTC):"
                    " the past would be learned from the future; split by time",
                    column=self.schema.timestamp.column,
                )  # fmt: skip

    def _nulls(self, batch: Batch) -> None:
        schema = self.schema
        for name in (schema.user, schema.timestamp.column, schema.impression_id):
            count = _invalid(batch.columns[name])
            self.findings.add(
                "null_key", "error", "is null; every row needs it", file=batch.file, column=name, rows=count
            )
        if schema.request_id is not None:
            self.findings.add(
                "null_request", "warning", "is null; such a row is a request of its own", file=batch.file,
                column=schema.request_id, rows=_invalid(batch.columns[schema.request_id]),
            )  # fmt: skip

    def _surfaces(self, batch: Batch) -> None:
        counts = self.surfaces[batch.split]
        counts += np.bincount(batch.surface, minlength=len(counts))
        odd = np.flatnonzero(batch.surface == len(counts) - 1)
        if len(odd) and batch.split not in self.others:
            self.others[batch.split] = _text_at(batch.columns[self.schema.surface.column], int(odd[0]))

    def _finish_surfaces(self, split: str) -> None:
        *listed, other = self.surfaces[split].tolist()
        rows, column = self.rows[split], self.schema.surface.column
        if other:
            severity: Severity = "warning" if other * 2 > rows else "info"
            message = (
                f"is none of the schema's surface.values in {other / rows:.1%} of the rows of {split}, such as"
                f" {self.others[split]}; they are surface other"
            )
            self.findings.add("other_surface", severity, message, column=column, rows=other, detail=split)
        for name, count in zip(self.schema.surface.values, listed, strict=True):
            if rows and not count and split == "train":
                message = f"is {name!r} in no row of train; is it spelt so in the rows? (schema key surface.values)"
                self.findings.add("empty_surface", "warning", message, column=column, detail=str(name))

    def _times(self, batch: Batch) -> None:
        column = batch.columns[self.schema.timestamp.column]
        time = batch.time if column.valid is None else batch.time[column.valid]
        odd = time[(time < self.low) | (time >= self.high)]
        if len(odd):
            self.findings.add(
                "time_unit", "error",
                f"has times such as {wall_text(int(odd[0]))}; is the unit really {self.schema.timestamp.unit!r}?"
                " (schema key timestamp.unit)",
                file=batch.file, column=self.schema.timestamp.column, rows=len(odd),
            )  # fmt: skip
        if len(time):
            low, high = self.ranges.get(batch.split, (int(time[0]), int(time[0])))
            self.ranges[batch.split] = (min(low, int(time.min())), max(high, int(time.max())))

    def _order(self, batch: Batch) -> None:
        """Time order of requests, and the user side of each request."""
        before = self.previous[batch.split]
        context = self._request_side(batch)
        starts = np.ones(batch.rows, dtype=bool)
        if batch.request is not None:
            previous = batch.request[0] - 1 if before.request is None else before.request
            starts = np.diff(batch.request, prepend=previous) != 0
            for name, values, last, check in (
                (self.schema.user, batch.user, before.user, "request_users"),
                (self.schema.surface.column, batch.surface, before.surface, "request_surfaces"),
            ):
                changed = (np.diff(values, prepend=last) != 0) & ~starts
                self.findings.add(
                    check, "error", "changes within a request, which has one user on one surface",
                    file=batch.file, column=name, rows=int(changed.sum()),
                )  # fmt: skip
            changed = (np.diff(context, prepend=before.features) != 0) & ~starts
            self.findings.add(
                "request_features", "warning",
                "user or context features change within a request; those of its first row are used",
                file=batch.file, column=self.schema.request_id, rows=int(changed.sum()),
            )  # fmt: skip
        times = batch.time[starts]
        if len(times):
            first = times[0] if before.time is None else before.time
            backwards = int((np.diff(times, prepend=first) < 0).sum())
            self.findings.add(
                "row_order", "warning", "rows are not in time order; prepare sorts them", file=batch.file,
                column=self.schema.timestamp.column, rows=backwards,
            )  # fmt: skip
            before.time = int(times[-1])
        before.request = None if batch.request is None else int(batch.request[-1])
        before.user, before.surface = int(batch.user[-1]), int(batch.surface[-1])
        before.features = int(context[-1])

    def _request_side(self, batch: Batch) -> np.ndarray:
        """One hash int64 per row of its plain user and context features."""
        names = [f.column for f in self.schema.request_features if f.kind in ("categorical", "dense")]
        return _mixed([hashed(batch.columns[n], n) for n in names], batch.rows)

    def _repeats(self, batch: Batch) -> None:
        """Rows that agree in user, time, surface and item; those in one batch (they are neighbours in time)."""
        items = [f.column for f in self.schema.item_features if f.kind == "categorical"]
        if not items:
            return
        parts = [batch.user, batch.time, batch.surface, *[hashed(batch.columns[n], n) for n in items]]
        repeats = batch.rows - len(np.unique(_mixed(parts, batch.rows)))
        self.findings.add(
            "repeated_rows", "warning",
            "rows repeat user, time, surface and item of another row; give prepare the key columns as `dedupe`",
            file=batch.file, rows=repeats,
        )  # fmt: skip

    def _sampling(self, batch: Batch) -> None:
        for name, most in ((self.schema.sampling_rate, 1.0), (self.schema.weight, np.inf)):
            if name is None:
                continue
            column = batch.columns[name]
            good = np.isfinite(column.values) & (column.values >= 0) & (column.values <= most)
            if most == 1.0:
                good &= column.values > 0
            bad = int((~good if column.valid is None else ~good | ~column.valid).sum())
            limits = "in (0, 1]" if most == 1.0 else "finite and not negative"
            self.findings.add("weights", "error", f"must be {limits}", file=batch.file, column=name, rows=bad)


@dataclass
class _LabelChecks:
    schema: Schema
    findings: Findings
    # [split][task, surface] -> rows, positives
    counts: dict[str, np.ndarray] = field(default_factory=dict)
    twins: np.ndarray | None = None

    def __post_init__(self) -> None:
        shape = (len(self.schema.tasks), len(self.schema.surface_names), 2)
        self.counts = {split: np.zeros(shape, np.int64) for split in SPLITS}
        self.twins = np.ones((shape[0], shape[0]), dtype=bool)

    def update(self, batch: Batch) -> None:
        tasks = self.schema.tasks
        values, valid = [], []
        for task in tasks:
            column = batch.columns[task.label]
            label = column.values.astype(np.float64)
            there = np.ones(batch.rows, bool) if column.valid is None else column.valid
            odd = there & ~((label == 0) | (label == 1))
            if odd.any():
                self.findings.add(
                    "label_value", "error", f"has labels that are not 0 or 1, such as {label[odd][0]:g}",
                    file=batch.file, column=task.label, rows=int(odd.sum()),
                )  # fmt: skip
            self.findings.add(
                "label_null", "info", "has no label; the task does not learn from such rows", file=batch.file,
                column=task.label, rows=int((~there).sum()),
            )  # fmt: skip
            values.append(label)
            valid.append(there & ~odd)
        for k, task in enumerate(tasks):
            if task.given is not None:
                condition = self.schema.task_names.index(task.given)
                impossible = valid[k] & (values[k] == 1) & ~(valid[condition] & (values[condition] == 1))
                self.findings.add(
                    "label_given", "warning", f"is 1 where {tasks[condition].label} is not; such rows do not count",
                    file=batch.file, column=task.label, rows=int(impossible.sum()),
                )  # fmt: skip
                valid[k] = valid[k] & valid[condition] & (values[condition] == 1)
            rows = np.bincount(batch.surface[valid[k]], minlength=len(self.schema.surface_names))
            ones = valid[k] & (values[k] == 1)
            self.counts[batch.split][k, :, 0] += rows
            self.counts[batch.split][k, :, 1] += np.bincount(batch.surface[ones], minlength=len(rows))
        assert self.twins is not None
        for a in range(len(tasks)):
            for b in range(a):
                self.twins[a, b] &= bool((values[a] + values[b] == 1).all())

    def finish(self) -> None:
        assert self.twins is not None
        tasks = self.schema.tasks
        everything = sum(self.counts.values())
        assert isinstance(everything, np.ndarray)
        for a, b in zip(*np.nonzero(np.tril(self.twins, -1)), strict=True):
            if everything[a, :, 0].sum():
                self.findings.add(
                    "inverted_label", "warning", f"is always the opposite of {tasks[b].label}; use one of them",
                    column=tasks[a].label,
                )  # fmt: skip
        for split, counts in self.counts.items():
            for k, task in enumerate(tasks):
                self._classes(split, task.label, counts[k])

    def _classes(self, split: str, label: str, counts: np.ndarray) -> None:
        rows, ones = int(counts[:, 0].sum()), int(counts[:, 1].sum())
        if rows and ones in (0, rows):
            severity: Severity = "error" if split == "train" else "warning"
            message = f"is {int(ones > 0)} in all {rows} rows of {split}: nothing to learn, AUC and NE are not defined"
            self.findings.add("one_class", severity, message, column=label, rows=rows, detail=split)
            return
        if rows and min(ones, rows - ones) / rows < RARE:
            self.findings.add(
                "rare_class", "info", f"is 1 in only {ones} of {rows} rows of {split}; its metrics will be noisy",
                column=label, rows=ones, detail=split,
            )  # fmt: skip
        for name, (n, positive) in zip(self.schema.surface_names, counts.tolist(), strict=True):
            if n and positive in (0, n):
                self.findings.add(
                    "one_class_surface", "warning",
                    f"is {int(positive > 0)} in all {n} rows of surface {name} in {split}; AUC is not defined there",
                    column=label, rows=n, detail=f"{split} {name}",
                )  # fmt: skip


def _text_at(column: Column, row: int) -> str:
    """A value of a plain column, for messages."""
    if column.valid is not None and not column.valid[row]:
        return "null"
    value = column.values[row]
    return repr(str(column.dictionary[value])) if column.dictionary is not None else f"{value:g}"


def _invalid(column: Column) -> int:
    missing = 0 if column.valid is None else int((~column.valid).sum())
    if column.values.dtype.kind == "f":
        good = column.values if column.valid is None else column.values[column.valid]
        missing += int(np.isnan(good).sum())
    return missing


def _mixed(parts: list[np.ndarray], rows: int) -> np.ndarray:
    """One int64 hash per row over several int64 columns."""
    mixed = np.zeros(rows, dtype=np.uint64)
    with np.errstate(over="ignore"):
        for part in parts:
            mixed = (mixed * _PRIME) ^ xxhash64_int64(part, 0)
    return mixed.view(np.int64)
