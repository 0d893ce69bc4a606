"""Streams a split of a dataset as encoded batches, sharded over ranks, with an exact position.

The order of batches depends on the data, the config and the epoch only, not on the number of worker processes.
Free of torch; ``foundation.data.batch`` turns the batches into tensors.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from foundation.data.arrow_columns import column_roles
from foundation.data.dataset import Dataset
from foundation.data.encoding import EncodedBatch
from foundation.data.index import SplitIndex, index_files
from foundation.data.plan import PlanSettings, Unit, plan_epoch
from foundation.data.storage import DatasetError
from foundation.data.window_loader import Counts, WindowLoader, empty_batch, label_columns
from foundation.data.workers import WorkerPool, read_here

# A row group from which several ranks or workers read is decoded by each of them up to its last row wanted.
_LARGE_GROUP = 1 << 20
# In file order a window is only a portion of work, so its size is free.
_PORTION = 1 << 16
_FORMAT = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class ReaderConfig:
    """How a split is read.

    Args:
        batch_size: the most impressions of a batch. A request is never split, unless it alone is larger.
        shuffle_window: rows that are shuffled together, by request; 0 reads in file order. Memory grows with it.
        window_mb: the most memory for the histories of a window; where histories are long, windows get smaller.
        workers: processes that read and encode, at most one for each row group; 0 reads in the calling process.
        prefetch: batches that each worker may have ready.
        seed: for the order of rows; every epoch has its own.
        drop_last: leave out the last batch of a window if it is not full, and what other ranks have too few of.
        balance: make the batches of a window hold nearly the same number of events, so that ranks wait less for one
            another: none, request (a history counts once), or impression (once for each impression of its request, as
            layers with copies of it compute). Ranks are alike as far as their windows are: large windows help.
        base_batch: impressions that stay together when batches are balanced; a batch has as many base batches as fit.
        max_tokens: the most events of a batch, counted as `balance` says; windows are cut into more batches by what the
            files' footers say, and the longest histories of a batch that still has more are cut. 0: any number.
    """

    batch_size: int = 1024
    shuffle_window: int = 65536
    window_mb: int = 192
    workers: int = 1
    prefetch: int = 4
    seed: int = 0
    drop_last: bool = False
    balance: Literal["none", "request", "impression"] = "none"
    base_batch: int = 128
    max_tokens: int = 0

    def __post_init__(self) -> None:
        for key, least in (
            ("batch_size", 1),
            ("shuffle_window", 0),
            ("window_mb", 1),
            ("workers", 0),
            ("prefetch", 1),
            ("seed", 0),
            ("base_batch", 1),
            ("max_tokens", 0),
        ):
            if getattr(self, key) < least:
                raise ValueError(f"reader.{key}: must be at least {least}, got {getattr(self, key)}")
        if self.balance not in ("none", "request", "impression"):
            raise ValueError(f"reader.balance: must be none, request or impression, got {self.balance!r}")
        if self.balance != "none" and not self.shuffle_window:
            raise ValueError("reader.balance: batches in file order cannot be balanced; set reader.shuffle_window")
        if self.max_tokens and (self.balance == "none" or self.drop_last):
            raise ValueError("reader.max_tokens: needs reader.balance, and reader.drop_last false")

    def in_order(self) -> ReaderConfig:
        """The same for reading all rows in the order of the files, as evaluation and scoring do."""
        return replace(self, shuffle_window=0, drop_last=False, balance="none", max_tokens=0)


class LogReader:
    """An iterable over the batches of one epoch of one rank; each iteration that ends starts the next epoch.

    Every rank yields the same number of batches; a rank with too few rows yields empty ones at the end. A new
    iterator begins at the start of the current epoch, or at the position given to :meth:`load_state_dict`.

    Args:
        dataset: the dataset.
        split: name of the split.
        config: how to read.
        rank, world_size: which share to read.
        surface: read only requests of this surface.
        tasks: use only the labels of these tasks (all by default); those of others are marked invalid, and
            their columns need not exist.

    Raises:
        DatasetError: a file is missing, broken, or lacks a column or has it in a type that cannot be used.
        ValueError: rank, surface or a task is not known.
    """

    def __init__(
        self,
        dataset: Dataset,
        split: str,
        config: ReaderConfig,
        *,
        rank: int = 0,
        world_size: int = 1,
        surface: str | None = None,
        tasks: Sequence[str] | None = None,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must be in 0 .. {world_size - 1}, got {rank}")
        schema = dataset.schema
        names = schema.task_names if tasks is None else tuple(tasks)
        unknown = [name for name in names if name not in schema.task_names]
        if unknown:
            raise ValueError(f"tasks: {unknown[0]!r} is not one of {', '.join(schema.task_names)}")
        self.dataset = dataset
        self.split = split
        self.config = config
        self.rank = rank
        self.world_size = world_size
        self.surface = surface
        self.tasks = names
        self.counters: Counts = defaultdict(lambda: defaultdict(int))
        """What was met while reading: missing and unknown ids, truncated lists, null labels, per feature or task."""
        number = None if surface is None else schema.surface_index(surface)
        needed = label_columns(schema, names) | set(replace(schema, tasks=()).columns())
        roles = {column: role for column, role in column_roles(schema).items() if column in needed}
        self._roles = roles
        self._index = index_files(dataset.files(split), schema, surface=number, roles=roles)
        _check_rows(dataset, split, self._index)
        if not self._index.rows:
            which = "" if surface is None else f" of surface {surface!r}"
            raise DatasetError(f"{dataset.path}: split {split!r} has no rows{which}")
        self._settings = _settings(config, self._index)
        self._epoch = 0
        self._segments: tuple[tuple[int, int], ...] = ()
        self._batch = 0
        self._resume = False
        self._plan: tuple[tuple[int, tuple[tuple[int, int], ...]], list[Unit]] | None = None
        self._warn_large_groups()
        if not len(self):
            raise DatasetError(
                f"{dataset.path}: split {split!r} has {self._index.rows} rows, which do not fill one batch of "
                f"{config.batch_size} on {world_size} ranks; set reader.drop_last to false or a smaller batch_size"
            )

    @property
    def epoch(self) -> int:
        """The current epoch, from 0."""
        return self._epoch

    @property
    def rows(self) -> int:
        """Impressions of an epoch, over all ranks."""
        return self._index.rows

    def __len__(self) -> int:
        """Batches of the current epoch, the same on every rank; it can differ a little between epochs."""
        return sum(count for _, count in self._segments) + sum(unit.length for unit in self._units())

    def __iter__(self) -> Iterator[EncodedBatch]:
        """Yields the batches of the current epoch from the current position.

        Raises:
            DatasetError: values that cannot be used; the message names file, column and row.
            WorkerDied: something killed a worker process.
        """
        if not self._resume:
            self._segments, self._batch = (), 0
        self._resume = False
        return self._read()

    def set_epoch(self, epoch: int) -> None:
        """Makes ``epoch`` the current one, from its start; the position is kept if it is the current one already."""
        if epoch < 0:
            raise ValueError(f"epoch must not be negative, got {epoch}")
        if epoch != self._epoch:
            self._epoch, self._segments, self._batch, self._resume = epoch, (), 0, False

    def state_dict(self) -> dict[str, Any]:
        """The position after the batch yielded last, the same on every rank; plain values, for JSON or a pickle.

        A consumer that fetches batches ahead keeps the state that goes with each batch it fetches.
        """
        return {
            "format": _FORMAT,
            "epoch": self._epoch,
            "batch": self._batch,
            "world_size": self.world_size,
            "segments": [list(segment) for segment in self._segments],
            "made_with": self._fingerprint(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Sets the position: the next iteration goes on after the batch that was yielded last.

        The number of ranks may differ: the rest of the epoch is dealt to the ranks that there are now. The number
        of workers may differ.

        Raises:
            ValueError: the state comes from another dataset or from settings that change the order of rows.
        """
        if state.get("format") != _FORMAT:
            raise ValueError(f"reader state: format is {state.get('format')!r}, expected {_FORMAT}")
        for key, value in self._fingerprint().items():
            found = state["made_with"].get(key)
            if found != value:
                raise ValueError(
                    f"reader state: {key} was {found!r}, now it is {value!r}; the position in the epoch would be "
                    "wrong. Use the same value, or start the epoch anew with set_epoch"
                )
        segments = tuple((int(world), int(count)) for world, count in state["segments"])
        batch, world = int(state["batch"]), int(state["world_size"])
        if world != self.world_size and (batch or segments):
            segments, batch = (*segments, (world, batch)), 0
        self._epoch, self._segments, self._batch = int(state["epoch"]), segments, batch
        self._resume = True

    def _read(self) -> Iterator[EncodedBatch]:
        left = _after(self._units(), self._batch)
        real = [unit for unit in left if unit.pieces]
        loader = WindowLoader(
            self._index, self.dataset.schema, self.dataset.encoder, self._settings, self.tasks, self._roles
        )
        try:
            if self.config.workers and real:
                # Two workers in one row group would both decode all its rows.
                groups = {piece.group for unit in real for piece in unit.pieces}
                workers = min(self.config.workers, len(real), len(groups))
                with WorkerPool(loader, real, workers, self.config.prefetch) as pool:
                    yield from self._count(iter(pool))
            else:
                yield from self._count(read_here(loader, real))
        finally:
            loader.close()
        for _ in range(sum(unit.length for unit in left if not unit.pieces)):
            self._batch += 1
            yield empty_batch(self.dataset.schema, self.dataset.encoder)
        self._epoch, self._segments, self._batch = self._epoch + 1, (), 0

    def _count(self, batches: Iterator[tuple[EncodedBatch, Counts]]) -> Iterator[EncodedBatch]:
        for batch, counts in batches:
            for key, values in counts.items():
                for name, value in values.items():
                    self.counters[key][name] += value
            self._batch += 1
            yield batch

    def _units(self) -> list[Unit]:
        """This rank's units of the current epoch; empty ones are last."""
        key = (self._epoch, self._segments)
        if self._plan is None or self._plan[0] != key:
            plan = plan_epoch(self._index, self._settings, self._epoch, self.world_size, self._segments)
            self._plan = (key, plan[self.rank])
        return self._plan[1]

    def _fingerprint(self) -> dict[str, Any]:
        """What the order of rows depends on."""
        config = self.config
        return {
            "balance": None if config.balance == "none" else [config.balance, config.base_batch, config.max_tokens],
            "schema_hash": self.dataset.schema.hash,
            "split": self.split,
            "surface": self.surface,
            "rows": self._index.rows,
            "row_groups": self._index.layout,
            "batch_size": self.config.batch_size,
            "shuffle": self._settings.shuffle,
            "window_rows": self._settings.window_rows,
            "seed": self.config.seed,
            "drop_last": self.config.drop_last,
        }

    def _warn_large_groups(self) -> None:
        largest = self._index.largest_group
        if largest > _LARGE_GROUP and self.world_size > 1:
            warnings.warn(
                f"{self.dataset.path}: split {self.split!r} has a row group of {largest} rows. It is streamed, but "
                "every rank that reads from it decodes it from its start; row groups of about 64,000 rows read faster",
                stacklevel=3,
            )


