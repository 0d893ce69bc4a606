"""Small datasets for tests: a schema with every kind of column, rows for it, and Parquet files."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from foundation.data.arrow_columns import column_roles, to_column
from foundation.data.dataset import Dataset, write_manifest
from foundation.data.encoder_fit import EncoderFit
from foundation.data.encoding import Encoder
from foundation.data.schema import Schema

SURFACES = ("feed", "reels", "stories")
SCHEMA: dict[str, Any] = {
    "name": "small",
    "user": "user_id",
    "request_id": "request_id",
    "impression_id": "impression_id",
    "timestamp": {"column": "time_ms", "unit": "ms"},
    "surface": {"column": "surface", "values": list(SURFACES)},
    "tables": {
        "user": {"kind": "hash", "rows": 50, "dim": 4},
        "item": {"kind": "vocabulary", "dim": 4},
        "topic": {"kind": "vocabulary", "dim": 4},
        "action": {"kind": "range", "rows": 6, "dim": 4},
        "hour": {"kind": "range", "rows": 26, "dim": 4},
    },
    "features": {
        "user_id": {"side": "user", "kind": "categorical", "table": "user"},
        "age": {"side": "user", "kind": "dense", "transform": "standardize"},
        "likes": {"side": "user", "kind": "multi", "table": "topic", "max_length": 3},
        "hour": {"side": "context", "kind": "categorical", "table": "hour"},
        "item_id": {"side": "item", "kind": "categorical", "table": "item"},
        "topics": {"side": "item", "kind": "multi", "table": "topic", "max_length": 2, "weights": "topic_weights"},
        "price": {"side": "item", "kind": "dense", "transform": "log1p"},
        "image": {"side": "item", "kind": "embedding", "dim": 3},
    },
    "sequences": {
        "watched": {
            "timestamp": "watched_time",
            "max_length": 4,
            "keep": "latest",
            "attributes": {
                "item": {"column": "watched_item", "table": "item"},
                "action": {"column": "watched_action", "table": "action"},
            },
        }
    },
    "tasks": {
        "click": {"label": "click"},
        "like": {"label": "like"},
        "conversion": {"label": "conversion", "given": "click"},
    },
}


def small_schema(**changes: Any) -> Schema:
    """The schema above with top-level keys replaced."""
    return Schema.from_dict({**copy.deepcopy(SCHEMA), **changes}, source="small.yaml")


def small_rows(sizes: Iterable[int], seed: int = 0, first_id: int = 0) -> dict[str, list[Any]]:
    """Rows of requests with these numbers of impressions, as lists by column."""
    rng = np.random.default_rng(seed)
    columns: dict[str, list[Any]] = {name: [] for name in small_schema().columns()}
    impression = first_id
    for request, size in enumerate(sizes):
        events = int(rng.integers(0, 8))
        user = int(rng.integers(0, 40))
        likes = [f"t{v}" for v in rng.integers(0, 9, rng.integers(0, 5))]
        shared = {
            "request_id": f"r{first_id}-{request}",
            "user_id": f"user-{user}",
            "time_ms": 1_000_000 + 1000 * request,
            "surface": [*SURFACES, "elsewhere"][int(rng.integers(0, 4))],
            "age": None if user % 7 == 0 else float(user),
            "likes": None if user % 5 == 0 else likes,
            "hour": int(rng.integers(0, 24)),
            "watched_item": rng.integers(0, 30, events).tolist(),
            "watched_action": rng.integers(0, 4, events).tolist(),
            "watched_time": sorted(rng.integers(0, 900_000, events).tolist()),
        }
        for _ in range(size):
            topics = int(rng.integers(0, 4))
            click = int(rng.integers(0, 2))
            row = shared | {
                "impression_id": impression,
                "item_id": int(rng.integers(0, 30)),
                "topics": [f"t{v}" for v in rng.integers(0, 9, topics)],
                "topic_weights": rng.random(topics).round(3).tolist(),
                "price": None if impression % 11 == 0 else float(rng.integers(0, 100)),
                "image": rng.random(3).round(3).tolist(),
                "click": click,
                "like": None if impression % 13 == 0 else int(rng.integers(0, 2)),
                "conversion": int(rng.integers(0, 2)) if click else 0,
            }
            for name in columns:
                columns[name].append(row[name])
            impression += 1
    return columns


def small_table(sizes: Iterable[int], seed: int = 0, first_id: int = 0) -> pa.Table:
    """:func:`small_rows` as an Arrow table."""
    rows = small_rows(sizes, seed, first_id)
    types = {"likes": pa.list_(pa.string()), "topics": pa.list_(pa.string()), "topic_weights": pa.list_(pa.float64())}
    types |= {name: pa.list_(pa.int64()) for name in ("watched_item", "watched_action", "watched_time")}
    return pa.table({name: pa.array(values, types.get(name)) for name, values in rows.items()})


def fit(schema: Schema, *tables: pa.Table) -> Encoder:
    """An encoder fitted on whole tables."""
    fitting = EncoderFit(schema)
    roles = column_roles(schema)
    for table in tables:
        for batch in table.to_batches():
            fitting.update({name: to_column(batch.column(name), role) for name, role in roles.items()})
    return fitting.finish()


def write_dataset(
    folder: Path,
    files: Mapping[str, pa.Table],
    schema: Schema | None = None,
    row_group_size: int = 7,
    encoder: Encoder | None = None,
) -> Dataset:
    """Writes ``{"train/part-00000.parquet": table, ...}`` as a dataset and opens it."""
    schema = schema or small_schema()
    folder.mkdir(parents=True, exist_ok=True)
    for name, table in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        pq.write_table(table, folder / name, row_group_size=row_group_size)
    train = [table for name, table in files.items() if name.startswith("train")]
    write_manifest(folder, schema, encoder or fit(schema, *train))
    return Dataset.open(folder)


def train_parts(*tables: pa.Table) -> dict[str, pa.Table]:
    """Tables as the files of a train split."""
    return {f"train/part-{number:05d}.parquet": table for number, table in enumerate(tables)}
