"""The manifest of an exported model folder and the configuration that NVIDIA Triton reads.

``manifest.json`` states the signature, the hash and size of every file, the parity proof, golden rows with their
scores, calibration and metrics. A server replays the golden rows before a model takes traffic.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from foundation.data.encoding import TensorSpec
from foundation.data.files import sha256_file
from value_models.student import check_files

FORMAT = 1
MANIFEST = "manifest.json"
MODEL = "model.onnx"
TRITON_CONFIG = "config.pbtxt"
TRITON_TYPES = {"int64": "TYPE_INT64", "float32": "TYPE_FP32"}


class ManifestError(ValueError):
    """A model folder that does not hold what its manifest says; the message names the file or key."""


def output_specs(task_names: Sequence[str]) -> list[TensorSpec]:
    """One calibrated probability per impression and task."""
    return [TensorSpec(name, "float32", ("N",)) for name in task_names]


def signature(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> dict[str, Any]:
    """Inputs and outputs as plain values: name, dtype, dims (``"R"``, ``"N"`` or a number)."""
    return {
        "inputs": [asdict(s) | {"dims": list(s.dims)} for s in inputs],
        "outputs": [asdict(s) | {"dims": list(s.dims)} for s in outputs],
    }


def file_entries(folder: Path) -> dict[str, dict[str, Any]]:
    """``{name: {sha256, bytes}}`` of every file of a folder except the manifest itself."""
    return {
        path.name: {"sha256": sha256_file(path), "bytes": path.stat().st_size}
        for path in sorted(folder.iterdir())
        if path.name != MANIFEST
    }


def golden_rows(inputs: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Inputs and scores as nested lists; a float32 survives JSON unchanged."""
    return {
        "inputs": {name: value.tolist() for name, value in inputs.items()},
        "outputs": {name: value.tolist() for name, value in outputs.items()},
    }


def first_requests(inputs: Mapping[str, np.ndarray], specs: Sequence[TensorSpec], count: int) -> dict[str, np.ndarray]:
    """The inputs of the first ``count`` requests and their impressions; ``request_index`` is ascending."""
    impressions = int(np.searchsorted(inputs["request_index"], count))
    sizes = {"R": count, "N": impressions}
    return {s.name: inputs[s.name][: sizes[str(s.dims[0])]] for s in specs}


def read_manifest(folder: str | Path) -> dict[str, Any]:
    """Reads a model folder's manifest and checks every listed file against its hash.

    Raises:
        ManifestError: no manifest, another format, a missing, truncated or changed file.
    """
    folder = Path(folder)
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text())
    except FileNotFoundError:
        raise ManifestError(f"{folder}: no {MANIFEST}; this is not an exported model") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ManifestError(f"{path}: not JSON: {error}") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT or "signature" not in manifest:
        raise ManifestError(f"{path}: not a model manifest of format {FORMAT}")
    check_files(folder, manifest.get("files"), ManifestError)
    return manifest


def check_name(name: str) -> str:
    """A model name that is safe as a folder and in a URL.

    Raises:
        ValueError: other signs than letters, digits, ``_``, ``-`` and ``.``, a leading dot, or more than 200 signs.
    """
    if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,199}", name):
        raise ValueError(
            f"name: {name!r} may hold only letters, digits, _, - and ., 200 at most; give another with --name"
        )
    return name


def triton_config(name: str, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> str:
    """``config.pbtxt`` for Triton's ONNX Runtime backend; R and N are variable, one thread per execution."""

    def tensor(spec: TensorSpec) -> str:
        dims = ", ".join(str(d) if isinstance(d, int) else "-1" for d in spec.dims)
        return f'  {{ name: "{spec.name}" data_type: {TRITON_TYPES[spec.dtype]} dims: [ {dims} ] }}'

    return "\n".join(
        [
            f'name: "{name}"',
            'backend: "onnxruntime"',
            "max_batch_size: 0",
            "input [",
            ",\n".join(tensor(s) for s in inputs),
            "]",
            "output [",
            ",\n".join(tensor(s) for s in outputs),
            "]",
            'parameters { key: "intra_op_thread_count" value: { string_value: "1" } }',
            'parameters { key: "inter_op_thread_count" value: { string_value: "1" } }',
            "",
        ]
    )
