"""How equal the batches of a step are across ranks, before and after balancing, where histories are heavy-tailed.

    python -m foundation.data.benchmarks.balance              # from token counts, no file is read
    python -m foundation.data.benchmarks.balance --read true  # and through the reader, from a dataset that it writes

A step takes as long as its heaviest rank: printed is the events of the heaviest rank over the mean of all, on average
over steps and at the 95th percentile. No dealing of whole requests can be below the optimum, which is the largest of 1
and the largest request over the mean.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from foundation.data.arrow_columns import column_roles, to_column
from foundation.data.commands import run_command
from foundation.data.dataset import Dataset, write_manifest
from foundation.data.encoder_fit import EncoderFit
from foundation.data.index import RowGroup, SplitIndex
from foundation.data.logs import LogReader, ReaderConfig
from foundation.data.options import parse_config
from foundation.data.plan import PlanSettings, plan_epoch, window_batches, window_requests
from foundation.data.schema import Schema

Balance = Literal["none", "request"]
GROUP_REQUESTS = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class BalanceConfig:
    """What to simulate.

    Args:
        ranks: numbers of ranks.
        windows: numbers of rows of a window.
        batch_size: impressions of a batch.
        base_batch: impressions of a base batch.
        steps: of each rank.
        mean, sigma, longest: histories of requests: log-normal with this mean and sigma, cut there.
        impressions: of a request, from 1 to this many.
        read: also write a small dataset and read it on all ranks.
    """

    ranks: tuple[int, ...] = (2, 8, 64)
    windows: tuple[int, ...] = (65536, 16384)
    batch_size: int = 1024
    base_batch: int = 128
    steps: int = 64
    mean: float = 512.0
    sigma: float = 1.0
    longest: int = 4096
    impressions: int = 15
    read: bool = False


@dataclass(frozen=True, slots=True)
class Requests:
    """Rows and events of requests, in file order, int64 ``[r]``."""

    sizes: np.ndarray
    events: np.ndarray

    @staticmethod
    def draw(config: BalanceConfig, rows: int, mean: float, longest: int) -> Requests:
        """About so many rows."""
        rng = np.random.default_rng(0)
        count = int(rows * 2 / (1 + config.impressions))
        drawn = rng.lognormal(np.log(mean) - config.sigma**2 / 2, config.sigma, count)
        return Requests(
            sizes=rng.integers(1, config.impressions + 1, count),
            events=np.minimum(np.rint(drawn), longest).astype(np.int64),
        )


@dataclass(frozen=True, slots=True)
class Imbalance:
    """Heaviest rank over mean, over steps: on average, at the 95th percentile, and the optimum on average."""

    mean: float
    p95: float
    optimum: float

    @staticmethod
    def of(tokens: np.ndarray, largest: np.ndarray) -> Imbalance:
        """From events by step and rank, and of the largest request of each step; steps without events are left out."""
        full = tokens.sum(1) > 0
        means = tokens[full].mean(1)
        ratio = tokens[full].max(1) / means
        optimum = np.maximum(1.0, largest[full] / means)
        return Imbalance(float(ratio.mean()), float(np.percentile(ratio, 95)), float(optimum.mean()))


def simulate(config: BalanceConfig, ranks: int, window: int, balance: Balance) -> Imbalance:
    """From token counts alone, through the reader's own plan."""
    requests = Requests.draw(config, config.steps * ranks * config.batch_size, config.mean, config.longest)
    index = _index(requests)
    settings = PlanSettings(
        batch_size=config.batch_size,
        window_rows=window,
        shuffle=True,
        seed=0,
        base_batch=config.base_batch if balance == "request" else 0,
    )
    tokens, largest = [], []
    for share in plan_epoch(index, settings, 0, ranks):
        own, most = [], []
        for unit in share:
            if not unit.pieces:
                own += [0] * unit.length
                most += [0] * unit.length
                continue
            sizes, order = window_requests(index, unit)
            where = [np.arange(p.first, p.stop) + p.group * GROUP_REQUESTS for p in unit.pieces]
            events = requests.events[np.concatenate(where)]
            order, cuts = window_batches(sizes, order, events, settings, unit)
            stops = np.searchsorted(np.cumsum(sizes[order]), cuts[1:]) + 1
            for start, stop in zip([0, *stops[:-1].tolist()], stops.tolist(), strict=True):
                own.append(int(events[order[start:stop]].sum()))
                most.append(int(events[order[start:stop]].max(initial=0)))
        tokens.append(own)
        largest.append(most)
    return Imbalance.of(np.array(tokens).T, np.array(largest).max(0))


