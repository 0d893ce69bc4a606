"""Goes on from a checkpoint as if the run had never stopped."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from foundation.data.json_shape import require_shape
from foundation.data.logs import LogReader
from foundation.parallel.parallelize import rescale_momentum
from foundation.training.checkpoint_files import (
    MANIFEST,
    CheckpointError,
    read_manifest,
    read_rank_state,
    read_tensors,
    verify_files,
)
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
    "sparse.row_wise_from",
    "reader.workers",
    "reader.prefetch",
)


def resume_from(
    checkpoint: Path, state: TrainState, reader: LogReader, manifest: Mapping[str, Any], device: torch.device
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

    Returns:
        To be called when the first batch is there: puts the random generators back. With another number of ranks they
        stay as they are.

    Raises:
        CheckpointError: the checkpoint is damaged, or of another schema, vocabulary, config or model.
    """
    saved = read_manifest(checkpoint)
    check_origin(checkpoint, saved, manifest["schema_hash"], manifest["encoder_hash"])
    changed = sorted(set(_differences(saved["config"], manifest["config"])))
    if changed:
        raise CheckpointError(
            f"{checkpoint}: was trained with another config; {'; '.join(changed)}. Use the same values, or another out"
        )
    verify_files(checkpoint, saved)
    read_tensors(checkpoint, state.tensors())
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


def check_origin(checkpoint: Path, manifest: Mapping[str, Any], schema_hash: str, encoder_hash: str) -> None:
    """Refuses a checkpoint of another schema or vocabulary.

    Raises:
        CheckpointError: naming both hashes, or the key of a damaged manifest.
    """
    shape = {"schema_hash": str, "encoder_hash": str, "config": {"model": dict}, "progress": dict, "world_size": int}
    try:
        require_shape(manifest, shape, "manifest")
    except ValueError as error:
        raise CheckpointError(f"{checkpoint / MANIFEST}: damaged; {error}") from None
    for what, key, mine in (("schema", "schema_hash", schema_hash), ("encoder", "encoder_hash", encoder_hash)):
        if manifest[key] != mine:
            raise CheckpointError(
                f"{checkpoint}: was trained with {what} {manifest[key]}, but here the {what} is {mine}; "
                "ids would mean other rows. Use the dataset it was trained on, or train anew into another out"
            )


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
