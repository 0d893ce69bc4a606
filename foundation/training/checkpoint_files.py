"""A checkpoint on disk: written whole or not at all, verified when read, loadable at any number of ranks.

    checkpoints/
      step-00000100/   __0_0.distcp ..., .metadata   tensors, torch.distributed.checkpoint
                       rank-00000.json ...           what belongs to one rank
                       manifest.json                 everything else, and the SHA-256 of each other file
      latest, best     text files that hold the name of a step's folder

A step's folder is written under another name, flushed and renamed; a pointer is replaced after that. A kill at any
moment therefore leaves the previous checkpoint in place and reachable.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from foundation.data.files import FULL, atomic_write, may_pass, sha256_file
from foundation.data.json_shape import Each, require_shape
from foundation.parallel.pieces import LoadPlanner, SavePlanner, Spread, local_shards
from foundation.training.hashing_writer import HashingWriter

FORMAT = 1
MANIFEST = "manifest.json"
Tensors = Mapping[str, Spread]
_OPTIONAL = {
    "progress": {"epoch": int, "samples": int},
    "written_by": Each(str),
    "world_size": int,
    "config": dict,
    "metrics": Each(Each(dict)),
}
"""What a manifest may say besides, and that is read."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be written, found or used; the message names the path and what is wrong.

    Attributes:
        full_disk: it could not be written because the disk is full.
    """

    full_disk = False


def step_name(step: int) -> str:
    """The folder's name of a step."""
    return f"step-{step:08d}"


def write_checkpoint(
    folder: Path,
    step: int,
    tensors: Tensors,
    rank_state: Mapping[str, Any],
    manifest: Mapping[str, Any],
    *,
    best: bool = False,
    group: dist.ProcessGroup | None = None,
) -> Path:
    """Writes one checkpoint and points `latest` at it; a collective call.

    Args:
        folder: the run's `checkpoints` folder, on a file system that all ranks share.
        step: updates done so far.
        tensors: by key; replicated ones are written once, of sharded ones each rank writes its part.
        rank_state: plain values of this rank.
        manifest: plain values of the run, equal on all ranks; what rank 0 passes is written.
        best: point `best` at it too.
        group: the ranks' process group for this call; None takes the default one.

    Returns:
        The folder that was written.

    Raises:
        CheckpointError: on every rank, if any rank could not write. Nothing is left behind.
    """
    final, temporary = folder / step_name(step), folder / f"{step_name(step)}.tmp"
    rank, what = _rank(), f"cannot write checkpoint {final}"
    advice = "; the checkpoints before it are untouched" if (folder / "latest").is_file() else ""
    with together(what, cleanup=temporary, group=group, advice=advice):
        if rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
    writer = HashingWriter(temporary, on_device=any(_on_device(value) for value in tensors.values()))
    with together(what, cleanup=temporary, group=group, advice=advice):
        with quiet():
            planner = SavePlanner()
            dcp.save(
                dict(tensors), storage_writer=writer, planner=planner, process_group=group, no_dist=not _distributed()
            )
        own = temporary / _rank_file(rank)
        atomic_write(own, json.dumps(rank_state))
        written = writer.files | {own.name: {"bytes": own.stat().st_size, "sha256": sha256_file(own)}}
    files = {name: entry for part in _gather(written, group) for name, entry in part.items()}
    with together(what, cleanup=temporary, group=group, advice=advice):
        if rank == 0:
            commit(temporary, final, {"format": FORMAT, "step": step, **manifest, "files": files})
            atomic_write(folder / "latest", final.name)
            if best:
                atomic_write(folder / "best", final.name)
    return final


def commit(temporary: Path, final: Path, manifest: Mapping[str, Any]) -> None:
    """Makes a folder of flushed files a checkpoint: its manifest, then its name. One process calls it."""
    atomic_write(temporary / MANIFEST, json.dumps(manifest, indent=1))
    _sync_folder(temporary)
    aside = _set_aside(final)
    os.rename(temporary, final)
    _sync_folder(final.parent)
    shutil.rmtree(aside, ignore_errors=True)


def point(folder: Path, name: str, target: Path) -> None:
    """Sets a pointer such as `best` to a checkpoint; only rank 0 writes."""
    if _rank() == 0:
        atomic_write(folder / name, target.name)


def prune(folder: Path, keep: int, keep_every: int = 0) -> None:
    """Removes checkpoints that the policy does not keep, and unfinished ones; only rank 0 does.

    Args:
        folder: a run's `checkpoints` folder.
        keep: so many of the newest stay; so do those that `latest` and `best` name.
        keep_every: those of steps that this divides stay for ever; 0 for none.
    """
    if _rank() != 0:
        return
    named = {path.read_text().strip() for path in (folder / "latest", folder / "best") if path.is_file()}
    steps = sorted(path for path in folder.glob("step-*") if path.suffix != ".tmp")
    for path in steps[: max(0, len(steps) - keep)]:
        number = path.name.removeprefix("step-")
        for_ever = keep_every and number.isdigit() and int(number) % keep_every == 0
        if path.name not in named and not for_ever:
            shutil.rmtree(_set_aside(path), ignore_errors=True)
    for path in folder.glob("step-*.tmp"):
        shutil.rmtree(path, ignore_errors=True)


