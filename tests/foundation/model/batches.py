"""Random batches for any schema, and a schema with every kind of input."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from foundation.data.batch import Batch
from foundation.data.encoding import EncodedBatch
from foundation.data.schema import Schema
from foundation.model.benchmarks.batches import random_batch

TABLE_ROWS = {"user": 30, "item": 40, "author": 20, "topic": 12, "action": 6, "interest": 15, "hour": 26}

SCHEMA: dict[str, Any] = {
    "name": "model-test",
    "user": "user_id",
    "impression_id": "impression_id",
    "timestamp": {"column": "time_ms"},
    "surface": {"column": "surface", "values": ["feed", "reels"]},
    "tables": {
        "user": {"kind": "hash", "rows": 30, "dim": 8},
        "item": {"kind": "hash", "rows": 40, "dim": 8},
        "author": {"kind": "hash", "rows": 20, "dim": 4},
        "topic": {"kind": "hash", "rows": 12, "dim": 8},
        "action": {"kind": "range", "rows": 6, "dim": 4},
        "interest": {"kind": "hash", "rows": 15, "dim": 4},
        "hour": {"kind": "range", "rows": 26, "dim": 4},
    },
    "features": {
        "user_id": {"side": "user", "kind": "categorical", "table": "user"},
        "interests": {"side": "user", "kind": "multi", "table": "interest", "max_length": 4},
        "liked_topics": {
            "side": "user",
            "kind": "multi",
            "table": "topic",
            "max_length": 3,
            "weights": "liked_weights",
        },
        "age": {"side": "user", "kind": "dense"},
        "hour": {"side": "context", "kind": "categorical", "table": "hour"},
        "item_id": {"side": "item", "kind": "categorical", "table": "item"},
        "author_id": {"side": "item", "kind": "categorical", "table": "author"},
        "topics": {"side": "item", "kind": "multi", "table": "topic", "max_length": 3},
        "price": {"side": "item", "kind": "dense"},
        "image": {"side": "item", "kind": "embedding", "dim": 3},
        "length": {"side": "item", "kind": "dense"},
    },
    "sequences": {
        "watched": {
            "timestamp": "watched_time",
            "max_length": 6,
            "attributes": {
                "item": {"column": "watched_item", "table": "item"},
                "author": {"column": "watched_author", "table": "author"},
                "action": {"column": "watched_action", "table": "action"},
            },
        },
        "bought": {
            "max_length": 3,
            "attributes": {"item": {"column": "bought_item", "table": "item"}},
        },
    },
    "tasks": {
        "click": {"label": "click"},
        "like": {"label": "like", "weight": 0.5},
        "conversion": {"label": "conversion", "given": "click"},
    },
}


def model_schema(**changes: Any) -> Schema:
    """The schema above with top-level keys replaced."""
    return Schema.from_dict({**copy.deepcopy(SCHEMA), **changes}, source="model.yaml")


def encoded_batch(
    schema: Schema,
    sizes: Sequence[int],
    seed: int = 0,
    table_rows: Mapping[str, int] = TABLE_ROWS,
    histories: Sequence[int] | None = None,
) -> EncodedBatch:
    """Random requests with these numbers of impressions, see ``random_batch``."""
    return random_batch(schema, sizes, table_rows, seed=seed, histories=histories)


def make_batch(schema: Schema, sizes: Sequence[int], **options: Any) -> Batch:
    """The same as tensors."""
    return Batch.from_encoded(encoded_batch(schema, sizes, **options), schema)
