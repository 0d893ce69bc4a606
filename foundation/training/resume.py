"""Goes on from a checkpoint as if the run had never stopped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from foundation.data.files import require_free
from foundation.data.logs import LogReader
from foundation.data.options import from_plain
from foundation.data.settings import plain
from foundation.parallel.parallelize import rescale_momentum
from foundation.training.checkpoint_files import (
    MANIFEST,
    CheckpointError,
    find_checkpoint,
    read_manifest,
    read_rank_state,
    read_tensors,
    verify_files,
)
from foundation.training.origin import check_origin, other_code
from foundation.training.rng import set_rng_state
from foundation.training.state import Progress, TrainState

# What may change between a run and its continuation; anything else would make it another run.
FREE = (
    "dataset",
    "out",
    "device",
    "epochs",
    "max_steps",
    "evaluation",
    "checkpoint",
    "log_every",
    "max_skipped",
    "resume",
    "overwrite",
    "parallel",
    "topology",
    "compile",
    "activation_memory_gb",
    "sparse.row_wise_from",
    "reader.workers",
    "reader.prefetch",
)


def begins(out: Path, *, resume: bool, overwrite: bool, inputs: Iterable[str | Path | None]) -> bool:
    """Whether a run in a folder begins, rather than goes on from a checkpoint.

    Args:
        out: the run folder.
        resume: go on from the latest checkpoint there, if there is one.
        overwrite: what is there may be replaced.
        inputs: as in `foundation.data.files.require_free`.

    Raises:
        FileExistsError, NotADirectoryError, ValueError: it would begin, and `require_free` refuses the folder.
        CheckpointError: as in :func:`ended_early`.
    """
    saved = (out / "checkpoints" / "latest").is_file()
    if resume and (saved or ended_early(out)):
        return not saved
    try:
        require_free(out, overwrite=overwrite, inputs=inputs)
    except FileExistsError as error:
        if resume or not saved:
            raise
        raise FileExistsError(f"{error}; to go on with the run that is there, set resume to true") from None
    return True


def resumable(checkpoints: Path) -> tuple[Path, dict[str, Any]]:
    """The checkpoint to go on from, and its manifest.

    Args:
        checkpoints: a run's folder of them, with a `latest`.

    Raises:
        CheckpointError: it cannot be used; the message says from which others the run can go on.
    """
    try:
        path = find_checkpoint(checkpoints)
    except CheckpointError as error:
        raise CheckpointError(f"{error}. {_instead(checkpoints)}") from None
    try:
        return path, read_manifest(path)
    except CheckpointError as error:
        raise CheckpointError(f"{error}. {_instead(checkpoints, path)}") from None


def ended_early(run: Path) -> bool:
    """Whether a folder is of a run that ended before its first checkpoint, which starts over.

    Raises:
        CheckpointError: it has checkpoints, but nothing says which one is the latest.
    """
    folder = run / "checkpoints"
    if not folder.is_dir():
        return False
    if any(path.suffix != ".tmp" for path in folder.glob("step-*")):
        raise CheckpointError(f"{folder / 'latest'}: is missing. {_instead(folder)}")
    others = {path.name for path in run.iterdir()} - {"checkpoints", "ledger.jsonl"}
    return not others or "config.yaml" in others


def resume_from(
    checkpoint: Path,
    state: TrainState,
    reader: LogReader,
    manifest: Mapping[str, Any],
    device: torch.device,
    config_class: type,
) -> Callable[[], None]:
    """Fills a new state and reader from a checkpoint; a collective call.

    On CPU and the same number of ranks, training on from here gives bit for bit what training without a stop gives; on
    CUDA it does so up to the order in which kernels add.

    Args:
        checkpoint: the folder.
        state: a state at step 0 of the same config; changed in place.
        reader: the training reader; set to the position after the last batch trained on. With another number of ranks
            it deals the rest of the epoch anew.
        manifest: what this run would write: hashes and config.
        device: where this rank computes.
        config_class: of the config; its defaults stand for fields that the checkpoint's version did not have.

    Returns:
        To be called when the first batch is there: puts the random generators back. With another number of ranks they
        stay as they are.

    Raises:
        CheckpointError: the checkpoint is damaged, or of another schema, vocabulary, config or model.
    """
    saved = read_manifest(checkpoint)
    check_origin(checkpoint, saved, manifest["schema_hash"], manifest["encoder_hash"])
    code = other_code(saved, exactly=True)
    _check_config(checkpoint, saved["config"], manifest["config"], config_class, code)
    try:
        verify_files(checkpoint, saved)
    except CheckpointError as error:
        raise CheckpointError(f"{error}. {_instead(checkpoint.parent, checkpoint)}") from None
    try:
        read_tensors(checkpoint, state.tensors())
    except CheckpointError as error:
        raise CheckpointError(f"{error}{code and f'; {code}'}") from None
    try:
        rescale_momentum(state.model, saved["momentum_scale"])
        state.progress = Progress(**saved["progress"])
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{checkpoint / MANIFEST}: damaged; momentum_scale or progress: {error!r}") from None
    rank, world = dist.get_rank(), dist.get_world_size()
    same_world = saved["world_size"] == world
    own = read_rank_state(checkpoint, rank if same_world else 0)
    try:
        reader.load_state_dict(own["reader"])
    except ValueError as error:
        raise CheckpointError(f"{checkpoint}: {error}") from None
    return (lambda: set_rng_state(own["rng"], device)) if same_world else (lambda: None)


def _check_config(
    checkpoint: Path, saved: Mapping[str, Any], now: Mapping[str, Any], config_class: type, code: str
) -> None:
    """Refuses a config that makes another run. A field that was not there yet had its default's effect."""
    try:
        complete = plain(from_plain(config_class, _known(_with_free(saved, now), now)))
    except ValueError as error:
        raise CheckpointError(
            f"{checkpoint}: its config is not one of this version of OpenGEM: {error}{code and f'; {code}'}"
        ) from None
    changed = list(_differences(_filled(saved, complete), now))
    if changed:
        raise CheckpointError(
            f"{checkpoint}: was trained with another config; {'; '.join(changed)}. Use the same values, or another out"
            f"{code and f'; {code}'}"
        )


