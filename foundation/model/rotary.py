"""Rotary encodings of an event's place and time gap.

Legend: T events, H heads, d head width, P angles (d / 2).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from foundation.model.events import Events
from kernels.jagged import sequence_ids


class Angles(NamedTuple):
    """Cosines and sines ``[T, 1, P]`` of the angles by which rows are turned."""

    cos: Tensor
    sin: Tensor

    def rotate(self, x: Tensor) -> Tensor:
        """Rotates ``x [T, H, d]``: element i and element i + d / 2 are a pair."""
        even, odd = x.chunk(2, dim=2)
        return torch.cat([even * self.cos - odd * self.sin, odd * self.cos + even * self.sin], dim=2).to(x.dtype)


class Rotary(nn.Module):
    """Rotates pairs of elements by an angle that grows with the event's place or time gap.

    A product of two rotated vectors depends on the difference of their angles only. Frequencies fall geometrically
    from 1 to 1/10,000 over places and from 4 to 1/16 over ``log(1 + seconds)`` (RoPE, arXiv 2104.09864; over time:
    ROTE).

    Raises:
        ValueError: the head width is not a multiple of 2, or of 4 for ``both``.
    """

    places: Tensor
    times: Tensor

    def __init__(self, width: int, kind: str) -> None:
        super().__init__()
        parts = 2 if kind == "both" else 1
        if width % (2 * parts):
            raise ValueError(
                f"sequence.rotary: {kind} needs a head width that is a multiple of {2 * parts}, got {width}"
            )
        pairs = width // (2 * parts)
        step = torch.arange(pairs) / max(1, pairs)
        empty = torch.zeros(0)
        self.register_buffer("places", empty if kind == "time" else 10000.0**-step, persistent=False)
        self.register_buffer("times", empty if kind == "position" else 4.0 * 64.0**-step, persistent=False)

    def forward(self, x: Tensor, events: Events) -> Tensor:
        """Rotates ``x [T, H, d]``, rows of the events."""
        return self.of_events(events).rotate(x)

    def of_events(self, events: Events) -> Angles:
        """Angles of all events."""
        return self.at(_places(events), events.gap)

    def positions(self, events: Events) -> tuple[Tensor, Tensor]:
        """What a kernel that rotates by itself takes: positions ``[T]`` or ``[T, 2]``, frequencies ``[P]``."""
        kinds = [(_places(events).to(torch.float32), self.places), (events.gap, self.times)]
        used = [(position, step) for position, step in kinds if step.shape[0]]
        positions = used[0][0] if len(used) == 1 else torch.stack([position for position, _ in used], dim=1)
        return positions, torch.cat([step for _, step in used])

    def at(self, place: Tensor, gap: Tensor) -> Angles:
        """Angles of rows at these places int64 ``[T]`` and gaps float32 ``[T]``."""
        place = place.to(torch.float32)
        angle = torch.cat([place[:, None] * self.places, gap[:, None] * self.times], dim=1)[:, None, :]
        return Angles(angle.cos(), angle.sin())


def _places(events: Events) -> Tensor:
    """Places of events in their sequences, int64 ``[T]``."""
    total = events.values.shape[0]
    owner = sequence_ids(events.offsets, total)
    return torch.arange(total, device=events.offsets.device) - events.offsets[:-1].index_select(0, owner)