def _set_aside(path: Path) -> Path:
    """Renames a checkpoint that is to go, so that a kill meanwhile does not leave one that looks whole."""
    aside = path.with_name(f"{path.name}.old.tmp")
    shutil.rmtree(aside, ignore_errors=True)
    if path.exists():
        os.rename(path, aside)
    return aside


def find_checkpoint(folder: Path, which: str | int = "latest") -> Path:
    """The folder of a checkpoint.

    Args:
        folder: a run's `checkpoints` folder.
        which: `latest`, `best`, or a step as a number or as its folder's name.

    Raises:
        CheckpointError: there is none; the message lists those that exist.
    """
    steps = sorted(path.name for path in folder.glob("step-*") if path.suffix != ".tmp")
    have = f"it has {', '.join(steps)}" if steps else "it has none"
    if isinstance(which, int) or which.isdigit():
        path = folder / step_name(int(which))
    elif which in ("latest", "best"):
        pointer = folder / which
        if not pointer.is_file():
            why = "; no evaluation has chosen one, ask for latest or a step" if which == "best" and steps else ""
            raise CheckpointError(f"{folder}: no checkpoint is called {which}{why}; {have}")
        name = pointer.read_bytes().decode(errors="replace").strip()
        if not re.fullmatch(r"step-[0-9]{8,}", name):
            raise CheckpointError(f"{pointer}: damaged, it should name a checkpoint; {have}, ask for one of them")
        path = folder / name
    elif re.fullmatch(r"step-[0-9]+", which):
        path = folder / which
    else:
        raise CheckpointError(f"{folder}: a checkpoint is latest, best or a step, got {which!r}; {have}")
    if not path.is_dir():
        named = f", which {folder / which} names" if which in ("latest", "best") else ""
        raise CheckpointError(f"{folder}: there is no checkpoint {path.name}{named}; {have}")
    return path


def run_checkpoint(run: Path, which: str | int) -> Path:
    """The folder of a checkpoint of a run folder.

    Raises:
        CheckpointError: there is no such run or checkpoint.
    """
    if not (run / "checkpoints").is_dir():
        above = next((path for path in run.resolve().parents if (path / "checkpoints").is_dir()), None)
        advice = "make one with `opengem train`" if above is None else f"its run is {os.path.relpath(above)}"
        raise CheckpointError(f"{run}: not a run folder, it has no checkpoints; {advice}")
    return find_checkpoint(run / "checkpoints", which)


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """The manifest of a checkpoint.

    Raises:
        CheckpointError: it is missing, damaged or of another format.
    """
    path = checkpoint / MANIFEST
    try:
        manifest = json.loads(path.read_text())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}); this is not a whole checkpoint") from None
    except ValueError:
        raise CheckpointError(f"{path}: damaged, not JSON") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        entries = manifest if isinstance(manifest, dict) else {}
        wrote = entries.get("written_by")
        by = (
            f"; use OpenGEM {wrote['opengem']}, which wrote it"
            if isinstance(wrote, dict) and "opengem" in wrote
            else ""
        )
        raise CheckpointError(
            f"{path}: format {entries.get('format')!r} is not the format {FORMAT} of this version of OpenGEM{by}"
        )
    try:
        optional = {key: shape for key, shape in _OPTIONAL.items() if key in manifest}
        require_shape(manifest, {"step": int, "files": Each({"bytes": int, "sha256": str}), **optional}, "manifest")
    except ValueError as error:
        raise CheckpointError(f"{path}: damaged; {error}") from None
    return dict(manifest)


def verify_files(checkpoint: Path, manifest: Mapping[str, Any]) -> None:
    """Compares size and SHA-256 of the files with the manifest; ranks share the work. A collective call.

    Raises:
        CheckpointError: on every rank, naming files that are missing or differ.
    """
    with together(""):
        problems: list[str] = []
        for number, (name, wanted) in enumerate(sorted(manifest["files"].items())):
            if number % _world() == _rank():
                problems += _damage(checkpoint / name, wanted)
        if problems:
            raise CheckpointError("; ".join(problems))


def _damage(path: Path, wanted: Mapping[str, Any]) -> Iterator[str]:
    try:
        size = path.stat().st_size
        if size != wanted["bytes"]:
            yield f"{path}: has {size} bytes instead of {wanted['bytes']}; it is damaged"
        elif sha256_file(path) != wanted["sha256"]:
            yield f"{path}: its SHA-256 differs from the manifest's; it is damaged"
    except FileNotFoundError:
        yield f"{path}: is missing; the checkpoint is damaged"
    except OSError as error:
        yield f"{path}: cannot be read ({error.strerror})"


def read_rank_state(checkpoint: Path, rank: int) -> dict[str, Any]:
    """What one rank wrote for itself. Raises CheckpointError when there is nothing for that rank."""
    path = checkpoint / _rank_file(rank)
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from None


