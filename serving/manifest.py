"""Reads and checks `manifest.json` of an exported model folder, and the files that it lists."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from foundation.data.encoding import TensorSpec

FORMAT = 1
FILE = "manifest.json"
MODEL = "model.onnx"
REQUIRED_FILES = (MODEL, "schema.yaml", "encoder.npz")


class ModelError(ValueError):
    """A model folder that must not serve; the message names the file and the fault."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """The parts of a manifest that the server uses. `sha256` is that of the manifest's own bytes."""

    path: Path
    name: str
    version: int
    schema_hash: str
    encoder_hash: str
    tasks: tuple[str, ...]
    surface: str
    value: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    files: dict[str, str]
    golden_inputs: dict[str, np.ndarray]
    golden_outputs: dict[str, np.ndarray]
    sha256: str

    @staticmethod
    def read(folder: Path) -> Manifest:
        """Reads `folder/manifest.json`. Raises ModelError naming file and key."""
        path = folder / FILE
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            raise ModelError(f"{path}: is missing") from None
        except OSError as error:
            raise ModelError(f"{path}: cannot be read: {error.strerror}") from None
        try:
            data = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise ModelError(f"{path}: not JSON, or cut off: {error}") from None
        return _Reader(path).manifest(data, hashlib.sha256(content).hexdigest())

    def verify_files(self, folder: Path) -> None:
        """Compares the sha256 of every listed file. Raises ModelError naming the first that differs."""
        for name, expected in self.files.items():
            path = folder / name
            try:
                with path.open("rb") as file:
                    found = hashlib.file_digest(file, "sha256").hexdigest()
            except OSError as error:
                raise ModelError(f"{path}: is listed in {FILE} but cannot be read: {error.strerror}") from None
            if found != expected:
                raise ModelError(f"{path}: sha256 is {found[:12]}..., {FILE} says {expected[:12]}...")
        for entry in sorted(folder.iterdir()):
            if entry.name != FILE and entry.name not in self.files and not entry.name.startswith("."):
                raise ModelError(f"{entry}: is not listed in {FILE}")


class _Reader:
    def __init__(self, path: Path) -> None:
        self.path = path

    def fail(self, key: str, problem: str) -> ModelError:
        return ModelError(f"{self.path}: {key}: {problem}")

    def get(self, data: Any, key: str, kind: type, where: str = "") -> Any:
        name = f"{where}.{key}" if where else key
        if not isinstance(data, Mapping):
            raise self.fail(where or "manifest", "expected an object")
        if key not in data:
            raise self.fail(name, "is missing")
        value = data[key]
        if not isinstance(value, kind) or isinstance(value, bool):
            raise self.fail(name, f"expected {kind.__name__}, got {type(value).__name__}")
        return value

    def manifest(self, data: Any, sha256: str) -> Manifest:
        if self.get(data, "format", int) != FORMAT:
            raise self.fail("format", f"this server reads format {FORMAT}, got {data['format']}")
        tasks = self.get(data, "tasks", list)
        if not tasks or not all(isinstance(task, str) for task in tasks):
            raise self.fail("tasks", "expected a list of names")
        signature = self.get(data, "signature", dict)
        inputs = self.specs(signature, "inputs")
        outputs = self.specs(signature, "outputs")
        if [spec.name for spec in outputs] != tasks:
            raise self.fail("signature.outputs", f"must be one per task, {tasks}")
        golden = self.get(data, "golden", dict)
        return Manifest(
            path=self.path,
            name=self.get(data, "name", str),
            version=self.get(data, "version", int),
            schema_hash=self.get(data, "schema_hash", str),
            encoder_hash=self.get(data, "encoder_hash", str),
            tasks=tuple(tasks),
            surface=self.get(data, "surface", str),
            value=self.get(data, "value", str),
            inputs=inputs,
            outputs=outputs,
            files=self.files(self.get(data, "files", dict)),
            golden_inputs=self.arrays(golden, "inputs", inputs),
            golden_outputs=self.arrays(golden, "outputs", outputs),
            sha256=sha256,
        )

    def specs(self, signature: Any, key: str) -> tuple[TensorSpec, ...]:
        specs = []
        for index, entry in enumerate(self.get(signature, key, list, "signature")):
            where = f"signature.{key}[{index}]"
            dtype = self.get(entry, "dtype", str, where)
            if dtype not in ("int64", "float32"):
                raise self.fail(f"{where}.dtype", f"must be int64 or float32, got {dtype!r}")
            dims = self.get(entry, "dims", list, where)
            for dim in dims:
                if dim not in ("R", "N") and (type(dim) is not int or dim < 1):
                    raise self.fail(f"{where}.dims", f"a dim is 'R', 'N' or a positive number, got {dim!r}")
            specs.append(TensorSpec(self.get(entry, "name", str, where), dtype, tuple(dims)))
        return tuple(specs)

    def files(self, listed: Mapping[str, Any]) -> dict[str, str]:
        for name in REQUIRED_FILES:
            if name not in listed:
                raise self.fail(f"files.{name}", "is missing")
        for name in listed:
            if Path(name).name != name or name in ("", ".", ".."):
                raise self.fail(f"files.{name}", "must be a plain file name in the same folder")
        return {name: self.get(entry, "sha256", str, f"files.{name}") for name, entry in listed.items()}

    def arrays(self, golden: Any, key: str, specs: tuple[TensorSpec, ...]) -> dict[str, np.ndarray]:
        lists = self.get(golden, key, dict, "golden")
        arrays = {}
        for spec in specs:
            nested = self.get(lists, spec.name, list, f"golden.{key}")
            try:
                arrays[spec.name] = np.array(nested, spec.dtype)
            except (ValueError, TypeError, OverflowError) as error:
                raise self.fail(f"golden.{key}.{spec.name}", f"not an array of {spec.dtype}: {error}") from None
        return arrays
