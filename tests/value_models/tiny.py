"""A small schema that uses every kind of input, and random encoded batches for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from foundation.data.encoding import EncodedBatch, EncodedRows, Encoder, model_inputs
from foundation.data.schema import Schema

SCHEMA: dict[str, Any] = {
    "name": "tiny",
    "user": "user_id",
    "request_id": "request_id",
    "impression_id": "impression_id",
    "timestamp": {"column": "time_ms", "unit": "ms"},
    "surface": {"column": "surface", "values": ["feed", "reels"]},
    "tables": {
        "user": {"kind": "hash", "rows": 40, "dim": 8},
        "item": {"kind": "range", "rows": 30, "dim": 8},
        "topic": {"kind": "range", "rows": 9, "dim": 4},
        "type": {"kind": "range", "rows": 6, "dim": 4},
    },
    "features": {
        "user_id": {"side": "user", "kind": "categorical", "table": "user"},
        "age": {"side": "user", "kind": "dense"},
        "likes": {"side": "user", "kind": "multi", "table": "topic", "max_length": 3},
        "screen": {"side": "context", "kind": "categorical", "table": "type"},
        "item_id": {"side": "item", "kind": "categorical", "table": "item"},
        "topics": {"side": "item", "kind": "multi", "table": "topic", "max_length": 4, "weights": "topic_weights"},
        "image": {"side": "item", "kind": "embedding", "dim": 3},
        "price": {"side": "item", "kind": "dense"},
    },
    "sequences": {
        "watched": {
            "timestamp": "watched_time",
            "max_length": 6,
            "attributes": {"item": {"table": "item"}, "action": {"table": "type"}},
        },
        "liked": {"max_length": 4, "attributes": {"item": {"column": "liked_item", "table": "item"}}},
    },
    "tasks": {"click": {"label": "click"}, "conversion": {"label": "conversion", "given": "click"}},
}


def schema() -> Schema:
    """The schema as an object."""
    return Schema.from_dict(SCHEMA, source="tiny")


def encoder() -> Encoder:
    """An encoder for the schema; it has no vocabularies to learn."""
    return Encoder(schema(), {}, {}, {})


def rows(rng: np.random.Generator, count: int, side: str) -> EncodedRows:
    """Random encoded rows of the request or the item side; some histories and lists are empty."""
    s = schema()
    sizes = encoder().table_rows
    features = s.request_features if side == "request" else s.item_features
    ids: dict[str, np.ndarray] = {}
    lengths: dict[str, np.ndarray] = {}
    weights: dict[str, np.ndarray] = {}
    times: dict[str, np.ndarray] = {}
    for f in features:
        if f.table is None:
            continue
        most = f.max_length if f.kind == "multi" else 1
        least = 0 if f.kind == "multi" else 1
        lengths[f.name] = rng.integers(least, most + 1, count)
        ids[f.name] = rng.integers(0, sizes[f.table], int(lengths[f.name].sum()))
        if f.weights:
            weights[f.name] = rng.random(len(ids[f.name])).astype(np.float32)
    width = sum(f.dim for f in features if f.table is None)
    if side == "request":
        for q in s.sequences:
            held = rng.integers(0, q.max_length + 1, count)
            for a in q.attributes:
                lengths[q.key(a.name)] = held
                ids[q.key(a.name)] = rng.integers(0, sizes[a.table], int(held.sum()))
            if q.timestamp:
                times[q.name] = np.sort(rng.integers(-1, 10**6, int(held.sum())))
    dense = rng.standard_normal((count, width)).astype(np.float32)
    return EncodedRows(rows=count, ids=ids, lengths=lengths, weights=weights, dense=dense, times=times)


def batch(seed: int = 0, requests: int = 3, impressions: int = 8, start: int = 0) -> EncodedBatch:
    """A random batch; labels follow the item and the user, so that there is something to learn.

    ``start`` is the id of the first impression.
    """
    rng = np.random.default_rng(seed)
    request, item = rows(rng, requests, "request"), rows(rng, impressions, "item")
    index = np.sort(rng.integers(0, requests, impressions)) if requests else np.zeros(0, np.int64)
    score = 1.5 * np.sin(item.ids["item_id"]) + 1.0 * np.cos(request.ids["user_id"][index]) - 0.3
    click = rng.random(impressions) < 1 / (1 + np.exp(-score))
    conversion = click & (rng.random(impressions) < 1 / (1 + np.exp(1.0 - score)))
    return EncodedBatch(
        request=request,
        item=item,
        request_index=index.astype(np.int64),
        request_time=np.full(requests, 2 * 10**6, np.int64),
        user_id=request.ids["user_id"].astype(np.int64),
        surface=rng.integers(0, 2, requests),
        labels=np.stack([click, conversion], 1).astype(np.float32),
        label_valid=np.stack([np.ones_like(click), click], 1),
        weight=np.ones(impressions, np.float32),
        sampling_rate=np.ones(impressions, np.float32),
        impression_id=np.arange(start, start + impressions, dtype=np.int64),
    )


def inputs(seed: int = 0, requests: int = 3, impressions: int = 8) -> dict[str, torch.Tensor]:
    """The value model's inputs for a random batch, as tensors."""
    b = batch(seed, requests, impressions)
    named = model_inputs(schema(), b.request, b.item, b.request_index, b.request_time)
    return {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in named.items()}
