"""Export: a student becomes ``models/<name>/<version>/`` with an ONNX graph that has passed the parity gate.

The folder appears whole or not at all; a graph whose scores differ from the model's is never written.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from foundation.data.encoding import model_signature
from foundation.data.files import atomic_dir, atomic_write
from foundation.data.onnx_runtime import onnx_runtime
from foundation.data.settings import show
from foundation.data.value_expression import ValueExpression
from value_models.manifest import (
    FORMAT,
    MANIFEST,
    MODEL,
    TRITON_CONFIG,
    check_name,
    file_entries,
    first_requests,
    golden_rows,
    output_specs,
    signature,
    triton_config,
)
from value_models.parity import Inputs, Scorer, check_parity, parity_cases, random_inputs
from value_models.student import CalibratedModel, Student, load_student, to_tensors

EXTERNAL_DATA_BYTES = 1_900_000_000
"""Above this size weights go to a file beside the graph: protobuf ends at 2 GB."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportConfig:
    """What to export.

    Attributes:
        student: a student folder, written by distil.
        out: the folder of models that a server reads.
        name: model name; None takes the student's surface.
        version: version number; None takes the next free one.
        value: what candidates are ordered by, arithmetic over task names and candidate fields; None takes the
            first task.
        opset: ONNX operator set.
        tolerance: largest absolute difference of a probability that the parity gate lets pass.
        golden_requests: real requests stored with their scores.
        external_data_bytes: weights above this size are stored in ``model.onnx.data``.
        overwrite: replace an existing version.
    """

    student: Path
    out: Path
    name: str | None = None
    version: int | None = None
    value: str | None = None
    opset: int = 18
    tolerance: float = 1e-5
    golden_requests: int = 2
    external_data_bytes: int = EXTERNAL_DATA_BYTES
    overwrite: bool = False

    def __post_init__(self) -> None:
        if self.version is not None and self.version < 1:
            raise ValueError(f"version must be at least 1, got {self.version}")
        if self.opset < 18:
            raise ValueError(f"opset must be at least 18, got {self.opset}")
        if self.golden_requests < 1:
            raise ValueError(f"golden_requests must be at least 1, got {self.golden_requests}")
        if self.tolerance <= 0:
            raise ValueError(f"tolerance must be above 0, got {self.tolerance}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportResult:
    """The exported version folder and the largest difference that the parity gate saw."""

    path: Path
    name: str
    version: int
    max_abs_diff: float


def export(config: ExportConfig) -> ExportResult:
    """Exports a student to ONNX.

    Raises:
        StudentError: the student folder is corrupt.
        ParityError: the graph's scores differ from the model's; nothing is written.
        FileExistsError: the version exists and ``overwrite`` is false.
        ValueError: a bad name or value expression.
    """
    show(config, "export")
    onnx_runtime()  # refuses here, not after the work, where it is not installed
    student = load_student(config.student)
    name = check_name(config.name or student.surface)
    value = ValueExpression.parse(config.value or student.schema.task_names[0], student.schema.task_names).text
    version = config.version or next_version(config.out / name)
    inputs = model_signature(student.schema)
    outputs = output_specs(student.schema.task_names)
    served = student.calibrated()
    final = config.out / name / str(version)
    with atomic_dir(final, overwrite=config.overwrite, inputs=[config.student]) as folder:
        write_onnx(student, folder / MODEL, config)
        session = Session(folder / MODEL)
        cases = parity_cases(student.schema, student.encoder.table_rows, student.sample)
        report = check_parity(torch_scorer(served), session, cases, config.tolerance)
        student.schema.save(folder / "schema.yaml")
        student.encoder.save(folder / "encoder.npz")
        golden = first_requests(student.sample, inputs, config.golden_requests)
        scores = session(golden)
        manifest: dict[str, Any] = {
            "format": FORMAT,
            "name": name,
            "version": version,
            "schema_hash": student.schema.hash,
            "encoder_hash": student.encoder.hash,
            "tasks": list(student.schema.task_names),
            "surface": student.surface,
            "value": value,
            "signature": signature(inputs, outputs),
            "files": file_entries(folder),
            "parity": report.to_dict(),
            "golden": golden_rows(golden, {s.name: scores[:, k] for k, s in enumerate(outputs)}),
            "calibration": student.calibration.to_dict(),
            "metrics": student.metrics,
            "student": {k: student.manifest.get(k) for k in ("created", "seed", "teacher")},
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "opset": config.opset,
        }
        (folder / MANIFEST).write_text(json.dumps(manifest, indent=1))
        atomic_write(config.out / name / TRITON_CONFIG, triton_config(name, inputs, outputs))
    path = config.out / name / str(version)
    print(f"{path}: {len(report.cases)} parity cases passed, largest difference {report.max_abs_diff:.1e}")
    return ExportResult(path=path, name=name, version=version, max_abs_diff=report.max_abs_diff)


def next_version(folder: Path) -> int:
    """One more than the largest version folder, or 1."""
    versions = [int(p.name) for p in folder.glob("*") if p.is_dir() and p.name.isdecimal()]
    return max(versions, default=0) + 1


class _Outputs(nn.Module):
    """Splits the probabilities ``[N, K]`` into one output per task."""

    def __init__(self, served: CalibratedModel) -> None:
        super().__init__()
        self.served = served

    def forward(self, inputs: dict[str, Tensor]) -> tuple[Tensor, ...]:
        return tuple(self.served(inputs).unbind(1))


def write_onnx(student: Student, path: Path, config: ExportConfig) -> None:
    """Traces the calibrated model and writes the graph, with dynamic R and N and the signature's names."""
    served = student.calibrated()
    inputs, outputs = model_signature(student.schema), output_specs(student.schema.task_names)
    # Sizes 0 and 1 would be taken for constants, so the traced example is larger.
    example = random_inputs(student.schema, student.encoder.table_rows, np.random.default_rng(0), 3, 7)
    with _quiet():
        program = torch.onnx.export(
            _Outputs(served).eval(),
            (),
            kwargs={"inputs": to_tensors(example)},
            dynamo=True,
            verbose=False,
            opset_version=config.opset,
            input_names=[s.name for s in inputs],
            output_names=[s.name for s in outputs],
            dynamic_shapes={"inputs": {s.name: {0: s.dims[0]} for s in inputs}},
        )
        assert program is not None
        size = sum(p.numel() * p.element_size() for p in served.state_dict().values())
        program.save(path, external_data=size > config.external_data_bytes)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences the exporter's notes about torchvision and axis names, which say nothing about the model."""
    logger = logging.getLogger("torch.onnx")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)


class Session:
    """An exported graph in ONNX Runtime on CPU, one thread, as the server runs it.

    Raises:
        RuntimeError: ONNX Runtime refuses the file.
    """

    def __init__(self, path: Path) -> None:
        runtime = onnx_runtime()
        options = runtime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self._session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def __call__(self, inputs: Inputs) -> np.ndarray:
        """Probabilities float32 ``[N, K]`` of named inputs."""
        return np.stack(self._session.run(None, inputs), axis=1)


def torch_scorer(served: CalibratedModel) -> Scorer:
    """The PyTorch model as a function of numpy inputs."""

    def score(inputs: Inputs) -> np.ndarray:
        with torch.no_grad():
            scores: np.ndarray = served(to_tensors(inputs)).numpy()
        return scores

    return score
