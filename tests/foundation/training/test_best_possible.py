"""The best possible score is the one of the truth."""

from __future__ import annotations

import numpy as np
import pytest

from foundation.training.best_possible import best_possible
from foundation.training.metrics import measure


def test_truth_beats_any_other_prediction() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(-1, 1.5, 50_000)
    truth = 1 / (1 + np.exp(-logits))
    labels = (rng.random(50_000) < truth).astype(np.int8)
    best = best_possible(labels, truth)
    assert best["calibration"] == pytest.approx(1, abs=0.02)
    users = np.zeros(50_000, np.int64)
    for other in (logits * 1.3, logits + 0.3, logits + rng.normal(0, 0.5, 50_000)):
        assert measure(other, labels, users)["ne"] > best["ne"]
    assert measure(logits + rng.normal(0, 0.5, 50_000), labels, users)["auc"] < best["auc"]


def test_known_value() -> None:
    """Half of the rows certain to 0.9, half to 0.1: NE is the entropy of 0.9 over the entropy of 0.5."""
    labels = np.array([1] * 9 + [0] + [0] * 9 + [1])
    best = best_possible(labels, np.array([0.9] * 10 + [0.1] * 10))
    entropy = -(0.9 * np.log(0.9) + 0.1 * np.log(0.1))
    assert best["ne"] == pytest.approx(entropy / np.log(2))
    assert best["auc"] == pytest.approx(0.9)


@pytest.mark.parametrize("truth", [[0.0, 0.5], [0.5, 1.0], [0.5, float("nan")]])
def test_probabilities_are_checked(truth: list[float]) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        best_possible(np.array([0, 1]), np.array(truth))


def test_lengths_are_checked() -> None:
    with pytest.raises(ValueError, match="2 labels but 1"):
        best_possible(np.array([0, 1]), np.array([0.5]))
