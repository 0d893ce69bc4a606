from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import log_loss as sklearn_log_loss
from sklearn.metrics import roc_auc_score
from torchmetrics.functional.classification import binary_auroc
from torchrec.metrics.calibration import compute_calibration
from torchrec.metrics.ne import compute_ne, get_ne_states

from foundation.training import metrics


def rows(seed: int, n: int, users: int = 7, ties: bool = True) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    scores = rng.normal(size=n).astype(np.float32)
    if ties:
        scores = np.round(scores, 1)
    labels = (rng.random(n) < 0.3).astype(np.float64)
    return scores, labels, rng.integers(0, users, n), rng.random(n) + 0.1


def brute_gauc(scores: np.ndarray, labels: np.ndarray, users: np.ndarray, weight: np.ndarray | None) -> float:
    total = share = 0.0
    for user in np.unique(users):
        mine = users == user
        if len(np.unique(labels[mine])) < 2:
            continue
        own = None if weight is None else weight[mine]
        size = float(mine.sum()) if own is None else float(own.sum())
        total += size * roc_auc_score(labels[mine], scores[mine], sample_weight=own)
        share += size
    return total / share


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), n=st.integers(10, 300), ties=st.booleans(), weighted=st.booleans())
def test_auc_and_gauc_equal_scikit_learn(seed: int, n: int, ties: bool, weighted: bool) -> None:
    scores, labels, users, weight = rows(seed, n, ties=ties)
    w = weight if weighted else None
    if len(np.unique(labels)) == 2:
        assert metrics.auc(scores, labels, w) == pytest.approx(
            roc_auc_score(labels, scores, sample_weight=w), abs=1e-12
        )
        if any(len(np.unique(labels[users == u])) == 2 for u in np.unique(users)):
            assert metrics.gauc(scores, labels, users, w) == pytest.approx(
                brute_gauc(scores, labels, users, w), abs=1e-12
            )


@pytest.mark.parametrize("weighted", [False, True])
def test_log_loss_and_normalized_entropy_equal_scikit_learn(weighted: bool) -> None:
    logits, labels, _, weight = rows(3, 500)
    w = weight if weighted else None
    p = metrics.sigmoid(logits)
    base = np.full(len(labels), np.average(labels, weights=w))
    assert metrics.log_loss(logits, labels, w) == pytest.approx(sklearn_log_loss(labels, p, sample_weight=w), abs=1e-12)
    wanted = sklearn_log_loss(labels, p, sample_weight=w) / sklearn_log_loss(labels, base, sample_weight=w)
    assert metrics.normalized_entropy(logits, labels, w) == pytest.approx(wanted, abs=1e-12)


def test_agrees_with_torchrec_and_torchmetrics() -> None:
    logits, labels, _, weight = rows(4, 2000)
    t = [torch.from_numpy(np.asarray(x, dtype=np.float64))[None] for x in (labels, metrics.sigmoid(logits), weight)]
    states = get_ne_states(*t, eta=1e-12)
    ne = compute_ne(
        states["cross_entropy_sum"], states["weighted_num_samples"], states["pos_labels"], states["neg_labels"], 1e-12
    )
    assert metrics.normalized_entropy(logits, labels, weight) == pytest.approx(float(ne), abs=1e-10)
    calibrated = compute_calibration((t[1] * t[2]).sum(), (t[0] * t[2]).sum())
    assert metrics.calibration(logits, labels, weight) == pytest.approx(float(calibrated), abs=1e-12)
    auroc = binary_auroc(torch.from_numpy(logits), torch.from_numpy(labels).long())
    assert metrics.auc(logits, labels) == pytest.approx(float(auroc), abs=1e-6)


def test_extreme_logits_give_finite_log_loss() -> None:
    logits = np.array([1000.0, -1000.0, 40.0])
    assert metrics.log_loss(logits, np.array([0.0, 1.0, 1.0])) == pytest.approx(2000 / 3)
    assert metrics.sigmoid(np.array([-1000.0, 0.0, 1000.0])).tolist() == [0.0, 0.5, 1.0]


