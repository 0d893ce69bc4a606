"""Exponential moving average of the weights, tables included: what is evaluated, saved and served when it is on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from foundation.parallel.parallelize import ParallelModel
from foundation.parallel.pieces import Spread, clone, local_shards
from foundation.parallel.tables import dense_tensors, table_weights


@dataclass(frozen=True, kw_only=True, slots=True)
class EMAConfig:
    """Averages weights over steps.

    Args:
        decay: weight of the old average in a step; 0 turns averaging off.
        warm_up: use `min(decay, (1 + step) / (10 + step))`, so that the first weights are soon forgotten.
        tables: average embedding tables too; costs their memory once more and a pass over them per step.
        every: average every so many steps, with `decay` to that power.
    """

    decay: float = 0.0
    warm_up: bool = True
    tables: bool = True
    every: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise ValueError(f"ema.decay: must be in [0, 1), got {self.decay}")
        if self.every < 1:
            raise ValueError(f"ema.every: must be at least 1, got {self.every}")


class EMA:
    """The averages of one model, in memory of their own, sharded like the model.

    Args:
        model: averages start from its weights.
        config: with `decay` above 0.
    """

    def __init__(self, model: ParallelModel, config: EMAConfig) -> None:
        assert config.decay > 0
        self._model, self._config = model, config
        weights: dict[str, Spread] = dense_tensors(model)
        self._table_names: set[str] = set()
        if config.tables:
            tables = table_weights(model)
            self._table_names = set(tables)
            weights |= tables
        self._averages = {name: clone(value) for name, value in weights.items()}
        self._weights = {name: _locals(value) for name, value in weights.items()}

    def tensors(self) -> dict[str, Spread]:
        """The averages by the name of the weight."""
        return self._averages

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Moves the averages towards the weights after step number `step` (1 for the first); a collective call."""
        every = self._config.every
        if step % every:
            return
        if self._table_names:
            self._model.gather_tables()
        decay = self._config.decay**every
        if self._config.warm_up:
            updates = step // every
            decay = min(decay, (1 + updates) / (10 + updates))
        averages, weights = self._pairs(self._averages)
        if averages:
            torch._foreach_lerp_(averages, weights, 1.0 - decay)

    @torch.no_grad()
    def restart_tables(self) -> None:
        """Sets the averages of tables to the tables' weights, after these were drawn anew."""
        for average, weight in zip(*self._pairs(self._table_names), strict=True):
            average.copy_(weight)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Puts the averages in place of the weights while the block runs; the weights come back bit for bit."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for average, weight in zip(*self._pairs(self._averages), strict=True):
            kept = weight.clone()
            weight.copy_(average)
            average.copy_(kept)

    def _pairs(self, names: Iterable[str]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        averages, weights = [], []
        for name in names:
            averages += _locals(self._averages[name])
            weights += self._weights[name]
        return averages, weights


def _locals(value: Spread) -> list[torch.Tensor]:
    return [shard.detach() for _, shard in local_shards(value)]
