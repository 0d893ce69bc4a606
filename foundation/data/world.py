"""`opengem world`: the raw logs of a synthetic world, in any size, with the true probability of every label.

    OUT/impressions/part-00000.parquet ...   one row per impression, sorted by time, rows of a request adjacent
    OUT/users.parquet, OUT/items.parquet     what is known about them
    OUT/schema.yaml, OUT/prepare.yaml        what `opengem prepare logs --config` needs to make a dataset of it
    OUT/world.yaml, OUT/world.json           the config and the counts

Histories are not written: `prepare` builds them from the log, as from any other. The columns `true_click`,
`true_like` and `true_conversion` (given a click) are no features; they tell what the best possible model would say.

Memory does not grow with the number of rows. Users are simulated in blocks of about `BLOCK_ROWS` rows, and the rows of
a block are appended to one Arrow stream per stretch of time; then each stretch is read, sorted and
written as Parquet. The stretches hold about `BLOCK_ROWS` rows too, up to `MAX_STRETCHES` of them (the number
of files that are open at once); beyond that they grow.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from foundation.data.files import atomic_dir, atomic_write
from foundation.data.progress import progress
from foundation.data.schema import Schema
from foundation.data.settings import save, show
from foundation.data.world_model import (
    COUNTRIES,
    DAY,
    DEVICES,
    DIMENSIONS,
    TAG_VALUES,
    TAGS,
    TOPICS,
    Items,
    Law,
    Users,
    draw_items,
    draw_users,
    simulate,
    unit,
)

BLOCK_ROWS = 500_000
MAX_STRETCHES = 256
ROW_GROUP = 65_536
TASKS = ("click", "like", "conversion")


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
    overwrite: bool = False

    def __post_init__(self) -> None:
        positive = ("rows", "candidates", "requests_per_user", "history_length", "half_life_hours", "delay_hours")
        for key in (*positive, "validation_days", "test_days"):
            if getattr(self, key) <= 0:
                raise ValueError(f"{key} must be positive, is {getattr(self, key)}")
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
        rng = np.random.default_rng(config.seed)
        centres = unit(rng.standard_normal((TOPICS, DIMENSIONS)))
        items = draw_items(config.item_count, centres, rng)
        pq.write_table(_item_table(items), folder / "items.parquet", compression="zstd")
        spills = _spill_blocks(config, items, centres, folder)
        counts = _sort_spills(config, spills, folder)
        world_schema(config).save(folder / "schema.yaml")
        atomic_write(folder / "prepare.yaml", yaml.safe_dump(_prepare_settings(config.out.resolve()), sort_keys=False))
        result = WorldResult(
            out=config.out, items=items.count, users=pq.read_metadata(folder / "users.parquet").num_rows, **counts
        )
        save(config, folder / "world.yaml")
        facts = {name: getattr(result, name) for name in ("impressions", "requests", "users", "items", "positives")}
        atomic_write(folder / "world.json", json.dumps(facts, indent=2) + "\n")
    rates = ", ".join(f"{task} {count / result.impressions:.1%}" for task, count in result.positives.items())
    print(f"{result.out}: {result.impressions:,} impressions of {result.users:,} users; positive: {rates}")
    return result


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
        "log": [str(folder / "impressions" / "*.parquet")],
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
    users = math.ceil(config.rows / _rows_per_user(config))
    return {"kind": "hash", "rows": 2 + 4 * users} if users > 1_000_000 else {}


def _rows_per_user(config: WorldConfig) -> float:
    return max(1.0, config.requests_per_user * config.candidates)


def _blocks(config: WorldConfig, items: Items, centres: np.ndarray) -> Iterator[tuple[Users, dict[str, np.ndarray]]]:
    """Simulated blocks of users until `rows` rows are there; the last block is cut to fit."""
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
    first_user, left, block = 1, config.rows, 0
    while left > 0:
        rng = np.random.default_rng([config.seed, block])
        count = math.ceil(min(left, BLOCK_ROWS) / _rows_per_user(config))
        users = draw_users(first_user, count, centres, law, rng)
        log = {name: value[:left] for name, value in simulate(users, items, law, rng).items()}
        rows = len(log["user_id"])
        yield users, log
        first_user, left, block = first_user + count, left - rows, block + 1


def _spill_blocks(config: WorldConfig, items: Items, centres: np.ndarray, folder: Path) -> list[Path]:
    """Writes users.parquet, and each block's impressions to one Arrow stream per stretch of time."""
    stretches = min(math.ceil(config.rows / BLOCK_ROWS), MAX_STRETCHES)
    length = math.ceil(config.days * DAY / stretches)
    spills = [folder / f"spill-{number:05d}.arrow" for number in range(stretches)]
    # Compressed: a spill is about as large as the Parquet that replaces it.
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    with ExitStack() as stack:
        writers: list[pa.ipc.RecordBatchStreamWriter] = []
        user_writer: pq.ParquetWriter | None = None
        advance = stack.enter_context(progress("simulating the world", config.rows))
        for users, log in _blocks(config, items, centres):
            table = pa.table(log)
            if user_writer is None:
                writers = [stack.enter_context(pa.ipc.new_stream(p, table.schema, options=options)) for p in spills]
                user_schema = _user_table(users, 0).schema
                user_writer = stack.enter_context(
                    pq.ParquetWriter(folder / "users.parquet", user_schema, compression="zstd")
                )
            user_writer.write_table(_user_table(users, int(log["user_id"][-1])))
            stretch = (log["time_ms"] - config.start_ms) // length
            order = np.argsort(stretch, kind="stable")
            ends = np.searchsorted(stretch[order], np.arange(stretches + 1))
            table = table.take(pa.array(order))
            for writer, start, end in zip(writers, ends[:-1], ends[1:], strict=True):
                if end > start:
                    writer.write_table(table.slice(start, end - start))
            advance(table.num_rows)
    return spills


