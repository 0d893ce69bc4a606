"""The rows of a synthetic world, by several processes: blocks of users are simulated, stretches of time sorted.

A block of users depends on the seed and its number only, and a stretch on the blocks only, so the files do not depend
on how many processes write them. The one thing that blocks share is how many rows are left: the last ones have fewer
users, and the very last is cut. Blocks are begun before that is known, and the few that guessed wrong are done again.

A block writes one Arrow file with a record batch per stretch; a stretch reads its batch of every block.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from foundation.data.processes import ProcessPool
from foundation.data.progress import progress
from foundation.data.world_model import (
    DAY,
    DIMENSIONS,
    TOPICS,
    Items,
    Law,
    Users,
    draw_items,
    draw_users,
    simulate,
    unit,
)

ROW_GROUP = 65_536
TASKS = ("click", "like", "conversion")


@dataclass(frozen=True, kw_only=True, slots=True)
class WorldPlan:
    """What the rows are made of.

    Args:
        folder: where the files go.
        rows: impressions, exactly.
        seed: of the world.
        items: number of items.
        surfaces: their names.
        law: constants of the world.
        block_rows: rows of a block of users, about.
        stretches: stretches of time, each one file.
    """

    folder: Path
    rows: int
    seed: int
    items: int
    surfaces: tuple[str, ...]
    law: Law
    block_rows: int
    stretches: int

    @property
    def rows_per_user(self) -> float:
        """Mean number of rows of a user, at least 1."""
        return max(1.0, self.law.requests_per_user * self.law.candidates)

    def users(self, left: int) -> int:
        """Users of the next block when `left` rows are missing."""
        return math.ceil(min(left, self.block_rows) / self.rows_per_user)

    def block_file(self, number: int) -> Path:
        """Where a block's rows wait to be sorted."""
        return self.folder / f"block-{number:05d}.arrow"


@dataclass(frozen=True, slots=True)
class Block:
    """A block that was written: its users and rows, and of each stretch the rows and the requests."""

    users: pa.Table
    count: int
    rows: int
    stretch_rows: np.ndarray
    stretch_requests: np.ndarray


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch to be sorted: its number, its file's, and the rows and requests before it."""

    stretch: int
    number: int
    rows: int
    requests: int


class _Result(Protocol):
    def result(self) -> Any: ...


@dataclass(frozen=True, slots=True)
class _Here:
    """What a pool's future is, when there is no pool: the call is made when its result is asked for."""

    call: Any
    arguments: tuple[Any, ...]

    def result(self) -> Any:
        return self.call(*self.arguments)


class _Pool:
    """Runs calls in `processes` processes, or in this one if that is 1."""

    def __init__(self, executor: ProcessPool | None, processes: int) -> None:
        self._executor, self.processes = executor, processes

    def submit(self, call: Any, *arguments: Any) -> Future[Any] | _Here:
        return _Here(call, arguments) if self._executor is None else self._executor.submit(call, *arguments)

    def ordered(self, call: Any, tasks: list[tuple[Any, ...]]) -> Iterator[Any]:
        """Results in the order of the tasks; a few more than there are processes are under way."""
        waiting: deque[_Result] = deque()
        for task in tasks:
            waiting.append(self.submit(call, *task))
            if len(waiting) > self.processes:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


@contextmanager
def _pool(processes: int) -> Iterator[_Pool]:
    if processes == 1:
        yield _Pool(None, 1)
        return
    with ProcessPool(processes) as executor:
        yield _Pool(executor, processes)


@lru_cache(maxsize=1)
def world_items(seed: int, count: int) -> tuple[Items, np.ndarray]:
    """The items of a world and the centres of their topics float32 [topics, d]; every process draws them anew."""
    rng = np.random.default_rng(seed)
    centres = unit(rng.standard_normal((TOPICS, DIMENSIONS)))
    return draw_items(count, centres, rng), centres


def write_rows(plan: WorldPlan, processes: int) -> dict[str, Any]:
    """Writes `users.parquet` and `impressions/`; returns the numbers of impressions, requests, users and positives."""
    with _pool(processes) as pool:
        blocks = _write_blocks(plan, pool)
        rows = np.sum([block.stretch_rows for block in blocks], axis=0)
        requests = np.sum([block.stretch_requests for block in blocks], axis=0)
        rows_before, requests_before = np.cumsum(rows) - rows, np.cumsum(requests) - requests
        filled = np.flatnonzero(rows).tolist()
        parts = [
            Part(stretch, number, int(rows_before[stretch]), int(requests_before[stretch]))
            for number, stretch in enumerate(filled)
        ]
        (plan.folder / "impressions").mkdir()
        positives = dict.fromkeys(TASKS, 0)
        with progress("sorting by time", plan.rows) as advance:
            tasks = [(plan, part, len(blocks)) for part in parts]
            for part, counts in zip(parts, pool.ordered(_sort_stretch, tasks), strict=True):
                positives = {task: positives[task] + counts[task] for task in TASKS}
                advance(int(rows[part.stretch]))
    for number in range(len(blocks)):
        plan.block_file(number).unlink()
    assert rows.sum() == plan.rows
    users = sum(block.users.num_rows for block in blocks)
    return {"impressions": plan.rows, "requests": int(requests.sum()), "users": users, "positives": positives}


