"""Writes the tensors of a checkpoint and knows size and SHA-256 of each file without reading it again."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

_BUFFER = 1 << 20


class HashingWriter(dcp.FileSystemWriter):
    """One file per rank, flushed to disk.

    When the disk is full, torch's zip writer raises an error about positions in the file; this one raises the error of
    the system, with the file's path.

    Args:
        folder: an empty folder.
        on_device: whether tensors come from a GPU; those in main memory are not copied on the way.
    """

    def __init__(self, folder: Path, *, on_device: bool = False) -> None:
        super().__init__(folder, per_thread_copy_ahead=10_000_000 if on_device else 0)
        self._files = _HashingFiles()
        self.fs = self._files

    @property
    def files(self) -> dict[str, dict[str, Any]]:
        """What this process has written: bytes and sha256 by name."""
        return {path.name: {"bytes": size, "sha256": digest} for path, (size, digest) in self._files.written.items()}

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's file. Raises OSError with the path when the file system refuses."""
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            if self._files.error is not None:
                raise self._files.error from error
            raise


class _HashingFiles(FileSystem):
    def __init__(self) -> None:
        self.written: dict[Path, tuple[int, str]] = {}
        self.error: OSError | None = None

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Generator[io.IOBase, None, None]:
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        file = _HashingFile(path)
        try:
            with _Buffered(file, _BUFFER) as buffered:
                yield buffered
        finally:
            self.error = self.error or file.error
        self.written[Path(path)] = (file.size, file.digest.hexdigest())

    def rename(self, path: str | os.PathLike, new_path: str | os.PathLike) -> None:
        super().rename(path, new_path)
        if Path(path) in self.written:
            self.written[Path(new_path)] = self.written.pop(Path(path))


class _HashingFile(io.FileIO):
    """Unbuffered: each call brings a megabyte, or one tensor."""

    def __init__(self, path: str | os.PathLike) -> None:
        super().__init__(path, "wb")
        self.path, self.digest, self.size = str(path), hashlib.sha256(), 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            count = super().write(data) or 0
        except OSError as error:
            self.error = OSError(error.errno, os.strerror(error.errno or 0), self.path)
            raise self.error from None
        self.digest.update(memoryview(data)[:count])
        self.size += count
        return count


class _Buffered(io.BufferedWriter):
    def fileno(self) -> int:
        self.flush()  # torch asks for it to sync the index, which it has not flushed by then
        return super().fileno()
