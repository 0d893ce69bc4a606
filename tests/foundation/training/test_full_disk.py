"""A full disk and lost permissions: one error that names the path and what to do, the previous checkpoint whole.

The limit on the size of a file (RLIMIT_FSIZE) stands for the full disk: writes fail in the same places, with EFBIG
instead of ENOSPC.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError

from foundation.data.files import atomic_dir, full_disk
from foundation.training.checkpoint_files import (
    CheckpointError,
    find_checkpoint,
    read_manifest,
    verify_files,
    write_checkpoint,
)
from foundation.training.checkpoint_writer import CheckpointConfig, CheckpointWriter
from foundation.training.full_disk import quiet_tensorboard
from foundation.training.train import train
from tests.foundation.training import small_run


def limit(size: int) -> None:
    """No file of this process may grow beyond so many bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


@contextmanager
def small_files(size: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    limit(size)
    try:
        yield
    finally:
        limit(before)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "small"
    small_run.dataset(path)
    return path


def test_a_save_that_does_not_fit_names_its_file_and_leaves_the_one_before(tmp_path: Path) -> None:
    weight = {"model.a": torch.arange(100_000.0), "model.b": torch.ones(3)}
    write_checkpoint(tmp_path, 1, weight, {}, {})
    name = r"__0_0\.distcp"
    for size in (250_000, 100):
        with small_files(size), pytest.raises(CheckpointError) as error:
            write_checkpoint(tmp_path, 2, weight, {}, {})
        assert error.match(
            rf"cannot write checkpoint .*step-00000002: .*File too large: '.*tmp/{name}'; the checkpoints"
        )
        assert error.value.full_disk
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000001"]
    whole = find_checkpoint(tmp_path)
    verify_files(whole, read_manifest(whole))


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (200, r"File too large; free space there, then start again; the run had no checkpoint yet, .*: '.*run"),
        (60_000, r"cannot write checkpoint .*step-00000002: .*__0_0\.distcp'; free space there, then start again; the"),
    ],
)
def test_a_run_without_a_checkpoint_is_removed(data: Path, tmp_path: Path, size: int, message: str) -> None:
    with small_files(size), pytest.raises((OSError, CheckpointError), match=message):
        train(small_run.config(data, tmp_path / "run", max_steps=2))
    assert not (tmp_path / "run").exists()
    # What was there before the run is not the run's to remove.
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "note.txt").write_text("mine")
    with small_files(10), pytest.raises(OSError, match="free space there, then start again:"):
        train(small_run.config(data, tmp_path / "run", max_steps=2, overwrite=True))


def test_a_run_goes_on_from_its_last_checkpoint_once_there_is_space(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_run.config(data, tmp_path / "run", max_steps=4, checkpoint=CheckpointConfig(every=2))
    save = CheckpointWriter.save

    def full_at_the_second(self: CheckpointWriter, step: int, *args: Any, **rest: Any) -> Path:
        if step == 4:
            self.wait()
            limit(60_000)
        return save(self, step, *args, **rest)

    message = r"step-00000004: .*the checkpoints before it are untouched; free space there, then go on with resume true"
    with monkeypatch.context() as patch, small_files(resource.RLIM_INFINITY):
        patch.setattr(CheckpointWriter, "save", full_at_the_second)
        with pytest.raises(CheckpointError, match=message):
            train(config)
    assert sorted(path.name for path in (config.out / "checkpoints").iterdir()) == ["latest", "step-00000002"]
    assert train(replace(config, resume=True)).steps == 4


def test_lost_permission_names_the_folder_and_leaves_the_checkpoint_before() -> None:
    folder = Path(tempfile.mkdtemp())  # outside of pytest's folders, which only their owner may enter
    try:
        folder.chmod(0o755)
        weight = {"model.a": torch.ones(3)}
        write_checkpoint(folder, 1, weight, {}, {})
        folder.chmod(0o555)
        reads, writes = os.pipe()
        pid = os.fork()
        if not pid:
            try:
                if os.geteuid() == 0:  # who may write anywhere
                    os.setuid(65534)
                write_checkpoint(folder, 2, weight, {}, {})
            except CheckpointError as error:
                os.write(writes, str(error).encode())
            finally:
                os._exit(0)
        os.close(writes)
        with os.fdopen(reads) as answer:
            text = answer.read()
        os.waitpid(pid, 0)
        folder.chmod(0o755)
        assert f"cannot write checkpoint {folder / 'step-00000002'}: [Errno 13] Permission denied" in text
        assert "make it writable for this user, then go on with resume true; the checkpoints before it are" in text
        whole = find_checkpoint(folder)
        verify_files(whole, read_manifest(whole))
        assert whole.name == "step-00000001"
    finally:
        shutil.rmtree(folder)


def test_a_full_disk_is_found_behind_the_errors_of_libraries(tmp_path: Path) -> None:
    cause = OSError(errno.ENOSPC, "No space left on device")
    hidden = ValueError("not supported")
    hidden.__cause__ = cause
    assert full_disk(hidden) is cause
    rust = SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
    found = full_disk(rust)
    assert found is not None and found.errno == errno.ENOSPC
    for other in (ValueError("x"), OSError(errno.EACCES, "no"), ValueError("(os error 13)"), None):
        assert full_disk(other) is None
    for error in (hidden, rust):
        with pytest.raises(OSError, match=r"nothing was written: '.*out'"), atomic_dir(tmp_path / "out"):
            raise error
    assert not list(tmp_path.iterdir())


def test_the_thread_of_tensorboard_prints_nothing_on_a_full_disk(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(tmp_path))
    with quiet_tensorboard(), small_files(10), pytest.raises(OSError, match="File too large"):
        for number in range(1000):
            writer.add_scalar("loss", json.loads(str(number)), number)
        writer.flush()
    assert "Traceback" not in capsys.readouterr().err
