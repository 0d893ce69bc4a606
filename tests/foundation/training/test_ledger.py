"""The ledger of real runs: seconds that sum up, over a kill too; a slow rank and a rank with broken batches."""

from __future__ import annotations

import errno
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from foundation.data import settings
from foundation.data.encoding import EncodedBatch
from foundation.data.logs import LogReader, ReaderConfig
from foundation.training import loop as loop_module
from foundation.training.bundle import batch_file
from foundation.training.efficiency import read_efficiency
from foundation.training.evaluate import EvaluationConfig
from foundation.training.ledger import Ledger, whole_lines
from foundation.training.loop import CheckpointConfig, TrainingError
from foundation.training.phases import (
    AWAY,
    CHECKPOINT,
    COMMUNICATION,
    COMPILE,
    COMPUTE,
    DATA,
    EVALUATION,
    IMPORTS,
    OPTIMIZER,
    REPEATED,
    RESTORE,
)
from foundation.training.pipeline import Delivered, device_batches
from foundation.training.reproduce import ReproduceConfig, reproduce
from foundation.training.train import train
from tests.foundation.parallel.ranks import on_ranks, one_rank
from tests.foundation.training import small_run
from tests.foundation.training.test_distributed import PARTS, as_torchrun_starts_it

ROOT = Path(__file__).resolve().parents[3]
KILLED = """
import os, signal, sys
from foundation.training.loop import Loop
step = Loop._step
def killed(self, delivered):
    if self.state.progress.step == 11:
        os.kill(os.getpid(), signal.SIGKILL)
    step(self, delivered)
Loop._step = killed
sys.argv = ["opengem", "train", "--config", sys.argv[1]]
import opengem
opengem.main()
"""


def test_every_second_is_accounted_for_over_a_kill(tmp_path: Path) -> None:
    small_run.dataset(tmp_path / "data")
    config = small_run.config(
        tmp_path / "data",
        tmp_path / "run",
        epochs=2,
        log_every=5,
        checkpoint=CheckpointConfig(every=4, asynchronous=False),
    )
    settings.save(config, tmp_path / "train.yaml")
    before = time.time()
    process = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path / "train.yaml")], cwd=ROOT, capture_output=True, text=True
    )
    assert process.returncode == -signal.SIGKILL, process.stderr
    first = read_efficiency(config.out)
    assert first.steps == 11 and first.ended.startswith("not yet")
    assert math.fsum(first.seconds.values()) == pytest.approx(first.wall, rel=0.01)
    start = whole_lines(config.out / "ledger.jsonl")[0]
    assert before - 0.05 <= start["started"] and start["at"] <= time.time()
    assert first.seconds[IMPORTS] > 0.2 and first.seconds[CHECKPOINT] > 0

    train(replace(config, resume=True))
    found = read_efficiency(config.out)
    assert math.fsum(found.seconds.values()) == pytest.approx(found.wall, rel=0.01)
    assert found.wall == pytest.approx(found.allocated + found.seconds[AWAY]) and found.seconds[AWAY] > 0
    assert (found.starts, found.ended, found.steps) == (2, "finished", 24)
    assert found.repeated_steps == 3 and found.seconds[REPEATED] > 0  # steps 9 to 11, the last checkpoint was of 8
    assert found.samples == 2 * small_run.Dataset.open(tmp_path / "data").split("train").rows
    for phase in (DATA, COMPUTE, OPTIMIZER, EVALUATION, COMPILE, RESTORE):
        assert found.seconds[phase] > 0, phase
    assert found.samples_per_second is not None and found.ne_per_hour is not None
    assert {path.name for path in config.out.glob("ledger.*")} == {"ledger.jsonl", "ledger.json", "ledger.html"}


def test_a_damaged_ledger_does_not_keep_a_run_from_going_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ledger.jsonl"
    facts = {"world": 1, "step": 0, "samples": 0, "device": "CPU", "peak": None, "precision": "fp32", "metric": "x"}
    with one_rank():
        for text, kept in ((b'{"kind": "start"\nmore\n', 0), (None, 1), (b'{"kind": "inter', 2)):
            if text is not None:
                path.write_bytes((path.read_bytes() if kept else b"") + text)
            monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(kept))
            ledger = Ledger()
            ledger.open(path, torch.device("cpu"), facts)
            ledger.close("finished")
            assert [line["kind"] for line in whole_lines(path)] == ["start", "end"] * (kept + 1)
            assert [line["restarts"] for line in whole_lines(path)[::2]] == list(range(kept + 1))
    assert path.with_suffix(".damaged").read_bytes().endswith(b"more\n")


