"""The sequence arm: a feed-forward network generated from the feature summaries, then self-attention.

``S' = S + GDPA(LN(S), K(X_sum), V(X_sum))`` and ``S'' = S' + MHA(LN(S'))``, the sequence layer of InterFormer (arXiv
2411.09852) with its personalised feed-forward network read as attention without softmax (Kunlun, arXiv 2602.10016):
each summary token gives ``kv_per_summary`` hidden units. With ``norm: post`` it is ``S' = LN(S + GDPA(S, ...))`` and
``S'' = LN(S' + MHA(S'))``, as Kunlun has it.

Legend: T events, B sequences, S summary tokens, E event width, H heads, d = E / H, m = kv_per_summary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foundation.model.events import Events
from foundation.model.norm import LayerNorm
from foundation.model.rotary import Rotary
from kernels.block_attention import block_attention
from kernels.gdpa import ACTIVATIONS, gdpa
from kernels.jagged_attention import jagged_attention
from kernels.norms import rms_norm


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceConfig:
    """One sequence arm.

    Args:
        width: width of events; 0: that of the feature tokens.
        heads: heads of self-attention.
        kv_per_summary: hidden units of the generated network per summary token; 0 leaves the network out.
        gdpa_heads: heads of the generated network.
        activation: its activation, one of ``kernels.gdpa.ACTIVATIONS``.
        attention: self-attention over all events (``full``), over a ``window`` on each side, inside blocks of 64
            consecutive events counted from the oldest (``block``), or none.
        window: events on each side.
        causal: an event sees itself and those before it; CLS tokens, which stand behind the events, see all of them.
        rotary: rotate queries and keys by the event's place, by its time gap, or half by each (ROTE of Kunlun).
        norm: ``pre``, normalise what each half reads; ``post``, what it leaves.
        qk_norm: root-mean-square norm of queries and keys, head by head, with a learned scale; in both halves.
        dropout: on what either half adds.
    """

    width: int = 0
    heads: int = 2
    kv_per_summary: int = 4
    gdpa_heads: int = 1
    activation: str = "silu"
    attention: Literal["full", "window", "block", "none"] = "full"
    window: int = 32
    causal: bool = False
    rotary: Literal["none", "position", "time", "both"] = "none"
    norm: Literal["pre", "post"] = "pre"
    qk_norm: bool = False
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for key, least in (("width", 0), ("heads", 1), ("kv_per_summary", 0), ("gdpa_heads", 1), ("window", 0)):
            if getattr(self, key) < least:
                raise ValueError(f"sequence.{key}: must be at least {least}, got {getattr(self, key)}")
        if self.activation not in ACTIVATIONS:
            known = ", ".join(ACTIVATIONS)
            raise ValueError(f"sequence.activation: must be one of {known}, got {self.activation!r}")
        if self.attention not in ("full", "window", "block", "none"):
            raise ValueError(f"sequence.attention: must be full, window, block or none, got {self.attention!r}")
        if self.causal and self.attention == "block":
            raise ValueError("sequence.causal: blocks of events are seen as a whole; choose attention full or window")
        if self.rotary not in ("none", "position", "time", "both"):
            raise ValueError(f"sequence.rotary: must be none, position, time or both, got {self.rotary!r}")
        if self.norm not in ("pre", "post"):
            raise ValueError(f"sequence.norm: must be pre or post, got {self.norm!r}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"sequence.dropout: must be in [0, 1), got {self.dropout}")


class SequenceArm(nn.Module):
    """One layer for one sequence: events in, events of the same shape out.

    Raises:
        ValueError: the width is no multiple of the heads, or rotary needs more even heads.
    """

    def __init__(self, config: SequenceConfig, width: int, *, bias: bool = True) -> None:
        super().__init__()
        self.feed_forward = GeneratedNetwork(config, width, bias) if config.kv_per_summary else None
        self.attention = SelfAttention(config, width, bias) if config.attention != "none" else None

    def forward(self, events: Events, summaries: Tensor | None) -> Events:
        """Events ``[T, E]`` under the feature summaries ``[B, S, E]`` of their rows (None without the network)."""
        values = events.values
        if self.feed_forward is not None:
            assert summaries is not None
            values = self.feed_forward(values, events.offsets, summaries)
        if self.attention is not None:
            values = self.attention(Events(values, events.offsets, events.gap))
        return Events(values, events.offsets, events.gap)


class GeneratedNetwork(nn.Module):
    """A feed-forward network whose matrices are made from the summaries of the row (PFFN as GDPA).

    Raises:
        ValueError: the width is no multiple of the heads.
    """

    def __init__(self, config: SequenceConfig, width: int, bias: bool) -> None:
        super().__init__()
        if width % config.gdpa_heads:
            raise ValueError(f"sequence.gdpa_heads: width {width} is no multiple of {config.gdpa_heads}")
        self.heads, self.units, self.activation = config.gdpa_heads, config.kv_per_summary, config.activation
        self.pre = config.norm == "pre"
        self.norm = LayerNorm(width, bias=bias)
        self.keys = nn.Linear(width, config.kv_per_summary * width, bias=bias)
        self.values = nn.Linear(width, config.kv_per_summary * width, bias=bias)
        self.dropout = nn.Dropout(config.dropout)
        self.qk_norm = QKNorm(width // config.gdpa_heads) if config.qk_norm else None

    def forward(self, values: Tensor, offsets: Tensor, summaries: Tensor) -> Tensor:
        """``values [T, E]`` of B sequences under ``summaries [B, S, E]``; residual and norm included."""
        batch, tokens, width = summaries.shape
        shape = (batch, tokens * self.units, self.heads, width // self.heads)
        keys = self.keys(summaries).reshape(shape)
        queries = (self.norm(values) if self.pre else values).view(-1, *shape[2:])
        if self.qk_norm is not None:
            queries, keys = self.qk_norm(queries, keys)
        generated = self.values(summaries).reshape(shape)
        out = gdpa(
            queries.to(generated.dtype),  # norms give float32 under autocast
            keys,
            generated,
            offsets,
            activation=self.activation,
            scale=shape[1] ** -0.5,
            logit_scale=shape[3] ** -0.5,
        )
        values = values + self.dropout(out.reshape(-1, width))
        return values if self.pre else self.norm(values)


class SelfAttention(nn.Module):
    """Self-attention of a sequence arm, over all events, a window or blocks.

    Raises:
        ValueError: the width is no multiple of the heads, or rotary needs more even heads.
    """

    def __init__(self, config: SequenceConfig, width: int, bias: bool) -> None:
        super().__init__()
        if width % config.heads:
            raise ValueError(f"sequence.heads: width {width} is no multiple of {config.heads}")
        self.heads, self.pre, self.block = config.heads, config.norm == "pre", config.attention == "block"
        self.window = config.window if config.attention == "window" else None
        self.causal = config.causal
        self.norm = LayerNorm(width, bias=bias)
        self.qkv = nn.Linear(width, 3 * width, bias=bias)
        self.out = nn.Linear(width, width, bias=bias)
        self.dropout = nn.Dropout(config.dropout)
        self.rotary = None if config.rotary == "none" else Rotary(width // config.heads, config.rotary)
        self.qk_norm = QKNorm(width // config.heads) if config.qk_norm else None

    def forward(self, events: Events) -> Tensor:
        """Values ``[T, E]``; residual and norm included."""
        total, width = events.values.shape
        x = self.norm(events.values) if self.pre else events.values
        # Three products rather than one: its slices would be copied on the way into the attention.
        biases = (None,) * 3 if self.qkv.bias is None else self.qkv.bias.chunk(3)
        parts = zip(self.qkv.weight.chunk(3), biases, strict=True)
        q, k, v = (F.linear(x, w, b).view(total, self.heads, width // self.heads) for w, b in parts)
        if self.qk_norm is not None:
            q, k = self.qk_norm(q, k)
        offsets = events.offsets
        if self.block:  # rotates inside the kernel
            positions, frequencies = (None, None) if self.rotary is None else self.rotary.positions(events)
            out = block_attention(q.to(v.dtype), k, v, offsets, positions=positions, frequencies=frequencies)
        else:
            if self.rotary is not None:
                angles = self.rotary.of_events(events)
                q, k = angles.rotate(q), angles.rotate(k)
            out = jagged_attention(q.to(v.dtype), k, v, offsets, offsets, causal=self.causal, window=self.window)
        values = events.values + self.dropout(self.out(out.reshape(total, width)))
        return values if self.pre else self.norm(values)


class QKNorm(nn.Module):
    """Root-mean-square norm of queries and keys over the head width, each with a learned scale."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = nn.RMSNorm(width)
        self.key = nn.RMSNorm(width)

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """``[..., d]`` each."""
        return _rms(q, self.query.weight), _rms(k, self.key.weight)


def _rms(x: Tensor, weight: Tensor) -> Tensor:
    """Norm of each ``[..., d]``, of the dtype of x, with sums in float32 or wider."""
    wide_type = torch.promote_types(x.dtype, torch.float32)
    eps = torch.finfo(wide_type).eps
    if not torch.compiler.is_compiling():
        return rms_norm(x, weight, eps=eps)
    # Written out, a compiler makes one pass of it and the rotation behind it.
    wide = x.to(wide_type)
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (scaled * weight).to(x.dtype)
