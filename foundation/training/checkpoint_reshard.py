"""`opengem checkpoint reshard`: the same checkpoint in another number of files.

Any number of ranks loads any number of files. Fewer files suit copying, as many as there are readers suit loading:
a rank reads saved pieces whole, however little of one it needs.
"""

from __future__ import annotations

import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from foundation.data.files import atomic_dir, atomic_write, require_free, sha256_file
from foundation.parallel.pieces import LoadPlanner, Piece, SavePlanner, Sharded
from foundation.training.checkpoint_files import (
    MANIFEST,
    CheckpointError,
    commit,
    quiet,
    read_manifest,
    run_checkpoint,
    saved_entries,
    verify_files,
)
from foundation.training.hashing_writer import HashingWriter

_PIECES_PER_FILE = 4
_READ_AHEAD = 64 << 20
_RUN_FILES = ("config.yaml", "schema.yaml", "encoder.npz")


@dataclass(frozen=True, kw_only=True, slots=True)
class ReshardConfig:
    """What to write again, and where.

    Args:
        run: folder of a training run.
        out: run folder to write, with this one checkpoint.
        files: number of files with tensors.
        which: checkpoint: best, latest, a step or its folder's name.
        overwrite: replace what is in `out`.
    """

    run: Path
    out: Path
    files: int
    which: str = "latest"
    overwrite: bool = False

    def __post_init__(self) -> None:
        if self.files < 1:
            raise ValueError(f"files: must be at least 1, got {self.files}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ReshardResult:
    """The checkpoint that was written, and the bytes of its tensors."""

    checkpoint: Path
    bytes: int


def reshard(config: ReshardConfig) -> ReshardResult:
    """Writes a run folder with one checkpoint, bit for bit the same tensors; it resumes and loads like the original.

    In memory is at most a quarter of a new file, or 64 MB, and a saved piece that overlaps it.

    Raises:
        CheckpointError: there is no such run or checkpoint, it is damaged, or it has too few rows for so many files.
        FileExistsError: `out` exists and `overwrite` is not set.
        ValueError: `out` holds the run, and `overwrite` is set.
    """
    require_free(config.out, overwrite=config.overwrite, inputs=[config.run])
    source = run_checkpoint(config.run, config.which)
    manifest = read_manifest(source)
    verify_files(source, manifest)
    entries = saved_entries(source)
    pieces = {key: _cut(entry, _total(entries) / config.files) for key, entry in entries.items()}
    if config.files > sum(len(value.pieces) for value in pieces.values()):
        raise CheckpointError(
            f"{source}: files: {config.files} are more than there are pieces to write; its tensors have "
            f"{_total(entries):,} bytes"
        )
    with atomic_dir(config.out, overwrite=config.overwrite) as out:
        for name in _RUN_FILES:
            if (config.run / name).is_file():
                shutil.copyfile(config.run / name, out / name)
        folder = out / "checkpoints"
        temporary = folder / f"{source.name}.tmp"
        temporary.mkdir(parents=True)
        files = _write(temporary, pieces, config.files, source)
        for name, entry in manifest["files"].items():
            if name.startswith("rank-"):
                shutil.copyfile(source / name, temporary / name)
                files[name] = entry
        commit(temporary, folder / source.name, {**manifest, "resharded_from": _version(source), "files": files})
        pointers = [source.parent / name for name in ("best", "latest")]
        for pointer in pointers:
            if pointer.name == "latest" or (pointer.is_file() and pointer.read_text().strip() == source.name):
                atomic_write(folder / pointer.name, source.name)
    written = config.out / "checkpoints" / source.name
    print(f"{written}: {_total(entries):,} bytes of tensors in {config.files} files")
    return ReshardResult(checkpoint=written, bytes=_total(entries))


def _version(checkpoint: Path) -> str:
    return sha256_file(checkpoint / MANIFEST)


def _total(entries: dict[str, TensorStorageMetadata]) -> int:
    return sum(math.prod(entry.size) * entry.properties.dtype.itemsize for entry in entries.values())


def _cut(entry: TensorStorageMetadata, per_file: float) -> Sharded:
    """Cuts a tensor along its rows into pieces of no more than a part of a file, without memory for them."""
    shape, dtype = tuple(entry.size), entry.properties.dtype
    size = math.prod(shape) * dtype.itemsize
    rows = shape[0] if shape else 1
    count = max(1, min(rows, math.ceil(size * _PIECES_PER_FILE / max(1.0, per_file))))
    step = max(1, math.ceil(rows / count))
    if not shape:
        return Sharded(shape, (Piece((), torch.empty((), dtype=dtype, device="meta")),))
    return Sharded(
        shape,
        tuple(
            Piece(
                (first, *(0 for _ in shape[1:])),
                torch.empty((min(step, rows - first), *shape[1:]), dtype=dtype, device="meta"),
            )
            for first in range(0, max(1, rows), step)
        ),
    )


def _write(folder: Path, pieces: dict[str, Sharded], files: int, source: Path) -> dict[str, Any]:
    """Writes as so many ranks would, one after the other; returns size and hash of each file."""
    planner, writer = _Planner(source), HashingWriter(folder)
    planner.set_up_planner(dict(pieces), is_coordinator=True)
    local = planner.create_local_plan()
    plans = [SavePlan(items, planner_data=local.planner_data) for items in _deal(local.items, files)]
    plans, metadata = planner.create_global_plan(plans)
    writer.set_up_storage_writer(True)
    results = []
    for plan in writer.prepare_global_plan(plans):
        planner.announce(plan.items)
        results.append(writer.write_data(plan, planner).value())
    writer.finish(metadata, results)
    return writer.files


def _deal(items: list[WriteItem], files: int) -> list[list[WriteItem]]:
    """Spreads pieces evenly, the largest first, each into the file that has least."""
    dealt: list[list[WriteItem]] = [[] for _ in range(files)]
    sizes = [0] * files
    for item in sorted(items, key=_size, reverse=True):
        least = min(range(files), key=lambda file: (sizes[file], len(dealt[file])))
        dealt[least].append(item)
        sizes[least] += _size(item)
    return dealt


def _size(item: WriteItem) -> int:
    assert item.tensor_data is not None
    return math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize


class _Planner(SavePlanner):
    """Reads pieces from another checkpoint when they are about to be written, small ones many at once."""

    def __init__(self, source: Path) -> None:
        super().__init__()
        self._reader = _Reader(source)
        self._coming: list[WriteItem] = []
        self._read: dict[MetadataIndex, torch.Tensor] = {}

    def announce(self, items: list[WriteItem]) -> None:
        """Says what is going to be written, in which order."""
        self._coming = items

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        if index not in self._read:
            self._fetch(next(place for place, item in enumerate(self._coming) if item.index == index))
        return self._read.pop(index)

    def _fetch(self, first: int) -> None:
        size, wanted = 0, dict[str, list[Piece]]()
        for item in self._coming[first:]:
            size += _size(item)
            if wanted and size > _READ_AHEAD:
                break
            empty = self.state_dict[item.index.fqn].__get_tensor_shard__(item.index)
            piece = Piece(tuple(item.index.offset or ()), torch.empty_like(empty, device="cpu"))
            wanted.setdefault(item.index.fqn, []).append(piece)
            self._read[item.index] = piece.tensor
        targets = {key: Sharded(self.state_dict[key].shape, tuple(parts)) for key, parts in wanted.items()}
        with quiet():
            dcp.load(dict(targets), storage_reader=self._reader, planner=LoadPlanner(), no_dist=True)


class _Reader(dcp.FileSystemReader):
    """Reads the index once."""

    _index: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._index is None:
            self._index = super().read_metadata(*args, **kwargs)
        return self._index
