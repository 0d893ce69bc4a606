from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from sklearn.isotonic import IsotonicRegression
from sklearn.linear_model import LogisticRegression

from value_models.calibration import (
    Calibration,
    CalibrationConfig,
    CalibrationError,
    fit_calibration,
    interpolate,
    sampling_offset,
    unsampled_weight,
)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def fit(
    logits: np.ndarray, labels: np.ndarray, config: CalibrationConfig, rate: np.ndarray | None = None
) -> Calibration:
    ones = np.ones(len(logits))
    valid = np.ones((len(logits), 1), bool)
    rate = ones if rate is None else rate
    return fit_calibration(["click"], logits[:, None], labels[:, None], valid, ones, rate, config)


def distorted(rows: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """True logits, logits as a badly scaled model gives them, labels."""
    rng = np.random.default_rng(seed)
    true = rng.normal(-1.0, 1.2, rows)
    labels = (rng.random(rows) < sigmoid(true)).astype(np.float32)
    return true, ((true + 0.9) / 0.6).astype(np.float32), labels


def test_platt_recovers_a_known_distortion() -> None:
    _, logits, labels = distorted(200_000)
    task = fit(logits, labels, CalibrationConfig(method="platt")).tasks["click"]
    assert task.scale == pytest.approx(0.6, abs=0.01)
    assert task.shift == pytest.approx(-0.9, abs=0.02)


def test_platt_equals_logistic_regression() -> None:
    _, logits, labels = distorted(3_000)
    task = fit(logits, labels, CalibrationConfig(method="platt")).tasks["click"]
    reference = LogisticRegression(C=np.inf, tol=1e-10).fit(logits[:, None].astype(np.float64), labels)
    assert task.scale == pytest.approx(float(reference.coef_[0, 0]), abs=1e-4)
    assert task.shift == pytest.approx(float(reference.intercept_[0]), abs=1e-4)


def test_isotonic_in_the_graph_equals_scikit_learn() -> None:
    _, logits, labels = distorted(5_000)
    calibration = fit(logits, labels, CalibrationConfig(method="isotonic"))
    reference = IsotonicRegression(y_min=1e-4, y_max=1 - 1e-4, out_of_bounds="clip")
    reference.fit(logits.astype(np.float64), labels)
    probe = np.concatenate([np.linspace(-9, 9, 4001), logits]).astype(np.float32)
    got = calibration(torch.from_numpy(probe)[:, None])[:, 0].numpy()
    np.testing.assert_allclose(got, reference.predict(probe.astype(np.float64)), atol=1e-6)


def test_isotonic_mends_a_curve_that_a_line_cannot() -> None:
    rng = np.random.default_rng(1)
    true = rng.normal(0, 2, 50_000)
    labels = (rng.random(len(true)) < sigmoid(true)).astype(np.float32)
    bent = np.where(true < 0, true * 3, true * 0.3).astype(np.float32)
    losses = {}
    for method in ("platt", "isotonic"):
        p = fit(bent, labels, CalibrationConfig(method=method))(torch.from_numpy(bent)[:, None])[:, 0].numpy()  # type: ignore[arg-type]
        losses[method] = -np.mean(labels * np.log(p) + (1 - labels) * np.log(1 - p))
    best = -np.mean(labels * np.log(sigmoid(true)) + (1 - labels) * np.log(1 - sigmoid(true)))
    assert losses["isotonic"] < best + 0.002 < losses["platt"]


def test_sampling_formula() -> None:
    # A model of 1% kept negatives that says 1/2 means odds of 1 in 100: 1 / 101.
    offset = sampling_offset(negatives_kept=1.0, negatives_before=100.0)
    q = float(sigmoid(np.array(0.0 + offset)))
    assert q == pytest.approx(1 / 101)
    p, w = 0.3, 0.05
    q = p / (p + (1 - p) / w)
    assert math.log(q / (1 - q)) == pytest.approx(math.log(p / (1 - p)) + sampling_offset(w, 1.0))
    assert sampling_offset(0.0, 0.0) == 0.0


def test_negatives_stand_for_the_rows_that_were_dropped() -> None:
    labels = np.array([[0, 0], [1, 0], [0, 1], [0, 1]], np.float32)
    valid = np.array([[1, 1], [1, 1], [1, 1], [1, 0]], bool)
    got = unsampled_weight(labels, valid, np.array([1.0, 1.0, 2.0, 1.0]), np.full(4, 0.25))
    np.testing.assert_array_equal(got, [4.0, 1.0, 2.0, 4.0])


@pytest.mark.parametrize("method", ["none", "platt", "isotonic"])
def test_sampled_negatives_are_corrected(method: str) -> None:
    rng = np.random.default_rng(2)
    true = rng.normal(-3.0, 1.0, 400_000)
    labels = (rng.random(len(true)) < sigmoid(true)).astype(np.float32)
    rate = 0.1
    kept = (labels == 1) | (rng.random(len(true)) < rate)
    # What a perfect model of the sampled rows says.
    logits = (true - math.log(rate)).astype(np.float32)
    calibration = fit(
        logits[kept],
        labels[kept],
        CalibrationConfig(method=method),  # type: ignore[arg-type]
        np.full(int(kept.sum()), rate),
    )
    predicted = calibration(torch.from_numpy(logits)[:, None])[:, 0].numpy()
    assert predicted.mean() / labels.mean() == pytest.approx(1.0, abs=0.02)


def test_a_conditional_task_needs_no_offset() -> None:
    logits, labels = np.zeros((10, 2), np.float32), np.tile([[1.0, 0.0]], (10, 1))
    labels[:5] = 0
    valid = np.ones((10, 2), bool)
    rate = np.full(10, 0.5)
    tasks = fit_calibration(
        ["click", "buy"], logits, labels, valid, np.ones(10), rate, CalibrationConfig(), [False, True]
    ).tasks
    assert tasks["click"].offset == pytest.approx(math.log(0.5))
    assert tasks["buy"].offset == 0.0


def test_too_few_events_get_a_shift_and_one_class_nothing() -> None:
    rng = np.random.default_rng(3)
    logits = rng.normal(0, 1, 1000).astype(np.float32)
    labels = np.zeros(1000, np.float32)
    assert fit(logits, labels, CalibrationConfig()).tasks["click"].method == "none"
    labels[:30] = 1
    calibration = fit(logits, labels, CalibrationConfig())
    assert calibration.tasks["click"].method == "shift" and calibration.tasks["click"].scale == 1.0
    assert calibration(torch.from_numpy(logits)[:, None]).mean() == pytest.approx(0.03, abs=1e-4)


def test_a_worthless_score_is_never_turned_around() -> None:
    _, logits, labels = distorted(5_000)
    task = fit(-logits, labels, CalibrationConfig()).tasks["click"]
    assert task.method == "shift" and task.scale == 1.0


def test_logits_that_are_not_finite_are_refused() -> None:
    with pytest.raises(CalibrationError, match="task click: 1 logits"):
        fit(np.array([0.0, np.inf], np.float32), np.array([0.0, 1.0]), CalibrationConfig())


def test_survives_json() -> None:
    _, logits, labels = distorted(2_000)
    for method in ("platt", "isotonic", "none"):
        before = fit(logits, labels, CalibrationConfig(method=method))  # type: ignore[arg-type]
        after = Calibration.from_dict(json.loads(json.dumps(before.to_dict())), ["click"])
        x = torch.from_numpy(logits)[:, None]
        torch.testing.assert_close(after(x), before(x), rtol=0, atol=0)


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"tasks": {"like": {}}},
        {"tasks": {"click": {"method": "platt"}}},
        {"tasks": {"click": Calibration.identity(["click"]).to_dict()["tasks"]["click"] | {"scale": "x"}}},
        {"tasks": {"click": Calibration.identity(["click"]).to_dict()["tasks"]["click"] | {"knots_x": [1.0]}}},
    ],
)
def test_malformed_calibrations_are_refused(data: dict[str, object]) -> None:
    with pytest.raises(CalibrationError, match=r"click|tasks"):
        Calibration.from_dict(data, ["click"])


def test_interpolation_with_one_knot_is_constant() -> None:
    y = interpolate(torch.tensor([-1.0, 5.0]), torch.tensor([0.0]), torch.tensor([0.3]))
    torch.testing.assert_close(y, torch.tensor([0.3, 0.3]))
