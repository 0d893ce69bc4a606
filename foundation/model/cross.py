"""The cross arm: what the two arms tell each other, as a few summary tokens.

``X_sum`` compresses the feature tokens, ``S_sum = Gate([S_CLS || S_PMA || S_recent])`` the sequences (InterFormer,
arXiv 2411.09852). ``Gate(x) = x * sigmoid(W x)``: a bounded factor, so that a summary can be switched off. (The paper
prints the sigmoid outside the product, which would bound the summary itself.)

Legend: M ensemble members, N impressions, B sequences (R or N), n feature tokens, D token width, T events, E event
width, S summary tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foundation.model.events import History
from foundation.model.norm import LayerNorm
from foundation.model.pooling import Pooling, SeedPooling
from kernels.jagged import gather_rows, last_k


@dataclass(frozen=True, kw_only=True, slots=True)
class CrossConfig:
    """Sizes of the summaries.

    Args:
        feature_tokens: tokens of ``X_sum``.
        feature_hidden: with 0, ``X_sum`` mixes tokens only (a linear compression, as in InterFormer); otherwise it is
            a network over all elements of all tokens with this many hidden units.
        cls_tokens: tokens made from the features that stand behind each sequence and live in it.
        pooled_tokens: tokens into which attention pools a sequence.
        pooling: ``pma``, one query per token, or ``hsp``, hierarchical seed pooling: ``seeds`` queries, compressed by a
            sum of ``kron_terms`` Kronecker products.
        seeds: queries of ``hsp``.
        kron_terms: terms of the compression of ``hsp``.
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
    pooling: Literal["pma", "hsp"] = "pma"
    seeds: int = 32
    kron_terms: int = 4
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
            ("seeds", 1),
            ("kron_terms", 1),
        ):
            if getattr(self, key) < least:
                raise ValueError(f"cross.{key}: must be at least {least}, got {getattr(self, key)}")
        if self.pooling not in ("pma", "hsp"):
            raise ValueError(f"cross.pooling: must be pma or hsp, got {self.pooling!r}")
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

    def __init__(
        self, hidden: int, outputs: int, tokens: int, members: int, width: int, out_width: int, *, bias: bool = True
    ) -> None:
        super().__init__()
        self.outputs, self.hidden, self.width = outputs, hidden, out_width
        if hidden:
            self.mix = nn.Linear(members * tokens * width, hidden, bias=bias)
            self.project = nn.Linear(hidden, outputs * out_width, bias=bias)
        else:
            self.mix = nn.Linear(members * tokens, outputs, bias=bias)
            self.project = nn.Linear(width, out_width, bias=bias)
        self.gate = nn.Linear(out_width, out_width, bias=bias)

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

    def __init__(self, config: CrossConfig, event_width: int, width: int, *, bias: bool = True) -> None:
        super().__init__()
        self.config = config
        self.norm = LayerNorm(event_width, bias=bias)
        self.pool = _pooling(config, event_width, bias) if config.pooled_tokens else None
        self.gate = nn.Linear(event_width, event_width, bias=bias)
        self.project = nn.Linear(event_width, width, bias=bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, history: History, target: Tensor) -> Tensor:
        """A history and a vector of the candidate ``[N, E]`` to ``[N, S, D]``: recent, CLS, pooled tokens."""
        config, (events, cls, request) = self.config, history
        values = self.norm(events.values)
        kept = config.recent_tokens + (config.cls_tokens if cls is None else 0)
        recent = [last_k(values, events.offsets, kept)[0]] if kept else []
        asks = config.reads_target or request is None
        pooled = [] if self.pool is None else [self.pool(values, events.offsets, target, request if asks else None)]
        if request is None:
            return self.dropout(self._tokens([*recent, *pooled]))
        assert cls is not None
        own = self._tokens([self.norm(cls), *(pooled if asks else [])])
        common = recent if asks else [*recent, *pooled]
        if common:
            # What the impressions of a request have in common is gated and projected once, then handed to them.
            common = [gather_rows(self._tokens(common), request, rising=True)]
            own = torch.cat([common[0][:, :kept], own, common[0][:, kept:]], dim=1)
        return self.dropout(own)

    def _tokens(self, parts: list[Tensor]) -> Tensor:
        summary = torch.cat(parts, dim=1)
        return self.project(summary * torch.sigmoid(self.gate(summary)))


def _pooling(config: CrossConfig, width: int, bias: bool) -> Pooling | SeedPooling:
    heads, target_aware = config.pooling_heads, config.target_aware
    if config.pooling == "pma":
        return Pooling(config.pooled_tokens, heads, target_aware, width, bias=bias)
    return SeedPooling(config.pooled_tokens, config.seeds, config.kron_terms, heads, target_aware, width, bias=bias)
