"""Surfaces that share parameters or weigh more, and the parameters that belong to one surface alone."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from foundation.data.batch import Batch
from foundation.data.schema import OTHER_SURFACE, Schema


@dataclass(frozen=True, kw_only=True, slots=True)
class SurfacesConfig:
    """How surfaces differ in the model and in its loss.

    Args:
        pooled: rare surfaces that share token, adapter and bias with "other".
        weights: factor of an impression's loss by its surface, 1 for a surface that is not named: above 1 for rare
            ones, 0 for impressions that are not to be learned from.
    """

    pooled: tuple[str, ...] = ()
    weights: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, weight in self.weights.items():
            if weight < 0:
                raise ValueError(f"surfaces.weights.{name}: must not be negative, got {weight}")


class Surfaces(nn.Module):
    """Maps surfaces to those whose parameters they use, and to weights.

    Raises:
        ValueError: a name that is no surface of the schema, or no surface that counts.
    """

    used: Tensor
    weights: Tensor

    def __init__(self, config: SurfacesConfig, schema: Schema) -> None:
        super().__init__()
        names = schema.surface_names
        for key, given in (("pooled", config.pooled), ("weights", tuple(config.weights))):
            for name in given:
                if name not in names:
                    raise ValueError(f"surfaces.{key}: no surface {name!r}; known: {', '.join(names)}")
        listed = [name for name in names if name != OTHER_SURFACE]
        if listed and all(config.weights.get(name, 1.0) == 0 for name in listed):
            raise ValueError(f"surfaces.weights: 0 for {', '.join(listed)} leaves no surface to learn from")
        self.pooled, self.weighted = bool(config.pooled), bool(config.weights)
        other = names.index(OTHER_SURFACE)
        used = [other if name in config.pooled else place for place, name in enumerate(names)]
        self.register_buffer("used", torch.tensor(used), persistent=False)
        weights = torch.tensor([config.weights.get(name, 1.0) for name in names])
        self.register_buffer("weights", weights, persistent=False)

    def pool(self, batch: Batch) -> Batch:
        """The batch with each surface replaced by the one whose parameters it uses."""
        return replace(batch, surface=self.used.index_select(0, batch.surface)) if self.pooled else batch

    def weight(self, surface: Tensor) -> Tensor | None:
        """Factors float32 ``[N]`` of impressions on these surfaces int64 ``[N]``, or None where all are 1."""
        return self.weights.index_select(0, surface) if self.weighted else None
