"""A model with an EmbeddingCollection, an EmbeddingBagCollection and dense layers, and batches for it."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)
from torchrec.modules.embedding_modules import EmbeddingBagCollection as Bags

ROWS = {"user": 12, "item": 23, "topic": 7}


@dataclass(frozen=True)
class SmallBatch:
    """`ids` has stride R; `label` is `[R]`."""

    ids: KeyedJaggedTensor
    label: torch.Tensor

    def part(self, rank: int, world: int) -> SmallBatch:
        """The requests of one rank: those whose number is `rank` modulo `world`."""
        keys, stride = self.ids.keys(), self.ids.stride()
        values, lengths = [], []
        for key in keys:
            jagged = self.ids[key]
            for r in range(rank, stride, world):
                start, end = int(jagged.offsets()[r]), int(jagged.offsets()[r + 1])
                values.append(jagged.values()[start:end])
                lengths.append(end - start)
        ids = KeyedJaggedTensor(keys=keys, values=torch.cat(values), lengths=torch.tensor(lengths))
        return SmallBatch(ids, self.label[rank::world])


class SmallModel(nn.Module):
    """Scores a request from its user, its watched items and its topics."""

    def __init__(self) -> None:
        super().__init__()
        self.sequence = EmbeddingCollection(
            tables=[
                EmbeddingConfig(name="user", num_embeddings=ROWS["user"], embedding_dim=8, feature_names=["user"]),
                EmbeddingConfig(
                    name="item", num_embeddings=ROWS["item"], embedding_dim=8, feature_names=["watched", "shown"]
                ),
            ]
        )
        self.bags: Bags = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(name="topic", num_embeddings=ROWS["topic"], embedding_dim=4, feature_names=["topic"])
            ]
        )
        self.hidden = nn.Linear(20, 16)
        self.out = nn.Linear(16, 1)

    def forward(self, batch: SmallBatch) -> torch.Tensor:
        """Logits `[R]`."""
        found = self.sequence(batch.ids)
        bags = self.bags(batch.ids)
        watched, shown = found["watched"], found["shown"]
        requests = batch.ids.stride()
        index = torch.repeat_interleave(torch.arange(requests, device=batch.label.device), watched.lengths())
        history = torch.zeros(requests, 8, device=index.device).index_add(0, index, watched.values())
        x = torch.cat([found["user"].values() + shown.values(), history, bags["topic"]], 1)
        return self.out(torch.relu(self.hidden(x))).squeeze(1)


def build(seed: int = 0) -> SmallModel:
    """A model whose weights depend on the seed only."""
    torch.manual_seed(seed)
    return SmallModel()


def batch(seed: int, requests: int = 8) -> SmallBatch:
    """A random batch with repeated ids and empty histories."""
    g = torch.Generator().manual_seed(seed)
    keys = ["user", "watched", "shown", "topic"]
    tables = {"user": "user", "watched": "item", "shown": "item", "topic": "topic"}
    values, lengths = [], []
    for key in keys:
        n = torch.randint(0, 5, (requests,), generator=g) if key in ("watched", "topic") else torch.ones(requests)
        lengths.append(n.long())
        values.append(torch.randint(0, ROWS[tables[key]], (int(n.sum()),), generator=g))
    ids = KeyedJaggedTensor(keys=keys, values=torch.cat(values), lengths=torch.cat(lengths))
    return SmallBatch(ids, (torch.rand(requests, generator=g) < 0.5).float())


def loss_of(logits: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    """Mean binary cross-entropy."""
    return nn.functional.binary_cross_entropy_with_logits(logits, label)


def train_plain(model: SmallModel, batches: list[SmallBatch], lr: float, eps: float) -> list[float]:
    """Row-wise AdaGrad on tables and SGD on the rest, written out, without TorchRec's kernels."""
    tables = {name: p for name, p in model.named_parameters() if "embedding" in name}
    sums = {name: torch.zeros(len(p)) for name, p in tables.items()}
    losses = []
    for b in batches:
        loss = loss_of(model(b), b.label)
        model.zero_grad()
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for name, p in model.named_parameters():
                if p.grad is None:
                    continue
                if name in tables:
                    sums[name] += p.grad.pow(2).mean(1)
                    p -= lr * p.grad / (sums[name].sqrt() + eps)[:, None]
                else:
                    p -= 0.1 * p.grad
    return losses


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    """A copy of an unsharded model's weights."""
    return copy.deepcopy(model.state_dict())
