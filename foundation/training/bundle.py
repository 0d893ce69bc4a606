"""What a run leaves when too many steps in a row were not finite: all that is needed to do the last of them again.

RUN/failures/step-00000012/
  bundle.json                   step, reason, config, versions, what was not finite on which rank
  batch-00000.safetensors ...   the batch of each rank
  schema.yaml  encoder.npz      as in a run's folder
  checkpoints/step-00000012/    weights; each rank's random generators before the step and the hash of its weights
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from foundation.data.batch import Batch
from foundation.data.batch_file import save_batch
from foundation.data.dataset import Dataset
from foundation.data.files import atomic_write
from foundation.parallel.pieces import Piece, Spread
from foundation.parallel.tables import model_tensors
from foundation.training.checkpoint_files import step_name, write_checkpoint
from foundation.training.state import MODEL, TrainState

FAILURES, BUNDLE = "failures", "bundle.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class FailedStep:
    """A step that was not finite, as one rank knows it.

    Args:
        step: its number.
        reason: what was not finite.
        found: columns or weights at fault, of all ranks.
        loss: of this rank.
        batch: of this rank.
        rng: of this rank, before the step.
        later: steps that the host had queued after it; the weights that are written are those after them.
    """

    step: int
    reason: str
    found: str
    loss: float
    batch: Batch
    rng: dict[str, Any]
    later: int


def batch_file(bundle: Path, rank: int) -> Path:
    """Where a rank's batch is."""
    return bundle / f"batch-{rank:05d}.safetensors"


def write_bundle(
    run: Path, failed: FailedStep, state: TrainState, manifest: Mapping[str, Any], dataset: Dataset
) -> Path:
    """Writes a bundle; a collective call.

    Args:
        run: the run's folder.
        failed: the step.
        state: the run's.
        manifest: what the run's checkpoints say of it.
        dataset: its schema and encoder go along.

    Returns:
        The folder.

    Raises:
        CheckpointError, OSError: it could not be written.
    """
    folder = run / FAILURES / step_name(failed.step)
    weights = model_tensors(state.model)
    rank_state = {
        "rng": failed.rng,
        "loss": failed.loss if math.isfinite(failed.loss) else str(failed.loss),
        "weights_sha256": weights_hash(weights),
    }
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
    whole = {**manifest, "progress": state.progress.to_dict(), "metrics": {}}
    tensors = {MODEL + name: value for name, value in weights.items()}
    write_checkpoint(folder / "checkpoints", failed.step, tensors, rank_state, whole)
    save_batch(batch_file(folder, dist.get_rank()), failed.batch)
    if dist.get_rank() == 0:
        dataset.schema.save(folder / "schema.yaml")
        dataset.encoder.save(folder / "encoder.npz")
        about = {key: manifest[key] for key in ("config", "schema_hash", "encoder_hash", "world_size", "written_by")}
        facts = {"step": failed.step, "reason": failed.reason, "found": failed.found, "later_steps": failed.later}
        atomic_write(folder / BUNDLE, json.dumps({**facts, **about}, indent=1) + "\n")
    return folder


def weights_hash(tensors: Mapping[str, Spread]) -> str:
    """SHA-256 of what one rank holds: names, shapes, places and bytes; the same for equal weights in equal places."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name]
        whole = [Piece((0,) * value.dim(), value)] if isinstance(value, torch.Tensor) else value.pieces
        digest.update(f"{name} {tuple(value.shape)}\0".encode())
        for piece in sorted(whole, key=lambda piece: piece.offset):
            digest.update(f"{piece.offset} {piece.tensor.dtype}\0".encode())
            digest.update(piece.tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
