"""The dataset schema: what each column means, checked on load.

A schema is a YAML file. It names the id spaces (``tables``), the columns that become model inputs
(``features``, ``sequences``), the prediction targets (``tasks``) and the columns that organise the rows
(request, impression, time, surface). Everything else in the project takes the typed objects of this module.

Free of torch, so that the server reads the same file as the trainer.
"""

from __future__ import annotations

import hashlib
import json
import keyword
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeVar, cast, get_args, get_type_hints

import yaml

from foundation.data.yaml_text import load_yaml, yaml_fault

MISSING_ROW = 0
UNKNOWN_ROW = 1
FIRST_ROW = 2
OTHER_SURFACE = "other"

TableKind = Literal["vocabulary", "hash", "range"]
FeatureKind = Literal["categorical", "multi", "dense", "embedding"]
Side = Literal["user", "item", "context"]
Transform = Literal["none", "log1p", "standardize", "log1p_standardize"]


class SchemaError(ValueError):
    """A schema that cannot be used; the message names the file and the key."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """An id space with one embedding row per id. Row 0 is "missing", row 1 is "unknown"; both are trained.

    ``rows`` counts all rows, those two included. A ``vocabulary`` learns its ids (and its size) from the
    training rows and needs no ``rows``; ``hash`` spreads ids with xxHash64 over ``rows - 2``; ``range`` holds
    the ids ``0 .. rows - 3``.
    """

    name: str
    kind: TableKind = "vocabulary"
    rows: int | None = None
    dim: int = 16
    seed: int = 0
    min_count: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Feature:
    """One model input column, of the user, the item or the request's context.

    ``categorical``: one id. ``multi``: a list of ids, at most ``max_length``, with an optional ``weights``
    column, one number per id. ``dense``: one number after ``transform``. ``embedding``: ``dim`` floats.
    """

    name: str
    side: Side
    kind: FeatureKind
    column: str = ""
    table: str | None = None
    max_length: int = 0
    weights: str | None = None
    dim: int = 1
    transform: Transform = "none"
    nullable: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceAttribute:
    """One aligned list column of a sequence; its ids live in ``table``.

    An outcome such as a click is not known at once. With ``known_after_hours``, an event younger than that at
    request time has it "missing", in training as in serving.
    """

    name: str
    column: str
    table: str
    known_after_hours: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Sequence:
    """A history: aligned list columns, oldest event first, at most ``max_length`` events are used."""

    name: str
    attributes: tuple[SequenceAttribute, ...]
    timestamp: str | None = None
    max_length: int = 50
    keep: Literal["latest", "earliest"] = "latest"

    def key(self, attribute: str) -> str:
        """The input name of an attribute, for example ``watched.item``."""
        return f"{self.name}.{attribute}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A binary target. With ``given``, a label counts only where the label of that task is 1."""

    name: str
    label: str
    weight: float = 1.0
    given: str | None = None
    delay_hours: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Surface:
    """The column that says where an impression was shown. A value not in ``values`` counts as "other"."""

    column: str
    values: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Timestamp:
    """The time of a row, an integer column in milliseconds or seconds since 1970 (UTC)."""

    column: str
    unit: Literal["ms", "s"] = "ms"


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """Cuts in time: train before ``train_until``, validation before ``validation_until``, test after it.

    Both are wall times of ``timezone`` (``YYYY-MM-DD`` or ISO 8601), exclusive.
    """

    train_until: str
    validation_until: str
    timezone: str = "UTC"


