"""`opengem checkpoint export`: weights as safetensors, for programs that know nothing of OpenGEM."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from foundation.data.files import atomic_dir, require_free, sha256_file
from foundation.training.checkpoint_files import (
    MANIFEST,
    read_manifest,
    read_tensors,
    run_checkpoint,
    saved_entries,
    verify_files,
)
from foundation.training.state import AVERAGE, MODEL, MOMENTUM

FORMAT = 1
DENSE = "dense.safetensors"


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightsConfig:
    """What to export, and where.

    Args:
        run: folder of a training run.
        out: folder to write: `dense.safetensors`, one file for each table, `weights.json`.
        which: checkpoint: best, latest, a step or its folder's name.
        tables: export the embedding tables too.
        averages: take averaged weights where the run has them, which are those that are evaluated and served.
        overwrite: replace what is in `out`.
    """

    run: Path
    out: Path
    which: str = "best"
    tables: bool = False
    averages: bool = True
    overwrite: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightsResult:
    """The folder, and the number of tensors and tables in it."""

    out: Path
    tensors: int
    tables: int


def export_weights(config: WeightsConfig) -> WeightsResult:
    """Writes a model's weights under their names in `GEM.state_dict()`, in the dtype they were saved in.

    `weights.json` says where they come from, the model's config, and of each file the SHA-256, of each tensor the file,
    shape and dtype. The dense part is in memory at once, of the tables one at a time.

    Raises:
        CheckpointError: there is no such run or checkpoint, or it is damaged.
        FileExistsError: `out` exists and `overwrite` is not set.
        ValueError: `out` holds the run, and `overwrite` is set.
    """
    require_free(config.out, overwrite=config.overwrite, inputs=[config.run])
    checkpoint = run_checkpoint(config.run, config.which)
    manifest = read_manifest(checkpoint)
    verify_files(checkpoint, manifest)
    saved = saved_entries(checkpoint)
    names = sorted(key.removeprefix(MODEL) for key in saved if key.startswith(MODEL))
    tables = [name for name in names if MOMENTUM + name in saved]
    files = {DENSE: [name for name in names if name not in tables]}
    if config.tables:
        files |= {f"{name}.safetensors": [name] for name in tables}
    described: dict[str, dict[str, Any]] = {}
    hashes: dict[str, dict[str, Any]] = {}
    with atomic_dir(config.out, overwrite=config.overwrite) as out:
        for file, part in files.items():
            keys = {name: _key(name, saved, config.averages) for name in part}
            tensors = {
                key: torch.empty(tuple(saved[key].size), dtype=saved[key].properties.dtype) for key in keys.values()
            }
            read_tensors(checkpoint, tensors, among=tensors)
            save_file({name: tensors[key] for name, key in keys.items()}, out / file, metadata={"format": "pt"})
            hashes[file] = {"bytes": (out / file).stat().st_size, "sha256": sha256_file(out / file)}
            for name, key in keys.items():
                described[name] = {
                    "file": file,
                    "shape": list(tensors[key].shape),
                    "dtype": str(tensors[key].dtype).removeprefix("torch."),
                    "averaged": key.startswith(AVERAGE),
                }
        about = {
            "format": FORMAT,
            "kind": "foundation weights",
            "checkpoint": checkpoint.name,
            "version": sha256_file(checkpoint / MANIFEST),
            **_entries(manifest, ("step", "schema_hash", "encoder_hash", "config_hash", "written_by", "metrics")),
            "model": manifest.get("config", {}).get("model"),
            "files": hashes,
            "tensors": described,
        }
        (out / "weights.json").write_text(json.dumps(about, indent=1) + "\n")
    left_out = "" if config.tables or not tables else f"; {len(tables)} tables are left out (tables true adds them)"
    print(f"{config.out}: {len(described)} tensors of {checkpoint}{left_out}")
    return WeightsResult(out=config.out, tensors=len(described), tables=len(tables) if config.tables else 0)


def _key(name: str, saved: Iterable[str], averages: bool) -> str:
    return AVERAGE + name if averages and AVERAGE + name in saved else MODEL + name


def _entries(manifest: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: manifest.get(name) for name in names}