def _write_blocks(plan: WorldPlan, pool: _Pool) -> list[Block]:
    """All blocks, each written; what is guessed is that a block leaves more rows to the next than it needs whole."""
    whole = plan.users(plan.block_rows)
    blocks: list[Block] = []
    guessed: deque[_Result] = deque()
    left, first_user = plan.rows, 1
    with ExitStack() as stack:
        advance = stack.enter_context(progress("simulating the world", plan.rows))
        writer: pq.ParquetWriter | None = None
        while left > 0:
            while len(guessed) <= pool.processes and left >= (len(guessed) + 1) * plan.block_rows:
                ahead = len(blocks) + len(guessed)
                begin = first_user + len(guessed) * whole
                guessed.append(pool.submit(_write_block, plan, ahead, begin, whole, plan.rows))
            block: Block | None = guessed.popleft().result() if guessed else None
            if block is None or block.count != plan.users(left) or block.rows > left:
                block = _write_block(plan, len(blocks), first_user, plan.users(left), left)
            blocks.append(block)
            left, first_user = left - block.rows, first_user + block.count
            if writer is None:
                path = plan.folder / "users.parquet"
                writer = stack.enter_context(pq.ParquetWriter(path, block.users.schema, compression="zstd"))
            writer.write_table(block.users)
            advance(block.rows)
    return blocks


def _write_block(plan: WorldPlan, number: int, first_user: int, count: int, limit: int) -> Block:
    """Simulates a block of `count` users and writes its first `limit` rows, those of a stretch together."""
    items, centres = world_items(plan.seed, plan.items)
    rng = np.random.default_rng([plan.seed, number])
    users = draw_users(first_user, count, centres, plan.law, rng)
    log = {name: value[:limit] for name, value in simulate(users, items, plan.law, rng).items()}
    user, time = log["user_id"], log["time_ms"]
    stretch = (time - plan.law.start_ms) // math.ceil(plan.law.days * DAY / plan.stretches)
    starts = _request_starts(user, time)
    order = np.argsort(stretch, kind="stable")
    ends = np.searchsorted(stretch[order], np.arange(plan.stretches + 1))
    table = pa.table(log).take(pa.array(order))
    # Compressed: a block is about as large as the Parquet that replaces it.
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    with pa.ipc.new_file(str(plan.block_file(number)), table.schema, options=options) as writer:
        empty = pa.RecordBatch.from_pylist([], schema=table.schema)
        for start, end in pairwise(ends):
            rows = table.slice(start, end - start).combine_chunks().to_batches() if end > start else []
            writer.write_batch(rows[0] if rows else empty)
    return Block(
        users=_user_table(users, int(user[-1])),
        count=count,
        rows=len(user),
        stretch_rows=np.diff(ends),
        stretch_requests=np.bincount(stretch[starts], minlength=plan.stretches),
    )


def _sort_stretch(plan: WorldPlan, part: Part, blocks: int) -> dict[str, int]:
    """Sorts a stretch by time and writes it as Parquet; numbers requests and impressions. Returns the positives."""
    parts = []
    for number in range(blocks):
        with pa.memory_map(str(plan.block_file(number))) as file:
            parts.append(pa.ipc.open_file(file).get_batch(part.stretch))
    table = pa.Table.from_batches(parts)
    user, time = table["user_id"].to_numpy(), table["time_ms"].to_numpy()
    # Stable, so that the positions within a request stay.
    order = np.lexsort((user, time))
    user, time = user[order], time[order]
    starts = _request_starts(user, time)
    request = part.requests + np.cumsum(starts)
    impression = part.rows + 1 + np.arange(len(user))
    table = _impression_table(table.take(pa.array(order)), impression, request, plan.surfaces)
    path = plan.folder / "impressions" / f"part-{part.number:05d}.parquet"
    pq.write_table(table, path, compression="zstd", row_group_size=ROW_GROUP)
    return {task: int(np.count_nonzero(table[task].to_numpy())) for task in TASKS}


def _request_starts(user: np.ndarray, time: np.ndarray) -> np.ndarray:
    """Whether a row is the first of its request, bool [N], where the rows of a request follow one another."""
    return np.concatenate([[True], (user[1:] != user[:-1]) | (time[1:] != time[:-1])])


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


def _user_table(users: Users, last_id: int) -> pa.Table:
    """What is known of each user up to `last_id`; about one age in 30 is missing."""
    keep = users.ids <= last_id
    ids = users.ids[keep]
    age = pa.array(users.age[keep], mask=ids % 30 == 0)
    return pa.table({"user_id": ids, "age": age, "country": users.country[keep]})
