"""The cross arm: what the two arms tell each other, as a few summary tokens.

``X_sum`` compresses the feature tokens, ``S_sum = Gate([S_CLS || S_PMA || S_recent])`` the sequences (InterFormer,
arXiv 2411.09852). ``Gate(x) = x * sigmoid(W x)``: a bounded factor, so that a summary can be switched off. (The paper
prints the sigmoid outside the product, which would bound the summary itself.)

Legend: M ensemble members, N impressions, n feature tokens, D token width, T events, E event width, S summary tokens,
Q pooling queries, H heads, d = E / H.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foundation.model.events import Events
from kernels.jagged import last_k
from kernels.jagged_attention import jagged_attention


@dataclass(frozen=True, kw_only=True, slots=True)
class CrossConfig:
    """Sizes of the summaries.

    Args:
        feature_tokens: tokens of ``X_sum``.
        feature_hidden: with 0, ``X_sum`` mixes tokens only (a linear compression, as in InterFormer); otherwise it is
            a network over all elements of all tokens with this many hidden units.
        cls_tokens: tokens made from the features that stand behind each sequence and live in it.
        pooled_tokens: queries that pool a sequence by attention (PMA).
        recent_tokens: latest events that are kept as they are.
        pooling_heads: heads of the pooling.
        target_aware: pooling queries depend on the candidate (target attention); otherwise they are the same for all
            rows.
        dropout: on summaries of sequences.
    """

    feature_tokens: int = 4
    feature_hidden: int = 0
    cls_tokens: int = 2
    pooled_tokens: int = 2
    recent_tokens: int = 2
    pooling_heads: int = 2
    target_aware: bool = True
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for key, least in (
            ("feature_tokens", 1),
            ("feature_hidden", 0),
            ("cls_tokens", 0),
            ("pooled_tokens", 0),
            ("recent_tokens", 0),
            ("pooling_heads", 1),
        ):
            if getattr(self, key) < least:
                raise ValueError(f"cross.{key}: must be at least {least}, got {getattr(self, key)}")
        if self.sequence_tokens == 0:
            raise ValueError("cross: one of cls_tokens, pooled_tokens and recent_tokens must be positive")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"cross.dropout: must be in [0, 1), got {self.dropout}")

    @property
    def reads_target(self) -> bool:
        """Whether summaries of sequences depend on the candidate."""
        return self.target_aware and self.pooled_tokens > 0

    @property
    def sequence_tokens(self) -> int:
        """Summary tokens of one sequence."""
        return self.cls_tokens + self.pooled_tokens + self.recent_tokens


class FeatureSummary(nn.Module):
    """Feature tokens of all members ``[M, N, n, D]`` to ``outputs`` tokens ``[N, outputs, E]``."""

    def __init__(self, hidden: int, outputs: int, tokens: int, members: int, width: int, out_width: int) -> None:
        super().__init__()
        self.outputs, self.hidden, self.width = outputs, hidden, out_width
        if hidden:
            self.mix = nn.Linear(members * tokens * width, hidden)
            self.project = nn.Linear(hidden, outputs * out_width)
        else:
            self.mix = nn.Linear(members * tokens, outputs)
            self.project = nn.Linear(width, out_width)
        self.gate = nn.Linear(out_width, out_width)

    def forward(self, x: Tensor) -> Tensor:
        """Summaries ``[N, outputs, E]``."""
        members, count, tokens, width = x.shape
        rows = x.transpose(0, 1).reshape(count, members * tokens, width)
        if self.hidden:
            summary = self.project(F.silu(self.mix(rows.flatten(1)))).view(count, self.outputs, self.width)
        else:
            summary = self.project(self.mix(rows.transpose(1, 2)).transpose(1, 2))
        return summary * torch.sigmoid(self.gate(summary))


class SequenceSummary(nn.Module):
    """One sequence to S tokens ``[N, S, D]``.

    Raises:
        ValueError: the event width is no multiple of the pooling heads.
    """

    def __init__(self, config: CrossConfig, event_width: int, width: int) -> None:
        super().__init__()
        self.config = config
        self.norm = nn.LayerNorm(event_width)
        self.pool = Pooling(config, event_width) if config.pooled_tokens else None
        self.gate = nn.Linear(event_width, event_width)
        self.project = nn.Linear(event_width, width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, events: Events, target: Tensor) -> Tensor:
        """Events ``[T, E]``, CLS tokens behind, and a vector of the candidate ``[N, E]`` to ``[N, S, D]``."""
        config = self.config
        values = self.norm(events.values)
        parts = []
        kept = config.cls_tokens + config.recent_tokens
        if kept:
            latest, _ = last_k(values, events.offsets, kept)
            parts.append(latest)
        if self.pool is not None:
            parts.append(self.pool(values, events.offsets, target))
        summary = torch.cat(parts, dim=1)
        summary = summary * torch.sigmoid(self.gate(summary))
        return self.dropout(self.project(summary))


class Pooling(nn.Module):
    """Multi-head attention of Q queries over a sequence: ``[T, E]`` to ``[N, Q, E]`` (PMA; 0 for an empty sequence).

    Keys and values are never made: with few queries it is cheaper to carry the key projection over to the query and the
    value projection over to the pooled result, which is the same product in another order.
    """

    def __init__(self, config: CrossConfig, width: int) -> None:
        super().__init__()
        if width % config.pooling_heads:
            raise ValueError(f"cross.pooling_heads: width {width} is no multiple of {config.pooling_heads}")
        self.heads, self.target_aware = config.pooling_heads, config.target_aware
        head = width // self.heads
        self.seeds = nn.Parameter(torch.randn(config.pooled_tokens, width))
        self.query = nn.Linear(width, width)
        self.key = nn.Parameter(torch.randn(self.heads, head, width) * width**-0.5)
        self.value = nn.Parameter(torch.randn(self.heads, width, head) * width**-0.5)
        self.out = nn.Linear(width, width)

    def forward(self, values: Tensor, offsets: Tensor, target: Tensor) -> Tensor:
        """Pools ``values [T, E]``; ``target [N, E]`` is added to the queries if the pooling is target-aware."""
        seeds = self.seeds + target[:, None] if self.target_aware else self.seeds[None]
        count, queries, width = seeds.shape
        q = self.query(seeds).view(count, queries, self.heads, width // self.heads)
        q = torch.einsum("nqhd,hde->nqhe", q, self.key).reshape(-1, 1, width)
        rows = queries * self.heads
        q_offsets = torch.arange(offsets.shape[0], device=offsets.device) * rows if self.target_aware else None
        kv = values.unsqueeze(1)
        pooled = jagged_attention(q, kv, kv, q_offsets, offsets, scale=(width // self.heads) ** -0.5)
        pooled = pooled.view(-1, queries, self.heads, width)
        return self.out(torch.einsum("nqhe,hed->nqhd", pooled, self.value).flatten(2))
