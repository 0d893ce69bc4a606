"""The sequence arm: a feed-forward network generated from the feature summaries, then self-attention.

``S' = S + GDPA(LN(S), K(X_sum), V(X_sum))`` and ``S'' = S' + MHA(LN(S'))``, the sequence layer of InterFormer (arXiv
2411.09852) with its personalised feed-forward network read as attention without softmax (Kunlun, arXiv 2602.10016):
each summary token gives ``kv_per_summary`` hidden units.

Legend: T events, B sequences, S summary tokens, E event width, H heads, d = E / H, m = kv_per_summary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foundation.model.events import Events
from kernels.gdpa import ACTIVATIONS, gdpa
from kernels.jagged import sequence_ids
from kernels.jagged_attention import jagged_attention


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceConfig:
    """One sequence arm.

    Args:
        width: width of events; 0: that of the feature tokens.
        heads: heads of self-attention.
        kv_per_summary: hidden units of the generated network per summary token; 0 leaves the network out.
        gdpa_heads: heads of the generated network.
        activation: its activation, one of ``kernels.gdpa.ACTIVATIONS``.
        attention: self-attention over all events, over a ``window`` on each side, or none.
        window: events on each side.
        rotary: rotate queries and keys by the event's place, by its time gap, or half by each (ROTE of Kunlun).
        dropout: on what either half adds.
    """

    width: int = 0
    heads: int = 2
    kv_per_summary: int = 4
    gdpa_heads: int = 1
    activation: str = "silu"
    attention: Literal["full", "window", "none"] = "full"
    window: int = 32
    rotary: Literal["none", "position", "time", "both"] = "none"
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for key, least in (("width", 0), ("heads", 1), ("kv_per_summary", 0), ("gdpa_heads", 1), ("window", 0)):
            if getattr(self, key) < least:
                raise ValueError(f"sequence.{key}: must be at least {least}, got {getattr(self, key)}")
        if self.activation not in ACTIVATIONS:
            known = ", ".join(ACTIVATIONS)
            raise ValueError(f"sequence.activation: must be one of {known}, got {self.activation!r}")
        if self.attention not in ("full", "window", "none"):
            raise ValueError(f"sequence.attention: must be full, window or none, got {self.attention!r}")
        if self.rotary not in ("none", "position", "time", "both"):
            raise ValueError(f"sequence.rotary: must be none, position, time or both, got {self.rotary!r}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"sequence.dropout: must be in [0, 1), got {self.dropout}")


class SequenceArm(nn.Module):
    """One layer for one sequence: events in, events of the same shape out.

    Raises:
        ValueError: the width is no multiple of the heads, or rotary needs more even heads.
    """

    def __init__(self, config: SequenceConfig, width: int) -> None:
        super().__init__()
        self.feed_forward = _GeneratedNetwork(config, width) if config.kv_per_summary else None
        self.attention = _SelfAttention(config, width) if config.attention != "none" else None

    def forward(self, events: Events, summaries: Tensor) -> Events:
        """Events ``[T, E]`` under the feature summaries ``[B, S, E]`` of their rows."""
        values = events.values
        if self.feed_forward is not None:
            values = values + self.feed_forward(values, events.offsets, summaries)
        if self.attention is not None:
            values = values + self.attention(events._replace(values=values))
        return events._replace(values=values)


class _GeneratedNetwork(nn.Module):
    def __init__(self, config: SequenceConfig, width: int) -> None:
        super().__init__()
        if width % config.gdpa_heads:
            raise ValueError(f"sequence.gdpa_heads: width {width} is no multiple of {config.gdpa_heads}")
        self.heads, self.units, self.activation = config.gdpa_heads, config.kv_per_summary, config.activation
        self.norm = nn.LayerNorm(width)
        self.keys = nn.Linear(width, config.kv_per_summary * width)
        self.values = nn.Linear(width, config.kv_per_summary * width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, values: Tensor, offsets: Tensor, summaries: Tensor) -> Tensor:
        batch, tokens, width = summaries.shape
        shape = (batch, tokens * self.units, self.heads, width // self.heads)
        keys = self.keys(summaries).reshape(shape)
        out = gdpa(
            self.norm(values).view(-1, *shape[2:]).to(keys.dtype),  # norms give float32 under autocast
            keys,
            self.values(summaries).reshape(shape),
            offsets,
            activation=self.activation,
            scale=shape[1] ** -0.5,
            logit_scale=shape[3] ** -0.5,
        )
        return self.dropout(out.reshape(-1, width))


class _SelfAttention(nn.Module):
    def __init__(self, config: SequenceConfig, width: int) -> None:
        super().__init__()
        if width % config.heads:
            raise ValueError(f"sequence.heads: width {width} is no multiple of {config.heads}")
        self.heads = config.heads
        self.window = config.window if config.attention == "window" else None
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.dropout = nn.Dropout(config.dropout)
        self.rotary = None if config.rotary == "none" else Rotary(width // config.heads, config.rotary)

    def forward(self, events: Events) -> Tensor:
        total, width = events.values.shape
        x = self.norm(events.values)
        # Three products rather than one: its slices would be copied on the way into the attention.
        parts = zip(self.qkv.weight.chunk(3), self.qkv.bias.chunk(3), strict=True)
        q, k, v = (F.linear(x, w, b).view(total, self.heads, width // self.heads) for w, b in parts)
        if self.rotary is not None:
            q, k = self.rotary(q, events), self.rotary(k, events)
        out = jagged_attention(q, k, v, events.offsets, events.offsets, window=self.window)
        return self.dropout(self.out(out.reshape(total, width)))


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
        """Rotates ``x [T, H, d]``."""
        total = x.shape[0]
        owner = sequence_ids(events.offsets, total)
        start = events.offsets[:-1].index_select(0, owner)
        place = (torch.arange(total, device=x.device) - start).to(torch.float32)
        angle = torch.cat([place[:, None] * self.places, events.gap[:, None] * self.times], dim=1)[:, None, :]
        cos, sin = angle.cos(), angle.sin()
        even, odd = x.chunk(2, dim=2)
        return torch.cat([even * cos - odd * sin, odd * cos + even * sin], dim=2).to(x.dtype)
