"""Event tokens: a user's history as packed vectors of one width.

Legend: R requests, N impressions, T events, E event width, C table dim, B sequences (R or N), S summary tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from foundation.data.batch import Batch
from foundation.data.encoding import NO_TIME
from foundation.data.schema import Sequence
from foundation.model.embeddings import Embedded
from foundation.model.norm import LayerNorm
from kernels.jagged import concat, gather_sequences, sequence_ids, split

LONGEST_GAP = 18.0
"""Upper end of ``log(1 + seconds)`` of a time gap: about two years."""


class Events(NamedTuple):
    """Packed sequences: ``values [T, E]``, ``offsets`` int64 ``[B + 1]``, ``gap`` float32 ``[T]``.

    ``gap`` is ``log(1 + seconds)`` from an event to its request, ``LONGEST_GAP`` where the time is not known.
    """

    values: Tensor
    offsets: Tensor
    gap: Tensor

    def gather(self, index: Tensor, total: int | None = None) -> Events:
        """The sequences ``index`` int64 ``[N]``, ``total`` events, again packed; gradients of copies are summed."""
        values, offsets = gather_sequences(self.values, self.offsets, index, total=total)
        gap, _ = gather_sequences(self.gap, self.offsets, index, total=values.shape[0])
        return Events(values, offsets, gap)

    def append(self, tokens: Tensor) -> Events:
        """Puts ``tokens [B, S, E]``, of gap 0, behind each sequence."""
        batch, count, width = tokens.shape
        ends = torch.arange(batch + 1, device=tokens.device) * count
        values, offsets = concat(self.values, self.offsets, tokens.reshape(batch * count, width), ends)
        gap, _ = concat(self.gap, self.offsets, self.gap.new_zeros(batch * count), ends)
        return Events(values, offsets, gap)

    def drop_last(self, count: int) -> tuple[Events, Tensor]:
        """What is left without the last ``count`` rows of each sequence, which it must have, and those rows.

        Those rows are ``[B, count, E]``.
        """
        batch = self.offsets.shape[0] - 1
        ends = torch.arange(batch + 1, device=self.offsets.device) * count
        offsets, total = self.offsets - ends, self.values.shape[0] - batch * count
        values, tail = split(self.values, offsets, ends, total)
        gap, _ = split(self.gap, offsets, ends, total)
        return Events(values, offsets, gap), tail.view(batch, count, tail.shape[1])


class History(NamedTuple):
    """A stream as the layers see it, in one of two forms.

    Own: ``events`` of the rows themselves, CLS tokens behind each sequence; ``cls`` and ``request`` are ``None``.
    Shared: ``events`` of R requests without CLS tokens; ``cls [N, c, E]`` and ``request`` int64 ``[N]``, rising, the
    request of each row.
    """

    events: Events
    cls: Tensor | None = None
    request: Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class EventsConfig:
    """How events become tokens.

    Args:
        time_knots: learned points on the logarithmic axis of an event's time gap; 0 leaves the time out.
        position_knots: the same for an event's place, counted from the latest; 0 leaves it out.
        mask_hidden: hidden units of a network that weighs the elements of all attributes against one another before
            they are projected, ``W (s * MLP(s))`` (MaskNet of InterFormer, arXiv 2411.09852); 0: no such network.
        dropout: share of elements dropped in training.
    """

    time_knots: int = 16
    position_knots: int = 8
    mask_hidden: int = 0
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for key in ("time_knots", "position_knots"):
            if getattr(self, key) < 0 or getattr(self, key) == 1:
                raise ValueError(f"events.{key}: must be 0 or at least 2, got {getattr(self, key)}")
        if self.mask_hidden < 0:
            raise ValueError(f"events.mask_hidden: must not be negative, got {self.mask_hidden}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"events.dropout: must be in [0, 1), got {self.dropout}")


class EventTokens(nn.Module):
    """Tokens of one sequence: the sum of projected attributes, time and place, normalised.

    Time and place are interpolated between learned vectors (hat functions on their axes), so that they are smooth.
    """

    def __init__(self, config: EventsConfig, sequence: Sequence, dims: Mapping[str, int], width: int) -> None:
        super().__init__()
        self.sequence = sequence
        self.keys = tuple(sequence.key(a.name) for a in sequence.attributes)
        self.time_knots = config.time_knots if sequence.timestamp is not None else 0
        self.position_knots = config.position_knots
        inputs = sum(dims[key] for key in self.keys)
        self.mask: nn.Sequential | None = None
        if config.mask_hidden:
            hidden = config.mask_hidden
            self.mask = nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, inputs))
        self.projection = nn.Linear(inputs, width)
        places = (self.time_knots + 1 if self.time_knots else 0) + self.position_knots
        self.place = nn.Parameter(torch.randn(places, width) * 0.1) if places else None
        self.norm = LayerNorm(width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, embedded: Embedded, batch: Batch) -> Events:
        """Events ``[T, E]`` of the R requests."""
        offsets = batch.sequence_offsets[self.sequence.name]
        rows = torch.cat([embedded.events[key] for key in self.keys], dim=1)
        total = rows.shape[0]
        parts = []
        owner = sequence_ids(offsets, total)
        if self.sequence.timestamp is not None:
            time = batch.sequence_times[self.sequence.name]
            known = time != NO_TIME
            age = (batch.request_time.index_select(0, owner) - time).clamp(min=0)
            gap = torch.where(known, torch.log1p(age.to(torch.float32) / 1000.0), LONGEST_GAP)
            if self.time_knots:
                parts.append(hats(gap / LONGEST_GAP, self.time_knots) * known[:, None])
                parts.append((~known)[:, None].to(torch.float32))
        else:
            gap = torch.full((total,), LONGEST_GAP, device=offsets.device)
        if self.position_knots:
            rank = offsets[1:].index_select(0, owner) - 1 - torch.arange(total, device=offsets.device)
            place = torch.log1p(rank.to(torch.float32)) / math.log1p(max(1, self.sequence.max_length))
            parts.append(hats(place, self.position_knots))
        if self.mask is not None:
            rows = rows * self.mask(rows)
        values = self.projection(rows)
        if self.place is not None:
            values = torch.addmm(values, torch.cat(parts, dim=1).to(values.dtype), self.place.to(values.dtype))
        return Events(self.dropout(self.norm(values)), offsets, gap)


def hats(x: Tensor, knots: int) -> Tensor:
    """Weights of linear interpolation between ``knots`` points spread over [0, 1]: ``[T]`` to ``[T, knots]``.

    What lies outside counts as the nearer end; each row sums to 1.
    """
    scaled = x.clamp(0.0, 1.0)[:, None] * (knots - 1)
    return (1.0 - (scaled - torch.arange(knots, device=x.device)).abs()).clamp(min=0.0)