def _sort_spills(config: WorldConfig, spills: list[Path], folder: Path) -> dict:
    """Sorts each stretch by time and writes it as Parquet; numbers requests and impressions from 1."""
    (folder / "impressions").mkdir()
    rows = requests = part = 0
    positives = dict.fromkeys(TASKS, 0)
    with progress("sorting by time", config.rows) as advance:
        for spill in spills:
            with pa.OSFile(str(spill)) as file, pa.ipc.open_stream(file) as reader:
                table = reader.read_all()
            spill.unlink()
            if table.num_rows == 0:
                continue
            user, time = table["user_id"].to_numpy(), table["time_ms"].to_numpy()
            # Stable, so that the positions within a request stay.
            order = np.lexsort((user, time))
            user, time = user[order], time[order]
            starts = np.concatenate([[True], (user[1:] != user[:-1]) | (time[1:] != time[:-1])])
            request = requests + np.cumsum(starts)
            impression = rows + 1 + np.arange(len(user))
            table = _impression_table(table.take(pa.array(order)), impression, request, config.surfaces)
            path = folder / "impressions" / f"part-{part:05d}.parquet"
            pq.write_table(table, path, compression="zstd", row_group_size=ROW_GROUP)
            for task in TASKS:
                positives[task] += int(np.count_nonzero(table[task].to_numpy()))
            rows, requests, part = rows + table.num_rows, int(request[-1]), part + 1
            advance(table.num_rows)
    assert rows == config.rows
    return {"impressions": rows, "requests": requests, "positives": positives}


def _impression_table(
    table: pa.Table, impression: np.ndarray, request: np.ndarray, surfaces: tuple[str, ...]
) -> pa.Table:
    """The columns of the raw log, in their order."""
    conversion_time = table["conversion_time_ms"].to_numpy()
    names = pa.DictionaryArray.from_arrays(pa.array(table["surface"].to_numpy().astype(np.int32)), list(surfaces))
    return pa.table(
        {
            "impression_id": impression,
            "request_id": request,
            "time_ms": table["time_ms"],
            "user_id": table["user_id"],
            "item_id": table["item_id"],
            "surface": names.cast(pa.string()),
            "device": table["device"],
            "click": table["click"],
            "like": table["like"],
            "conversion": table["conversion"],
            "conversion_time_ms": pa.array(conversion_time, mask=conversion_time == 0),
            "true_click": table["true_click"],
            "true_like": table["true_like"],
            "true_conversion": table["true_conversion"],
        }
    )


def _item_table(items: Items) -> pa.Table:
    """What is known of each item, sorted by id."""
    order = np.argsort(items.ids)
    tags = pa.FixedSizeListArray.from_arrays(pa.array(items.tags[order].ravel()), TAGS).cast(pa.list_(pa.int64()))
    columns = {"item_id": items.ids, "topic": items.topic, "creator": items.creator, "price": items.price}
    return pa.table({name: values[order] for name, values in columns.items()} | {"tags": tags})


def _user_table(users: Users, last_id: int) -> pa.Table:
    """What is known of each user up to `last_id`; about one age in 30 is missing."""
    keep = users.ids <= last_id
    ids = users.ids[keep]
    age = pa.array(users.age[keep], mask=ids % 30 == 0)
    return pa.table({"user_id": ids, "age": age, "country": users.country[keep]})
