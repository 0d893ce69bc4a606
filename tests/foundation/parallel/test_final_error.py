"""An error under torchrun is said once and, where it is final, not tried again."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from foundation.data.storage import read_bytes
from foundation.parallel import final_error
from foundation.training.checkpoint_files import together
from tests.foundation.parallel.ranks import one_rank

ROOT = Path(__file__).resolve().parents[3]


class Notes:
    """What a store of torch does for all ranks."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def add(self, key: str, count: int) -> int:
        self.counts[key] += count
        return self.counts[key]


@pytest.fixture
def signals(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Sent by ranks that torchrun started, which may try twice more."""
    sent: list[tuple[int, int]] = []
    notes = Notes()
    for key, value in {"RUN_ID": "job", "RESTART_COUNT": "1", "MAX_RESTARTS": "3"}.items():
        monkeypatch.setenv(f"TORCHELASTIC_{key}", value)
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr(final_error, "_store", lambda: notes)
    monkeypatch.setattr(final_error, "_is_torchrun", lambda process: process == os.getppid())
    monkeypatch.setattr(os, "kill", lambda process, number: sent.append((process, number)))
    return sent


def test_ranks_that_say_the_same_are_heard_once_and_torchrun_ends_once(
    signals: list[tuple[int, int]], capsys: pytest.CaptureFixture[str]
) -> None:
    for text in ("error: seed", "error: seed", "error: only here"):
        final_error.report(text, final=True)
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if line.startswith("error")] == ["error: seed", "error: only here"]
    assert signals == [(os.getppid(), signal.SIGTERM)]


def test_what_may_pass_is_tried_again(signals: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    final_error.report("error: the disk is full", final=False)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "3")  # the last try ends by itself
    final_error.report("error: seed", final=True)
    assert signals == []


@pytest.mark.parametrize(
    ("error", "final"),
    [
        (ValueError("seed: must be a number"), True),
        (FileNotFoundError(errno.ENOENT, "no such file"), True),
        (OSError(errno.EIO, "the network is gone"), False),
        (OSError(errno.ENOSPC, "the disk is full"), False),
    ],
)
def test_a_disk_or_a_network_may_recover(error: Exception, final: bool) -> None:
    """Also behind the errors that name a dataset's or a checkpoint's file."""

    def read(path: Path) -> bytes:
        raise error

    assert final_error.is_final(error) == final
    with one_rank(), pytest.raises(ValueError, match="save") as failed, together("save"):
        raise error
    assert final_error.is_final(failed.value) == final
    with pytest.MonkeyPatch.context() as patched, pytest.raises(ValueError, match=r".") as failed:
        patched.setattr(Path, "read_bytes", read)
        read_bytes("dataset.json")
    assert final_error.is_final(failed.value) == final


def test_without_notes_all_ranks_speak_and_the_first_of_a_host_ends_torchrun(
    signals: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(final_error, "_store", lambda: None)
    for rank in ("0", "1"):
        monkeypatch.setenv("LOCAL_RANK", rank)
        final_error.report("error: seed", final=True)
    assert capsys.readouterr().err.count("error: seed") == 2
    assert len(signals) == 1


def test_without_torchrun_every_error_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setattr(os, "kill", lambda *_: pytest.fail("nobody is to be ended"))
    for _ in range(2):
        final_error.report("error: seed", final=True)
    assert capsys.readouterr().err == "error: seed\nerror: seed\n"


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(300)
def test_torchrun_says_an_error_once_and_does_not_restart(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--max-restarts=3"]
    command = ["-m", "opengem", "train", "--config", "foundation/tiny", "--out", str(tmp_path / "run")]
    done = subprocess.run(
        [*torchrun, *command, "--dataset", str(tmp_path / "none")],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert done.stderr.count("no such dataset folder") == 1, done.stderr[-3000:]
    assert done.stderr.count("a restart would meet the same error") == 1
    assert "attempts left" not in done.stderr
