"""Schema: loading, round trip, and one clear error per fault."""

from __future__ import annotations

import copy
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from foundation.data.schema import Schema, SchemaError, Task

EXAMPLE: dict[str, Any] = {
    "name": "example",
    "user": "user_id",
    "request_id": "request_id",
    "impression_id": "impression_id",
    "timestamp": {"column": "time_ms", "unit": "ms"},
    "surface": {"column": "surface", "values": ["feed", "reels"]},
    "tables": {
        "user": {"kind": "hash", "rows": 100, "dim": 8},
        "item": {"kind": "vocabulary", "dim": 8},
        "hour": {"kind": "range", "rows": 26, "dim": 4},
    },
    "features": {
        "user_id": {"side": "user", "kind": "categorical", "table": "user"},
        "hour": {"side": "context", "kind": "categorical", "table": "hour"},
        "item_id": {"side": "item", "kind": "categorical", "table": "item"},
        "price": {"side": "item", "kind": "dense", "transform": "log1p"},
    },
    "sequences": {
        "watched": {
            "timestamp": "watched_time_ms",
            "max_length": 20,
            "attributes": {"item": {"column": "watched_item", "table": "item"}},
        }
    },
    "tasks": {"click": {}, "conversion": {"given": "click", "delay_hours": 24}},
}


def test_round_trip(tmp_path: Path) -> None:
    schema = Schema.from_dict(EXAMPLE)
    schema.save(tmp_path / "schema.yaml")
    again = Schema.load(tmp_path / "schema.yaml")
    assert again == schema
    assert again.hash == schema.hash


def test_views() -> None:
    schema = Schema.from_dict(EXAMPLE)
    assert [f.name for f in schema.request_features] == ["user_id", "hour"]
    assert [f.name for f in schema.item_features] == ["item_id", "price"]
    assert schema.surface_names == ("feed", "reels", "other")
    assert schema.surface_index("reels") == 1
    assert schema.task_names == ("click", "conversion")
    assert schema.sequence("watched").key("item") == "watched.item"
    assert {"watched_item", "watched_time_ms", "click", "request_id"} <= set(schema.columns())


def test_hash_sees_every_field() -> None:
    changed = copy.deepcopy(EXAMPLE)
    changed["sequences"]["watched"]["max_length"] = 21
    assert Schema.from_dict(changed).hash != Schema.from_dict(EXAMPLE).hash


def test_hash_is_that_of_earlier_versions() -> None:
    """Datasets and models on disk hold it; a change here makes them all unreadable."""
    assert Schema.from_dict(EXAMPLE).hash == "efffa8cb632e3bf6"


def test_a_field_added_at_its_default_leaves_the_hash() -> None:
    @dataclass(frozen=True, kw_only=True, slots=True)
    class Later(Task):
        window_days: int = 7

    def with_tasks(**changes: int) -> Schema:
        schema = Schema.from_dict(EXAMPLE)
        later = (Later(**{f.name: getattr(t, f.name) for f in fields(t)}, **changes) for t in schema.tasks)
        return replace(schema, tasks=tuple(later))

    assert with_tasks().hash == with_tasks(window_days=7).hash == Schema.from_dict(EXAMPLE).hash
    assert with_tasks(window_days=8).hash != with_tasks().hash


def reordered(data: Any) -> Any:
    """The same mapping with the keys of every level the other way round."""
    return {k: reordered(v) for k, v in reversed(data.items())} if isinstance(data, dict) else data


def test_hash_sees_an_order_only_where_it_has_a_meaning() -> None:
    want = Schema.from_dict(EXAMPLE).hash
    assert Schema.from_dict(EXAMPLE | {"tables": reordered(EXAMPLE["tables"])}).hash == want
    same = reordered(EXAMPLE)
    for group in ("features", "sequences", "tasks"):
        same[group] = {name: reordered(entry) for name, entry in EXAMPLE[group].items()}
    assert Schema.from_dict(same).hash == want
    for group in ("features", "tasks"):  # their columns of a tensor are numbered in this order
        other = copy.deepcopy(EXAMPLE)
        other["tasks"]["conversion"].pop("given")
        before = Schema.from_dict(other).hash
        other[group] = dict(reversed(other[group].items()))
        assert Schema.from_dict(other).hash != before


