"""A run folder has one training at a time."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from foundation.training.sole_writer import sole_writer


def test_a_second_process_is_refused_until_the_first_has_ended(tmp_path: Path) -> None:
    out = tmp_path / "run"
    out.mkdir()
    held, say = os.pipe()
    first = os.fork()
    if not first:
        try:
            with sole_writer(out):
                os.write(say, b"x")
                signal.pause()
        finally:
            os._exit(1)
    os.read(held, 1)
    with (
        pytest.raises(ValueError, match="run: another process is training there; wait for it, or"),
        sole_writer(out, wait_seconds=0),
    ):
        pytest.fail("the block ran")
    os.kill(first, signal.SIGKILL)
    os.waitpid(first, 0)
    with sole_writer(out, wait_seconds=0):
        child = os.fork()  # as a reader, which may live longer than the block
        if not child:
            signal.pause()
    with sole_writer(out, wait_seconds=0):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_folder_that_stays_empty_is_not_left_behind(tmp_path: Path) -> None:
    with sole_writer(tmp_path / "deep" / "run"):
        assert (tmp_path / "deep" / "run").is_dir()
    assert not (tmp_path / "deep" / "run").exists()
    with sole_writer(tmp_path / "run"):
        (tmp_path / "run" / "file").touch()
    assert (tmp_path / "run" / "file").exists()


def test_a_file_system_without_locks_is_used_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.flock", none)
    with sole_writer(tmp_path, wait_seconds=0):
        pass
