"""A trained student on disk: weights, calibration, schema, encoder and a sample of real inputs, checked on load.

Layout: ``model.safetensors``, ``calibration.json``, ``schema.yaml``, ``encoder.npz``, ``sample.npz`` (named model
inputs of a few real requests, for parity and golden rows), ``metrics.json``, ``manifest.json`` (sizes, hashes).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from foundation.data.encoding import Encoder
from foundation.data.files import sha256_file
from foundation.data.json_shape import require_shape
from foundation.data.options import from_plain
from foundation.data.schema import Schema
from foundation.data.settings import plain
from value_models.calibration import Calibration
from value_models.model import ValueModel, ValueModelConfig

FORMAT = 1
WEIGHTS, CALIBRATION, METRICS, MANIFEST = "model.safetensors", "calibration.json", "metrics.json", "manifest.json"
SCHEMA, ENCODER, SAMPLE = "schema.yaml", "encoder.npz", "sample.npz"
PARTS = (WEIGHTS, CALIBRATION, METRICS, SCHEMA, ENCODER, SAMPLE)


class StudentError(ValueError):
    """A student folder that cannot be used; the message names the folder and the file."""


class CalibratedModel(nn.Module):
    """The served function: named inputs to calibrated probabilities."""

    def __init__(self, model: ValueModel, calibration: Calibration) -> None:
        super().__init__()
        self.model = model
        self.calibration = calibration

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Probabilities float32 ``[N, K]`` of named inputs with R requests and N impressions."""
        probabilities: Tensor = self.calibration(self.model(inputs))
        return probabilities


@dataclass(frozen=True, kw_only=True, slots=True)
class Student:
    """A trained student. ``sample`` maps input names to numpy arrays of a few real requests."""

    surface: str
    model: ValueModel
    calibration: Calibration
    schema: Schema
    encoder: Encoder
    sample: dict[str, np.ndarray]
    metrics: dict[str, Any]
    manifest: dict[str, Any]

    def calibrated(self) -> CalibratedModel:
        """Model and calibration as one module in evaluation mode."""
        return CalibratedModel(self.model, self.calibration).eval()


def save_student(folder: Path, student: Student) -> None:
    """Writes every part into an existing folder, ``manifest.json`` last; ``student.manifest`` is added to it."""
    weights = {name: value.detach().cpu().contiguous() for name, value in student.model.state_dict().items()}
    save_file(weights, folder / WEIGHTS)
    (folder / WEIGHTS).chmod(0o644)  # safetensors writes files that only their owner can read
    (folder / CALIBRATION).write_text(json.dumps(student.calibration.to_dict(), indent=1))
    (folder / METRICS).write_text(json.dumps(student.metrics, indent=1))
    student.schema.save(folder / SCHEMA)
    student.encoder.save(folder / ENCODER)
    np.savez(folder / SAMPLE, allow_pickle=False, **student.sample)
    manifest = {
        "format": FORMAT,
        "kind": "student",
        "surface": student.surface,
        "tasks": list(student.schema.task_names),
        "schema_hash": student.schema.hash,
        "encoder_hash": student.encoder.hash,
        "model": plain(student.model.config),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        **student.manifest,
        "files": {name: _entry(folder / name) for name in PARTS},
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1))


def _entry(path: Path) -> dict[str, Any]:
    return {"sha256": sha256_file(path), "bytes": path.stat().st_size}


def load_student(folder: str | Path) -> Student:
    """Reads a student folder and checks every part against its manifest.

    Raises:
        StudentError: the folder is missing, a file is missing, changed or unreadable, or parts do not fit together.
    """
    folder = Path(folder)
    manifest = _read_manifest(folder)
    check_files(folder, manifest.get("files"), StudentError)
    try:
        schema = Schema.load(folder / SCHEMA)
        encoder = Encoder.load(folder / ENCODER, schema)
        calibration = Calibration.from_dict(json.loads((folder / CALIBRATION).read_text()), schema.task_names)
        metrics = json.loads((folder / METRICS).read_text())
        with np.load(folder / SAMPLE) as arrays:
            sample = {name: arrays[name] for name in arrays.files}
        weights = load_file(folder / WEIGHTS)
    except (KeyError, TypeError, ValueError, OSError, SafetensorError) as error:
        raise StudentError(f"{folder}: not a usable student: {error}") from error
    try:
        model = ValueModel(from_plain(ValueModelConfig, manifest["model"]), schema, encoder.table_rows)
    except ValueError as error:
        raise StudentError(f"{folder / MANIFEST}: damaged; model: {error}") from error
    load_weights(model, weights, str(folder / WEIGHTS))
    for key, found in (("schema_hash", schema.hash), ("encoder_hash", encoder.hash)):
        if manifest.get(key) != found:
            raise StudentError(f"{folder}: {key} is {found}, the manifest says {manifest.get(key)}")
    return Student(
        surface=str(manifest["surface"]),
        model=model.eval(),
        calibration=calibration,
        schema=schema,
        encoder=encoder,
        sample=sample,
        metrics=metrics,
        manifest=manifest,
    )


def check_files(folder: Path, entries: Any, error: type[ValueError]) -> None:
    """Compares files with their ``{name: {sha256, bytes}}`` entries.

    Raises:
        error: a file is missing or differs, or the entries are malformed; the message names it.
    """
    if not isinstance(entries, Mapping) or not entries:
        raise error(f"{folder}: the manifest lists no files")
    for name, entry in entries.items():
        path = folder / name
        if Path(name).name != name or not path.is_file():
            raise error(f"{folder}: {name} is missing")
        size = path.stat().st_size
        if not isinstance(entry, Mapping) or size != entry.get("bytes"):
            raise error(f"{path}: {size} bytes, the manifest says {entry!r}; the file is truncated or was changed")
        if sha256_file(path) != entry.get("sha256"):
            raise error(f"{path}: sha256 differs from the manifest; the file was changed")


def load_weights(model: nn.Module, weights: Mapping[str, Tensor], source: str) -> None:
    """Loads weights; any missing, unexpected or misshapen name is an error.

    Raises:
        StudentError: names what does not match.
    """
    expected = model.state_dict()
    missing, extra = sorted(set(expected) - set(weights)), sorted(set(weights) - set(expected))
    shapes = [n for n in expected if n in weights and expected[n].shape != weights[n].shape]
    if missing or extra or shapes:
        raise StudentError(f"{source}: weights do not fit: missing {missing}, unexpected {extra}, other shape {shapes}")
    model.load_state_dict(weights)


def to_tensors(inputs: Mapping[str, np.ndarray], device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """Named numpy inputs as tensors on a device."""
    return {name: torch.from_numpy(np.ascontiguousarray(value)).to(device) for name, value in inputs.items()}


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text())
    except FileNotFoundError:
        raise StudentError(f"{folder}: no {MANIFEST}; this is not a student folder") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise StudentError(f"{path}: not JSON: {error}") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT or manifest.get("kind") != "student":
        raise StudentError(f"{path}: not a student manifest of format {FORMAT}")
    try:
        require_shape(manifest, {"surface": str, "model": dict, "files": dict}, "manifest")
    except ValueError as error:
        raise StudentError(f"{path}: damaged; {error}") from None
    return manifest
