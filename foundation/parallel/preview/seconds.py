"""How long a step takes: terms that run beside one another, and those that nothing runs beside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foundation.model.flops import TRAINING
from foundation.parallel.preview.devices import DeviceMemory
from foundation.parallel.preview.memory import FLOAT
from foundation.parallel.preview.rehearsal import Rehearsal
from foundation.parallel.preview.traffic import Collective
from foundation.parallel.topology import Layout


@dataclass(frozen=True, kw_only=True, slots=True)
class Shares:
    """What of a machine's best rates a step reaches; `python -m foundation.training.benchmarks.step` measures them.

    Args:
        compute: of the peak rate of matrix products.
        memory: of the GPU's memory bandwidth.
        links: of the links' speed in topology.yaml.
        launch_us: microseconds that the host takes to queue one operator.
    """

    compute: float = 0.4
    memory: float = 0.8
    links: float = 0.8
    launch_us: float = 10.0

    def __post_init__(self) -> None:
        for key in ("compute", "memory", "links"):
            if not 0 < getattr(self, key) <= 1:
                raise ValueError(f"shares.{key}: must be above 0 and at most 1, got {getattr(self, key)}")
        if self.launch_us < 0:
            raise ValueError(f"shares.launch_us: must not be negative, got {self.launch_us}")


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """Seconds of a step: `step = max(beside) + sum(alone)`.

    Args:
        beside: terms that overlap, by name; the longest counts.
        alone: terms that nothing overlaps, by name.
        bound: the term that takes longest.
    """

    beside: dict[str, float]
    alone: dict[str, float]

    @property
    def step(self) -> float:
        """Seconds of a step."""
        return max(self.beside.values()) + sum(self.alone.values())

    @property
    def bound(self) -> str:
        """The term that takes longest, of those that count."""
        longest = max(self.beside, key=lambda name: self.beside[name])
        terms = {**self.alone, longest: self.beside[longest]}
        return max(terms, key=lambda name: terms[name])


def step_time(
    rehearsal: Rehearsal,
    layout: Layout,
    collectives: Sequence[Collective],
    peak: float,
    memory: DeviceMemory,
    shares: Shares,
    imbalance: float,
) -> StepTime:
    """Seconds by term.

    Products, other operators' memory traffic and the host's launches overlap, and so do collectives that a layer does
    not wait for. The optimizer comes after: AdamW reads four and writes three numbers per parameter, row-wise AdaGrad
    reads and writes each row that was looked up, and its gradient.

    Args:
        peak: operations per second of the device.
        imbalance: heaviest rank over mean: all wait for it.
    """
    dense = rehearsal.rest / (layout.shard * layout.expert) + rehearsal.blocks / layout.shard
    rows = sum(look.ids * look.dim for look in rehearsal.lookups.values())
    speed = memory.speed * shares.memory
    beside = {
        "products": TRAINING * rehearsal.flops / (peak * shares.compute) * imbalance,
        "GPU memory": rehearsal.moved / speed * imbalance,
        "host": rehearsal.operators * shares.launch_us * 1e-6,
    }
    hidden = sum(c.seconds for c in collectives if not c.waited)
    if hidden:
        beside["overlapped collectives"] = hidden
    alone = {c.name: c.seconds for c in collectives if c.waited}
    alone["dense optimizer"] = 7 * FLOAT * dense / speed
    alone["table lookups and updates"] = 4 * FLOAT * rows / speed
    return StepTime(beside=beside, alone=alone)