def read(dataset: Dataset, config: BalanceConfig, ranks: int, balance: Balance) -> Imbalance:
    """Through the reader; one rank after the other."""
    made = ReaderConfig(batch_size=config.batch_size, base_batch=config.base_batch, balance=balance, workers=0)
    tokens, largest = [], []
    for rank in range(ranks):
        lengths = [
            b.request.lengths["seen.item"] for b in LogReader(dataset, "train", made, rank=rank, world_size=ranks)
        ]
        tokens.append([int(own.sum()) for own in lengths])
        largest.append([int(own.max(initial=0)) for own in lengths])
    return Imbalance.of(np.array(tokens).T, np.array(largest).max(0))


def write(folder: Path, config: BalanceConfig, rows: int) -> Dataset:
    """A dataset with one heavy-tailed history, of a sixteenth of the events, which is enough to read and to balance."""
    schema = Schema.from_dict(
        {
            "name": "balance",
            "user": "user",
            "request_id": "request",
            "impression_id": "impression",
            "timestamp": {"column": "time", "unit": "ms"},
            "surface": {"column": "surface", "values": ["feed"]},
            "tables": {"item": {"kind": "hash", "rows": 1000, "dim": 8}},
            "features": {"item": {"side": "item", "kind": "categorical", "table": "item"}},
            "sequences": {
                "seen": {
                    "max_length": config.longest,
                    "attributes": {"item": {"column": "seen_item", "table": "item"}},
                }
            },
            "tasks": {"click": {"label": "click"}},
        },
        source="balance",
    )
    requests = Requests.draw(config, rows, config.mean / 16, config.longest // 16)
    request = np.repeat(np.arange(len(requests.sizes)), requests.sizes)
    ends = np.concatenate([[0], np.cumsum(requests.events[request])]).astype(np.int32)
    rng = np.random.default_rng(1)
    count = len(request)
    table = pa.table(
        {
            "user": request,
            "request": request,
            "impression": np.arange(count),
            "time": np.full(count, 1_700_000_000_000),
            "surface": pa.array(["feed"] * count),
            "item": rng.integers(0, 500, count),
            "seen_item": pa.ListArray.from_arrays(pa.array(ends), pa.array(rng.integers(0, 500, int(ends[-1])))),
            "click": rng.integers(0, 2, count),
        }
    )
    (folder / "train").mkdir(parents=True)
    pq.write_table(table, folder / "train" / "part-00000.parquet", row_group_size=4096)
    fitting = EncoderFit(schema)
    fitting.update(
        {name: to_column(table.column(name).combine_chunks(), r) for name, r in column_roles(schema).items()}
    )
    write_manifest(folder, schema, fitting.finish())
    return Dataset.open(folder)


def _index(requests: Requests) -> SplitIndex:
    groups, row = [], 0
    for number, start in enumerate(range(0, len(requests.sizes), GROUP_REQUESTS)):
        sizes = requests.sizes[start : start + GROUP_REQUESTS]
        rows = int(sizes.sum())
        groups.append(RowGroup(0, number, row, rows, row, len(sizes), rows, sizes=sizes.astype(np.uint8)))
        row += rows
    return SplitIndex(("simulated",), (row,), tuple(groups), 0.0)


def main(arguments: list[str]) -> None:
    """Prints the table."""
    config: BalanceConfig = parse_config(BalanceConfig, arguments, name="python -m foundation.data.benchmarks.balance")
    print("| ranks | window | how | before, mean | p95 | balanced, mean | p95 | optimum | over the optimum |")
    print("|---|---|---|---|---|---|---|---|---|")
    for ranks in config.ranks:
        for window in config.windows:
            _row(
                ranks,
                window,
                "counted",
                simulate(config, ranks, window, "none"),
                simulate(config, ranks, window, "request"),
            )
        if config.read:
            with tempfile.TemporaryDirectory() as folder:
                dataset = write(Path(folder) / "data", config, ranks * 8 * config.batch_size)
                found = [read(dataset, config, ranks, balance) for balance in ("none", "request")]  # type: ignore[arg-type]
                _row(ranks, 8 * config.batch_size, "read", *found)


def _row(ranks: int, window: int, how: str, before: Imbalance, after: Imbalance) -> None:
    print(
        f"| {ranks} | {window:,} | {how} | {before.mean:.3f} | {before.p95:.3f} | {after.mean:.3f} | {after.p95:.3f} "
        f"| {after.optimum:.3f} | {after.mean / after.optimum - 1:+.1%} |",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
