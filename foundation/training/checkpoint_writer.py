"""Writes the checkpoints of a run, beside training: what the training thread waits for is a copy in main memory.

The tensors are copied into buffers that every save uses again; a thread of its own then writes, flushes and commits
them, with collectives on a process group of its own. A save that fails is reported at the next one, or at the end.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from foundation.parallel.pieces import Sharded, Spread
from foundation.training.checkpoint_files import Tensors, prune, step_name, together, write_checkpoint


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """When checkpoints are written, besides at the best evaluation and at the end, and which are kept.

    Args:
        every: steps between checkpoints; 0 writes none besides those.
        keep: newest checkpoints to keep; the best one is always kept.
        keep_every: checkpoints of steps that this divides are kept for ever, a multiple of `every`; 0 keeps none so.
        asynchronous: write beside training; takes main memory for a copy of what this rank holds.
    """

    every: int = 0
    keep: int = 2
    keep_every: int = 0
    asynchronous: bool = True

    def __post_init__(self) -> None:
        if self.every < 0:
            raise ValueError(f"checkpoint.every: must not be negative, got {self.every}")
        if self.keep < 1:
            raise ValueError(f"checkpoint.keep: must be at least 1, got {self.keep}")
        if self.keep_every < 0:
            raise ValueError(f"checkpoint.keep_every: must not be negative, got {self.keep_every}")
        if self.keep_every and (not self.every or self.keep_every % self.every):
            raise ValueError(
                f"checkpoint.keep_every: must be a multiple of checkpoint.every ({self.every}), got {self.keep_every}"
            )


class CheckpointWriter:
    """The checkpoints of one run. All ranks make one and call it at the same steps; a context manager.

    Args:
        folder: the run's `checkpoints` folder.
        config: which are kept, and whether they are written in the background.

    Attributes:
        folder: as given.
        stall_seconds: what the last save cost the training thread, its waiting for the save before included.
        total_stall_seconds: of all saves so far.
    """

    def __init__(self, folder: Path, config: CheckpointConfig) -> None:
        self.folder = folder
        self.stall_seconds = self.total_stall_seconds = 0.0
        self._config = config
        self._group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self._thread = ThreadPoolExecutor(1, "checkpoint") if config.asynchronous else None
        self._running: Future[None] | None = None
        self._staging = Staging()

    def reserve(self, tensors: Tensors) -> None:
        """Makes the buffers of background saves, in the background: the first save then costs what others do.

        Args:
            tensors: those that will be saved.
        """
        if self._thread is not None:
            self._join()
            self._running = self._thread.submit(self._staging.reserve, tensors)

    def save(
        self,
        step: int,
        tensors: Tensors,
        rank_state: Mapping[str, Any],
        manifest: Mapping[str, Any],
        *,
        best: bool = False,
    ) -> Path:
        """Saves a step; `latest`, `best` and what is kept follow when it is whole. A collective call.

        Args:
            step: updates done so far.
            tensors: all of the run by key; they may change as soon as this returns.
            rank_state: plain values of this rank; not changed by the caller any more.
            manifest: plain values of the run, likewise.
            best: point `best` at it too.

        Returns:
            The folder that will hold the checkpoint.

        Raises:
            CheckpointError: on every rank, when this save failed, or the one before that ran in the background.
        """
        started = time.perf_counter()
        try:
            self._join()
            if self._thread is None:
                self._write(step, tensors, rank_state, manifest, best)
            else:
                staged = self._staging.copy(tensors)
                self._running = self._thread.submit(self._write, step, staged, rank_state, manifest, best)
        finally:
            self._stalled(started)
        return self.folder / step_name(step)

    def wait(self) -> None:
        """Waits until what was saved is on disk. Raises CheckpointError, on every rank, when it could not be."""
        started = time.perf_counter()
        try:
            self._join()
        finally:
            self.total_stall_seconds += time.perf_counter() - started

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            self.wait()
        except Exception:
            if error is None:  # else it would hide what ended the run
                raise
        finally:
            if self._thread is not None:
                self._thread.shutdown()

    def _join(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.result()

    def _write(
        self, step: int, tensors: Tensors, rank_state: Mapping[str, Any], manifest: Mapping[str, Any], best: bool
    ) -> None:
        write_checkpoint(self.folder, step, tensors, rank_state, manifest, best=best, group=self._group)
        with together(f"cannot remove old checkpoints of {self.folder}", group=self._group):
            prune(self.folder, self._config.keep, self._config.keep_every)

    def _stalled(self, started: float) -> None:
        self.stall_seconds = time.perf_counter() - started
        self.total_stall_seconds += self.stall_seconds


class Staging:
    """Copies of tensors in main memory, page-locked for those of a GPU, in the same buffers every time."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, int], torch.Tensor] = {}

    def copy(self, tensors: Tensors) -> dict[str, Spread]:
        """Copies spread like the originals; whole when this returns, and valid until the next call."""
        staged: dict[str, Spread] = {}
        on_device = False
        for key, value in tensors.items():
            parts = _parts(value)
            copies = [self._buffer(key, place, part) for place, part in enumerate(parts)]
            for copy, part in zip(copies, parts, strict=True):
                copy.copy_(part, non_blocking=True)
                on_device |= part.is_cuda
            staged[key] = value.over(copies) if isinstance(value, Sharded) else copies[0]
        if on_device:
            torch.cuda.current_stream().synchronize()
        return staged

    def reserve(self, tensors: Tensors) -> None:
        """Makes the buffers, and writes to them, since memory is given out when it is first written to."""
        for key, value in tensors.items():
            for place, part in enumerate(_parts(value)):
                self._buffer(key, place, part).zero_()

    def _buffer(self, key: str, place: int, part: torch.Tensor) -> torch.Tensor:
        buffer = self._buffers.get((key, place))
        if buffer is None or buffer.shape != part.shape or buffer.dtype != part.dtype:
            buffer = torch.empty(part.shape, dtype=part.dtype, pin_memory=part.is_cuda)
            self._buffers[key, place] = buffer
        return buffer


def _parts(value: Spread) -> list[torch.Tensor]:
    return [piece.tensor for piece in value.pieces] if isinstance(value, Sharded) else [value]
