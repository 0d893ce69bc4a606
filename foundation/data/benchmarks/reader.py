"""How fast the reader is and how much memory it takes, for files of several shapes.

    python -m foundation.data.benchmarks.reader                   # makes datasets with the columns of KuaiRand
    python -m foundation.data.benchmarks.reader --dataset DIR     # reads a dataset that is there
    python -m foundation.data.benchmarks.reader --schema configs/datasets/streams.yaml --rows 65536
                                          # makes one of that schema: 16 impressions a request, heavy-tailed histories

The baseline beside it is Arrow alone: the same columns decoded by one thread and thrown away. Memory is the largest
sum over the main process and its workers, as resident (pages that processes share count once per process) and as
proportional (they count once) memory.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
import pyarrow as pa

from foundation.data.benchmarks.heavy_tailed import write_heavy_tailed
from foundation.data.benchmarks.kuairand_like import write_kuairand_like
from foundation.data.dataset import Dataset
from foundation.data.logs import LogReader, ReaderConfig
from foundation.data.processes import ProcessPool
from foundation.data.schema import Schema
from foundation.data.storage import open_parquet

_RESIDENT_EVERY = 0.05
_PROPORTIONAL_EVERY = 20


@dataclass(frozen=True, slots=True)
class Measurement:
    """What one pass over a split took."""

    rows: int
    wall_s: float
    cpu_s: float
    first_s: float
    resident_mb: float
    proportional_mb: float
    decode_rows_per_s: float


def measure(folder: str, split: str, config: ReaderConfig, epochs: int) -> Measurement:
    """Reads a split ``epochs`` times in this process and the reader's workers."""
    dataset = Dataset.open(folder)
    reader = LogReader(dataset, split, config)
    rows, first = 0, 0.0
    with _MemoryWatch() as memory:
        before, start = _cpu_seconds(), time.perf_counter()
        for _ in range(epochs):
            for batch in reader:
                first = first or time.perf_counter() - start
                rows += len(batch.impression_id)
        wall, cpu = time.perf_counter() - start, _cpu_seconds() - before
    assert rows == epochs * reader.rows
    return Measurement(
        rows, wall, cpu, first, memory.resident / 2**20, memory.proportional / 2**20, _decode_rate(dataset, split)
    )


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", help="a dataset folder or URL to read instead of making some")
    parser.add_argument("--schema", help="make a dataset of this schema instead")
    parser.add_argument("--once", action="store_true", help="histories in the first row of each request only")
    parser.add_argument("--split", default="train")
    parser.add_argument("--rows", type=int, default=400_000, help="impressions of the datasets that are made")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--shuffle-window", type=int, default=65536)
    parser.add_argument("--epochs", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        if options.dataset:
            cases = {options.dataset: options.dataset}
        elif options.schema:
            cases = {Path(options.schema).stem: str(Path(temporary) / "made")}
            schema = Schema.load(options.schema)
            write = partial(write_heavy_tailed, once=options.once)
            _elsewhere(write, Path(temporary) / "made", schema, options.rows // 16)
        else:
            shapes = {
                "row groups of 65,536": (options.rows, 65536),
                "one row group": (options.rows, options.rows),
                "4 x as many rows": (4 * options.rows, 65536),
                "4 x, one row group": (4 * options.rows, 4 * options.rows),
            }
            cases = {}
            for number, (name, (rows, group)) in enumerate(shapes.items()):
                cases[name] = str(Path(temporary) / str(number))
                _elsewhere(write_kuairand_like, Path(cases[name]), rows, group)
        print(
            f"{'dataset':<24} {'rows':>10} {'workers':>7} {'rows/s':>9} {'CPU us/row':>10} {'first s':>8} "
            f"{'RSS MB':>7} {'PSS MB':>7} {'Arrow alone rows/s':>19} {'ratio':>6}"
        )
        for name, folder in cases.items():
            for workers in options.workers:
                config = ReaderConfig(
                    batch_size=options.batch_size, shuffle_window=options.shuffle_window, workers=workers
                )
                found = _elsewhere(measure, folder, options.split, config, options.epochs)
                rate = found.rows / found.wall_s
                print(
                    f"{name:<24} {found.rows:>10,} {workers:>7} {rate:>9,.0f} "
                    f"{1e6 * found.cpu_s / found.rows:>10.1f} {found.first_s:>8.2f} {found.resident_mb:>7,.0f} "
                    f"{found.proportional_mb:>7,.0f} {found.decode_rows_per_s:>19,.0f} "
                    f"{rate / found.decode_rows_per_s:>6.2f}",
                    flush=True,
                )
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, pyarrow {pa.__version__}")


def _elsewhere(function, *args):  # type: ignore[no-untyped-def]
    """Calls a function in a new process, so that its memory is not that of another measurement."""
    with ProcessPool(1) as executor:
        return executor.submit(function, *args).result()


def _decode_rate(dataset: Dataset, split: str) -> float:
    """Rows per second that Arrow alone decodes with one thread."""
    columns = list(dataset.schema.columns())
    start, rows = time.perf_counter(), 0
    for file in dataset.files(split):
        parquet = open_parquet(file)
        for batch in parquet.iter_batches(4096, columns=columns, use_threads=False):
            rows += len(batch)
        parquet.close()
    return rows / (time.perf_counter() - start)


def _cpu_seconds() -> float:
    """CPU time of this process and of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


class _MemoryWatch:
    """Samples the memory of this process and its children until the block ends."""

    def __init__(self) -> None:
        self.resident = 0
        self.proportional = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> _MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        this = psutil.Process()
        count = 0
        while not self._stop.wait(_RESIDENT_EVERY):
            resident, proportional = 0, 0
            # Not psutil's children(), which looks at every process of the machine.
            for process in (this, *(psutil.Process(child.pid) for child in mp.active_children())):
                with suppress(psutil.Error):
                    resident += process.memory_info().rss
                    if count % _PROPORTIONAL_EVERY == 0:
                        proportional += process.memory_full_info().pss
            self.resident = max(self.resident, resident)
            self.proportional = max(self.proportional, proportional)
            count += 1


if __name__ == "__main__":
    main()
