"""Ranking metrics: AUC, GAUC, normalised entropy and calibration, per surface and task, exact across ranks.

Everything here sums in float64 over all rows, with ties and row weights counted exactly. torchmetrics' AUROC takes no
row weights and accumulates in float32, and TorchRec's AUC keeps a window of rows; the tests hold these functions to
theirs, and to scikit-learn's, where the definitions meet.

Legend: N rows, K tasks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

Slice = dict[str, Any]
Results = dict[str, dict[str, Slice]]

ALL = "all"
LARGER_IS_BETTER = {"auc": True, "gauc": True, "ne": False}


def auc(scores: np.ndarray, labels: np.ndarray, weight: np.ndarray | None = None) -> float:
    """Area under the ROC curve: the chance that a positive row scores above a negative one, ties counting half.

    Args:
        scores: logits or probabilities `[N]`; only their order matters.
        labels: 0 or 1, `[N]`.
        weight: row weights `[N]`, not negative; None gives every row weight 1.

    Returns:
        A number in [0, 1], or NaN when one of the classes has no weight.
    """
    groups = np.zeros(len(scores), dtype=np.int64)
    values, _ = _grouped_auc(groups, scores, labels, _weights(weight, len(scores)))
    return float(values[0]) if len(values) else math.nan


def gauc(scores: np.ndarray, labels: np.ndarray, users: np.ndarray, weight: np.ndarray | None = None) -> float:
    """AUC per user, averaged with the users' total row weights; users whose rows are of one class are left out.

    Args:
        scores: logits or probabilities `[N]`.
        labels: 0 or 1, `[N]`.
        users: int64 user ids `[N]`.
        weight: row weights `[N]`; None gives every row weight 1, so a user counts by the number of rows.

    Returns:
        A number in [0, 1], or NaN when no user has rows of both classes.
    """
    values, weights = _grouped_auc(users, scores, labels, _weights(weight, len(scores)))
    both = ~np.isnan(values)
    return float(np.average(values[both], weights=weights[both])) if both.any() else math.nan


def log_loss(logits: np.ndarray, labels: np.ndarray, weight: np.ndarray | None = None) -> float:
    """Weighted mean of `softplus(logit) - label * logit` in nats, without clipping; NaN for no weight."""
    w = _weights(weight, len(logits))
    z = np.asarray(logits, dtype=np.float64)
    total = w.sum()
    return float((w * (np.logaddexp(0.0, z) - labels * z)).sum() / total) if total > 0 else math.nan


def normalized_entropy(logits: np.ndarray, labels: np.ndarray, weight: np.ndarray | None = None) -> float:
    """Log loss over the entropy of the rows' own mean label (He et al., 2014, section 2.2); 1 is a constant predictor.

    Args:
        logits: `[N]`, before the sigmoid.
        labels: 0 or 1, `[N]`.
        weight: row weights `[N]`, or None.

    Returns:
        A number >= 0, or NaN when the rows are of one class (the entropy is 0).
    """
    w = _weights(weight, len(logits))
    total = w.sum()
    mean = float((w * labels).sum() / total) if total > 0 else math.nan
    if not 0.0 < mean < 1.0:
        return math.nan
    entropy = -(mean * math.log(mean) + (1.0 - mean) * math.log1p(-mean))
    return log_loss(logits, labels, w) / entropy


def calibration(logits: np.ndarray, labels: np.ndarray, weight: np.ndarray | None = None) -> float:
    """Mean predicted probability over mean label; 1 is calibrated, above 1 predicts too much.

    Args:
        logits: `[N]`, before the sigmoid.
        labels: 0 or 1, `[N]`.
        weight: row weights `[N]`, or None.

    Returns:
        A number >= 0, or NaN when no row is positive.
    """
    w = _weights(weight, len(logits))
    positives = (w * labels).sum()
    return float((w * sigmoid(logits)).sum() / positives) if positives > 0 else math.nan


def sigmoid(logits: np.ndarray) -> np.ndarray:
    """Logistic function in float64, for any finite logit."""
    z = np.asarray(logits, dtype=np.float64)
    return np.asarray(np.exp(-np.logaddexp(0.0, -z)))


def measure(logits: np.ndarray, labels: np.ndarray, users: np.ndarray, weight: np.ndarray | None = None) -> Slice:
    """All metrics of one set of rows.

    Returns:
        `auc`, `gauc`, `ne`, `calibration`, `rows`, `positives`, and, where a metric is NaN, a `note` that says why.
    """
    rows, positives = len(logits), int(np.count_nonzero(labels))
    slice_: Slice = {"auc": math.nan, "gauc": math.nan, "ne": math.nan, "calibration": math.nan}
    slice_ |= {"rows": rows, "positives": positives}
    if not rows:
        return slice_ | {"note": "no rows"}
    broken = int(np.count_nonzero(~np.isfinite(logits)))
    if broken:
        return slice_ | {"note": f"{broken} predictions are not finite"}
    slice_ |= {
        "auc": auc(logits, labels, weight),
        "gauc": gauc(logits, labels, users, weight),
        "ne": normalized_entropy(logits, labels, weight),
        "calibration": calibration(logits, labels, weight),
    }
    if positives in (0, rows):
        return slice_ | {"note": f"one class: all labels are {int(positives > 0)}"}
    if math.isnan(slice_["gauc"]):
        return slice_ | {"note": "no user has rows of both classes"}
    return slice_


class MetricSuite:
    """Collects predictions of an evaluation and computes every metric per task and surface.

    It keeps the rows, because AUC and GAUC are exact: `6 K + 14` bytes per row in main memory on each rank, and
    the same for all ranks' rows on rank 0 while `compute` runs (26 bytes for two tasks: 2.6 GB per 100 million rows).
    Bound it with the evaluation's `max_batches`.

    Args:
        task_names: K names, one per column of the logits.
        surface_names: surface i of `update` is called `surface_names[i]`.
    """

    def __init__(self, task_names: Sequence[str], surface_names: Sequence[str]) -> None:
        if ALL in surface_names:
            raise ValueError(f"surface {ALL!r} collides with the name of the total; rename the surface")
        if len(surface_names) > np.iinfo(np.int16).max:
            raise ValueError(f"{len(surface_names)} surfaces are more than metrics are kept for")
        self.task_names = tuple(task_names)
        self.surface_names = tuple(surface_names)
        self._chunks: list[tuple[torch.Tensor, ...]] = []

    def reset(self) -> None:
        """Forgets all rows."""
        self._chunks = []

    def update(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        label_valid: torch.Tensor,
        weight: torch.Tensor,
        surface: torch.Tensor,
        user_id: torch.Tensor,
    ) -> None:
        """Adds a batch; it may be empty.

        Args:
            logits: `[N, K]`, any float dtype.
            labels: `[N, K]`, 0 or 1; only read where valid.
            label_valid: bool `[N, K]`.
            weight: `[N]`.
            surface: int64 `[N]`, index into the surface names.
            user_id: int64 `[N]`.
        """
        chunk = (
            logits.detach().to("cpu", torch.float32),
            labels.detach().to("cpu", torch.uint8),
            label_valid.detach().to("cpu", torch.bool),
            weight.detach().to("cpu", torch.float32),
            surface.detach().to("cpu", torch.int16),
            user_id.detach().to("cpu", torch.int64),
        )
        rows, tasks = len(user_id), len(self.task_names)
        wanted = [(rows, tasks)] * 3 + [(rows,)] * 3
        assert [tuple(tensor.shape) for tensor in chunk] == wanted, [tensor.shape for tensor in chunk]
        self._chunks.append(chunk)

    def compute(self) -> Results:
        """Metrics of all rows of all ranks; a collective call. Every rank gets the same answer.

        Returns:
            `{task: {surface or "all": {"auc", "gauc", "ne", "calibration", "rows", "positives"}}}`, where rows are
            those with a valid label. A metric that a slice has no answer to is NaN and the slice has a `note`.
        """
        columns = [gather_rows(column) for column in self._columns()]
        answer: list[Results | None] = [None]
        if not _world() or dist.get_rank() == 0:
            answer[0] = self._measure([column.numpy() for column in columns])
        if _world():
            dist.broadcast_object_list(answer, src=0)
        assert answer[0] is not None
        return answer[0]

    def _columns(self) -> list[torch.Tensor]:
        if self._chunks:
            return [torch.cat(column) for column in zip(*self._chunks, strict=True)]
        shape = (0, len(self.task_names))
        dtypes = (torch.float32, torch.uint8, torch.bool, torch.float32, torch.int16, torch.int64)
        return [torch.zeros(shape if i < 3 else (0,), dtype=dtype) for i, dtype in enumerate(dtypes)]

    def _measure(self, columns: list[np.ndarray]) -> Results:
        logits, labels, label_valid, weight, surface, user_id = columns
        results: Results = {}
        for k, task in enumerate(self.task_names):
            valid = label_valid[:, k]
            slices = {ALL: valid}
            slices |= {name: valid & (surface == i) for i, name in enumerate(self.surface_names)}
            results[task] = {
                name: measure(logits[rows, k], labels[rows, k], user_id[rows], weight[rows])
                for name, rows in slices.items()
            }
        return results


def pick(results: Results, metric: str) -> float:
    """One number out of `MetricSuite.compute`, such as "click/all/ne", or "mean/all/auc" for the mean over tasks.

    Tasks without an answer (NaN) are left out of a mean; NaN when none has one.

    Raises:
        ValueError: the metric is not `TASK/SURFACE/NAME` with known parts; the message lists them.
    """
    parts = metric.split("/")
    surfaces = next(iter(results.values()))
    known = (
        len(parts) == 3
        and (parts[0] == "mean" or parts[0] in results)
        and parts[1] in surfaces
        and parts[2] in LARGER_IS_BETTER
    )
    if not known:
        raise ValueError(
            f"evaluation.metric: {metric!r} is not TASK/SURFACE/NAME with TASK one of {', '.join(['mean', *results])}, "
            f"SURFACE one of {', '.join(surfaces)} and NAME one of {', '.join(LARGER_IS_BETTER)}"
        )
    tasks = list(results) if parts[0] == "mean" else [parts[0]]
    values = [results[task][parts[1]][parts[2]] for task in tasks]
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else math.nan


def gather_rows(rows: torch.Tensor) -> torch.Tensor:
    """Rows of all ranks in rank order on rank 0, `[sum N, ...]` in main memory; on other ranks the own rows.

    A collective call; ranks may have different numbers of rows, none included.
    """
    if not _world():
        return rows
    device = torch.device("cuda") if dist.get_backend() == "nccl" else torch.device("cpu")
    counts = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(counts, torch.tensor([len(rows)], dtype=torch.int64, device=device))
    longest = max(int(count) for count in counts)
    if not longest:
        return rows
    # Bytes, because not every backend moves every dtype.
    padded = torch.zeros((longest, *rows.shape[1:]), dtype=rows.dtype)
    padded[: len(rows)] = rows
    sent = padded.reshape(longest, -1).contiguous().view(torch.uint8).to(device)
    if dist.get_rank() != 0:
        dist.gather(sent, None, dst=0)
        return rows
    received = [torch.empty_like(sent) for _ in counts]
    dist.gather(sent, received, dst=0)
    parts = [
        part[: int(count)].cpu().view(rows.dtype).reshape(-1, *rows.shape[1:])
        for part, count in zip(received, counts, strict=True)
    ]
    return torch.cat(parts)


def table_rows(results: Results) -> Iterable[tuple[str, str, Slice]]:
    """(task, surface, slice) of every slice that has rows, in order."""
    for task, surfaces in results.items():
        for surface, slice_ in surfaces.items():
            if slice_["rows"]:
                yield task, surface, slice_


def _world() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _weights(weight: np.ndarray | None, rows: int) -> np.ndarray:
    return np.ones(rows) if weight is None else np.asarray(weight, dtype=np.float64)


def _grouped_auc(
    groups: np.ndarray, scores: np.ndarray, labels: np.ndarray, weight: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """AUC and total weight of each group, float64 `[G]` each; the AUC of a group of one class is NaN."""
    if not len(scores):
        return np.zeros(0), np.zeros(0)
    order = np.lexsort((scores, groups))
    groups, scores = groups[order], scores[order]
    positive = np.where(labels[order] > 0, weight[order], 0.0)
    negative = weight[order] - positive
    new_group = np.r_[True, groups[1:] != groups[:-1]]
    new_score = new_group | np.r_[True, scores[1:] != scores[:-1]]
    # Rows of one group with equal scores form a block; a positive beats the negatives of earlier blocks of its
    # group, and half of those of its own block.
    block_starts = np.flatnonzero(new_score)
    block_positive = np.add.reduceat(positive, block_starts)
    block_negative = np.add.reduceat(negative, block_starts)
    first_block = np.flatnonzero(new_group[block_starts])
    blocks = np.diff(np.r_[first_block, len(block_starts)])
    before = np.cumsum(block_negative) - block_negative
    before -= np.repeat(before[first_block], blocks)
    wins = np.add.reduceat(block_positive * (before + 0.5 * block_negative), first_block)
    total_positive = np.add.reduceat(block_positive, first_block)
    total_negative = np.add.reduceat(block_negative, first_block)
    pairs = total_positive * total_negative
    values = np.divide(wins, pairs, out=np.full(len(wins), math.nan), where=pairs > 0)
    return values, total_positive + total_negative
