"""One training at a time in a run folder: a second one would remove or overwrite what the first writes."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

WAIT_SECONDS = 30.0
"""Readers of a run that was killed live until they see it."""


@contextmanager
def sole_writer(out: Path, *, wait_seconds: float | None = None) -> Iterator[None]:
    """Holds a run folder for the length of the block. The folder is made, and removed again if it stays empty.

    The lock is the system's, on the folder itself: it ends with the process, and leaves no file. A file system without
    locks, as network ones may be, is used without.

    Args:
        out: the run folder.
        wait_seconds: so long for another process to leave it; WAIT_SECONDS if not given.

    Raises:
        ValueError: another process holds it.
    """
    made = not out.exists()
    out.mkdir(parents=True, exist_ok=True)
    folder = os.open(out, os.O_RDONLY)
    try:
        _lock(folder, out, time.monotonic() + (WAIT_SECONDS if wait_seconds is None else wait_seconds))
        yield
    finally:
        with suppress(OSError):
            fcntl.flock(folder, fcntl.LOCK_UN)  # closing would leave it to the forks of this process
        os.close(folder)
        if made:
            with suppress(OSError):
                out.rmdir()


def _lock(folder: int, out: Path, deadline: float) -> None:
    while True:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise ValueError(
                    f"{out}: another process is training there; wait for it, or choose another out"
                ) from None
            time.sleep(0.2)
        except OSError:
            return
        else:
            return