def _check_rows(dataset: Dataset, split: str, index: SplitIndex) -> None:
    for entry, path, rows in zip(dataset.split(split).files, index.files, index.file_rows, strict=True):
        if entry.rows != rows:
            raise DatasetError(
                f"{path}: has {rows} rows, but dataset.json says {entry.rows}; the file was replaced or truncated"
            )


def _settings(config: ReaderConfig, index: SplitIndex) -> PlanSettings:
    """Shrinks the window where the histories of its rows would take more than ``window_mb``."""
    rows = config.shuffle_window or _PORTION
    if index.event_bytes:
        rows = min(rows, int(config.window_mb * 2**20 / index.event_bytes))
    return PlanSettings(
        batch_size=config.batch_size,
        window_rows=max(rows, config.batch_size),
        shuffle=config.shuffle_window > 0,
        seed=config.seed,
        drop_last=config.drop_last,
        base_batch=config.base_batch if config.balance != "none" else 0,
        copies=config.balance == "impression",
        max_tokens=config.max_tokens,
    )


def _after(units: Sequence[Unit], batches: int) -> list[Unit]:
    """The units without the first ``batches`` batches."""
    left = []
    for unit in units:
        skipped = min(batches, unit.length)
        batches -= skipped
        if skipped < unit.length:
            left.append(replace(unit, first=unit.first + skipped))
    return left
