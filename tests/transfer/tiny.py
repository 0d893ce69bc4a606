"""A small dataset whose true click logits are known, and label stores made from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from foundation.data.dataset import Dataset
from foundation.data.files import atomic_dir
from foundation.data.schema import Schema
from tests.foundation.data.builders import write_dataset
from transfer.label_store import STORE, PartWriter, StoreInfo

USERS, ITEMS, SHOWN = 24, 30, 4
SCHEMA: dict[str, Any] = {
    "name": "tiny",
    "user": "user_id",
    "request_id": "request_id",
    "impression_id": "impression_id",
    "timestamp": {"column": "time_ms", "unit": "ms"},
    "surface": {"column": "surface", "values": ["feed", "reels"]},
    "tables": {
        "user": {"kind": "range", "rows": USERS + 2, "dim": 8},
        "item": {"kind": "range", "rows": ITEMS + 2, "dim": 8},
        "action": {"kind": "range", "rows": 4, "dim": 4},
    },
    "features": {
        "user_id": {"side": "user", "kind": "categorical", "table": "user"},
        "age": {"side": "user", "kind": "dense"},
        "item_id": {"side": "item", "kind": "categorical", "table": "item"},
    },
    "sequences": {
        "watched": {
            "timestamp": "watched_time",
            "max_length": 5,
            "attributes": {
                "item": {"column": "watched_item", "table": "item"},
                "action": {"column": "watched_action", "table": "action"},
            },
        }
    },
    "tasks": {"click": {"label": "click"}, "conversion": {"label": "conversion", "given": "click"}},
}


def schema() -> Schema:
    """The schema as an object."""
    return Schema.from_dict(SCHEMA, source="tiny")


def true_logits(user: np.ndarray, item: np.ndarray) -> np.ndarray:
    """Logits float32 ``[n, 2]`` of click and of conversion given click."""
    rng = np.random.default_rng(99)
    taste, kind = rng.normal(0, 1, USERS), rng.normal(0, 1, ITEMS)
    click = 1.2 * taste[user] + 1.2 * kind[item] + 0.4 * taste[user] * kind[item] - 0.5
    return np.stack([click, 0.5 * click - 0.5], 1).astype(np.float32)


def table(requests: int, seed: int, first_id: int) -> tuple[pa.Table, np.ndarray]:
    """Rows of requests with ``SHOWN`` impressions each, and their true logits ``[n, 2]``."""
    rng = np.random.default_rng(seed)
    rows = requests * SHOWN
    user = np.repeat(rng.integers(0, USERS, requests), SHOWN)
    item = rng.integers(0, ITEMS, rows)
    logits = true_logits(user, item)
    click = rng.random(rows) < 1 / (1 + np.exp(-logits[:, 0]))
    conversion = click & (rng.random(rows) < 1 / (1 + np.exp(-logits[:, 1])))
    request = np.repeat(np.arange(requests), SHOWN)
    lengths = rng.integers(0, 6, requests)
    histories = [rng.integers(0, ITEMS, n).tolist() for n in lengths]
    actions = [rng.integers(0, 2, n).tolist() for n in lengths]
    times = [sorted(rng.integers(0, 10**6, n).tolist()) for n in lengths]
    columns = {
        "user_id": user,
        "age": user / USERS,
        "item_id": item,
        "request_id": [f"{first_id}-{r}" for r in request],
        "impression_id": np.arange(first_id, first_id + rows),
        "time_ms": 2_000_000 + 1000 * request,
        "surface": np.where(request % 3 == 0, "reels", "feed"),
        "click": click.astype(np.int64),
        "conversion": conversion.astype(np.int64),
        "watched_item": pa.array([histories[r] for r in request], pa.list_(pa.int64())),
        "watched_action": pa.array([actions[r] for r in request], pa.list_(pa.int64())),
        "watched_time": pa.array([times[r] for r in request], pa.list_(pa.int64())),
    }
    return pa.table({name: pa.array(value) for name, value in columns.items()}), logits


SPLITS = {"train": (180, 0), "validation": (120, 100_000), "test": (300, 200_000)}


def dataset(folder: Path) -> Dataset:
    """Writes the dataset: 720 training, 480 validation and 1,200 test rows."""
    files = {
        f"{split}/part-00000.parquet": table(requests, seed, first)[0]
        for seed, (split, (requests, first)) in enumerate(SPLITS.items())
    }
    return write_dataset(folder, files, schema(), row_group_size=200)


def store(folder: Path, data: Dataset, *, keep: float = 1.0, noise: float = 0.0, **changes: Any) -> Path:
    """Writes a label store of the true logits; ``keep`` is the share of rows that it holds."""
    rng = np.random.default_rng(5)
    with atomic_dir(folder) as out:
        writer = PartWriter(out, data.schema.task_names, 4, rows_per_file=500)
        for seed, (requests, first) in enumerate(SPLITS.values()):
            _, logits = table(requests, seed, first)
            ids = np.arange(first, first + len(logits))
            kept = rng.random(len(ids)) < keep
            logits = logits + rng.normal(0, noise, logits.shape).astype(np.float32)
            embedding = np.repeat(ids[:, None] % 7, 4, axis=1).astype(np.float32)
            for piece in np.array_split(np.flatnonzero(kept), 4):
                writer.write(ids[piece], logits[piece], embedding[piece])
        writer.close()
        info = StoreInfo(
            **{
                "teacher": "f" * 64,
                "run": "run",
                "schema_hash": data.schema.hash,
                "encoder_hash": data.encoder.hash,
                "tasks": data.schema.task_names,
                "embedding_dim": 4,
                "rows": sum(writer.files.values()),
                "splits": tuple(SPLITS),
                "files": writer.files,
                "created": "2026-01-01T00:00:00+00:00",
            }
            | changes
        )
        (out / STORE).write_text(info.to_json())
    return folder
