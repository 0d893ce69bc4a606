"""Worker processes: they end when they should, say why they could not go on, and leave nothing behind."""

from __future__ import annotations

import errno
import mmap
import multiprocessing as mp
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from foundation.data import workers
from foundation.data.dataset import Dataset
from foundation.data.files import may_pass
from foundation.data.logs import LogReader, ReaderConfig
from foundation.data.storage import DatasetError
from foundation.data.workers import WorkerDied
from tests.foundation.data.builders import small_table, train_parts, write_dataset

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return write_dataset(
        tmp_path_factory.mktemp("workers"), train_parts(small_table([1, 2, 3] * 15)), row_group_size=20
    )


def config(count: int) -> ReaderConfig:
    return ReaderConfig(batch_size=4, shuffle_window=20, workers=count, prefetch=2)


def test_a_killed_worker_is_reported(dataset: Dataset) -> None:
    iterator = iter(LogReader(dataset, "train", config(2)))
    next(iterator)
    victim = next(p for p in mp.active_children() if p.name == "opengem-reader-0")
    assert victim.pid is not None
    os.kill(victim.pid, signal.SIGKILL)
    with pytest.raises(WorkerDied, match=r"opengem-reader-0 ended unexpectedly \(killed by signal 9\); the system may"):
        list(iterator)
    assert not mp.active_children()


@pytest.mark.parametrize(("number", "passing"), [(errno.EIO, True), (errno.ENOENT, False)])
def test_a_failure_of_the_system_is_told_from_damaged_data(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch, number: int, passing: bool
) -> None:
    def fail(*_: object) -> Iterator[None]:
        raise OSError(number, os.strerror(number))
        yield

    monkeypatch.setattr("foundation.data.parquet_rows.RowReader._read_group", fail)
    with pytest.raises(DatasetError, match="cannot be read") as failed:
        list(LogReader(dataset, "train", config(1)))
    assert may_pass(failed.value) == passing


def test_nothing_runs_on_after_an_epoch_or_a_break(dataset: Dataset) -> None:
    reader = LogReader(dataset, "train", config(3))
    list(reader)
    assert not mp.active_children()
    iterator = iter(reader)
    next(iterator)
    assert len(mp.active_children()) == 3
    iterator.close()  # type: ignore[attr-defined]
    assert not mp.active_children()


def test_no_more_workers_than_row_groups(tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path, train_parts(small_table([1, 2, 3] * 15)), row_group_size=90)
    iterator = iter(LogReader(dataset, "train", config(3)))
    next(iterator)
    assert len(mp.active_children()) == 1
    assert sum(1 for _ in iterator) > 20


def test_batches_too_large_for_shared_memory_come_through_the_pipe(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [b.impression_id.tolist() for b in LogReader(dataset, "train", config(0))]
    monkeypatch.setattr(workers, "_SLOT_BYTES", 2048)
    mixed = list(LogReader(dataset, "train", config(2)))
    assert [b.impression_id.tolist() for b in mixed] == expected
    monkeypatch.setattr(workers, "_SLOT_BYTES", 64)
    assert [b.impression_id.tolist() for b in LogReader(dataset, "train", config(2))] == expected


def test_batches_are_writable_and_independent(dataset: Dataset) -> None:
    for count in (0, 1, 2):
        kept = list(LogReader(dataset, "train", config(count)))
        again = list(LogReader(dataset, "train", config(count)))
        for batch in kept:
            batch.impression_id[:] = -1
            batch.item.ids["item_id"][:] = -1
        assert all((batch.impression_id >= 0).all() for batch in again)
        assert len(np.unique(np.concatenate([b.impression_id for b in again]))) == 90


def test_batches_that_are_kept_do_not_change(dataset: Dataset) -> None:
    expected = [b.impression_id.tolist() for b in LogReader(dataset, "train", config(0))]
    for every in (1, 2, 3, 5):
        # A tensor or a view keeps a batch as the batch itself does.
        kept = {
            i: batch.impression_id[::1]
            for i, batch in enumerate(LogReader(dataset, "train", config(2)))
            if i % every == 0
        }
        assert {i: ids.tolist() for i, ids in kept.items()} == {
            i: ids for i, ids in enumerate(expected) if i % every == 0
        }


def test_memory_of_a_batch_is_used_again_when_its_arrays_are_gone(dataset: Dataset) -> None:
    # The first array of a batch begins where its slot does, at the start of a page.
    places = [b.request.dense.__array_interface__["data"][0] for b in LogReader(dataset, "train", config(1))]
    assert len(places) > 20 and len(set(places)) <= 2 + workers._LENT
    assert all(place % mmap.PAGESIZE == 0 for place in places)


SCRIPT = """
import sys, time
from foundation.data.dataset import Dataset
from foundation.data.logs import LogReader, ReaderConfig
config = ReaderConfig(batch_size=4, shuffle_window=20, workers=2, prefetch=1)
reader = LogReader(Dataset.open(sys.argv[1]), "train", config)
iterator = iter(reader)
next(iterator)
assert "torch" not in sys.modules and "pandas" not in sys.modules
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_workers_end_with_the_main_process(dataset: Dataset, how: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(dataset.path)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=ROOT
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        children = psutil.Process(process.pid).children()
        assert len(children) == 2
        process.send_signal(how)
        process.wait(20)
        deadline = time.monotonic() + 20
        while any(c.is_running() and c.status() != psutil.STATUS_ZOMBIE for c in children):
            assert time.monotonic() < deadline, "reader processes outlive the main process"
            time.sleep(0.1)
    finally:
        process.kill()
        process.wait()