def test_a_full_disk_names_the_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with one_rank():
        ledger = Ledger()
        ledger.open(tmp_path / "ledger.jsonl", torch.device("cpu"), {})
        real, room = os.pwrite, [10]

        def full(file: int, data: bytes, offset: int) -> int:
            if not room[0]:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            fits = min(room[0], len(data))
            room[0] -= fits
            return real(file, data[:fits], offset)

        monkeypatch.setattr(os, "pwrite", full)
        with pytest.raises(OSError, match=r"No space left on device: '.*ledger\.jsonl'"):
            ledger.step_done(1, tokens=1, flops=0.0)
        first, rest = (tmp_path / "ledger.jsonl").read_bytes().split(b"\n", 1)
        assert json.loads(first)["kind"] == "start"
        assert b"\n" not in rest  # the line that did not fit is not whole


READER = ReaderConfig(batch_size=8, shuffle_window=64, workers=0)
BURN = 0.5  # s a batch


def faults(folder: str) -> dict[str, str]:
    """Rank 1 is slow in one run, and its batches are broken in another."""
    as_torchrun_starts_it()
    out = Path(folder)
    settings: dict[str, Any] = {"reader": READER, "evaluation": EvaluationConfig(every=1000, batch_size=128)}
    patch = pytest.MonkeyPatch()
    original = LogReader.__iter__

    def slow(self: LogReader) -> Iterator[EncodedBatch]:
        for batch in original(self):
            if dist.get_rank() == 1 and self.split == "train":
                threading.Event().wait(BURN)  # nobody sets it
            yield batch

    patch.setattr(LogReader, "__iter__", slow)
    train(small_run.config(out / "data", out / "slow", max_steps=9, log_every=4, **settings))
    patch.undo()

    def broken(*args: Any, **options: Any) -> Iterator[Delivered]:
        for delivered in device_batches(*args, **options):
            if dist.get_rank() == 1:
                delivered.batch.request_dense[:, 0] = math.nan
            yield delivered

    patch.setattr(loop_module, "device_batches", broken)
    with pytest.raises(TrainingError) as error:
        train(small_run.config(out / "data", out / "broken", max_skipped=2, parallel=PARTS, **settings))
    patch.undo()
    return {"error": str(error.value)}


@pytest.mark.distributed
@pytest.mark.timeout(900)
def test_a_slow_rank_and_a_rank_with_broken_batches_are_named(tmp_path: Path) -> None:
    small_run.dataset(tmp_path / "data", train_requests=60)
    answers = on_ranks(faults, 2, tmp_path / "ranks", str(tmp_path))

    assert "rank 1 is slow: its own work takes" in (tmp_path / "ranks" / "output-0.txt").read_text()
    intervals = [line for line in whole_lines(tmp_path / "slow" / "ledger.jsonl") if line["kind"] == "interval"]
    assert [line["steps"] for line in intervals] == [4, 4, 1]
    # In the first four, one step is start-up, and in one DDP waits for the other rank while it arranges its buckets.
    slow = intervals[1]["slow"]
    assert slow["rank"] == 1 and slow["own"] - slow["others"] > 0.5 * BURN and slow["data"] > 0.74 * BURN
    found = read_efficiency(tmp_path / "slow")
    assert math.fsum(found.seconds.values()) == pytest.approx(found.wall, rel=0.01)
    assert found.slow_rank == 1 and found.slow_lag is not None and found.slow_lag > 0.5 * BURN
    assert found.seconds[COMMUNICATION] > 3 * BURN * 0.5, "rank 0 waits for rank 1"
    assert found.time_imbalance is not None and found.time_imbalance > 1.2
    assert found.token_imbalance is not None and 1.0 < found.token_imbalance < 2.0

    for rank, answer in enumerate(answers):
        assert "column age on rank 1" in answer["error"], answer
        bundle = tmp_path / "broken" / "failures" / "step-00000002"
        assert str(bundle) in answer["error"] and batch_file(bundle, rank).is_file()
    again = reproduce(ReproduceConfig(bundle=bundle, rank=1))
    assert math.isnan(again.loss) and again.found == "column age" and again.same_weights is None
    assert math.isfinite(reproduce(ReproduceConfig(bundle=bundle, rank=0)).loss)
