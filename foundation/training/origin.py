"""Where a checkpoint comes from: the code that wrote it, the schema and vocabulary it belongs to."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from foundation.data.json_shape import require_shape
from foundation.training.checkpoint_files import MANIFEST, CheckpointError

_ROOT = Path(__file__).resolve().parents[2]
_SOURCES = ("foundation", "kernels")


@cache
def written_by() -> dict[str, str]:
    """The code of this process, for a manifest: versions, and a hash of the sources that training runs."""
    digest = hashlib.sha256()
    for path in sorted(path for folder in _SOURCES for path in (_ROOT / folder).rglob("*.py")):
        digest.update(f"{path.relative_to(_ROOT)}\0".encode() + path.read_bytes() + b"\0")
    try:
        opengem = version("opengem")
    except PackageNotFoundError:
        opengem = "not installed"
    return {
        "opengem": opengem,
        "sources": digest.hexdigest()[:16],
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def config_hash(config: Mapping[str, Any]) -> str:
    """16 hex digits of a config of plain values."""
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:16]


def other_code(manifest: Mapping[str, Any], *, exactly: bool) -> str:
    """In what the code that wrote a checkpoint differs from this one; empty where it does not.

    Another code is not refused for its version: the number of the format changes when the meaning of a checkpoint does,
    and keys, shapes and config are compared as they are.

    Args:
        manifest: the checkpoint's.
        exactly: also for a difference that only matters to a run that goes on bit for bit.
    """
    wrote = manifest.get("written_by")
    if not isinstance(wrote, dict):
        return "it was written by a version of OpenGEM that did not record itself" if exactly else ""
    names = ("opengem", "torch", "sources") if exactly else ("opengem",)
    mine = written_by()
    different = [f"{name} {wrote.get(name)} (here {mine[name]})" for name in names if wrote.get(name) != mine[name]]
    return f"it was written by {', '.join(different)}" if different else ""


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