@dataclass(frozen=True, kw_only=True, slots=True)
class Schema:
    """A whole schema. Build it with :meth:`load` or :meth:`from_dict`, which check it."""

    name: str
    user: str
    impression_id: str
    timestamp: Timestamp
    surface: Surface
    tables: tuple[Table, ...]
    features: tuple[Feature, ...]
    tasks: tuple[Task, ...]
    sequences: tuple[Sequence, ...] = ()
    request_id: str | None = None
    weight: str | None = None
    sampling_rate: str | None = None
    split: Split | None = None
    source: str = field(default="schema", compare=False)

    @staticmethod
    def load(path: str | Path) -> Schema:
        """Reads and checks a YAML file. Raises SchemaError naming file and key."""
        path = Path(path)
        try:
            data = load_yaml(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise SchemaError(f"{path}: no such schema file") from None
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise SchemaError(f"{path}: {yaml_fault(error)}") from None
        return Schema.from_dict(data, source=str(path))

    @staticmethod
    def from_dict(data: object, source: str = "schema") -> Schema:
        """Builds and checks a schema from plain values. Raises SchemaError naming source and key."""
        return _SchemaParser(source).parse(data)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for YAML; :meth:`from_dict` reads them back to an equal schema."""
        data = {k: v for k, v in _plain(self).items() if k != "source"}
        for group in ("tables", "features", "tasks", "sequences"):
            data[group] = {entry.pop("name"): entry for entry in data[group]}
        for sequence in data["sequences"].values():
            sequence["attributes"] = {a.pop("name"): a for a in sequence["attributes"]}
        return data

    def save(self, path: str | Path) -> None:
        """Writes the schema as YAML."""
        Path(path).write_text(yaml.safe_dump(self.to_dict(), sort_keys=False), encoding="utf-8")

    @property
    def hash(self) -> str:
        """16 hex digits of all that differs from the defaults: a field added later, at its default, changes nothing.

        Hence a default never changes; a new meaning takes a new field. The order of features, sequences, attributes,
        tasks and surface values counts, because tensors are laid out by it; that of tables and of keys does not.
        """
        canonical = json.dumps(_differing(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]

    def table(self, name: str) -> Table:
        """The table called ``name``. Raises KeyError."""
        return _named(self.tables, name)

    def feature(self, name: str) -> Feature:
        """The feature called ``name``. Raises KeyError."""
        return _named(self.features, name)

    def sequence(self, name: str) -> Sequence:
        """The sequence called ``name``. Raises KeyError."""
        return _named(self.sequences, name)

    def task(self, name: str) -> Task:
        """The task called ``name``. Raises KeyError."""
        return _named(self.tasks, name)

    @property
    def request_features(self) -> tuple[Feature, ...]:
        """User and context features: one row per request."""
        return tuple(f for f in self.features if f.side != "item")

    @property
    def item_features(self) -> tuple[Feature, ...]:
        """Item features: one row per impression."""
        return tuple(f for f in self.features if f.side == "item")

    @property
    def task_names(self) -> tuple[str, ...]:
        """Task names in order; column k of every ``[N, K]`` tensor is task k."""
        return tuple(t.name for t in self.tasks)

    @property
    def surface_names(self) -> tuple[str, ...]:
        """Surface names by index, ``other`` last."""
        return (*self.surface.values, OTHER_SURFACE)

    def surface_index(self, name: str) -> int:
        """The index of a surface. Raises ValueError listing the known ones."""
        if name not in self.surface_names:
            raise ValueError(f"surface {name!r} is not one of {', '.join(self.surface_names)}")
        return self.surface_names.index(name)

    def columns(self) -> tuple[str, ...]:
        """Every Parquet column the reader needs, without repeats."""
        names = [self.user, self.impression_id, self.timestamp.column, self.surface.column]
        names += [c for c in (self.request_id, self.weight, self.sampling_rate) if c]
        names += [t.label for t in self.tasks]
        for feature in self.features:
            names += [feature.column] + ([feature.weights] if feature.weights else [])
        for sequence in self.sequences:
            names += [a.column for a in sequence.attributes]
            names += [sequence.timestamp] if sequence.timestamp else []
        return tuple(dict.fromkeys(names))


_T = TypeVar("_T")


def _named(entries: Iterable[_T], name: str) -> _T:
    for entry in entries:
        if getattr(entry, "name") == name:  # noqa: B009 - every entry of the schema has a name
            return entry
    raise KeyError(name)


def _plain(value: Any) -> Any:
    """Dataclasses, tuples and their contents as plain YAML values."""
    if hasattr(value, "__dataclass_fields__"):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, tuple):
        return [_plain(v) for v in value]
    return value


def _differing(value: Any) -> Any:
    """The plain values of a schema that are not at their defaults, tables by name."""
    if hasattr(value, "__dataclass_fields__"):
        parts = ((f, getattr(value, f.name)) for f in fields(value) if f.compare)
        kept = {f.name: part for f, part in parts if part != f.default}
        if isinstance(value, Schema):
            kept["tables"] = tuple(sorted(value.tables, key=lambda table: table.name))
        return {name: _differing(part) for name, part in kept.items()}
    if isinstance(value, tuple):
        return [_differing(part) for part in value]
    return value


class _SchemaParser:
    """Turns plain values into a Schema; every complaint names the source and the key."""

    def __init__(self, source: str) -> None:
        self.source = source

    def fail(self, key: str, problem: str) -> SchemaError:
        return SchemaError(f"{self.source}: {key}: {problem}")

    def parse(self, data: object) -> Schema:
        top = self._mapping(data, "schema")
        parts: dict[str, Any] = dict(top)
        parts["tables"] = self._entries(top, "tables", self._table)
        parts["features"] = self._entries(top, "features", self._feature)
        parts["sequences"] = self._entries(top, "sequences", self._sequence, optional=True)
        parts["tasks"] = self._entries(top, "tasks", self._task)
        parts["timestamp"] = self._build(Timestamp, top.get("timestamp"), "timestamp")
        parts["surface"] = self._surface(top.get("surface"))
        if top.get("split") is not None:
            parts["split"] = self._build(Split, top["split"], "split")
        parts["source"] = self.source
        schema = self._build(Schema, parts, "schema")
        self._check_references(schema)
        self._check_names(schema)
        return schema

    def _mapping(self, value: object, key: str) -> Mapping[str, Any]:
        if not isinstance(value, Mapping):
            raise self.fail(key, f"expected a mapping, got {_kind(value)}")
        return cast(Mapping[str, Any], {str(k): v for k, v in value.items()})

    def _entries(
        self, top: Mapping[str, Any], group: str, build: Callable[[str, Any], _T], optional: bool = False
    ) -> tuple[_T, ...]:
        if optional and top.get(group) is None:
            return ()
        if group not in top:
            raise self.fail(group, "is missing")
        entries = self._mapping(top[group], group)
        if not entries and not optional:
            raise self.fail(group, "is empty")
        return tuple(build(name, value) for name, value in entries.items())

    def _build(self, kind: type[_T], value: object, key: str) -> _T:
        """An instance of a dataclass from a mapping, with unknown, missing and mistyped keys named."""
        given = self._mapping(value, key)
        known = {f.name: f for f in fields(cast(Any, kind))}
        prefix = "" if key == "schema" else f"{key}."
        for name in given:
            if name not in known:
                raise self.fail(f"{prefix}{name}", f"is not a key here; known keys: {', '.join(known)}")
        types = get_type_hints(kind)
        for name, spec in known.items():
            required = spec.default is spec.default_factory  # both MISSING
            if name not in given and required:
                raise self.fail(f"{prefix}{name}", "is missing")
            if name in given:
                self._check_type(given[name], types[name], f"{prefix}{name}")
        # 2 and 2.0 are the same content, and so hash alike.
        return kind(**{name: float(value) if types[name] is float else value for name, value in given.items()})

    def _check_type(self, value: object, expected: Any, key: str) -> None:
        options = get_args(expected)
        if expected is float:
            expected = (int, float)
            if isinstance(value, expected) and not abs(value) < 1e300:
                raise self.fail(key, f"expected a finite number, got {value!r:.40}")
        if expected in (int, str, bool, (int, float)):
            if not isinstance(value, expected) or (isinstance(value, bool) and expected is not bool):
                name = getattr(expected, "__name__", "number")
                raise self.fail(key, f"expected {name}, got {value!r}")
        elif options and all(isinstance(o, str) for o in options):
            if value not in options:
                raise self.fail(key, f"must be one of {', '.join(options)}, got {value!r}")
        elif type(None) in options and value is not None and len(options) == 2:
            self._check_type(value, options[0], key)

    def _table(self, name: str, value: Any) -> Table:
        key = f"tables.{name}"
        table = self._build(Table, {"name": name, **self._mapping(value, key)}, key)
        if table.kind != "vocabulary" and table.rows is None:
            raise self.fail(f"{key}.rows", f"is missing; a {table.kind} table needs its number of rows")
        if table.rows is not None and table.rows < FIRST_ROW + 1:
            raise self.fail(f"{key}.rows", f"must be at least 3 (0 and 1 are reserved), got {table.rows}")
        for name_, least in (("dim", 1), ("min_count", 1), ("seed", 0)):
            if getattr(table, name_) < least:
                raise self.fail(f"{key}.{name_}", f"must be at least {least}, got {getattr(table, name_)}")
        return table

    def _feature(self, name: str, value: Any) -> Feature:
        key = f"features.{name}"
        feature = self._build(Feature, {"name": name, "column": name, **self._mapping(value, key)}, key)
        has_ids = feature.kind in ("categorical", "multi")
        if has_ids and feature.table is None:
            raise self.fail(f"{key}.table", f"is missing; a {feature.kind} feature needs a table")
        if not has_ids and feature.table is not None:
            raise self.fail(f"{key}.table", f"does not belong to a {feature.kind} feature")
        if feature.kind == "multi" and feature.max_length < 1:
            raise self.fail(f"{key}.max_length", "is missing; a multi feature needs its greatest length")
        if feature.weights is not None and feature.kind != "multi":
            raise self.fail(f"{key}.weights", f"does not belong to a {feature.kind} feature")
        if feature.dim < 1:
            raise self.fail(f"{key}.dim", f"must be at least 1, got {feature.dim}")
        return feature

    def _sequence(self, name: str, value: Any) -> Sequence:
        key = f"sequences.{name}"
        entry = dict(self._mapping(value, key))
        attributes = self._mapping(entry.get("attributes"), f"{key}.attributes")
        if not attributes:
            raise self.fail(f"{key}.attributes", "is empty")
        entry["attributes"] = tuple(
            self._build(
                SequenceAttribute,
                {"name": a, "column": a, **self._mapping(v, f"{key}.attributes.{a}")},
                f"{key}.attributes.{a}",
            )
            for a, v in attributes.items()
        )
        sequence = self._build(Sequence, {"name": name, **entry}, key)
        if sequence.max_length < 1:
            raise self.fail(f"{key}.max_length", f"must be at least 1, got {sequence.max_length}")
        for a in sequence.attributes:
            if a.known_after_hours < 0:
                raise self.fail(f"{key}.attributes.{a.name}.known_after_hours", "must not be negative")
            if a.known_after_hours and sequence.timestamp is None:
                raise self.fail(f"{key}.timestamp", f"is missing; {a.name} has known_after_hours")
        return sequence

    def _task(self, name: str, value: Any) -> Task:
        key = f"tasks.{name}"
        task = self._build(Task, {"name": name, "label": name, **self._mapping(value, key)}, key)
        for name_ in ("weight", "delay_hours"):
            if getattr(task, name_) < 0:
                raise self.fail(f"{key}.{name_}", f"must not be negative, got {getattr(task, name_)}")
        return task

    def _surface(self, value: Any) -> Surface:
        entry = dict(self._mapping(value, "surface"))
        values = entry.get("values")
        if not isinstance(values, list | tuple) or not values:
            raise self.fail("surface.values", "expected a list of surface names")
        entry["values"] = tuple(str(v) for v in values)
        if len(set(entry["values"])) < len(entry["values"]) or OTHER_SURFACE in entry["values"]:
            raise self.fail("surface.values", f"names must differ and not be {OTHER_SURFACE!r}")
        return self._build(Surface, entry, "surface")

    def _check_references(self, schema: Schema) -> None:
        tables = {t.name for t in schema.tables}
        for feature in schema.features:
            if feature.table is not None and feature.table not in tables:
                raise self.fail(f"features.{feature.name}.table", f"no table {feature.table!r} under tables")
        for sequence in schema.sequences:
            for attribute in sequence.attributes:
                if attribute.table not in tables:
                    key = f"sequences.{sequence.name}.attributes.{attribute.name}.table"
                    raise self.fail(key, f"no table {attribute.table!r} under tables")
        earlier: set[str] = set()
        for task in schema.tasks:
            if task.given is not None and task.given not in earlier:
                raise self.fail(f"tasks.{task.name}.given", f"no earlier task {task.given!r} under tasks")
            earlier.add(task.name)

    def _check_names(self, schema: Schema) -> None:
        """Names become input names of exported models, so they must not collide or hold odd signs."""
        groups = (
            [("features", f.name) for f in schema.features]
            + [("sequences", s.name) for s in schema.sequences]
            + [("sequences." + s.name, a.name) for s in schema.sequences for a in s.attributes]
            + [("tasks", t.name) for t in schema.tasks]
            + [("tables", t.name) for t in schema.tables]
        )
        for group, name in groups:
            if not name.replace("_", "a").isalnum() or not name.isascii():
                raise self.fail(f"{group}.{name}", "a name holds only letters, digits and _")
        for name in schema.task_names:
            if not name.isidentifier() or keyword.iskeyword(name):
                raise self.fail(
                    f"tasks.{name}", "value expressions could not name it: no leading digit, no Python keyword"
                )
        for reserved in ("dense", "request_index"):
            if reserved in {f.name for f in schema.features} | {s.name for s in schema.sequences}:
                raise self.fail(reserved, "this name is reserved for model inputs; rename the feature")
        for sequence in schema.sequences:
            if {"length", "age"} & {a.name for a in sequence.attributes}:
                raise self.fail(f"sequences.{sequence.name}", "attributes 'length' and 'age' are reserved")
        both = {f.name for f in schema.features} & {s.name for s in schema.sequences}
        if both:
            raise self.fail(f"sequences.{min(both)}", "is also the name of a feature")
        inputs = {f.name for f in schema.features} & set(schema.task_names)
        if inputs:
            raise self.fail(f"tasks.{min(inputs)}", "is also the name of a feature; rename one of them")


def _kind(value: object) -> str:
    return "nothing" if value is None else type(value).__name__
