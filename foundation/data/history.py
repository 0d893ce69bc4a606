"""Point-in-time histories: for every row, the events of its user strictly earlier than the row's own time.

One implementation, written as Ibis expressions: DuckDB runs it in process, Spark on a cluster. It uses only
group-by, window functions, equality joins and slices of arrays, and its work and memory grow linearly with the
number of events, however long one user's history is:

1. Events that satisfy the sequence's condition are numbered per user, oldest first, and gathered in chunks of
   ``max_length``; each chunk carries the one before it.
2. For every pair (user, time) that a row has, the number ``n`` of events with a strictly smaller time is a
   running sum over distinct times, so events that share a time never see each other.
3. The history is the slice ``[n - max_length, n)``, which always lies in one such pair of chunks: one join.

Events from before the log whose times are not known (``seed``) come first, in their own order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce

import ibis
import ibis.expr.datatypes as dt
import ibis.expr.types as ir

from foundation.data.expressions import condition

_USER, _TIME, _LOGGED, _ORDER, _NUMBER, _CHUNK = "_user", "_time", "_logged", "_order", "_number", "_chunk"


@dataclass(frozen=True, kw_only=True, slots=True)
class History:
    """One sequence to build.

    ``attributes`` maps each list column to write to the event column it holds; ``timestamp`` is the list column
    for event times (none if null); ``where`` is the condition an event must meet (all events if null);
    the last ``max_length`` events are kept, oldest first.
    """

    name: str
    attributes: Mapping[str, str]
    timestamp: str | None = None
    max_length: int = 50
    where: str | None = None

    def __post_init__(self) -> None:
        if self.max_length < 1:
            raise ValueError(f"{self.name}.max_length: must be at least 1, got {self.max_length}")
        if not self.attributes:
            raise ValueError(f"{self.name}.attributes: is empty")


@dataclass(frozen=True, kw_only=True, slots=True)
class EventLog:
    """Where events come from.

    ``events`` has the columns ``user``, ``time`` (integer, any unit, the same as the rows') and those of
    ``order``, which break ties between events of one time (the order within a tie is arbitrary without them).
    ``seed`` optionally holds events from before the log: ``user``, ``seed_position`` (integer, oldest first) and
    any event column it knows; the others are null. ``seed_until`` names an integer column of ``seed``, the time
    of the user's last seed event: rows at or before it do not see the seed at all.
    """

    events: ir.Table
    user: str
    time: str
    order: tuple[str, ...] = ()
    seed: ir.Table | None = None
    seed_position: str = "position"
    seed_until: str | None = None
    columns: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        for column in (self.user, self.time, *self.order):
            if column not in self.events.columns:
                raise ValueError(f"events: no column {column!r}; columns are {', '.join(self.events.columns)}")
        if not self.events[self.time].type().is_integer():
            raise ValueError(f"events: column {self.time!r} must be an integer time")


def with_histories(rows: ir.Table, log: EventLog, histories: Sequence[History], *, user: str, time: str) -> ir.Table:
    """``rows`` with one list column per attribute (and event time) of every history.

    A row of ``user`` u at ``time`` t gets the last ``max_length`` events of u with event time < t that meet the
    history's condition, oldest first; lists of one history are aligned, and empty (never null) without events.
    Event times are int64 in the log's unit, null for seed events. ``rows`` keeps its columns and its number of
    rows; the order of the result is not defined. Raises ValueError naming history and column.
    """
    names = [c for h in histories for c in (*h.attributes, *([h.timestamp] if h.timestamp else []))]
    for name in names:
        if names.count(name) > 1 or name in rows.columns:
            raise ValueError(f"history column {name!r} is there twice")
    if not rows[time].type().is_integer():
        raise ValueError(f"rows: column {time!r} must be an integer time")
    if not histories:
        return rows
    matching = {h.name: _matching_events(log, h) for h in histories}
    counts = _counts(rows.select(**{_USER: rows[user], _TIME: rows[time]}), matching, log)
    keep = list(rows.columns)
    result = rows.left_join(counts, [rows[user] == counts[_USER], rows[time] == counts[_TIME]])
    result = result.drop(_USER, _TIME)
    for history in histories:
        result = _join_slices(result, user, history, matching[history.name])
        keep += [*history.attributes, *([history.timestamp] if history.timestamp else [])]
        rest = [c for c in result.columns if c.startswith("_n_")]
        result = result.select(*keep, *rest)
    return result.select(*keep)


def _matching_events(log: EventLog, history: History) -> ir.Table:
    """Events of one history, seed included: _user, _logged (0 seed, 1 log), _time, _order.., attributes."""
    events = log.events
    for column in history.attributes.values():
        if column not in events.columns:
            own = [c for c in events.columns if not c.startswith("_")]
            raise ValueError(
                f"sequences.{history.name}.attributes: no event column {column!r}; columns are {', '.join(own)}"
            )
    if history.where is not None:
        events = events.filter(condition(events, history.where, f"sequences.{history.name}.where"))
    order = {f"{_ORDER}{i}": events[c] for i, c in enumerate(log.order)}
    values = {a: events[c] for a, c in history.attributes.items()}
    logged = events.select(
        **{_USER: events[log.user], _LOGGED: ibis.literal(1, "int8"), _TIME: events[log.time].cast("int64")},
        **order, **values,
    )  # fmt: skip
    if log.seed is None:
        return logged
    seed = log.seed
    unknown = {c: ibis.null(t) for c, t in log.events.schema().items() if c not in seed.columns}
    seed = seed.mutate(**unknown)
    if history.where is not None:
        seed = seed.filter(condition(seed, history.where, f"sequences.{history.name}.where"))
    types = logged.schema()
    before = seed.select(
        **{_USER: seed[log.user].cast(types[_USER]), _LOGGED: ibis.literal(0, "int8"),
           _TIME: seed[log.seed_position].cast("int64")},
        **{o: ibis.null(types[o]) for o in order},
        **{a: seed[c].cast(types[a]) for a, c in history.attributes.items()},
    )  # fmt: skip
    return before.union(logged)


def _counts(keys: ir.Table, matching: Mapping[str, ir.Table], log: EventLog) -> ir.Table:
    """Per (user, time) of ``keys`` and history h: events seen, ``_n_h``, and those hidden at their start, ``_s_h``."""
    zero = ibis.literal(0, "int64")
    names = list(matching)
    parts = [keys.select(_USER, _TIME, **{f"_n_{n}": zero for n in names}, _asked=ibis.literal(1, "int8"))]
    for name, events in matching.items():
        logged = events.filter(events[_LOGGED] == 1)
        flags = {f"_n_{n}": ibis.literal(int(n == name), "int64") for n in names}
        parts.append(logged.select(_USER, _TIME, **flags, _asked=ibis.literal(0, "int8")))
    every = reduce(lambda a, b: a.union(b), parts)
    times = every.group_by([_USER, _TIME]).aggregate(
        _asked=every["_asked"].max(), **{f"_n_{n}": every[f"_n_{n}"].sum() for n in names}
    )
    # One row per distinct time: everything up to the previous row is strictly earlier.
    earlier = ibis.window(group_by=_USER, order_by=_TIME, preceding=(None, 1))
    seen = times.mutate(**{f"_n_{n}": times[f"_n_{n}"].sum().over(earlier).fill_null(0) for n in names})
    seen = seen.filter(seen["_asked"] == 1).drop("_asked")
    if log.seed is None:
        return seen.mutate(**{f"_n_s_{n}": zero for n in names})
    for name, events in matching.items():
        seeds = events.filter(events[_LOGGED] == 0).group_by(_USER).aggregate(_seeds=lambda t: t.count())
        seen = seen.left_join(seeds, _USER).drop(f"{_USER}_right")
        seen = seen.mutate(**{f"_n_s_{name}": seen["_seeds"].fill_null(0)}).drop("_seeds")
    if log.seed_until is None:
        hidden: ir.BooleanValue = ibis.literal(False)
    else:
        until = log.seed.group_by(**{_USER: log.seed[log.user].cast(keys.schema()[_USER])}).aggregate(
            _until=log.seed[log.seed_until].max()
        )
        seen = seen.left_join(until, _USER).drop(f"{_USER}_right")
        hidden = (seen[_TIME] <= seen["_until"]).fill_null(False)
    ends = {f"_n_{n}": seen[f"_n_{n}"] + seen[f"_n_s_{n}"] for n in names}
    starts = {f"_n_s_{n}": hidden.ifelse(seen[f"_n_s_{n}"], 0) for n in names}
    return seen.mutate(**ends, **starts).select(_USER, _TIME, *ends, *starts)


def _join_slices(rows: ir.Table, user: str, history: History, events: ir.Table) -> ir.Table:
    """Adds the list columns of one history to rows that carry its ``_n_`` columns."""
    length = history.max_length
    pairs = _chunk_pairs(events, history)
    end, hidden = rows[f"_n_{history.name}"], rows[f"_n_s_{history.name}"]
    chunk = ((end - 1) // length).cast("int64")
    joined = rows.mutate(_chunk_of=chunk).left_join(pairs, [("_chunk_of", _CHUNK), (user, _USER)], rname="{name}_event")
    # Where a pair begins: at the chunk before, if there is one.
    base = ibis.greatest((joined["_chunk_of"] - 1) * length, 0)
    start = ibis.greatest(joined[end.get_name()] - length, joined[hidden.get_name()])
    low, high = start - base, joined[end.get_name()] - base
    lists = {}
    for column in (*history.attributes, *_times(history)):
        events_of_row = joined[column][low:high]
        lists[column] = events_of_row.fill_null(ibis.literal([], type=events_of_row.type()))
    return joined.mutate(**lists)


def _times(history: History) -> tuple[str, ...]:
    return (history.timestamp,) if history.timestamp else ()


def _chunk_pairs(events: ir.Table, history: History) -> ir.Table:
    """Chunks of ``max_length`` events of one user, oldest first, each with the chunk before it in front."""
    order = [c for c in events.columns if c.startswith(_ORDER)]
    number = ibis.row_number().over(ibis.window(group_by=_USER, order_by=[_LOGGED, _TIME, *order]))
    numbered = events.mutate(**{_NUMBER: number})
    time = (numbered[_LOGGED] == 1).ifelse(numbered[_TIME], ibis.null(dt.int64))
    fields = {_NUMBER: numbered[_NUMBER], **{a: numbered[a] for a in history.attributes}}
    if history.timestamp:
        fields[history.timestamp] = time
    key = {_USER: numbered[_USER], _CHUNK: (numbered[_NUMBER] // history.max_length).cast("int64")}
    chunks = numbered.group_by(**key).aggregate(_events=ibis.struct(fields).collect())
    chunks = chunks.mutate(_events=chunks["_events"].sort())  # by _NUMBER, the first field
    before = chunks["_events"].lag(1).over(ibis.window(group_by=_USER, order_by=_CHUNK))
    empty = ibis.literal([], type=chunks["_events"].type())
    pairs = chunks.mutate(_events=before.fill_null(empty).concat(chunks["_events"]))
    lists = {c: pairs["_events"].map(_getter(c)) for c in fields if c != _NUMBER}
    return pairs.select(_USER, _CHUNK, **lists)


def _getter(column: str):  # type: ignore[no-untyped-def]
    return lambda event: event[column]
