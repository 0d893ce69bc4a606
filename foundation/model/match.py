"""What a candidate has in common with the history, counted exactly from ids.

A dot product of embeddings has to learn from data that two ids are equal, and learns nothing for ids it has never seen.
Counts state it. The statistics have no parameters: they are numbers of the batch, and one token is made from them.

Legend: N impressions, T events of the impressions, L greatest length, P comparisons (any event first, then one per
pair), Q ways to count.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from foundation.data.batch import Batch
from foundation.data.encoding import NO_TIME
from foundation.data.schema import FIRST_ROW, UNKNOWN_ROW, Schema, Sequence
from kernels.jagged import last_k, segment_sum, sequence_ids, to_padded
from kernels.jagged.sequences_op import sequence_rows

_NO_EVENT = 14.0
"""``log(1 + seconds)`` that stands for an event that is absent or of unknown time: two weeks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MatchConfig:
    """Which histories are compared with the candidate.

    A candidate's id is compared with the events' wherever an attribute of the sequence and a categorical feature of the
    item or the context have one table. Per pair, and once for any event:

    * the logarithms of the numbers of matching events with known and with unknown time;
    * per outcome: the logarithm of the number of matching events whose outcome is known, and the rate of positive
      ones among them, smoothed by ``prior_events`` events of the expected rate.

    Per sequence: the time gaps of its latest events, the numbers of events within some hours, and per outcome the
    rate of positives weighted towards the latest.

    Args:
        sequences: names of the sequences; empty: no statistics.
        outcomes: expected rate by ``sequence.attribute``, for attributes that hold 0 or 1 in a ``range`` table; its
            other rows (missing, unknown, other values) mean that the outcome is not known.
        prior_events: strength of the smoothing.
        recent: the gaps of these events, 1 is the latest.
        windows_hours: events within so many hours are counted.
        decay: weight of an event relative to the next later one, for the rates weighted towards the latest.
    """

    sequences: tuple[str, ...] = ()
    outcomes: dict[str, float] = field(default_factory=dict)
    prior_events: float = 2.0
    recent: tuple[int, ...] = (1, 2, 5)
    windows_hours: tuple[float, ...] = (1 / 6, 1.0, 24.0)
    decay: float = 0.8

    def __post_init__(self) -> None:
        for key, rate in self.outcomes.items():
            if not 0 < rate < 1:
                raise ValueError(f"match.outcomes.{key}: must be between 0 and 1, got {rate}")
            if key.split(".")[0] not in self.sequences:
                raise ValueError(f"match.outcomes.{key}: its sequence is not among match.sequences")
        if self.prior_events <= 0:
            raise ValueError(f"match.prior_events: must be positive, got {self.prior_events}")
        if any(place < 1 for place in self.recent):
            raise ValueError(f"match.recent: places count from 1, got {list(self.recent)}")
        if any(hours <= 0 for hours in self.windows_hours):
            raise ValueError(f"match.windows_hours: must be positive, got {list(self.windows_hours)}")
        if not 0 < self.decay <= 1:
            raise ValueError(f"match.decay: must be in (0, 1], got {self.decay}")


class _Plan(NamedTuple):
    sequence: Sequence
    pairs: tuple[tuple[str, str, bool], ...]  # attribute key, feature, whether it is the item's
    outcomes: tuple[tuple[str, float], ...]  # attribute key, expected rate


