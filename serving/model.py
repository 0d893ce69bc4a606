"""One loaded version of a model: verified files, an onnxruntime session, and a proof that it still scores
as it did when it was exported. No networking here.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from foundation.data.encoding import Encoder, EncodingError, TensorSpec, model_signature
from foundation.data.onnx_runtime import onnx_runtime
from foundation.data.schema import Schema, SchemaError
from foundation.data.value_expression import ValueExpression, ValueExpressionError
from serving.codec import datatype_of
from serving.encoder import RequestEncoder
from serving.errors import Reason, ServingError, invalid
from serving.manifest import MODEL, Manifest, ModelError

if TYPE_CHECKING:
    import onnxruntime as ort

GOLDEN_TOLERANCE = 1e-5
"""Largest allowed difference between a golden score and its replay; the bound of the exporter's parity gate."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelLimits:
    """What one inference call may ask for, and how sessions run.

    Args:
        max_candidates: rows N in one call.
        max_requests: rows R in one call.
        providers: onnxruntime execution providers, the preferred one first.
    """

    max_candidates: int = 4096
    max_requests: int = 256
    providers: tuple[str, ...] = ("CPUExecutionProvider",)

    def __post_init__(self) -> None:
        for key in ("max_candidates", "max_requests"):
            if getattr(self, key) < 1:
                raise ValueError(f"limits.{key}: must be at least 1, got {getattr(self, key)}")
        available = onnx_runtime().get_available_providers()
        for provider in self.providers:
            if provider not in available:
                raise ValueError(f"limits.providers: {provider!r} is not one of {', '.join(available)}")


