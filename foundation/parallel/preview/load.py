"""The batch that a plan counts with: sizes as in training, ids at random."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from foundation.data.batch import Batch
from foundation.data.dataset import Dataset
from foundation.data.schema import Schema
from foundation.data.storage import open_parquet
from foundation.model.benchmarks.batches import random_batch

_FILES = 16
"""Files of a dataset whose footers are read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Requests:
    """What requests look like on average.

    Args:
        impressions: of a request.
        events: of a request by sequence, before it is cut.
        sigma: histories are log-normal with this sigma; heavy-tailed from about 1 on.
    """

    impressions: float
    events: Mapping[str, float]
    sigma: float

    @staticmethod
    def stated(schema: Schema, impressions: float, events: float, sigma: float) -> Requests:
        """Events over all sequences, shared out in proportion to their greatest lengths."""
        whole = sum(sequence.max_length for sequence in schema.sequences)
        shares = {s.name: events * s.max_length / whole for s in schema.sequences}
        return Requests(impressions=impressions, events=shares, sigma=sigma)

    @staticmethod
    def of_dataset(dataset: Dataset, sigma: float) -> Requests:
        """Means of the training split, from its manifest and from the footers of its first files."""
        split = dataset.split("train")
        columns = {s.attributes[0].column: s.name for s in dataset.schema.sequences}
        events = dict.fromkeys(columns.values(), 0.0)
        rows = 0
        for path in dataset.files("train")[:_FILES]:
            parquet = open_parquet(path)
            for number in range(parquet.metadata.num_row_groups):
                group = parquet.metadata.row_group(number)
                rows += group.num_rows
                for place in range(group.num_columns):
                    name = columns.get(group.column(place).path_in_schema.split(".", 1)[0])
                    if name is not None:
                        events[name] += group.column(place).num_values
            parquet.close()
        return Requests(
            impressions=split.rows / max(1, split.requests),
            events={name: count / max(1, rows) for name, count in events.items()},
            sigma=sigma,
        )

    def lengths(self, schema: Schema, draws: np.ndarray) -> dict[str, np.ndarray]:
        """Events of requests by sequence, int64, cut to the sequences' greatest lengths.

        Args:
            draws: one number of (0, 1) for each request: a long history is long in all sequences.
        """
        normal = NormalDist(-(self.sigma**2) / 2, self.sigma) if self.sigma else None
        factor = np.array([np.exp(normal.inv_cdf(d)) if normal else 1.0 for d in draws.tolist()])
        return {
            s.name: np.minimum(np.rint(self.events[s.name] * factor), s.max_length).astype(np.int64)
            for s in schema.sequences
        }

    def batch(self, schema: Schema, table_rows: Mapping[str, int], impressions: int) -> Batch:
        """A batch of so many impressions whose histories are spread as those of all requests are."""
        count = max(1, round(impressions / self.impressions))
        sizes = np.diff(np.arange(count + 1) * impressions // count)
        draws = (np.arange(count) + 0.5) / count
        histories = {name: own.tolist() for name, own in self.lengths(schema, draws).items()}
        rng = np.random.default_rng(0)
        order = rng.permutation(count)
        histories = {name: [own[i] for i in order] for name, own in histories.items()}
        return Batch.from_encoded(random_batch(schema, sizes.tolist(), table_rows, histories=histories), schema)

    def tokens(self, schema: Schema, batches: int, impressions: int) -> np.ndarray:
        """Events of so many random batches, int64."""
        count = max(1, round(impressions / self.impressions))
        draws = np.random.default_rng(0).uniform(1e-6, 1 - 1e-6, batches * count)
        return sum(self.lengths(schema, draws).values(), np.zeros(batches * count, np.int64)).reshape(batches, count)
