"""A schema with tables of several sizes, random batches of it, and their parts by rank."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foundation.data.encoding import EncodedBatch, EncodedRows
from foundation.data.schema import Schema

TASKS = ("click", "like")


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """How large tables and batches are.

    Args:
        users, items: rows of the two large tables; the third, of actions, has 5.
        dim: of the tables.
        requests: of a batch of all ranks together.
        impressions: per request.
        history: mean events per request.
        tail: lengths of histories are log-normal with this sigma; 0: all equal.
        longest: cap of a history.
    """

    users: int = 60
    items: int = 90
    dim: int = 8
    requests: int = 12
    impressions: int = 2
    history: int = 4
    tail: float = 1.0
    longest: int = 12

    @property
    def table_rows(self) -> dict[str, int]:
        """Rows by table."""
        return {"user": self.users, "item": self.items, "action": 5}

    def schema(self) -> Schema:
        """Users with a history of items and actions; two dense columns; two tasks."""
        rows = self.table_rows
        return Schema.from_dict(
            {
                "name": "random",
                "user": "user_id",
                "impression_id": "impression_id",
                "timestamp": {"column": "time_ms"},
                "surface": {"column": "surface", "values": ["feed", "reels"]},
                "tables": {
                    "user": {"kind": "hash", "rows": rows["user"], "dim": self.dim},
                    "item": {"kind": "hash", "rows": rows["item"], "dim": self.dim},
                    "action": {"kind": "range", "rows": rows["action"], "dim": self.dim},
                },
                "features": {
                    "user_id": {"side": "user", "kind": "categorical", "table": "user"},
                    "age": {"side": "user", "kind": "dense"},
                    "item_id": {"side": "item", "kind": "categorical", "table": "item"},
                    "price": {"side": "item", "kind": "dense"},
                },
                "sequences": {
                    "shown": {
                        "timestamp": "shown_time",
                        "max_length": self.longest,
                        "attributes": {
                            "item": {"column": "shown_item", "table": "item"},
                            "action": {"column": "shown_action", "table": "action"},
                        },
                    }
                },
                "tasks": {name: {"label": name} for name in TASKS},
            },
            source="random",
        )


def random_batch(sizes: Sizes, seed: int, requests: int | None = None) -> EncodedBatch:
    """A batch; the same for the same seed. `requests` replaces the number in `sizes`."""
    rng = np.random.default_rng(seed)
    count = sizes.requests if requests is None else requests
    rows, impressions = sizes.table_rows, count * sizes.impressions
    lengths = np.full(count, sizes.history)
    if sizes.tail:
        lengths = sizes.history * rng.lognormal(-(sizes.tail**2) / 2, sizes.tail, count)
    lengths = np.clip(np.round(lengths), 0, sizes.longest).astype(np.int64)
    now = 1_700_000_000_000 + rng.integers(0, 10**9, count)
    events = int(lengths.sum())
    one = np.ones(count, dtype=np.int64)
    request = EncodedRows(
        rows=count,
        ids={
            "user_id": rng.integers(0, rows["user"], count),
            "shown.item": rng.integers(0, rows["item"], events),
            "shown.action": rng.integers(0, rows["action"], events),
        },
        lengths={"user_id": one, "shown.item": lengths, "shown.action": lengths},
        weights={},
        dense=rng.normal(size=(count, 1)).astype(np.float32),
        times={"shown": np.repeat(now, lengths) - rng.integers(1_000, 10**9, events)},
    )
    item = EncodedRows(
        rows=impressions,
        ids={"item_id": rng.integers(0, rows["item"], impressions)},
        lengths={"item_id": np.ones(impressions, dtype=np.int64)},
        weights={},
        dense=rng.normal(size=(impressions, 1)).astype(np.float32),
        times={},
    )
    return EncodedBatch(
        request=request,
        item=item,
        request_index=np.repeat(np.arange(count), sizes.impressions),
        request_time=now,
        user_id=request.ids["user_id"],
        surface=rng.integers(0, 2, count),
        labels=(rng.random((impressions, len(TASKS))) < 0.3).astype(np.float32),
        label_valid=np.ones((impressions, len(TASKS)), dtype=bool),
        weight=rng.uniform(0.5, 2.0, impressions).astype(np.float32),
        sampling_rate=np.ones(impressions, dtype=np.float32),
        impression_id=np.arange(impressions),
    )


def take(batch: EncodedBatch, requests: list[int]) -> EncodedBatch:
    """Some requests of a batch with their impressions, in ascending order."""
    return _in_order(batch, np.array(sorted(requests), dtype=np.int64))


def backwards(batch: EncodedBatch) -> EncodedBatch:
    """The same requests, the last one first: what is summed over them is summed in another order."""
    return _in_order(batch, np.arange(len(batch.request_time))[::-1].copy())


def _in_order(batch: EncodedBatch, chosen: np.ndarray) -> EncodedBatch:
    place = np.full(len(batch.request_time), -1, dtype=np.int64)
    place[chosen] = np.arange(len(chosen))
    owner = place[batch.request_index]
    items = np.flatnonzero(owner >= 0)
    items = items[np.argsort(owner[items], kind="stable")]
    return EncodedBatch(
        request=batch.request.take(chosen),
        item=batch.item.take(items),
        request_index=owner[items],
        request_time=batch.request_time[chosen],
        user_id=batch.user_id[chosen],
        surface=batch.surface[chosen],
        labels=batch.labels[items],
        label_valid=batch.label_valid[items],
        weight=batch.weight[items],
        sampling_rate=batch.sampling_rate[items],
        impression_id=batch.impression_id[items],
    )


def dealt(requests: int, world: int) -> list[list[int]]:
    """Requests by rank, uneven: each rank gets one more than the rank before it as long as there are any.

    The last rank gets the rest; with few requests the later ranks get none.
    """
    shares: list[list[int]] = [[] for _ in range(world)]
    start = 0
    for rank in range(world):
        stop = requests if rank == world - 1 else min(requests, start + 1 + rank)
        shares[rank] = list(range(start, stop))
        start = stop
    return shares
