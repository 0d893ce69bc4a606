"""`opengem world`: the raw logs of a synthetic world, in any size, with the true probability of every label.

    OUT/impressions/part-00000.parquet ...   one row per impression, sorted by time, rows of a request adjacent
    OUT/users.parquet, OUT/items.parquet     what is known about them
    OUT/schema.yaml, OUT/prepare.yaml        what `opengem prepare logs --config` needs to make a dataset of it
    OUT/world.yaml, OUT/world.json           the config and the counts

Histories are not written: `prepare` builds them from the log, as from any other. The columns `true_click`,
`true_like` and `true_conversion` (given a click) are no features; they tell what the best possible model would say.

Memory does not grow with the number of rows, but with that of processes. Users are simulated in blocks of about
`BLOCK_ROWS` rows, and a block's rows are written to one Arrow file, those of a stretch of time together; then each
stretch is read from all blocks, sorted and written as Parquet. The stretches hold about `BLOCK_ROWS` rows too, up to
`MAX_STRETCHES` of them; beyond that they grow. The blocks' files go when the last stretch is written, so that the disk
holds the log about twice until then.
"""

from __future__ import annotations

import glob
import json
import math
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from foundation.data.files import atomic_dir, atomic_write
from foundation.data.schema import Schema
from foundation.data.settings import save, show
from foundation.data.world_blocks import TASKS, WorldPlan, world_items, write_rows
from foundation.data.world_model import COUNTRIES, DAY, DEVICES, TAG_VALUES, TAGS, TOPICS, Items, Law