def test_defaults_and_whole_numbers_may_be_written_out() -> None:
    written = copy.deepcopy(EXAMPLE)
    written["tasks"] = {
        "click": {"label": "click", "weight": 1, "delay_hours": 0},
        "conversion": {"given": "click", "delay_hours": 24.0},
    }
    assert Schema.from_dict(written).hash == Schema.from_dict(EXAMPLE).hash


FAULTS = [
    ("tables.item.dim", lambda d: d["tables"]["item"].update(dim=0)),
    ("tables.item.dim", lambda d: d["tables"]["item"].update(dim="wide")),
    ("tables.user.rows", lambda d: d["tables"]["user"].pop("rows")),
    ("tables.user.rows", lambda d: d["tables"]["user"].update(rows=2)),
    ("tables.item.kind", lambda d: d["tables"]["item"].update(kind="map")),
    ("tables.item.colour", lambda d: d["tables"]["item"].update(colour="red")),
    ("features.item_id.table", lambda d: d["features"]["item_id"].update(table="video")),
    ("features.item_id.table", lambda d: d["features"]["item_id"].pop("table")),
    ("features.price.table", lambda d: d["features"]["price"].update(table="item")),
    ("features.price.side", lambda d: d["features"]["price"].pop("side")),
    ("features.item_id.max_length", lambda d: d["features"]["item_id"].update(kind="multi")),
    ("sequences.watched.attributes", lambda d: d["sequences"]["watched"].pop("attributes")),
    ("sequences.watched.max_length", lambda d: d["sequences"]["watched"].update(max_length=True)),
    (
        "sequences.watched.timestamp",
        lambda d: d["sequences"]["watched"].update(
            timestamp=None, attributes={"item": {"table": "item", "known_after_hours": 24.0}}
        ),
    ),
    ("tasks.conversion.given", lambda d: d["tasks"]["conversion"].update(given="buy")),
    ("tasks.click.weight", lambda d: d["tasks"]["click"].update(weight=float("nan"))),
    ("tasks.click.weight", lambda d: d["tasks"]["click"].update(weight=10**400)),
    ("tasks", lambda d: d.pop("tasks")),
    ("tables", lambda d: d.update(tables=[])),
    ("surface.values", lambda d: d["surface"].update(values="feed")),
    ("surface.values", lambda d: d["surface"].update(values=["feed", "other"])),
    ("timestamp.unit", lambda d: d["timestamp"].update(unit="minutes")),
    ("user", lambda d: d.pop("user")),
    ("features.item-id", lambda d: d["features"].update({"item-id": d["features"].pop("item_id")})),
    ("tasks.return", lambda d: d["tasks"].update({"return": {}})),
    ("tasks.2nd", lambda d: d["tasks"].update({"2nd": {}})),
    ("tasks.price", lambda d: d["tasks"].update(price={})),
]


@pytest.mark.parametrize(("key", "break_it"), FAULTS, ids=[f"{i}-{k}" for i, (k, _) in enumerate(FAULTS)])
def test_fault_names_its_key(tmp_path: Path, key: str, break_it: Any) -> None:
    data = copy.deepcopy(EXAMPLE)
    break_it(data)
    path = tmp_path / "bad.yaml"
    path.write_text(yaml.safe_dump(data))
    with pytest.raises(SchemaError) as caught:
        Schema.load(path)
    assert str(caught.value).startswith(f"{path}: {key}: ")


def test_files_that_are_no_schema(tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match="no such schema file"):
        Schema.load(tmp_path / "none.yaml")
    (tmp_path / "list.yaml").write_text("- 1\n")
    with pytest.raises(SchemaError, match="expected a mapping"):
        Schema.load(tmp_path / "list.yaml")
    (tmp_path / "broken.yaml").write_text("a: [")
    with pytest.raises(SchemaError, match="not a YAML file"):
        Schema.load(tmp_path / "broken.yaml")
