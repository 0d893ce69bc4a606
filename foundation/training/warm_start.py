"""Starting from a trained run: the same model for data with more surfaces, with or without a frozen trunk.

The new run takes the old one's weights and its encoder, so that ids mean the same rows. What belongs to a surface is
copied by the surface's name; surfaces that the old run did not have start afresh. With a frozen trunk only these learn:
the predictions on all other surfaces stay what they were, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from foundation.data.dataset import Dataset
from foundation.data.encoding import Encoder
from foundation.data.schema import Schema
from foundation.model.gem import GEM
from foundation.parallel.parallelize import SparseConfig
from foundation.training.checkpoint import LoadedModel, load_model

Freeze: TypeAlias = Literal["none", "trunk"]

_MAY_DIFFER = ("name", "split", "surface")


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmStart:
    """A trained run to start from.

    Args:
        source: its best checkpoint.
        freeze: ``none``, or ``trunk``: everything but the parts of new surfaces.
    """

    source: LoadedModel
    freeze: Freeze

    @staticmethod
    def of(run: Path, freeze: Freeze, dataset: Dataset) -> WarmStart:
        """Loads a run.

        Raises:
            ValueError: the dataset's schema differs in more than the values of its surface, or there is no new surface
                that could learn beside a frozen trunk.
        """
        source = load_model(run)
        old, new = source.schema.to_dict(), dataset.schema.to_dict()
        odd = sorted(key for key in old.keys() | new.keys() if key not in _MAY_DIFFER and old.get(key) != new.get(key))
        if odd or source.schema.surface.column != dataset.schema.surface.column:
            where = ", ".join(odd) or "surface.column"
            raise ValueError(
                f"init_from: {dataset.schema.source} differs from the schema of {run} in {where}; "
                "only values of the surface, the name and the split may differ"
            )
        gone = set(source.schema.surface_names) - set(dataset.schema.surface_names)
        if gone:
            raise ValueError(f"init_from: {run} knows surface {min(gone)!r}, which {dataset.schema.source} lacks")
        start = WarmStart(source=source, freeze=freeze)
        if freeze == "trunk" and not start.new_surfaces(dataset.schema):
            raise ValueError(f"freeze: {dataset.schema.source} has no surface that {run} does not know")
        return start

    def new_surfaces(self, schema: Schema) -> list[str]:
        """Surfaces that the source does not know."""
        return [name for name in schema.surface_names if name not in self.source.schema.surface_names]

    def dataset(self, dataset: Dataset) -> Dataset:
        """The dataset read with the source's vocabularies and statistics."""
        own = self.source.encoder
        return replace(dataset, encoder=Encoder(dataset.schema, own.vocabularies, own.statistics, own.hash_ids))

    def sparse(self, config: SparseConfig) -> SparseConfig:
        """The tables' optimizer, which stands still when they are frozen."""
        return replace(config, lr=0.0, table_lr={}) if self.freeze == "trunk" else config

    @torch.no_grad()
    def fill(self, model: GEM) -> None:
        """Copies weights into a new model and freezes what is to be frozen, before the model is sharded.

        Raises:
            ValueError: the models differ in more than their surfaces.
        """
        old, new = dict(self.source.model.named_parameters()), dict(model.named_parameters())
        if old.keys() != new.keys():
            odd = sorted(old.keys() ^ new.keys())
            raise ValueError(
                f"init_from: model is another than that of {self.source.checkpoint}; {odd[0]} is in one only"
            )
        by_surface = model.surface_parameters()
        names, known = model.schema.surface_names, self.source.schema.surface_names
        fresh = [place for place, name in enumerate(names) if name not in known]
        for name, parameter in new.items():
            wanted = list(parameter.shape)
            if name in by_surface:
                wanted[by_surface[name]] = wanted[by_surface[name]] // len(names) * len(known)
            if list(old[name].shape) != wanted:
                raise ValueError(
                    f"init_from: {name} is {list(old[name].shape)} in {self.source.checkpoint} and should be {wanted}; "
                    "use the same model"
                )
            if name in by_surface:
                dim = by_surface[name]
                size = parameter.shape[dim] // len(names)
                for place, surface in enumerate(names):
                    if surface in known:
                        part = old[name].narrow(dim, known.index(surface) * size, size)
                        parameter.narrow(dim, place * size, size).copy_(part)
                if self.freeze == "trunk":
                    parameter.register_hook(_only(dim, size, fresh, len(names)))
                continue
            parameter.copy_(old[name])
            if self.freeze == "trunk" and not name.startswith("embeddings."):
                parameter.requires_grad_(False)


def _only(dim: int, size: int, places: list[int], surfaces: int) -> Callable[[Tensor], Tensor]:
    """A hook that lets through the gradients of some surfaces."""

    def hook(gradient: Tensor) -> Tensor:
        kept: Any = gradient.clone()
        for place in range(surfaces):
            if place not in places:
                kept.narrow(dim, place * size, size).zero_()
        return kept

    return hook
