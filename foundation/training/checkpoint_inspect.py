"""`opengem checkpoint inspect`: what a checkpoint holds, who wrote it, and whether its files are whole."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from foundation.training.checkpoint_files import MANIFEST, read_manifest, run_checkpoint, saved_entries, verify_files
from foundation.training.origin import other_code


@dataclass(frozen=True, kw_only=True, slots=True)
class InspectConfig:
    """Which checkpoint to look at.

    Args:
        run: folder of a training run.
        which: checkpoint: best, latest, a step or its folder's name.
        verify: read all files and compare their SHA-256.
        as_json: print JSON instead of tables.
    """

    run: Path
    which: str = "latest"
    verify: bool = True
    as_json: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Inspection:
    """What was found.

    Args:
        checkpoint: the folder.
        manifest: as it is on disk.
        tensors: shape, dtype, bytes and number of saved pieces by key.
        verified: whether all files were read and are those of the manifest.
    """

    checkpoint: Path
    manifest: dict[str, Any]
    tensors: dict[str, dict[str, Any]]
    verified: bool


def inspect_checkpoint(config: InspectConfig) -> Inspection:
    """Prints a checkpoint's origin, progress, files and tensors to stdout. Needs no memory for the tensors.

    Raises:
        CheckpointError: there is no such run or checkpoint, or it is damaged; the message names the files.
    """
    checkpoint = run_checkpoint(config.run, config.which)
    manifest = read_manifest(checkpoint)
    if config.verify:
        verify_files(checkpoint, manifest)
    found = Inspection(
        checkpoint=checkpoint,
        manifest=manifest,
        tensors={
            key: {
                "shape": list(entry.size),
                "dtype": str(entry.properties.dtype).removeprefix("torch."),
                "bytes": math.prod(entry.size) * entry.properties.dtype.itemsize,
                "pieces": len(entry.chunks),
            }
            for key, entry in sorted(saved_entries(checkpoint).items())
        },
        verified=config.verify,
    )
    if config.as_json:
        answer = {"checkpoint": str(checkpoint), "verified": found.verified, "manifest": manifest}
        print(json.dumps({**answer, "tensors": found.tensors}, indent=1))
    else:
        _print(found)
    return found


def _print(found: Inspection) -> None:
    manifest = found.manifest
    progress = manifest.get("progress", {})
    when = datetime.fromtimestamp((found.checkpoint / MANIFEST).stat().st_mtime, UTC)
    by = ", ".join(f"{name} {value}" for name, value in manifest.get("written_by", {}).items())
    sizes = [entry["bytes"] for entry in manifest["files"].values()]
    hashes = ("schema_hash", "encoder_hash", "config_hash")
    about = {
        "checkpoint": str(found.checkpoint),
        "step": f"{manifest['step']:,}, epoch {progress.get('epoch', 0)}, {progress.get('samples', 0):,} impressions",
        "best so far": f"{progress.get('best')}, at step {progress.get('best_step')}",
        "written": f"{when.isoformat(timespec='seconds')} by {manifest.get('world_size', 1)} ranks; {by or 'not said'}",
        "here": other_code(manifest, exactly=True) or "the same code",
        **{name.replace("_", " "): str(manifest.get(name, "not recorded")) for name in hashes},
        "files": f"{len(sizes)}, {sum(sizes):,} bytes; {'all' if found.verified else 'not'} compared with SHA-256",
    }
    _table([(name, text) for name, text in about.items()])
    files = sorted(manifest["files"].items())
    _table([("file", "bytes", "SHA-256"), *((name, f"{entry['bytes']:,}", entry["sha256"]) for name, entry in files)])
    tensors = [
        (key, str(tuple(t["shape"])), t["dtype"], f"{t['bytes']:,}", str(t["pieces"]))
        for key, t in found.tensors.items()
    ]
    _table([("tensor", "shape", "dtype", "bytes", "pieces"), *tensors])
    total: dict[str, int] = {}
    for key, tensor in found.tensors.items():
        part = key.split(".")[0]
        total[part] = total.get(part, 0) + tensor["bytes"]
    print("; ".join(f"{part} {size:,} bytes" for part, size in total.items()))


def _table(rows: list[tuple[str, ...]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    print()