class MatchStatistics(nn.Module):
    """Statistics ``[N, width]``, float32, about -2 to 5 in size.

    Raises:
        ValueError: a sequence or outcome is not in the schema, or an outcome's table is not of kind ``range``.
    """

    def __init__(self, config: MatchConfig, schema: Schema) -> None:
        super().__init__()
        self.config = config
        known = {s.name: s for s in schema.sequences}
        tables = {s.key(a.name): a.table for s in schema.sequences for a in s.attributes}
        for name in config.sequences:
            if name not in known:
                raise ValueError(f"match.sequences: no sequence {name!r}; known: {', '.join(known)}")
        for key in config.outcomes:
            if key not in tables:
                raise ValueError(f"match.outcomes.{key}: no such attribute; known: {', '.join(tables)}")
            if schema.table(tables[key]).kind != "range":
                raise ValueError(f"match.outcomes.{key}: its table {tables[key]} must be of kind range")
        features = [f for f in schema.features if f.kind == "categorical" and f.side != "user"]
        self.plans: list[_Plan] = []
        for name in config.sequences:
            keys = [known[name].key(a.name) for a in known[name].attributes]
            pairs = [(k, f.name, f.side == "item") for k in keys for f in features if f.table == tables[k]]
            outcomes = [(k, config.outcomes[k]) for k in keys if k in config.outcomes]
            self.plans.append(_Plan(known[name], tuple(pairs), tuple(outcomes)))
        self.width = sum(self._width(plan) for plan in self.plans)
        # As numbers, since tensors would have to be copied to the device; rounded to float32, as gaps are.
        self.windows = [float(np.float32(hours) * np.float32(3600.0)) for hours in config.windows_hours]

    def _width(self, plan: _Plan) -> int:
        counts = (1 + len(plan.pairs)) * (2 + 2 * len(plan.outcomes)) + len(plan.outcomes)
        timed = plan.sequence.timestamp is not None
        return counts + (len(self.config.recent) + len(self.config.windows_hours) if timed else 0)

    @torch.no_grad()
    def forward(self, batch: Batch) -> Tensor:
        """The statistics of all sequences."""
        return torch.cat([self._statistics(batch, plan) for plan in self.plans], dim=1)

    def _statistics(self, batch: Batch, plan: _Plan) -> Tensor:
        config, sequence = self.config, plan.sequence
        events = batch.impression_events[sequence.name]
        rows, offsets = sequence_rows(batch.sequence_offsets[sequence.name], batch.request_index, events)
        owner = sequence_ids(offsets, rows.shape[0])
        matches = _matches(batch, plan, rows, owner)
        gap = _gaps(batch, sequence, rows, owner)
        known = gap < torch.inf
        outcomes = [batch.sparse[key].values().index_select(0, rows) for key, _ in plan.outcomes]
        settled = [(ids == FIRST_ROW) | (ids == FIRST_ROW + 1) for ids in outcomes]
        positive = [ids == FIRST_ROW + 1 for ids in outcomes]

        columns = torch.stack([*matches, known, ~known, *settled, *positive], dim=1).to(torch.float32)
        padded = to_padded(columns, offsets, sequence.max_length)
        pairs, ways = padded[:, :, : len(matches)], padded[:, :, len(matches) :]
        counts = torch.bmm(pairs.transpose(1, 2), ways)  # [N, P, Q]
        parts = [torch.log1p(counts[:, :, :2]).flatten(1)]
        for k, (_, rate) in enumerate(plan.outcomes):
            seen, hits = counts[:, :, 2 + k], counts[:, :, 2 + len(outcomes) + k]
            smoothed = (hits + config.prior_events * rate) / (seen + config.prior_events)
            parts += [torch.log1p(seen), 2.0 * smoothed - 1.0]
        place = offsets[1:].index_select(0, owner) - 1 - torch.arange(rows.shape[0], device=rows.device)
        recency = (config.decay ** place.to(torch.float32))[:, None]
        total = segment_sum(recency * columns[:, len(matches) + 2 :], offsets)
        for k, (_, rate) in enumerate(plan.outcomes):
            seen, hits = total[:, k], total[:, len(outcomes) + k]
            parts.append((2.0 * (hits - rate * seen) / (seen + 0.5))[:, None])
        if sequence.timestamp is not None:
            parts += self._times(gap, offsets)
        return torch.cat(parts, dim=1)

    def _times(self, gap: Tensor, offsets: Tensor) -> list[Tensor]:
        """From gaps in seconds ``[T]`` (infinite where unknown)."""
        config = self.config
        latest, real = last_k(torch.where(gap < torch.inf, torch.log1p(gap), _NO_EVENT), offsets, max(config.recent))
        latest = torch.where(real, latest, _NO_EVENT)
        latest = torch.stack([latest[:, latest.shape[1] - place] for place in config.recent], dim=1)
        inside = [(gap < window)[:, None] for window in self.windows]
        within = segment_sum(torch.cat([gap[:, None][:, :0], *inside], dim=1).to(torch.float32), offsets)
        return [latest / 5.0 - 2.0, torch.log1p(within) - 1.0]


def _matches(batch: Batch, plan: _Plan, rows: Tensor, owner: Tensor) -> list[Tensor]:
    """Bool ``[T]`` of each comparison, any event first; missing and unknown ids match nothing."""
    matches = [torch.ones_like(rows, dtype=torch.bool)]
    for key, name, of_item in plan.pairs:
        ids = batch.sparse[key].values().index_select(0, rows)
        wanted = batch.sparse[name].values()
        if not of_item:
            wanted = wanted.index_select(0, batch.request_index)
        matches.append((ids == wanted.index_select(0, owner)) & (ids > UNKNOWN_ROW))
    return matches


def _gaps(batch: Batch, sequence: Sequence, rows: Tensor, owner: Tensor) -> Tensor:
    """Seconds from each event to its request, ``[T]``; infinite where the time is not known."""
    if sequence.timestamp is None:
        return torch.full((rows.shape[0],), math.inf, device=rows.device)
    time = batch.sequence_times[sequence.name].index_select(0, rows)
    asked = batch.request_time.index_select(0, batch.request_index).index_select(0, owner)
    seconds = (asked - time).clamp(min=0).to(torch.float32) / 1000.0
    return torch.where(time == NO_TIME, math.inf, seconds)
