"""Rows of a dataset become raw `/rank` requests."""

from __future__ import annotations

import json

import pyarrow as pa
import pytest

from foundation.data.requests import rank_body
from foundation.data.schema import Schema

SCHEMA = Schema.from_dict(
    {
        "name": "test",
        "user": "user_id",
        "request_id": "request_id",
        "impression_id": "impression_id",
        "timestamp": {"column": "time", "unit": "s"},
        "surface": {"column": "surface", "values": ["feed"]},
        "tables": {name: {"kind": "vocabulary"} for name in ("user", "item", "tag", "hour")},
        "features": {
            "user_id": {"side": "user", "kind": "categorical", "table": "user"},
            "age": {"side": "user", "kind": "dense"},
            "hour": {"side": "context", "kind": "categorical", "table": "hour"},
            "item_id": {"side": "item", "kind": "categorical", "table": "item"},
            "tags": {"side": "item", "kind": "multi", "table": "tag", "max_length": 3, "weights": "tag_weights"},
        },
        "sequences": {
            "seen": {"timestamp": "seen_time", "attributes": {"item": {"column": "seen_item", "table": "item"}}}
        },
        "tasks": {"click": {"label": "click"}},
    }
)


def rows(**changes: list) -> pa.Table:
    columns = {
        "impression_id": [10, 11],
        "request_id": [5, 5],
        "user_id": ["u", "u"],
        "age": [None, None],
        "hour": [3, 3],
        "time": [1000, 1000],
        "surface": ["feed", "feed"],
        "item_id": [7, 8],
        "tags": [[1, 2], []],
        "tag_weights": [[0.5, 1.0], []],
        "seen_item": [[1, 2], [1, 2]],
        "seen_time": [[900, None], [900, None]],
        "click": [0, 1],
    }
    return pa.table(columns | changes)


def test_body_of_one_request() -> None:
    body = rank_body(SCHEMA, rows(), "feed")
    assert json.loads(json.dumps(body)) == {
        "model": "feed",
        "time_ms": 1_000_000,
        "user": {"user_id": "u"},
        "context": {"hour": 3},
        "history": {"seen": {"item": [1, 2], "time_ms": [900_000, None]}},
        "candidates": [
            {"id": 10, "item_id": 7, "tags": [1, 2], "tag_weights": [0.5, 1.0]},
            {"id": 11, "item_id": 8, "tags": [], "tag_weights": []},
        ],
    }


def test_rows_must_be_of_one_request() -> None:
    with pytest.raises(ValueError, match="several requests"):
        rank_body(SCHEMA, rows(request_id=[5, 6]), "feed")
    with pytest.raises(ValueError, match="no rows"):
        rank_body(SCHEMA, rows().slice(0, 0), "feed")