class ServedModel:
    """A version that is ready for traffic. Build it with :meth:`load`. `run` may be called from many threads."""

    def __init__(
        self,
        manifest: Manifest,
        schema: Schema,
        encoder: Encoder,
        session: ort.InferenceSession,
        value: ValueExpression,
        limits: ModelLimits,
    ) -> None:
        self.manifest = manifest
        self.schema = schema
        self.encoder = encoder
        self.value = value
        self.limits = limits
        self.request_encoder = RequestEncoder(schema, encoder, manifest.surface, value.fields)
        self.loaded_at = time.time()
        self._session = session
        self._specs = {spec.name: spec for spec in manifest.inputs}
        self._bounds = _bounds(schema, encoder)

    @property
    def name(self) -> str:
        """The model's name: its folder, usually a surface."""
        return self.manifest.name

    @property
    def version(self) -> str:
        """The version, as text, as the protocol has it."""
        return str(self.manifest.version)

    @staticmethod
    def load(folder: Path, limits: ModelLimits | None = None) -> ServedModel:
        """Loads `models/<name>/<version>` and proves it before anybody may use it.

        In this order: manifest, sha256 of every file, schema and encoder, the session and its signature, the
        golden rows, and one run at each of several sizes, because first runs allocate.

        Raises:
            ModelError: any of these fails; the message names the file and says what is wrong.
        """
        limits = limits or ModelLimits()
        manifest = Manifest.read(folder)
        if (manifest.name, str(manifest.version)) != (folder.parent.name, folder.name):
            raise ModelError(
                f"{manifest.path}: is for {manifest.name}/{manifest.version}, "
                f"but lies in {folder.parent.name}/{folder.name}"
            )
        manifest.verify_files(folder)
        try:
            schema = Schema.load(folder / "schema.yaml")
            encoder = Encoder.load(folder / "encoder.npz", schema)
        except (SchemaError, EncodingError) as error:
            raise ModelError(str(error)) from None
        for key, found, expected in (
            ("schema_hash", schema.hash, manifest.schema_hash),
            ("encoder_hash", encoder.hash, manifest.encoder_hash),
        ):
            if found != expected:
                raise ModelError(f"{manifest.path}: {key}: is {expected}, the file beside it has {found}")
        try:
            value = ValueExpression.parse(manifest.value, manifest.tasks)
        except ValueExpressionError as error:
            raise ModelError(f"{manifest.path}: {error}") from None
        session = _session(folder / MODEL, limits)
        _check_signature(folder / MODEL, session, manifest, schema)
        model = ServedModel(manifest, schema, encoder, session, value, limits)
        model._replay()
        model._warm_up()
        return model

    def check(self, inputs: Mapping[str, np.ndarray]) -> int:
        """Compares tensors from a client with the signature; the number of candidates N.

        Names, dtypes, dims (all "R" equal, all "N" equal), the limits, ids inside their tables, lengths inside
        their padding, finite floats and a `request_index` that points at requests are checked, because
        onnxruntime trusts what it is given.

        Raises:
            ServingError: names the input (`invalid`, or `too_large`).
        """
        for name in inputs:
            if name not in self._specs:
                raise invalid(f"{name}: is not an input of {self.name}; inputs: {', '.join(self._specs)}")
        sizes: dict[str, tuple[int, str]] = {}
        for name, spec in self._specs.items():
            if name not in inputs:
                raise invalid(f"{name}: this input is missing")
            self._check_tensor(spec, inputs[name], sizes)
        requests = sizes.get("R", (1, ""))[0]
        rows = sizes["N"][0]
        for size, limit, what in (
            (requests, self.limits.max_requests, "requests"),
            (rows, self.limits.max_candidates, "candidates"),
        ):
            if size > limit:
                raise ServingError(Reason.TOO_LARGE, f"{size} {what} in one call, at most {limit} are allowed")
        if requests < 1:
            raise invalid(f"{sizes['R'][1]}: at least one request row is needed, even for no candidates")
        for name, array in inputs.items():
            upper = requests if name == "request_index" else self._bounds.get(name)
            if upper is not None:
                _check_range(name, array, upper)
            elif array.dtype.kind == "f":
                _check_finite(name, array)
        return rows

    def _check_tensor(self, spec: TensorSpec, array: np.ndarray, sizes: dict[str, tuple[int, str]]) -> None:
        if array.dtype != spec.dtype:
            wanted, got = datatype_of(np.dtype(spec.dtype)), datatype_of(array.dtype)
            raise invalid(f"{spec.name}: expected datatype {wanted}, got {got}")
        shape = list(array.shape)
        if len(shape) != len(spec.dims):
            raise invalid(f"{spec.name}: expected {len(spec.dims)} dims {list(spec.dims)}, got shape {shape}")
        for dim, size in zip(spec.dims, shape, strict=True):
            wanted_size, other = sizes.setdefault(dim, (size, spec.name)) if isinstance(dim, str) else (dim, "")
            if size != wanted_size:
                why = f", because {other} has {dim} = {wanted_size}" if other else ""
                raise invalid(f"{spec.name}: expected dims {list(spec.dims)}, got shape {shape}{why}")

    def run(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Probabilities float32 ``[N]`` per task, for inputs that passed :meth:`check`.

        Raises:
            ServingError: `internal`, where the session fails or a score is not finite.
        """
        try:
            outputs = self._session.run(list(self.manifest.tasks), dict(inputs))
        except Exception as error:  # onnxruntime has no common base class for its errors
            raise ServingError(Reason.INTERNAL, f"{self.name}/{self.version}: the model failed: {error}") from error
        scores = dict(zip(self.manifest.tasks, outputs, strict=True))
        for task, score in scores.items():
            if not np.isfinite(score).all():
                raise ServingError(Reason.INTERNAL, f"{self.name}/{self.version}: a {task} score is not finite")
        return scores

    def _warm_up(self) -> None:
        """Runs at the smallest and the largest N and one between: first runs allocate and pack weights."""
        for rows in sorted({0, 1, min(64, self.limits.max_candidates), self.limits.max_candidates}):
            self._try(self.repeat_golden(rows))

    def repeat_golden(self, rows: int) -> dict[str, np.ndarray]:
        """The first golden request with `rows` copies of its first candidate."""
        first = {}
        for name, spec in self._specs.items():
            array = self.manifest.golden_inputs[name][:1]
            first[name] = np.repeat(array, rows, axis=0) if spec.dims[0] == "N" else array
        return {**first, "request_index": np.zeros(rows, np.int64)}

    def _replay(self) -> None:
        if not len(self.manifest.golden_inputs["request_index"]):
            raise self._golden("there are none")
        scores = self._try(self.manifest.golden_inputs)
        for task, expected in self.manifest.golden_outputs.items():
            found = scores[task]
            if found.shape != expected.shape:
                raise self._golden(f"{task} has shape {list(found.shape)}, expected {list(expected.shape)}")
            worst = float(np.abs(found - expected).max())
            if not worst <= GOLDEN_TOLERANCE:
                raise self._golden(
                    f"{task} differs by {worst:.2e} from the stored scores, at most {GOLDEN_TOLERANCE:.0e} is allowed"
                )
            if not ((found >= 0) & (found <= 1)).all():
                raise self._golden(f"{task} is not a probability")

    def _try(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        try:
            self.check(inputs)
            return self.run(inputs)
        except ServingError as error:
            raise self._golden(str(error)) from None

    def _golden(self, problem: str) -> ModelError:
        return ModelError(f"{self.manifest.path}: golden rows: {problem}")


def _session(path: Path, limits: ModelLimits) -> ort.InferenceSession:
    """A session of one thread that never spins: requests run side by side on the scheduler's threads, and
    onnxruntime's own pool would size itself by the machine, not by the container."""
    runtime = onnx_runtime()
    options = runtime.SessionOptions()
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    options.execution_mode = runtime.ExecutionMode.ORT_SEQUENTIAL
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry("session.inter_op.allow_spinning", "0")
    try:
        session: ort.InferenceSession = runtime.InferenceSession(str(path), options, providers=list(limits.providers))
    except Exception as error:  # onnxruntime has no common base class for its errors
        raise ModelError(f"{path}: onnxruntime cannot load it: {error}") from None
    return session


def _check_signature(path: Path, session: ort.InferenceSession, manifest: Manifest, schema: Schema) -> None:
    """The graph, the manifest and the encoder must agree on names, dtypes and dims."""
    expected = model_signature(schema)
    if list(manifest.inputs) != expected:
        wrong = sorted({s.name for s in set(expected) ^ set(manifest.inputs)})
        raise ModelError(
            f"{manifest.path}: signature.inputs: differs from what schema.yaml makes: {', '.join(wrong) or 'order'}"
        )
    for kind, specs, nodes in (
        ("input", manifest.inputs, session.get_inputs()),
        ("output", manifest.outputs, session.get_outputs()),
    ):
        found = {node.name: node for node in nodes}
        for spec in specs:
            if spec.name not in found:
                raise ModelError(f"{path}: has no {kind} {spec.name!r}, which the manifest declares")
            node: Any = found.pop(spec.name)
            wanted = {"int64": "tensor(int64)", "float32": "tensor(float)"}[spec.dtype]
            if node.type != wanted or len(node.shape) != len(spec.dims):
                raise ModelError(
                    f"{path}: {kind} {spec.name!r} is {node.type} {node.shape}, "
                    f"the manifest declares {spec.dtype} {list(spec.dims)}"
                )
        if found and kind == "input":
            raise ModelError(f"{path}: needs input {min(found)!r}, which the manifest does not declare")


def _bounds(schema: Schema, encoder: Encoder) -> dict[str, int]:
    """Input name -> the number that its values must stay below."""
    rows = encoder.table_rows
    bounds: dict[str, int] = {}
    for feature in schema.features:
        if feature.table is not None:
            bounds[feature.name] = rows[feature.table]
        if feature.kind == "multi":
            bounds[f"{feature.name}.length"] = feature.max_length + 1
    for sequence in schema.sequences:
        for attribute in sequence.attributes:
            bounds[sequence.key(attribute.name)] = rows[attribute.table]
        bounds[f"{sequence.name}.length"] = sequence.max_length + 1
    return bounds


def _check_range(name: str, array: np.ndarray, upper: int) -> None:
    if array.size and (array.min() < 0 or array.max() >= upper):
        place = np.argwhere((array < 0) | (array >= upper))[0]
        value = array[tuple(place)]
        raise invalid(f"{name}{place.tolist()}: {value} is outside 0 .. {upper - 1}")


def _check_finite(name: str, array: np.ndarray) -> None:
    if not np.isfinite(array).all():
        place = np.argwhere(~np.isfinite(array))[0]
        raise invalid(f"{name}{place.tolist()}: {array[tuple(place)]} is not a finite number")
