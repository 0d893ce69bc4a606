"""Training in one process without TorchRec's sharding, FSDP or expert parallelism: what spread models must equal.

Table replicas are simulated: each group computes its own gradient and update of the same rows, which are then averaged.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from foundation.data.batch import Batch
from foundation.model.gem import GEM
from foundation.parallel.plan import SparseConfig
from foundation.training.optimizer import DenseConfig, DenseOptimizer


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """What training came to; tensors are in main memory.

    Args:
        losses: of each step, before its update.
        weights: by name.
        momentum: row-wise AdaGrad's sums of squares by table, `[rows]`.
        moments: AdamW's state by parameter and moment.
        averages: of the weights over steps.
    """

    losses: list[float]
    weights: dict[str, torch.Tensor]
    momentum: dict[str, torch.Tensor]
    moments: dict[str, torch.Tensor]
    averages: dict[str, torch.Tensor]


def train_plain(
    model: GEM,
    steps: list[list[Batch]],
    sparse: SparseConfig,
    dense: DenseConfig,
    momentum_scale: float,
    decay: float,
    sync_every: int = 1,
) -> Trained:
    """Trains in place.

    Args:
        model: with plain TorchRec collections, on the batches' device.
        steps: for each step the part of each replica group; one part without replica groups.
        sparse: row-wise AdaGrad: `v += mean(g^2)`, `w -= lr g / (sqrt(v / momentum_scale) + eps)`.
        dense: AdamW for the rest.
        momentum_scale: what sums of squares are divided by.
        decay: `average = decay average + (1 - decay) weight` after each step.
        sync_every: groups are averaged after so many steps, and in the end.
    """
    tables = {name: p for name, p in model.named_parameters() if name.startswith("embeddings.")}
    start = sparse.initial_accumulator * momentum_scale
    rows = [{name: p.detach().clone() for name, p in tables.items()} for _ in steps[0]]  # of each group
    sums = [{name: torch.full_like(p[:, 0], start) for name, p in tables.items()} for _ in steps[0]]
    others = {name: p for name, p in model.named_parameters() if name not in tables}
    optimizer = DenseOptimizer(others, dense)
    averages = {name: p.detach().clone() for name, p in model.named_parameters()}
    losses = []
    for number, parts in enumerate(steps, 1):
        weights = [float(part.weight.sum()) for part in parts]
        loss_of_all = 0.0
        for part, weight, own, squares in zip(parts, weights, rows, sums, strict=True):
            _fill(tables, own)
            share = weight / sum(weights)
            loss = model.loss(model(part), part).total
            (loss * share).backward()  # dense gradients add up over groups
            loss_of_all += loss.item() * share
            for name, table in tables.items():
                assert table.grad is not None
                # Each group takes the mean over its own ranks: its sum is multiplied by the number of groups.
                gradient = table.grad * len(parts)
                table.grad = None
                squares[name] = squares[name] + gradient.square().mean(1)
                root = (squares[name] / momentum_scale).sqrt() + sparse.eps
                own[name] = own[name] - sparse.lr * gradient / root[:, None]
        _fill(tables, _mean(rows))
        if number % sync_every == 0 or number == len(steps):
            rows = [_mean(rows) for _ in rows]
            sums = [_mean(sums) for _ in sums]
        optimizer.clip()
        optimizer.step()
        optimizer.zero_grad()
        for name, p in model.named_parameters():
            averages[name].lerp_(p.detach(), 1.0 - decay)
        losses.append(loss_of_all)
    moments = {key: value for key, value in optimizer.tensors().items() if isinstance(value, torch.Tensor)}
    states = (model.state_dict(), sums[0], moments, averages)
    whole = [{name: value.detach().cpu() for name, value in state.items()} for state in states]
    return Trained(losses=losses, weights=whole[0], momentum=whole[1], moments=whole[2], averages=whole[3])


def _mean(groups: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([own[name] for own in groups]).mean(0) for name in groups[0]}


@torch.no_grad()
def _fill(tables: dict[str, torch.nn.Parameter], rows: dict[str, torch.Tensor]) -> None:
    for name, table in tables.items():
        table.copy_(rows[name])
