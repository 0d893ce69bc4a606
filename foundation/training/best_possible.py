"""The score of a model that knows the truth: what a synthetic world's labels allow at best."""

from __future__ import annotations

import numpy as np

from foundation.training.metrics import Slice, measure


def best_possible(labels: np.ndarray, true_p: np.ndarray, users: np.ndarray | None = None) -> Slice:
    """Metrics of the true probabilities as predictions, to be shown beside a model's.

    No model can be expected to do better: the log loss of the true probabilities is the least that is possible in
    expectation. On few rows a model may do better by chance.

    Args:
        labels: 0 or 1, `[N]`.
        true_p: the probability with which each label was drawn, `[N]`, in (0, 1).
        users: int64 user ids `[N]` for GAUC; None takes all rows as one user's.

    Raises:
        ValueError: a probability is not in (0, 1), or the lengths differ.
    """
    p = np.asarray(true_p, dtype=np.float64)
    if len(p) != len(labels):
        raise ValueError(f"best_possible: {len(labels)} labels but {len(p)} true probabilities")
    if not ((p > 0) & (p < 1)).all():
        raise ValueError("best_possible: true probabilities must lie between 0 and 1")
    return measure(np.log(p) - np.log1p(-p), labels, np.zeros(len(p), np.int64) if users is None else users)
