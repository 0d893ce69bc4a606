"""Logits to probabilities that mean what they say: Platt or isotonic per task, inside the exported graph.

Fitted on held-out rows. A task with too few events gets a shift only, one without both classes none; what was
done stands in the summary.

Shapes: N rows, K tasks, M knots of an isotonic fit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

import numpy as np
import torch
from sklearn.isotonic import IsotonicRegression
from torch import Tensor, nn

Method = Literal["platt", "isotonic", "shift", "none"]


class CalibrationError(ValueError):
    """A calibration that cannot be fitted or read; the message names the task."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibrationConfig:
    """How to calibrate.

    Attributes:
        method: ``platt`` (a straight line in logit space, keeps the order of scores), ``isotonic`` (a monotone
            piecewise-linear curve; equal scores may arise) or ``none``.
        min_events: with fewer clicks, or fewer rows without, than this a task gets a shift only.
    """

    method: Literal["platt", "isotonic", "none"] = "platt"
    min_events: int = 100

    def __post_init__(self) -> None:
        if self.min_events < 1:
            raise ValueError(f"min_events must be at least 1, got {self.min_events}")


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskCalibration:
    """The calibration of one task.

    The logit plus ``offset`` goes through ``sigmoid(scale * z + shift)``, or for ``isotonic`` through the curve
    of ``knots_x`` (logits) to ``knots_y`` (probabilities), constant outside.
    """

    method: Method
    offset: float = 0.0
    scale: float = 1.0
    shift: float = 0.0
    knots_x: tuple[float, ...] = ()
    knots_y: tuple[float, ...] = ()
    rows: int = 0
    positives: int = 0


def sampling_offset(negatives_kept: float, negatives_before: float) -> float:
    """What to add to a logit that was learned with sampled negatives: ln of the share of negatives kept.

    A model of rows with a share ``w`` of negatives kept learns the odds ``p / ((1 - p) w)``, so the true
    probability is ``q / (q + (1 - q) / w)`` (He et al., 2014, section 6.3): in logits, ``+ ln w``.
    """
    if negatives_kept <= 0 or negatives_before <= 0:
        return 0.0
    return math.log(negatives_kept / negatives_before)


def unsampled_weight(labels: np.ndarray, valid: np.ndarray, weight: np.ndarray, rate: np.ndarray) -> np.ndarray:
    """Weights that undo negative sampling: a row without any positive label stands for ``1 / rate`` rows.

    Args:
        labels: float32 ``[N, K]``. valid: bool ``[N, K]``. weight: ``[N]``. rate: share of negatives kept ``[N]``.

    Returns:
        float64 ``[N]``.
    """
    negative = ~((labels > 0) & valid).any(axis=1)
    return np.where(negative, weight / rate, weight).astype(np.float64)


def fit_calibration(
    task_names: Sequence[str],
    logits: np.ndarray,
    labels: np.ndarray,
    valid: np.ndarray,
    weight: np.ndarray,
    sampling_rate: np.ndarray,
    config: CalibrationConfig,
    conditional: Sequence[bool] = (),
) -> Calibration:
    """Fits every task on held-out rows.

    Args:
        task_names: K names.
        logits: float32 ``[N, K]`` of the model.
        labels: ``[N, K]`` in {0, 1}. valid: bool ``[N, K]``. weight: ``[N]``. sampling_rate: ``[N]`` in (0, 1].
        conditional: K flags; a task that counts only after another task's event saw no sampling of its
            negatives, so it needs no offset. Empty: none is conditional.

    Raises:
        CalibrationError: a logit is not finite, naming the task.
    """
    whole = unsampled_weight(labels, valid, weight, sampling_rate)
    tasks: dict[str, TaskCalibration] = {}
    for k, name in enumerate(task_names):
        use = valid[:, k]
        z, y = logits[use, k].astype(np.float32), labels[use, k].astype(np.float64)
        if not np.isfinite(z).all():
            raise CalibrationError(f"task {name}: {int((~np.isfinite(z)).sum())} logits are not finite")
        offset = 0.0
        if not (conditional and conditional[k]):
            negative = y == 0
            offset = sampling_offset(
                float(weight[use][negative].sum(dtype=np.float64)), float(whole[use][negative].sum())
            )
        tasks[name] = _fit_task(z + np.float32(offset), y, whole[use], offset, config)
    return Calibration(tasks)


def _fit_task(
    z: np.ndarray, y: np.ndarray, weight: np.ndarray, offset: float, config: CalibrationConfig
) -> TaskCalibration:
    positives = int((y == 1).sum())
    fewest = min(positives, len(y) - positives)
    counts: dict[str, Any] = {"offset": offset, "rows": len(y), "positives": positives}
    if config.method == "none" or fewest == 0:
        return TaskCalibration(method="none", **counts)
    if fewest >= config.min_events and config.method == "isotonic":
        x, p = _isotonic(z, y, weight)
        return TaskCalibration(method="isotonic", knots_x=x, knots_y=p, **counts)
    if fewest >= config.min_events:
        scale, shift = _logistic(z, y, weight)
        if scale > 0:
            return TaskCalibration(method="platt", scale=scale, shift=shift, **counts)
    _, shift = _logistic(z, y, weight, fixed_scale=True)
    return TaskCalibration(method="shift", shift=shift, **counts)


