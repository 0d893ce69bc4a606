"""Random batches for any schema, and a schema with every kind of input."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from foundation.data.batch import Batch
from foundation.data.encoding import NO_TIME, EncodedBatch, EncodedRows
from foundation.data.schema import Feature, Schema

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
    """Random requests with these numbers of impressions.

    Args:
        histories: number of events of each request, in every sequence; random by default.
    """
    rng = np.random.default_rng(seed)
    requests, impressions = len(sizes), sum(sizes)
    now = 1_700_000_000_000 + rng.integers(0, 10**9, requests)
    request = _rows(rng, schema.request_features, requests, table_rows)
    for sequence in schema.sequences:
        lengths = np.asarray(
            rng.integers(0, sequence.max_length + 1, requests) if histories is None else histories, dtype=np.int64
        ).clip(0, sequence.max_length)
        for attribute in sequence.attributes:
            key = sequence.key(attribute.name)
            request.ids[key] = rng.integers(0, table_rows[attribute.table], lengths.sum())
            request.lengths[key] = lengths
        if sequence.timestamp is not None:
            age = (10 ** rng.uniform(3, 10, lengths.sum())).astype(np.int64)
            time = np.repeat(now, lengths) - age
            request.times[sequence.name] = np.where(rng.random(len(time)) < 0.1, NO_TIME, time)
    tasks = len(schema.tasks)
    labels = (rng.random((impressions, tasks)) < 0.4).astype(np.float32)
    valid = np.ones((impressions, tasks), dtype=bool)
    for k, task in enumerate(schema.tasks):
        if task.given is not None:
            valid[:, k] = labels[:, schema.task_names.index(task.given)] == 1
    return EncodedBatch(
        request=request,
        item=_rows(rng, schema.item_features, impressions, table_rows),
        request_index=np.repeat(np.arange(requests), sizes),
        request_time=now,
        user_id=rng.integers(0, 100, requests),
        surface=rng.integers(0, len(schema.surface_names), requests),
        labels=labels,
        label_valid=valid,
        weight=rng.uniform(0.5, 2.0, impressions).astype(np.float32),
        sampling_rate=np.ones(impressions, dtype=np.float32),
        impression_id=np.arange(impressions),
    )


def make_batch(schema: Schema, sizes: Sequence[int], **options: Any) -> Batch:
    """The same as tensors."""
    return Batch.from_encoded(encoded_batch(schema, sizes, **options), schema)


def _rows(
    rng: np.random.Generator, features: Sequence[Feature], rows: int, table_rows: Mapping[str, int]
) -> EncodedRows:
    ids: dict[str, np.ndarray] = {}
    lengths: dict[str, np.ndarray] = {}
    weights: dict[str, np.ndarray] = {}
    width = 0
    for feature in features:
        if feature.table is None:
            width += feature.dim
            continue
        multi = feature.kind == "multi"
        length = rng.integers(0, feature.max_length + 1, rows) if multi else np.ones(rows, dtype=np.int64)
        lengths[feature.name] = length
        ids[feature.name] = rng.integers(0, table_rows[feature.table], length.sum())
        if feature.weights is not None:
            weights[feature.name] = rng.uniform(0.1, 1.0, length.sum()).astype(np.float32)
    dense = rng.normal(size=(rows, width)).astype(np.float32)
    return EncodedRows(rows=rows, ids=ids, lengths=lengths, weights=weights, dense=dense, times={})
