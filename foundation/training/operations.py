"""Counts the useful operations of training steps, on batches as they are and as padding would make them."""

from __future__ import annotations

import numpy as np
import torch

from foundation.data.batch import Batch
from foundation.data.dataset import Dataset
from foundation.data.options import whole_keys
from foundation.model.flops import TRAINING, Load, forward_flops
from foundation.model.gem import GEM, GEMConfig


class Operations:
    """Of a model, whose shapes alone are made.

    Args:
        config: of the model.
        dataset: its schema and vocabularies.
    """

    def __init__(self, config: GEMConfig, dataset: Dataset) -> None:
        with torch.device("meta"), whole_keys(GEMConfig, "model"):
            self._shapes = GEM(config, dataset.schema, dataset.encoder.table_rows)

    @property
    def dense(self) -> int:
        """Parameters besides the tables."""
        return sum(p.numel() for p in self._shapes.dense_parameters())

    @property
    def tables(self) -> int:
        """Numbers in the tables."""
        return sum(p.numel() for p in self._shapes.embeddings.parameters())

    def step(self, batch: Batch) -> float:
        """Floating-point operations of a training step; waits for the device that holds the batch."""
        return self._of(Load.of(batch))

    def padding(self, batch: Batch) -> float | None:
        """Useful operations over those that there would be if each history were as long as the batch's longest.

        The project's kernels work on jagged histories, so this is what they save. None for an empty batch.
        """
        load = Load.of(batch)
        longest = {name: np.full_like(own, own.max(initial=0)) for name, own in load.events.items()}
        padded = self._of(Load(impressions=load.impressions, events=longest))
        return self._of(load) / padded if padded else None

    def _of(self, load: Load) -> float:
        return TRAINING * sum(forward_flops(self._shapes, load).values())
