"""A trained student on held-out rows: its calibration, and metrics beside the teacher's on the same rows.

Shapes: N rows of a split, K tasks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from foundation.data.progress import track
from foundation.data.schema import Schema
from foundation.training.metrics import MetricSuite
from transfer.batches import StudentBatches
from value_models.calibration import Calibration, CalibrationConfig, fit_calibration, unsampled_weight
from value_models.model import ValueModel


@dataclass(frozen=True, kw_only=True, slots=True)
class Predictions:
    """What student and teacher say about a split's rows.

    ``student`` and ``teacher`` float32 logits ``[N, K]``, ``found`` bool ``[N]`` (rows that the teacher scored),
    ``labels`` float32 and ``valid`` bool ``[N, K]``, ``weight`` and ``sampling_rate`` float32, ``surface`` and
    ``user_id`` int64, all ``[N]``.
    """

    student: np.ndarray
    teacher: np.ndarray
    found: np.ndarray
    labels: np.ndarray
    valid: np.ndarray
    weight: np.ndarray
    sampling_rate: np.ndarray
    surface: np.ndarray
    user_id: np.ndarray

    def rows(self, keep: np.ndarray) -> Predictions:
        """Only the rows where bool ``keep [N]`` is true."""
        return Predictions(**{name: getattr(self, name)[keep] for name in self.__slots__})


@torch.no_grad()
def predict(model: ValueModel, batches: StudentBatches, description: str) -> Predictions:
    """Scores every row of a split; keeps ``10 K + 25`` bytes per row.

    Args:
        model: in evaluation mode, on CPU.
        batches: the split, with the label store if there is one.
        description: shown beside the progress bar.
    """
    columns: dict[str, list[np.ndarray]] = {name: [] for name in Predictions.__slots__}
    for batch in track(batches, description):
        found = {
            "student": model(batch.inputs),
            "teacher": batch.teacher_logits,
            "found": batch.teacher_found,
            "labels": batch.labels,
            "valid": batch.label_valid,
            "weight": batch.weight,
            "sampling_rate": batch.sampling_rate,
            "surface": batch.surface,
            "user_id": batch.user_id,
        }
        for name, value in found.items():
            columns[name].append(value.numpy())
    return Predictions(**{name: np.concatenate(parts) for name, parts in columns.items()})


def fit(rows: Predictions, logits: np.ndarray, schema: Schema, config: CalibrationConfig) -> Calibration:
    """The calibration of logits ``[N, K]`` on held-out rows."""
    return fit_calibration(
        schema.task_names,
        logits,
        rows.labels,
        rows.valid,
        rows.weight,
        rows.sampling_rate,
        config,
        [task.given is not None for task in schema.tasks],
    )


def measure(rows: Predictions, logits: np.ndarray, schema: Schema) -> dict[str, Any]:
    """``{task: {surface or "all": metrics}}``, negative sampling undone by weights; surfaces without rows left out."""
    suite = MetricSuite(schema.task_names, schema.surface_names)
    weight = unsampled_weight(rows.labels, rows.valid, rows.weight, rows.sampling_rate)
    suite.update(
        torch.from_numpy(logits),
        torch.from_numpy(rows.labels),
        torch.from_numpy(rows.valid),
        torch.from_numpy(weight),
        torch.from_numpy(rows.surface),
        torch.from_numpy(rows.user_id),
    )
    return {
        task: {name: values for name, values in slices.items() if values["rows"]}
        for task, slices in suite.compute().items()
    }


def calibrated_logits(calibration: Calibration, logits: np.ndarray) -> np.ndarray:
    """Log odds float32 ``[N, K]`` of the calibrated probabilities of logits ``[N, K]``."""
    with torch.no_grad():
        probabilities = calibration(torch.from_numpy(logits))
        odds: np.ndarray = torch.logit(probabilities, eps=1e-7).numpy()
    return odds


def report(
    splits: dict[str, Predictions], schema: Schema, config: CalibrationConfig
) -> tuple[Calibration, dict[str, Any]]:
    """Fits the calibration on ``validation`` and measures every split.

    Returns:
        The student's calibration, and metrics: by split the calibrated student, under ``uncalibrated`` its raw
        logits, and under ``teacher``, where the teacher scored rows, the teacher calibrated on the same rows in the
        same way.
    """
    held_out = splits["validation"]
    calibration = fit(held_out, held_out.student, schema, config)
    metrics: dict[str, Any] = {}
    uncalibrated: dict[str, Any] = {}
    for name, rows in splits.items():
        metrics[name] = measure(rows, calibrated_logits(calibration, rows.student), schema)
        uncalibrated[name] = measure(rows, rows.student, schema)
    metrics["uncalibrated"] = uncalibrated
    if held_out.found.any():
        scored = held_out.rows(held_out.found)
        of_teacher = fit(scored, scored.teacher, schema, config)
        metrics["teacher"] = {
            name: measure(rows.rows(rows.found), calibrated_logits(of_teacher, rows.teacher[rows.found]), schema)
            for name, rows in splits.items()
            if rows.found.any()
        }
    return calibration, _without_nan(metrics)


def _without_nan(value: Any) -> Any:
    """NaN as None: JSON has no NaN."""
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    return None if isinstance(value, float) and math.isnan(value) else value
