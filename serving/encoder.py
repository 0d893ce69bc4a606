"""From a raw `/rank` request to the inputs of a model, with errors that name the field.

Raw values go into `Column`s and from there through `foundation.data.encoding`, the same code that made the
training rows. What a request leaves out becomes the trained "missing" row, an id never seen the "unknown" row;
both are counted in the answer. A field that the model does not know is an error, because it is most often
a misspelt one whose real value would silently count as missing; the server can be told to count it instead.
"""

from __future__ import annotations

import difflib
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from foundation.data.encoding import Column, EncodedRows, Encoder, encode_rows, model_inputs
from foundation.data.schema import UNKNOWN_ROW, Feature, Schema, Sequence
from serving.codec import shorten
from serving.columns import Place, id_column, list_column, number_column, take_events, time_column
from serving.errors import Reason, ServingError, invalid

TIME = "time_ms"
_BODY = (
    "model",
    "surface",
    "version",
    "user",
    "context",
    "history",
    TIME,
    "candidates",
    "deadline_ms",
)


@dataclass(slots=True)
class Counts:
    """What was repaired in one request: rows by field, ids by input, and plain numbers."""

    missing: dict[str, int] = field(default_factory=dict)
    unknown_ids: dict[str, int] = field(default_factory=dict)
    unknown_fields: int = 0
    future_events: int = 0

    def to_dict(self) -> dict[str, Any]:
        """For the answer."""
        return {
            "missing": self.missing,
            "unknown_ids": self.unknown_ids,
            "unknown_fields": self.unknown_fields,
            "future_events": self.future_events,
        }

    def totals(self) -> dict[str, int]:
        """For the metrics: kind -> number of values."""
        return {
            "missing": sum(self.missing.values()),
            "unknown_id": sum(self.unknown_ids.values()),
            "unknown_field": self.unknown_fields,
            "future_event": self.future_events,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class RankRequest:
    """The body of `/rank`, checked in form; values are still raw."""

    model: str
    surface: str
    version: str
    time_ms: int
    deadline_ms: float | None
    user: dict[str, Any]
    context: dict[str, Any]
    history: dict[str, Any]
    candidates: list[dict[str, Any]]
    unknown: tuple[str, ...] = ()

    @staticmethod
    def parse(body: Mapping[str, Any], max_candidates: int) -> RankRequest:
        """Checks the outer form. Raises ServingError (`invalid`, `too_large`) naming the field."""
        names = {}
        for key in ("model", "surface"):
            names[key] = body.get(key, "")
            if not isinstance(names[key], str):
                raise invalid(f"{key}: expected a string, got {shorten(names[key])}")
        if not names["model"] and not names["surface"]:
            raise invalid("model: name a model, or a surface in 'surface'")
        version = body.get("version", "")
        if type(version) not in (str, int):
            raise invalid(f"version: expected a number, got {shorten(version)}")
        candidates = body.get("candidates")
        if not isinstance(candidates, list):
            raise invalid(f"candidates: expected a list, got {shorten(candidates)}")
        if len(candidates) > max_candidates:
            raise ServingError(
                Reason.TOO_LARGE, f"candidates: {len(candidates)} in one request, at most {max_candidates}"
            )
        for index, candidate in enumerate(candidates):
            if type(candidate) is not dict:
                raise invalid(f"candidates[{index}]: expected an object, got {shorten(candidate)}")
        return RankRequest(
            model=names["model"],
            surface=names["surface"],
            version=str(version),
            time_ms=_time(body.get(TIME)),
            deadline_ms=_budget(body.get("deadline_ms")),
            user=_object(body, "user"),
            context=_object(body, "context"),
            history=_object(body, "history"),
            candidates=candidates,
            unknown=tuple(key for key in body if key not in _BODY),
        )


def _object(body: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = body.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise invalid(f"{key}: expected an object, got {shorten(value)}")
    return value


def _time(value: Any) -> int:
    if value is None:
        return time.time_ns() // 1_000_000
    if type(value) is not int or not 0 <= value < 2**53:
        raise invalid(f"{TIME}: expected milliseconds since 1970 as an integer, got {shorten(value)}")
    return value


def _budget(value: Any) -> float | None:
    if value is None:
        return None
    if type(value) not in (int, float) or not 0 <= value < math.inf:
        raise invalid(f"deadline_ms: expected a number of milliseconds, got {shorten(value)}")
    return float(value)


class RequestEncoder:
    """Encodes raw requests for one model.

    Args:
        schema, encoder: from the model's folder.
        surface: the model's surface, for requests that name only the model.
        numbers: further fields of a candidate that are allowed, those of the value expression.
    """

    def __init__(self, schema: Schema, encoder: Encoder, surface: str, numbers: Iterable[str]) -> None:
        self._schema = schema
        self._encoder = encoder
        self._surface = surface
        self._sides = {
            side: tuple(f for f in schema.features if f.side == side) for side in ("user", "context", "item")
        }
        self._known: dict[str, frozenset[str]] = {
            side: frozenset(_columns(features)) for side, features in self._sides.items()
        }
        self._known["user"] |= {schema.user}
        self._known["context"] |= {schema.surface.column, schema.timestamp.column}
        self._known["item"] |= {"id", *numbers}
        self._known["history"] = frozenset(s.name for s in schema.sequences)

    def encode(self, request: RankRequest, counts: Counts, reject_unknown: bool) -> dict[str, np.ndarray]:
        """The model's inputs for one request (R = 1) and its N candidates; fills `counts`.

        Raises:
            ServingError: a value does not fit its field, or an unknown field while `reject_unknown`.
        """
        unknown = _Unknown(counts, reject_unknown)
        unknown.note("", request.unknown, _BODY)
        unknown.find("user", request.user, self._known["user"])
        unknown.find("context", request.context, self._known["context"])
        unknown.find("history", request.history, self._known["history"])
        for index, candidate in enumerate(request.candidates):
            if not candidate.keys() <= self._known["item"]:
                unknown.find(f"candidates[{index}]", candidate, self._known["item"])
        context = self._with_defaults(request)
        columns = self._columns("user", [request.user], lambda index: "user", counts)
        columns |= self._columns("context", [context], lambda index: "context", counts)
        items = self._columns("item", request.candidates, lambda index: f"candidates[{index}]", counts)
        rows = len(request.candidates)
        moment = np.array([request.time_ms], np.int64)
        histories = [self._history(s, request, counts, unknown) for s in self._schema.sequences]
        try:
            with np.errstate(over="ignore"):  # numbers too large for float32 are refused below
                user = encode_rows(self._encoder, self._schema.request_features, (), columns, 1)
                item = encode_rows(self._encoder, self._schema.item_features, (), items, rows)
            for sequence, events in zip(self._schema.sequences, histories, strict=True):
                user = _merge(user, encode_rows(self._encoder, (), (sequence,), events, 1, moment))
        except ValueError as error:  # EncodingError, and the id functions' own
            raise invalid(str(error)) from None
        _check_dense(self._schema.request_features, user)
        _check_dense(self._schema.item_features, item)
        for encoded in (user, item):
            for key, ids in encoded.ids.items():
                if found := int(np.count_nonzero(ids == UNKNOWN_ROW)):
                    counts.unknown_ids[key] = found
        return model_inputs(self._schema, user, item, np.zeros(rows, np.int64), moment)

    def _with_defaults(self, request: RankRequest) -> dict[str, Any]:
        """The context, with surface and time filled in where they are features and the request names them
        only at the top."""
        filled = dict(request.context)
        stamp, surface = self._schema.timestamp, self._schema.surface.column
        if stamp.column not in filled:
            filled[stamp.column] = request.time_ms // (1000 if stamp.unit == "s" else 1)
        if surface not in filled:
            filled[surface] = request.surface or self._surface
        return filled

    def _takes(self, table: str | None) -> type | None:
        """int or str, as the ids of a table were in training; None where that is not known."""
        known = None if table is None else self._encoder.id_type(table)
        return None if known is None else {"integer": int, "string": str}[known]

    def _columns(
        self,
        side: str,
        rows: list[dict[str, Any]],
        row_name: Callable[[int], str],
        counts: Counts,
    ) -> dict[str, Column]:
        """Columns by name for the features of one side; what is missing is counted."""
        columns: dict[str, Column] = {}
        for f in self._sides[side]:
            values = [row.get(f.column) for row in rows]
            place = Place(f.column, row_name)
            if f.kind == "categorical":
                column = id_column(values, place, self._takes(f.table))
            elif f.kind == "dense":
                column = number_column(values, place)
            elif f.kind == "multi":
                column = list_column(values, place, self._takes(f.table))
            else:
                column = list_column(values, place, float)
            absent = values.count(None)
            if absent and not f.nullable:
                raise invalid(f"{place(values.index(None))}: is missing, and this field may not be")
            if absent:
                counts.missing[f.column] = absent
            if f.kind == "embedding":
                _check_lengths(_lengths(column), np.full(len(rows), f.dim), place, "or none", empty=True)
            if f.kind != "dense" or f.column not in columns:  # ids serve a dense feature of this column too
                columns[f.column] = column
            if f.weights is not None:
                place = Place(f.weights, row_name)
                weights = list_column([row.get(f.weights) for row in rows], place, float)
                _check_lengths(_lengths(weights), _lengths(column), place, f"one for each of {f.column}")
                columns[f.weights] = weights
        return columns

    def _history(
        self, sequence: Sequence, request: RankRequest, counts: Counts, unknown: _Unknown
    ) -> dict[str, Column]:
        """Columns of one sequence: events before the request's time only, oldest first."""
        known = (*(a.name for a in sequence.attributes), TIME)
        lists, count, name = _event_lists(sequence.name, request.history.get(sequence.name), known, unknown)
        empty = [None] * count
        moments = time_column(lists.get(TIME, empty), Place(TIME, name))
        timed = np.ones(count, bool) if moments.valid is None else moments.valid
        keep = np.flatnonzero(~(timed & (moments.values >= request.time_ms)))
        counts.future_events += count - len(keep)
        if timed[keep].all():
            keep = keep[np.argsort(moments.values[keep], kind="stable")]
        columns: dict[str, Column] = {}
        for a in sequence.attributes:
            column = id_column(lists.get(a.name, empty), Place(a.name, name), self._takes(a.table))
            columns[a.column] = take_events(column, keep)
        if sequence.timestamp is not None:
            columns[sequence.timestamp] = take_events(moments, keep)
        return columns


class _Unknown:
    """Fields that nobody asked for: an error, or a count."""

    def __init__(self, counts: Counts, reject: bool) -> None:
        self._counts = counts
        self._reject = reject

    def find(self, where: str, given: Iterable[str], known: Collection[str]) -> None:
        self.note(f"{where}.", [name for name in given if name not in known], known)

    def note(self, prefix: str, names: Collection[str], known: Collection[str]) -> None:
        self._counts.unknown_fields += len(names)
        if names and self._reject:
            name = next(iter(names))[:100]
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known fields: {', '.join(sorted(known))}"
            raise invalid(f"{prefix}{name}: is not a known field; {hint}")


def _columns(features: Iterable[Feature]) -> list[str]:
    return [name for f in features for name in (f.column, f.weights) if name]


def _event_lists(
    sequence: str, raw: Any, known: tuple[str, ...], unknown: _Unknown
) -> tuple[dict[str, list[Any]], int, Callable[[int], str]]:
    """One list per attribute from either form of a history (a list of events, or an object of lists), the
    number of events, and the name of event i in error messages."""
    where = f"history.{sequence}"
    if raw is None:
        raw = []
    if isinstance(raw, list):
        for index, event in enumerate(raw):
            if type(event) is not dict:
                raise invalid(f"{where}[{index}]: expected an object, got {shorten(event)}")
            if not event.keys() <= set(known):
                unknown.find(f"{where}[{index}]", event, known)
        return {k: [e.get(k) for e in raw] for k in known}, len(raw), lambda index: f"{where}[{index}]"
    if not isinstance(raw, dict):
        raise invalid(f"{where}: expected a list of events or an object of lists, got {shorten(raw)}")
    unknown.find(where, raw, known)
    lists = {name: raw[name] for name in known if raw.get(name) is not None}
    for name, values in lists.items():
        if not isinstance(values, list):
            raise invalid(f"{where}.{name}: expected a list, got {shorten(values)}")
    sizes = {name: len(values) for name, values in lists.items()}
    if len(set(sizes.values())) > 1:
        raise invalid(f"{where}: its lists must have one length, got {sizes}")
    return lists, max(sizes.values(), default=0), lambda index: f"{where}[{index}]"


def _check_dense(features: tuple[Feature, ...], rows: EncodedRows) -> None:
    """A number so large that it is infinite in float32 must not reach the model."""
    if np.isfinite(rows.dense).all():
        return
    row, position = np.argwhere(~np.isfinite(rows.dense))[0]
    f = [f for f in features if f.kind in ("dense", "embedding") for _ in range(f.dim)][position]
    where = f"candidates[{row}]" if f.side == "item" else f.side
    raise invalid(f"{where}.{f.column}: the number is too large")


def _lengths(column: Column) -> np.ndarray:
    assert column.offsets is not None
    return np.diff(column.offsets)


def _check_lengths(lengths: np.ndarray, expected: np.ndarray, place: Place, why: str, *, empty: bool = False) -> None:
    wrong = np.flatnonzero((lengths != expected) & ~((lengths == 0) & empty))
    if len(wrong):
        row = int(wrong[0])
        raise invalid(f"{place(row)}: expected {expected[row]} numbers, {why}, got {lengths[row]}")


def _merge(rows: EncodedRows, more: EncodedRows) -> EncodedRows:
    return EncodedRows(
        rows=rows.rows,
        ids=rows.ids | more.ids,
        lengths=rows.lengths | more.lengths,
        weights=rows.weights | more.weights,
        dense=rows.dense,
        times=rows.times | more.times,
    )
