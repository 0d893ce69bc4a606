"""What a candidate has in common with the history, counted exactly from ids.

For each pair (sequence attribute, feature) and each way to count, ``log(1 + number of events)`` that hold the
candidate's id in that attribute. A dot product of embeddings has to learn equality of ids from data; counts state it,
also for ids that were never trained.

Legend: R requests, N impressions, T events of the impressions, L greatest length, P pairs (and one for any event), Q
ways to count.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foundation.data.batch import Batch
from foundation.data.encoding import NO_TIME
from foundation.data.schema import UNKNOWN_ROW, Schema, Sequence
from kernels.jagged import sequence_ids, to_padded
from kernels.jagged.op import sequence_rows


@dataclass(frozen=True, kw_only=True, slots=True)
class MatchConfig:
    """Which ids are compared and how matching events are counted.

    Args:
        pairs: feature name by ``sequence.attribute``; both categorical and of the same table. Empty: nothing is
            counted.
        outcomes: attributes (``sequence.attribute``) of small tables; matching events are also counted for each of the
            first ``outcome_rows`` rows of their table.
        outcome_rows: see above.
        windows_hours: matching events are also counted within so many hours before the request.
    """

    pairs: dict[str, str] = field(default_factory=dict)
    outcomes: tuple[str, ...] = ()
    outcome_rows: int = 8
    windows_hours: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.outcome_rows < 1:
            raise ValueError(f"match.outcome_rows: must be at least 1, got {self.outcome_rows}")
        if any(hours <= 0 for hours in self.windows_hours):
            raise ValueError(f"match.windows_hours: must be positive, got {list(self.windows_hours)}")


class HistoryMatch(nn.Module):
    """Counts ``[N, width]``, float32. Has no parameters.

    Raises:
        ValueError: a pair or outcome names an unknown attribute or feature, or the two have different tables.
    """

    def __init__(self, config: MatchConfig, schema: Schema, table_rows: Mapping[str, int]) -> None:
        super().__init__()
        self.windows = config.windows_hours
        tables = {s.key(a.name): a.table for s in schema.sequences for a in s.attributes}
        features = {f.name: f for f in schema.features if f.kind == "categorical"}
        for key, name in config.pairs.items():
            if key not in tables:
                raise ValueError(f"match.pairs.{key}: no such sequence attribute; known: {', '.join(tables)}")
            if name not in features:
                raise ValueError(f"match.pairs.{key}: no categorical feature {name!r}; known: {', '.join(features)}")
            if features[name].table != tables[key]:
                raise ValueError(f"match.pairs.{key}: has table {tables[key]}, {name} has {features[name].table}")
        for key in config.outcomes:
            if key not in tables:
                raise ValueError(f"match.outcomes: no sequence attribute {key!r}; known: {', '.join(tables)}")
        item_names = {f.name for f in schema.item_features}
        self.sequences: list[tuple[Sequence, list[tuple[str, str, bool]], list[tuple[str, int]]]] = []
        self.width = 0
        for sequence in schema.sequences:
            keys = {sequence.key(a.name) for a in sequence.attributes}
            pairs = [(key, name, name in item_names) for key, name in config.pairs.items() if key in keys]
            outcomes = [(k, min(config.outcome_rows, table_rows[tables[k]])) for k in config.outcomes if k in keys]
            if pairs:
                windows = len(self.windows) if sequence.timestamp is not None else 0
                self.sequences.append((sequence, pairs, outcomes))
                self.width += (1 + len(pairs)) * (1 + sum(rows for _, rows in outcomes) + windows)

    @torch.no_grad()
    def forward(self, batch: Batch) -> Tensor:
        """Counts of all sequences, pairs and ways to count."""
        counts = [self._count(batch, *entry) for entry in self.sequences]
        return torch.cat(counts, dim=1) if counts else batch.labels.new_zeros((batch.num_impressions, 0))

    def _count(
        self,
        batch: Batch,
        sequence: Sequence,
        pairs: list[tuple[str, str, bool]],
        outcomes: list[tuple[str, int]],
    ) -> Tensor:
        rows, offsets = sequence_rows(batch.sequence_offsets[sequence.name], batch.request_index)
        owner = sequence_ids(offsets, rows.shape[0])
        matches = [torch.ones_like(rows, dtype=torch.bool)]
        for key, name, of_item in pairs:
            ids = batch.sparse[key].values().index_select(0, rows)
            wanted = batch.sparse[name].values()
            if not of_item:
                wanted = wanted.index_select(0, batch.request_index)
            matches.append((ids == wanted.index_select(0, owner)) & (ids > UNKNOWN_ROW))
        ways = [torch.ones_like(rows, dtype=torch.float32)[:, None]]
        for key, kept in outcomes:
            ids = batch.sparse[key].values().index_select(0, rows)
            ways.append(F.one_hot(ids.clamp(max=kept), kept + 1)[:, :kept].to(torch.float32))
        if sequence.timestamp is not None and self.windows:
            time = batch.sequence_times[sequence.name].index_select(0, rows)
            asked = batch.request_time.index_select(0, batch.request_index).index_select(0, owner)
            hours = torch.where(time == NO_TIME, torch.inf, (asked - time) / 3_600_000)
            ways.append((hours[:, None] < torch.tensor(self.windows, device=hours.device)).to(torch.float32))
        matched = torch.stack(matches, dim=1).to(torch.float32)
        table = torch.cat([matched, *ways], dim=1)
        padded = to_padded(table, offsets, sequence.max_length)
        pairs_first, ways_last = padded.split([len(matches), table.shape[1] - len(matches)], dim=2)
        return torch.log1p(torch.bmm(pairs_first.transpose(1, 2), ways_last)).flatten(1)
