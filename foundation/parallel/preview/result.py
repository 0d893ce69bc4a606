"""What a plan says."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from foundation.parallel.preview.memory import Memory
from foundation.parallel.preview.seconds import StepTime
from foundation.parallel.preview.traffic import Collective
from foundation.parallel.topology import Layout


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedTable:
    """Where a table lies in each table group: whole on a rank of the group, or by rows over all (rank None)."""

    name: str
    rows: int
    dim: int
    rank: int | None
    bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What a step needs.

    Args:
        layout: groups of ranks.
        parameters: dense ones of the whole model.
        memory: of the fullest GPU.
        capacity: bytes of a GPU.
        kept: bytes of activations at the end of the forward pass, by module.
        trail: bytes of activations when the forward pass of a module ended, in order.
        again: modules that compute their activations again.
        tables: each once, largest first.
        table_imbalance: bytes of the fullest rank over the mean.
        token_imbalance: events of the heaviest rank over the mean, in a random step.
        collectives: those of a step.
        time: of a step.
        flops: useful operations of a step of one rank.
        samples_per_second: impressions of all ranks.
        mfu: useful operations over the peak rate.
    """

    layout: Layout
    parameters: int
    memory: Memory
    capacity: float
    kept: dict[str, int]
    trail: tuple[tuple[str, int], ...]
    again: tuple[str, ...]
    tables: tuple[PlacedTable, ...]
    table_imbalance: float
    token_imbalance: float
    collectives: tuple[Collective, ...]
    time: StepTime
    flops: float
    samples_per_second: float
    mfu: float

    def plain(self) -> dict[str, Any]:
        """As JSON."""
        values = asdict(self)
        values["groups"] = self.layout.describe().splitlines()
        values["time"] |= {"step": self.time.step, "bound": self.time.bound}
        return values