def _instead(folder: Path, damaged: Path | None = None) -> str:
    """What to do about a damaged checkpoint, or a damaged `latest`."""
    others = sorted(path.name for path in folder.glob("step-*") if path.suffix != ".tmp" and path != damaged)
    if not others:
        return "There is no other checkpoint: train anew with overwrite true"
    earlier = "an earlier" if damaged else "another"
    return f"To go on from {earlier} one, write its name into {folder / 'latest'}: there is {', '.join(others)}"


def _filled(saved: Any, complete: Any) -> Any:
    """What was saved, with the values that this version reads in it where it says nothing."""
    if not (isinstance(saved, dict) and isinstance(complete, dict)):
        return complete
    kept = {key: _filled(value, complete[key]) if key in complete else value for key, value in saved.items()}
    return {**complete, **kept}


def _known(saved: Any, now: Any) -> Any:
    """What was saved under keys that there still are."""
    if not (isinstance(saved, dict) and isinstance(now, dict)):
        return saved
    return {key: _known(value, now[key]) for key, value in saved.items() if key in now}


def _with_free(saved: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """A saved config with this run's values of what may change."""
    config = dict(saved)
    for name in FREE:
        head, _, rest = name.partition(".")
        if not rest:
            config[head] = now[head]
        elif isinstance(config.get(head), dict):
            config[head] = {**config[head], rest: now[head][rest]}
    return config


def _differences(saved: Any, now: Any, prefix: str = "") -> Iterator[str]:
    for key in sorted(saved.keys() | now.keys()):
        name = f"{prefix}{key}"
        old, new = saved.get(key), now.get(key)
        if name in FREE or old == new:
            continue
        if isinstance(old, dict) and isinstance(new, dict):
            yield from _differences(old, new, f"{name}.")
        else:
            yield f"{name} was {old!r} and is {new!r}"
