"""A small untrained student with awkward calibration, saved once per test session, and its export."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from foundation.data.encoding import model_inputs
from tests.value_models import tiny
from value_models.calibration import Calibration, TaskCalibration
from value_models.export import ExportConfig, ExportResult, export
from value_models.model import ValueModel, ValueModelConfig
from value_models.student import Student, save_student

CONFIG = ValueModelConfig(
    event_dim=8, pooling_heads=1, target_heads=2, request_hidden=(16,), cross_rank=4, hidden=(16, 8), init_std=0.5
)


def make_student() -> Student:
    """Random weights large enough that every input moves the scores."""
    torch.manual_seed(0)
    schema, encoder = tiny.schema(), tiny.encoder()
    model = ValueModel(CONFIG, schema, encoder.table_rows).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    calibration = Calibration(
        {
            "click": TaskCalibration(method="platt", offset=-0.7, scale=0.8, shift=0.2),
            "conversion": TaskCalibration(
                method="isotonic", knots_x=(-0.5, 0.0, 0.1, 0.7), knots_y=(0.1, 0.2, 0.2, 0.9)
            ),
        }
    )
    b = tiny.batch(1, requests=6, impressions=20)
    b = replace(b, request_index=np.sort(np.arange(20) % 6))
    return Student(
        surface="feed",
        model=model,
        calibration=calibration,
        schema=schema,
        encoder=encoder,
        sample=model_inputs(schema, b.request, b.item, b.request_index, b.request_time),
        metrics={"test": {}},
        manifest={"seed": 0, "teacher": None},
    )


@pytest.fixture(scope="session")
def student() -> Student:
    """The student in memory."""
    return make_student()


@pytest.fixture(scope="session")
def student_folder(student: Student, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The student on disk; tests that change it copy it first."""
    folder = tmp_path_factory.mktemp("student")
    save_student(folder, student)
    return folder


@pytest.fixture(scope="session")
def traced(student_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[ExportResult, Any]:
    """One real export and what PyTorch made of the student, which takes a quarter of a minute."""
    programs = []
    trace = torch.onnx.export

    def kept(*args: Any, **options: Any) -> Any:
        programs.append(trace(*args, **options))
        return programs[-1]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.onnx, "export", kept)
        out = tmp_path_factory.mktemp("models")
        result = export(ExportConfig(student=student_folder, out=out, value="click * (1 + conversion)"))
    return result, programs[0]


@pytest.fixture(scope="session")
def exported(traced: tuple[ExportResult, Any]) -> ExportResult:
    """One real export; tests that change it copy it first."""
    return traced[0]
