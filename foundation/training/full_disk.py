"""A full disk ends a run with one error that names what did not fit, also where a library hides the system's error."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from foundation.data.files import empty_folder, full_disk
from foundation.training.checkpoint_files import CheckpointError


@contextmanager
def full_disk_named(out: Path) -> Iterator[None]:
    """For a block that writes a run folder: says on a full disk what to do, and removes a run without a checkpoint.

    Args:
        out: the run folder. It is removed only if it had nothing in it before the block, and only by rank 0.

    Raises:
        OSError: naming the file that did not fit, or the folder.
        CheckpointError: the same for a checkpoint.
    """
    free = not out.exists() or (out.is_dir() and not any(out.iterdir()))
    try:
        with quiet_tensorboard():
            yield
    except Exception as error:
        full = full_disk(error)
        if full is None and not (isinstance(error, CheckpointError) and error.full_disk):
            raise
        advice = "free space there, then go on with resume true"
        if not (out / "checkpoints" / "latest").is_file():
            advice = "free space there, then start again"
            if free and int(os.environ.get("RANK", "0")) == 0:
                with suppress(OSError):  # what is left of a link or a mount is an empty folder
                    empty_folder(out)
                    out.rmdir()
                advice += "; the run had no checkpoint yet, its folder is removed"
        if isinstance(error, CheckpointError):
            raise CheckpointError(f"{error}; {advice}") from error
        assert full is not None
        code = full.errno or errno.ENOSPC
        raise OSError(code, f"{os.strerror(code)}; {advice}", str(full.filename or out)) from error


@contextmanager
def quiet_tensorboard() -> Iterator[None]:
    """Without the traceback of TensorBoard's thread when the disk is full: its next write raises the same error."""
    original = threading.excepthook

    def hook(what: threading.ExceptHookArgs) -> None:
        if full_disk(what.exc_value) is None or not type(what.thread).__module__.startswith("tensorboard."):
            original(what)

    threading.excepthook = hook
    try:
        yield
    finally:
        threading.excepthook = original