BLOCK_ROWS = 500_000
MAX_STRETCHES = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class WorldConfig:
    """What to generate.

    Args:
        out: folder to write.
        rows: impressions, exactly; from 2,000 for tests to 100 million and more.
        seed: the same seed and settings give the same files.
        surfaces: names of the surfaces, at least 3; their traffic and behaviour take turns.
        items: number of items; null: one per 200 rows, between 200 and 1,000,000.
        days: length of the log.
        start: date of its first day, UTC.
        validation_days: days between the training and the test rows.
        test_days: last days of the log.
        candidates: impressions of a request; an item drawn twice is shown once.
        requests_per_user: mean number of requests of a user in the whole log; a few users have very many.
        history_length: events of the history in the dataset that the schema describes.
        half_life_hours: after this time a past click drives new clicks half as much.
        fade_per_click: how much of older clicks remains after each request with a click, 0 to 1.
        confirmation: how much the weight of a click in that drive depends on its agreement with the clicks before it;
            0: not at all, 8: much. Then what a click means can only be told beside other clicks.
        delay_hours: a conversion counts up to this long after the click.
        processes: that write at the same time; the files are the same whatever their number.
        overwrite: replace `out` if it exists.
    """

    out: Path
    rows: int = 200_000
    seed: int = 0
    surfaces: tuple[str, ...] = ("feed", "reels", "stories")
    items: int | None = None
    days: int = 14
    start: str = "2026-01-01"
    validation_days: int = 2
    test_days: int = 2
    candidates: int = 8
    requests_per_user: float = 12.0
    history_length: int = 50
    half_life_hours: float = 72.0
    fade_per_click: float = 0.7
    confirmation: float = 0.0
    delay_hours: float = 24.0
    processes: int = 1
    overwrite: bool = False

    def __post_init__(self) -> None:
        positive = ("rows", "candidates", "requests_per_user", "history_length", "half_life_hours", "delay_hours")
        for key in (*positive, "validation_days", "test_days", "processes"):
            if getattr(self, key) <= 0:
                raise ValueError(f"{key} must be positive, is {getattr(self, key)}")
        if self.seed < 0:
            raise ValueError(f"seed must not be negative, is {self.seed}")
        if len(self.surfaces) < 3 or len(set(self.surfaces)) < len(self.surfaces):
            raise ValueError(f"surfaces must be at least 3 different names, are {list(self.surfaces)}")
        if self.items is not None and self.items < TOPICS:
            raise ValueError(f"items must be at least {TOPICS}, is {self.items}")
        if self.days < self.validation_days + self.test_days + 1:
            raise ValueError(f"days must leave at least one day for training, is {self.days}")
        if not 0 <= self.fade_per_click <= 1:
            raise ValueError(f"fade_per_click must be between 0 and 1, is {self.fade_per_click}")
        if self.confirmation < 0:
            raise ValueError(f"confirmation must not be negative, is {self.confirmation}")
        try:
            datetime.strptime(self.start, "%Y-%m-%d")
        except ValueError as error:
            raise ValueError(f"start must be a date such as 2026-01-01, is {self.start!r}") from error

    @property
    def item_count(self) -> int:
        """Number of items, derived from the number of rows when not given."""
        return self.items if self.items is not None else min(max(200, self.rows // 200), 1_000_000)

    @property
    def start_ms(self) -> int:
        """Beginning of the log, milliseconds since 1970, UTC."""
        return int(datetime.strptime(self.start, "%Y-%m-%d").replace(tzinfo=UTC).timestamp() * 1000)


@dataclass(frozen=True, kw_only=True, slots=True)
class WorldResult:
    """What was written: numbers of rows, and positives per task."""

    out: Path
    impressions: int
    requests: int
    users: int
    items: int
    positives: dict[str, int]


def world(config: WorldConfig) -> WorldResult:
    """Generates the raw logs.

    Raises:
        FileExistsError: `out` exists and `overwrite` is false.
        OSError: the disk is full; nothing is left behind.
    """
    show(config, "world")
    with atomic_dir(config.out, overwrite=config.overwrite) as folder:
        items, _ = world_items(config.seed, config.item_count)
        pq.write_table(_item_table(items), folder / "items.parquet", compression="zstd")
        counts = write_rows(_plan(config, folder), config.processes)
        world_schema(config).save(folder / "schema.yaml")
        atomic_write(folder / "prepare.yaml", yaml.safe_dump(_prepare_settings(config.out.resolve()), sort_keys=False))
        result = WorldResult(out=config.out, items=items.count, **counts)
        save(config, folder / "world.yaml")
        facts = {name: getattr(result, name) for name in ("impressions", "requests", "users", "items", "positives")}
        atomic_write(folder / "world.json", json.dumps(facts, indent=2) + "\n")
    rates = ", ".join(f"{task} {count / result.impressions:.1%}" for task, count in result.positives.items())
    print(f"{result.out}: {result.impressions:,} impressions of {result.users:,} users; positive: {rates}")
    return result


def _plan(config: WorldConfig, folder: Path) -> WorldPlan:
    law = Law(
        surfaces=len(config.surfaces),
        days=config.days,
        start_ms=config.start_ms,
        candidates=config.candidates,
        requests_per_user=config.requests_per_user,
        half_life_hours=config.half_life_hours,
        fade_per_click=config.fade_per_click,
        confirmation=config.confirmation,
        delay_hours=config.delay_hours,
    )
    return WorldPlan(
        folder=folder,
        rows=config.rows,
        seed=config.seed,
        items=config.item_count,
        surfaces=config.surfaces,
        law=law,
        block_rows=BLOCK_ROWS,
        stretches=min(math.ceil(config.rows / BLOCK_ROWS), MAX_STRETCHES),
    )


def world_schema(config: WorldConfig) -> Schema:
    """The schema of the dataset that `prepare` makes of the raw logs."""
    test_from = config.days - config.test_days
    cuts = [
        datetime.fromtimestamp((config.start_ms + day * DAY) / 1000, UTC).strftime("%Y-%m-%d")
        for day in (test_from - config.validation_days, test_from)
    ]
    fixed = {"device": DEVICES, "country": COUNTRIES, "topic": TOPICS, "tag": TAG_VALUES, "flag": 2}
    tables: dict[str, dict] = {
        "user": {"kind": "vocabulary", "dim": 16} | _hashed_users(config),
        "item": {"kind": "range", "rows": config.item_count + 3, "dim": 16},
        "creator": {"kind": "vocabulary", "dim": 8, "min_count": 5},
        "surface": {"kind": "vocabulary", "dim": 8},
    } | {name: {"kind": "range", "rows": values + 2, "dim": 8} for name, values in fixed.items()}
    return Schema.from_dict(
        {
            "name": "synthetic",
            "user": "user_id",
            "request_id": "request_id",
            "impression_id": "impression_id",
            "timestamp": {"column": "time_ms", "unit": "ms"},
            "surface": {"column": "surface", "values": list(config.surfaces)},
            "tables": tables,
            "features": {
                "user_id": {"side": "user", "kind": "categorical", "table": "user"},
                "age": {"side": "user", "kind": "dense", "transform": "standardize"},
                "country": {"side": "user", "kind": "categorical", "table": "country"},
                "device": {"side": "context", "kind": "categorical", "table": "device"},
                "item_id": {"side": "item", "kind": "categorical", "table": "item"},
                "topic": {"side": "item", "kind": "categorical", "table": "topic"},
                "creator": {"side": "item", "kind": "categorical", "table": "creator"},
                "tags": {"side": "item", "kind": "multi", "table": "tag", "max_length": TAGS},
                "price": {"side": "item", "kind": "dense", "transform": "log1p_standardize"},
            },
            "sequences": {
                "clicked": {
                    "timestamp": "clicked_time_ms",
                    "max_length": config.history_length,
                    "keep": "latest",
                    "attributes": {
                        "item": {"column": "clicked_item", "table": "item"},
                        "topic": {"column": "clicked_topic", "table": "topic"},
                        "like": {"column": "clicked_like", "table": "flag"},
                        "conversion": {
                            "column": "clicked_conversion",
                            "table": "flag",
                            "known_after_hours": config.delay_hours,
                        },
                        "surface": {"column": "clicked_surface", "table": "surface"},
                    },
                }
            },
            "tasks": {
                "click": {"label": "click"},
                "like": {"label": "like"},
                "conversion": {"label": "conversion", "given": "click", "delay_hours": config.delay_hours},
            },
            "split": {"train_until": cuts[0], "validation_until": cuts[1], "timezone": "UTC"},
        },
        source="synthetic world",
    )


def _prepare_settings(folder: Path) -> dict[str, Any]:
    """The settings of `opengem prepare logs` for the logs in `folder`; the output is left to the user."""
    return {
        "schema": str(folder / "schema.yaml"),
        "log": [str(Path(glob.escape(str(folder))) / "impressions" / "*.parquet")],
        "users": {"path": str(folder / "users.parquet"), "key": "user_id"},
        "items": {"path": str(folder / "items.parquet"), "key": "item_id"},
        "sequences": {
            "clicked": {
                "attributes": {name: name for name in ("topic", "like", "conversion", "surface")} | {"item": "item_id"},
                "where": "click == 1",
            }
        },
        "carry": [f"true_{task}" for task in TASKS],
    }


def _hashed_users(config: WorldConfig) -> dict[str, Any]:
    """Above a million users a hash table of four rows per user: a vocabulary would have to hold all their ids."""
    users = math.ceil(config.rows / max(1.0, config.requests_per_user * config.candidates))
    return {"kind": "hash", "rows": 2 + 4 * users} if users > 1_000_000 else {}


def _item_table(items: Items) -> pa.Table:
    """What is known of each item, sorted by id."""
    order = np.argsort(items.ids)
    tags = pa.FixedSizeListArray.from_arrays(pa.array(items.tags[order].ravel()), TAGS).cast(pa.list_(pa.int64()))
    columns = {"item_id": items.ids, "topic": items.topic, "creator": items.creator, "price": items.price}
    return pa.table({name: values[order] for name, values in columns.items()} | {"tags": tags})