def saved_entries(checkpoint: Path) -> dict[str, TensorStorageMetadata]:
    """What a checkpoint's index says of each tensor. Raises CheckpointError when it cannot be read."""
    try:
        metadata: Metadata = dcp.FileSystemReader(checkpoint).read_metadata()
    except Exception as error:  # pickle, zip and the file system each have their own
        raise CheckpointError(f"{checkpoint}: its index .metadata cannot be read: {error}") from None
    items = metadata.state_dict_metadata.items()
    return {key: entry for key, entry in items if isinstance(entry, TensorStorageMetadata)}


def saved_keys(checkpoint: Path) -> dict[str, tuple[int, ...]]:
    """Key and whole shape of every tensor in a checkpoint. Raises CheckpointError when it cannot be read."""
    return {key: tuple(entry.size) for key, entry in saved_entries(checkpoint).items()}


def read_tensors(checkpoint: Path, tensors: Tensors, among: Collection[str] | None = None) -> None:
    """Fills tensors in place, at any sharding; a collective call when there is a process group.

    Args:
        checkpoint: the folder.
        tensors: by key, of the shapes that were saved. Over all ranks they must be exactly the saved ones.
        among: the saved keys that are looked at; the others may stay unread. None means all.

    Raises:
        CheckpointError: listing keys that are missing, not expected, or of another shape.
    """
    saved = saved_keys(checkpoint)
    if among is not None:
        saved = {key: saved[key] for key in saved.keys() & set(among)}
    wanted = _union({key: tuple(value.shape) for key, value in tensors.items()})
    problems = [
        f"{len(keys)} {what}: {', '.join(sorted(keys)[:20])}{', ...' if len(keys) > 20 else ''}"
        for what, keys in (
            ("keys are missing in it", wanted.keys() - saved.keys()),
            ("keys in it are not expected", saved.keys() - wanted.keys()),
            (
                "keys have another shape",
                {f"{k} {saved[k]} instead of {wanted[k]}" for k in wanted.keys() & saved if wanted[k] != saved[k]},
            ),
        )
        if keys
    ]
    if problems:
        raise CheckpointError(f"{checkpoint}: does not fit the model; {'; '.join(problems)}")
    with together(f"cannot read checkpoint {checkpoint}"), quiet():
        reader = dcp.FileSystemReader(checkpoint)
        dcp.load(dict(tensors), storage_reader=reader, planner=LoadPlanner(), no_dist=not _distributed())


def _rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.json"


def _distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def _rank() -> int:
    return dist.get_rank() if _distributed() else 0


def _world() -> int:
    return dist.get_world_size() if _distributed() else 1


def _sync_folder(path: Path) -> None:
    """Flushes a folder's entries; the files in it flush themselves when they are written."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _union(keys: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Keys of all ranks; a rank without a row of a table has no momentum for it."""
    return {key: shape for part in _gather(keys, None) for key, shape in part.items()}


def _on_device(value: Spread) -> bool:
    return any(not piece.is_cpu for _, piece in local_shards(value))


def _gather(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """The values of all ranks, on each of them."""
    if _world() == 1:
        return [value]
    values: list[Any] = [None] * _world()
    dist.all_gather_object(values, value, group=group)
    return values


@contextmanager
def together(
    what: str, cleanup: Path | None = None, group: dist.ProcessGroup | None = None, advice: str = ""
) -> Iterator[None]:
    """Runs a block on every rank; if it fails on one, every rank raises a CheckpointError with the first reason.

    Args:
        what: what the message starts with.
        cleanup: a folder that rank 0 removes then.
        group: the ranks' process group; None takes the default one.
        advice: what the message ends with.
    """
    reason: tuple[str, bool, bool] | None = None
    bug: Exception | None = None
    try:
        yield
    except CheckpointException as error:  # torch's own, not an Exception: one reason per rank
        reason = _reason(next(iter(error.failures.values()))[0])
    except (OSError, ValueError, RuntimeError) as error:
        reason = _reason(error)
    except Exception as error:  # raised below, once the other ranks know that they need not wait
        reason, bug = _reason(error), error
    first = next((r for r in _gather(reason, group) if r is not None), None)
    if first is None:
        return
    if cleanup is not None and _rank() == 0:
        shutil.rmtree(cleanup, ignore_errors=True)
    text, full, passing = first
    failed = CheckpointError((f"{what}: {text}" if what else text) + advice)
    failed.full_disk = full
    raise failed from bug or (OSError(errno.EIO, text) if passing else None)


def _reason(error: BaseException) -> tuple[str, bool, bool]:
    """What went wrong, with what to do where the file system says it; whether the disk is full; whether it may pass."""
    code = error.errno if isinstance(error, OSError) else None
    if code in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"{error}; make it writable for this user, then go on with resume true", False, False
    return str(error), code in FULL, may_pass(error)


@contextmanager
def quiet() -> Iterator[None]:
    """Without torch's warning that a checkpoint of one process is one of one process."""
    if _distributed():  # it does not warn, and filters of warnings belong to all threads
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
