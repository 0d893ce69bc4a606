"""Several event streams: what differs between them, and the layer that merges them into one.

Legend: T events, B sequences (R or N), E event width, n streams, c CLS tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from foundation.data.schema import Sequence
from foundation.model.cross import CrossConfig
from foundation.model.events import Events
from foundation.model.sequence import SequenceConfig
from kernels.jagged import gather_rows, sequence_ids

MERGED = "merged"
"""Name of the stream into which the others are merged."""

_BEHIND = 32.0
"""More than any ``log(1 + seconds)``: about two million years."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamsConfig:
    """What differs between streams, by name of the sequence; what is not named is as ``layer`` says.

    Streams can also be merged into one by the events' time, which then has the name ``merged`` here.

    Args:
        width: width of events.
        heads: heads of self-attention.
        layers: the sequence arm is in the first so many layers only; afterwards the events stay as they are.
        attention, window: kind of self-attention.
        cls_tokens, pooled_tokens, recent_tokens: size of the summary.
        merge_after: merge the streams behind so many layers, 0 before the first; null: never.
        left_out: sequences whose events the model does not see. Match statistics (``match``) may still count them.
    """

    width: dict[str, int] = field(default_factory=dict)
    heads: dict[str, int] = field(default_factory=dict)
    layers: dict[str, int] = field(default_factory=dict)
    attention: dict[str, Literal["full", "window", "block", "none"]] = field(default_factory=dict)
    window: dict[str, int] = field(default_factory=dict)
    cls_tokens: dict[str, int] = field(default_factory=dict)
    pooled_tokens: dict[str, int] = field(default_factory=dict)
    recent_tokens: dict[str, int] = field(default_factory=dict)
    merge_after: int | None = None
    left_out: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for key, least in (("width", 1), ("layers", 0)):
            for name, value in getattr(self, key).items():
                if value < least:
                    raise ValueError(f"streams.{key}.{name}: must be at least {least}, got {value}")
        if self.merge_after is not None and self.merge_after < 0:
            raise ValueError(f"streams.merge_after: must be null or at least 0, got {self.merge_after}")

    def named(self) -> dict[str, dict[str, Any]]:
        """The dicts by field."""
        keys = ("width", "heads", "layers", "attention", "window", "cls_tokens", "pooled_tokens", "recent_tokens")
        return {key: getattr(self, key) for key in keys}

    def seen(self, sequences: Iterable[Sequence]) -> tuple[Sequence, ...]:
        """The sequences that are not left out.

        Raises:
            ValueError: a name is not a sequence's.
        """
        known = {sequence.name: sequence for sequence in sequences}
        for name in self.left_out:
            if name not in known:
                raise ValueError(f"streams.left_out: no sequence {name!r}; known: {', '.join(known)}")
        return tuple(sequence for name, sequence in known.items() if name not in self.left_out)


class Stream(NamedTuple):
    """One stream in full: its name, event width, layers with a sequence arm, arm and summary."""

    name: str
    width: int
    layers: int
    sequence: SequenceConfig
    cross: CrossConfig


def resolve(
    config: StreamsConfig, names: Iterable[str], sequence: SequenceConfig, cross: CrossConfig, width: int, layers: int
) -> tuple[Stream, ...]:
    """The streams of these names.

    Args:
        sequence, cross: what holds for streams that ``config`` does not name.
        width: the event width of such streams.
        layers: of the model.

    Raises:
        ValueError: a value that the arm or the summary refuses; the message names stream and key.
    """
    streams = []
    for name in names:
        own = {key: values[name] for key, values in config.named().items() if name in values}
        arm = {key: own[key] for key in ("heads", "attention", "window") if key in own}
        summary = {key: own[key] for key in ("cls_tokens", "pooled_tokens", "recent_tokens") if key in own}
        try:
            stream = Stream(
                name,
                own.get("width", width),
                own.get("layers", layers),
                replace(sequence, **arm),
                replace(cross, **summary),
            )
        except ValueError as error:
            raise ValueError(f"streams, {name}: {error}") from None
        streams.append(stream)
    return tuple(streams)


def check_names(config: StreamsConfig, names: Iterable[str]) -> None:
    """Refuses names of streams that there are not.

    Raises:
        ValueError: naming key and stream.
    """
    known = [*names, *([MERGED] if config.merge_after is not None else [])]
    for key, values in config.named().items():
        for name in values:
            if name not in known:
                raise ValueError(f"streams.{key}.{name}: no such sequence; known: {', '.join(known)}")
    if config.merge_after is not None and known.count(MERGED) > 1:
        raise ValueError(f"streams.merge_after: a sequence is called {MERGED}; rename it in the schema")


class MergeStreams(nn.Module):
    """Streams to one: events side by side in the order of time, projected to one width, marked by their stream.

    Events of unknown time stand first, CLS tokens last.
    """

    def __init__(self, streams: tuple[Stream, ...], width: int, cls_tokens: Mapping[str, int], *, bias: bool) -> None:
        super().__init__()
        self.names = tuple(stream.name for stream in streams)
        self.cls_tokens = dict(cls_tokens)
        self.project = nn.ModuleDict({s.name: nn.Linear(s.width, width, bias=bias) for s in streams})
        self.mark = nn.Parameter(torch.randn(len(streams), width) * 0.1)

    def forward(self, events: Mapping[str, Events]) -> Events:
        """Streams of the same B sequences, each with its number of CLS tokens behind."""
        values, gaps, owners, lateness = [], [], [], []
        for name, mark in zip(self.names, self.mark.unbind(0), strict=True):
            own = events[name]
            projected = self.project[name](own.values)
            total = projected.shape[0]
            owner = sequence_ids(own.offsets, total)
            rank = own.offsets[1:].index_select(0, owner) - 1 - torch.arange(total, device=owner.device)
            values.append(projected + mark.to(projected.dtype))
            gaps.append(own.gap)
            owners.append(owner)
            lateness.append(torch.where(rank < self.cls_tokens[name], _BEHIND, _BEHIND - 1 - own.gap.clamp(0, 30)))
        # One stable sort: by sequence, then by time, then by the order of the streams.
        key = torch.cat(owners).to(torch.float64) * (2 * _BEHIND) + torch.cat(lateness)
        order = torch.argsort(key, stable=True)
        offsets = torch.stack([events[name].offsets for name in self.names]).sum(0)
        return Events(gather_rows(torch.cat(values), order), offsets, torch.cat(gaps).index_select(0, order))


def by_stream(
    streams: tuple[Stream, ...], base: nn.Module | None, own: nn.ModuleDict, x: Tensor
) -> dict[str, Tensor | None]:
    """What a module makes of ``x`` for each stream: the stream's own module if it has one, else ``base``."""
    shared = None if base is None else base(x)
    return {stream.name: own[stream.name](x) if stream.name in own else shared for stream in streams}
