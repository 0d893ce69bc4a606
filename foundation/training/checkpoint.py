"""Loads a trained foundation model for use: whole tables in plain TorchRec collections, on one device."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from foundation.data.encoding import Encoder
from foundation.data.files import sha256_file
from foundation.data.options import from_plain
from foundation.data.schema import Schema
from foundation.model.gem import GEM, GEMConfig
from foundation.training.checkpoint_files import (
    MANIFEST,
    CheckpointError,
    read_manifest,
    read_tensors,
    run_checkpoint,
    saved_keys,
    verify_files,
)
from foundation.training.launch import quiet_torchrec
from foundation.training.origin import check_origin, other_code
from foundation.training.state import AVERAGE, MODEL


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedModel:
    """A trained model and what it needs to read data.

    Args:
        model: unsharded, in eval mode, with the averaged weights if it was trained with averages.
        schema: the schema it was trained with.
        encoder: its vocabularies and statistics.
        manifest: the checkpoint's manifest.
        version: SHA-256 of that manifest, which names every other file's: it identifies the weights.
        checkpoint: the folder.
    """

    model: GEM
    schema: Schema
    encoder: Encoder
    manifest: dict[str, Any]
    version: str
    checkpoint: Path


def load_model(run: str | Path, which: str | int = "best", device: torch.device | str = "cpu") -> LoadedModel:
    """Loads a checkpoint of a run, whatever number of ranks trained it.

    Args:
        run: the run folder, the `out` of training.
        which: `best`, `latest`, or a step.
        device: where to put the model.

    Raises:
        CheckpointError: there is no such run or checkpoint, it is damaged, or it does not belong to the run's schema.
    """
    quiet_torchrec()
    folder = Path(run)
    checkpoint = run_checkpoint(folder, which)
    manifest = read_manifest(checkpoint)
    verify_files(checkpoint, manifest)
    schema = Schema.load(folder / "schema.yaml")
    encoder = Encoder.load(folder / "encoder.npz", schema)
    check_origin(checkpoint, manifest, schema.hash, encoder.hash)
    try:
        model = GEM(from_plain(GEMConfig, manifest["config"]["model"]), schema, encoder.table_rows)
    except ValueError as error:
        raise CheckpointError(f"{checkpoint / MANIFEST}: damaged; config.model: {error}") from None
    saved = saved_keys(checkpoint)
    # One key per weight: its average where there is one. Buffers and weights without averages are the model's own.
    tensors = {
        (AVERAGE + name if AVERAGE + name in saved else MODEL + name): value
        for name, value in model.state_dict().items()
    }
    unused = {key for key in saved if key.startswith(MODEL)} - {MODEL + name for name in model.state_dict()}
    if unused:
        raise CheckpointError(
            f"{checkpoint}: does not fit the model; keys are not expected: {', '.join(sorted(unused))}"
        )
    code = other_code(manifest, exactly=False)
    try:
        read_tensors(checkpoint, tensors, among=tensors)
    except CheckpointError as error:
        raise CheckpointError(f"{error}{code and f'; {code}'}") from None
    if code:
        print(f"{checkpoint}: {code}; its format is the same, so it is used", file=sys.stderr)
    return LoadedModel(
        model=model.to(device).eval(),
        schema=schema,
        encoder=encoder,
        manifest=manifest,
        version=sha256_file(checkpoint / MANIFEST),
        checkpoint=checkpoint,
    )