def test_gauc_leaves_out_users_of_one_class() -> None:
    scores = np.array([0.1, 0.9, 0.5, 0.2, 0.3])
    labels = np.array([0.0, 1.0, 1.0, 1.0, 0.0])
    users = np.array([1, 1, 2, 3, 3])
    assert metrics.gauc(scores, labels, users) == pytest.approx((2 * 1.0 + 2 * 0.0) / 4)


def suite_of(n: int, seed: int = 0) -> tuple[metrics.MetricSuite, list[torch.Tensor]]:
    g = torch.Generator().manual_seed(seed)
    batch = [
        torch.randn(n, 2, generator=g),
        (torch.rand(n, 2, generator=g) < 0.4).float(),
        torch.rand(n, 2, generator=g) < 0.8,
        torch.rand(n, generator=g) + 0.5,
        torch.randint(0, 2, (n,), generator=g),
        torch.randint(0, 9, (n,), generator=g),
    ]
    return metrics.MetricSuite(["click", "like"], ["feed", "reels", "other"]), batch


def test_suite_cuts_by_task_surface_and_validity() -> None:
    suite, batch = suite_of(400)
    for part in range(4):
        suite.update(*[column[part * 100 : part * 100 + 100] for column in batch])
    suite.update(*[column[:0] for column in batch])
    results = suite.compute()
    logits, labels, valid, weight, surface, users = [column.numpy() for column in batch]
    weight = weight.astype(np.float64)
    for k, task in enumerate(["click", "like"]):
        for name, index in (("feed", 0), ("reels", 1)):
            mine = valid[:, k] & (surface == index)
            got = results[task][name]
            assert got["rows"] == mine.sum() and got["positives"] == labels[mine, k].sum()
            assert got["auc"] == pytest.approx(
                roc_auc_score(labels[mine, k], logits[mine, k], sample_weight=weight[mine]), abs=1e-12
            )
            assert got["gauc"] == pytest.approx(
                brute_gauc(logits[mine, k], labels[mine, k], users[mine], weight[mine]), abs=1e-12
            )
            assert "note" not in got
        assert results[task]["all"]["rows"] == valid[:, k].sum()
        assert results[task]["other"] == pytest.approx(
            {"auc": math.nan, "gauc": math.nan, "ne": math.nan, "calibration": math.nan, "rows": 0, "positives": 0}
            | {"note": "no rows"},
            nan_ok=True,
        )


def test_suite_answers_one_class_slices_with_a_note() -> None:
    suite, batch = suite_of(50)
    batch[1][:, 0] = 0.0
    batch[1][:, 1] = 1.0
    suite.update(*batch)
    results = suite.compute()
    click, like = results["click"]["all"], results["like"]["all"]
    assert click["note"] == "one class: all labels are 0" and like["note"] == "one class: all labels are 1"
    assert all(math.isnan(click[name]) for name in ("auc", "gauc", "ne", "calibration"))
    assert math.isnan(like["auc"]) and math.isnan(like["ne"]) and 0 < like["calibration"] < 1


def test_suite_without_rows_and_with_broken_predictions() -> None:
    suite, batch = suite_of(50)
    assert suite.compute()["click"]["all"]["note"] == "no rows"
    batch[0][3, 0] = math.nan
    batch[2][3, 0] = True
    suite.update(*batch)
    assert suite.compute()["click"]["all"]["note"] == "1 predictions are not finite"
    suite.reset()
    assert suite.compute()["click"]["all"]["rows"] == 0


def test_suite_refuses_a_surface_called_all() -> None:
    with pytest.raises(ValueError, match="'all'"):
        metrics.MetricSuite(["click"], ["all"])


def test_pick() -> None:
    suite, batch = suite_of(300)
    suite.update(*batch)
    results = suite.compute()
    assert metrics.pick(results, "click/feed/auc") == results["click"]["feed"]["auc"]
    mean = (results["click"]["all"]["ne"] + results["like"]["all"]["ne"]) / 2
    assert metrics.pick(results, "mean/all/ne") == pytest.approx(mean)
    results["like"]["all"]["ne"] = math.nan
    assert metrics.pick(results, "mean/all/ne") == results["click"]["all"]["ne"]
    for wrong in ("ne", "share/all/ne", "click/moon/ne", "click/all/speed"):
        with pytest.raises(ValueError, match="TASK/SURFACE/NAME"):
            metrics.pick(results, wrong)