def _logistic(z: np.ndarray, y: np.ndarray, weight: np.ndarray, fixed_scale: bool = False) -> tuple[float, float]:
    """Weighted logistic regression of ``y`` on ``z``: Newton steps with halving. Returns scale and shift."""
    x = np.stack([z.astype(np.float64), np.ones(len(z))], axis=1)
    free = np.array([not fixed_scale, True])
    beta = np.array([1.0, 0.0])

    def loss(b: np.ndarray) -> float:
        s = x @ b
        return float((weight * (np.logaddexp(0.0, s) - y * s)).sum())

    current = loss(beta)
    for _ in range(100):
        p = 1.0 / (1.0 + np.exp(-np.clip(x @ beta, -500, 500)))
        gradient = (x * (weight * (p - y))[:, None]).sum(0)[free]
        curvature = (x * (weight * p * (1 - p))[:, None]).T @ x
        step = np.zeros(2)
        # The ridge keeps the step finite where every logit is equal.
        step[free] = np.linalg.solve(curvature[np.ix_(free, free)] + 1e-9 * weight.sum() * np.eye(free.sum()), gradient)
        size = 1.0
        while (after := loss(beta - size * step)) > current and size > 1e-6:
            size /= 2
        beta = beta - size * step
        if current - after < 1e-12 * max(1.0, abs(current)):
            break
        current = after
    return float(beta[0]), float(beta[1])


def _isotonic(z: np.ndarray, y: np.ndarray, weight: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Knots of scikit-learn's isotonic regression; probabilities stay half a row away from 0 and 1."""
    edge = 0.5 / len(y)
    fit = IsotonicRegression(y_min=edge, y_max=1 - edge, out_of_bounds="clip")
    fit.fit(z.astype(np.float64), y, sample_weight=weight)
    return tuple(map(float, fit.X_thresholds_)), tuple(map(float, fit.y_thresholds_))


def _read_task(name: str, values: Mapping[str, Any]) -> TaskCalibration:
    parts: dict[str, Any] = {k: tuple(v) if isinstance(v, list | tuple) else v for k, v in values.items()}
    numbers = [v for k, v in parts.items() if k not in ("method", "knots_x", "knots_y")]
    numbers += [*parts["knots_x"], *parts["knots_y"]]
    if parts["method"] not in get_args(Method) or not all(isinstance(v, int | float) for v in numbers):
        raise CalibrationError(f"task {name}: not a calibration: {dict(values)!r}")
    if len(parts["knots_x"]) != len(parts["knots_y"]) or (parts["method"] == "isotonic") != bool(parts["knots_x"]):
        raise CalibrationError(f"task {name}: knots_x and knots_y do not go together with {parts['method']}")
    return TaskCalibration(**parts)


class Calibration(nn.Module):
    """Maps logits float32 ``[N, K]`` to probabilities float32 ``[N, K]``; part of the exported graph.

    Args:
        tasks: the calibration of each task, in task order.
    """

    def __init__(self, tasks: Mapping[str, TaskCalibration]) -> None:
        super().__init__()
        self.tasks = dict(tasks)
        for k, task in enumerate(self.tasks.values()):
            self.register_buffer(f"knots_x_{k}", torch.tensor(task.knots_x, dtype=torch.float32))
            self.register_buffer(f"knots_y_{k}", torch.tensor(task.knots_y, dtype=torch.float32))

    @staticmethod
    def identity(task_names: Sequence[str]) -> Calibration:
        """A plain sigmoid for every task."""
        return Calibration({name: TaskCalibration(method="none") for name in task_names})

    def forward(self, logits: Tensor) -> Tensor:
        """Probabilities ``[N, K]`` for logits ``[N, K]``."""
        return torch.stack([self._task(k, task, logits[:, k]) for k, task in enumerate(self.tasks.values())], dim=1)

    def _task(self, k: int, task: TaskCalibration, logit: Tensor) -> Tensor:
        z = logit + task.offset
        if task.method != "isotonic":
            return torch.sigmoid(z * task.scale + task.shift)
        return interpolate(z, self.get_buffer(f"knots_x_{k}"), self.get_buffer(f"knots_y_{k}"))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for ``calibration.json`` and the manifest."""
        return {"format": 1, "tasks": {name: asdict(task) for name, task in self.tasks.items()}}

    @staticmethod
    def from_dict(data: Mapping[str, Any], task_names: Sequence[str]) -> Calibration:
        """Reads :meth:`to_dict` back. Raises CalibrationError naming what is missing or malformed."""
        tasks = data.get("tasks")
        if not isinstance(tasks, Mapping) or list(tasks) != list(task_names):
            found = ", ".join(map(str, tasks)) if isinstance(tasks, Mapping) else "none"
            raise CalibrationError(f"calibration holds tasks {found}; the schema has {', '.join(task_names)}")
        out = {}
        for name, values in tasks.items():
            if not isinstance(values, Mapping) or set(values) != {f.name for f in fields(TaskCalibration)}:
                raise CalibrationError(f"task {name}: not a calibration: {values!r}")
            out[name] = _read_task(name, values)
        return Calibration(out)


def interpolate(x: Tensor, knots_x: Tensor, knots_y: Tensor) -> Tensor:
    """Piecewise-linear curve through M knots, constant outside, as comparisons and Gathers.

    Args:
        x: float32 ``[N]``. knots_x: float32 ``[M]``, ascending, distinct, M >= 1. knots_y: float32 ``[M]``.

    Returns:
        float32 ``[N]``.
    """
    last = knots_x.shape[0] - 1
    if last == 0:
        return torch.zeros_like(x) + knots_y[0]
    x = torch.minimum(torch.maximum(x, knots_x[0]), knots_x[last])
    left = ((x.unsqueeze(1) >= knots_x.unsqueeze(0)).to(torch.int64).sum(1) - 1).clamp(0, last - 1)
    x0, x1 = knots_x.index_select(0, left), knots_x.index_select(0, left + 1)
    y0, y1 = knots_y.index_select(0, left), knots_y.index_select(0, left + 1)
    return y0 + (x - x0) / (x1 - x0) * (y1 - y0)
