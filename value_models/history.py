"""A user's history in a value model: events, pooling once per request, attention per candidate.

Shapes: R requests, N impressions, L events per history (padded, oldest first, left aligned), E event width,
H attention heads, P matched pairs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foundation.data.schema import FIRST_ROW, Feature, Sequence
from value_models.fields import Tables, length_mask

AGE_CENTRES = tuple(float(c) for c in range(0, 18, 2))  # log1p(seconds): 0 s, 6 s, 53 s, ... 100 days


def matching_pairs(features: tuple[Feature, ...], sequence: Sequence) -> tuple[tuple[str, str], ...]:
    """(feature name, history input) pairs whose ids live in one table, so that equality means the same thing."""
    return tuple(
        (feature.name, sequence.key(attribute.name))
        for feature in features
        for attribute in sequence.attributes
        if feature.kind == "categorical" and feature.table == attribute.table
    )


def matched_weights(
    pairs: tuple[tuple[str, str], ...],
    candidate: Mapping[str, Tensor],
    history: Mapping[str, Tensor],
    mask: Tensor,
) -> tuple[Tensor, Tensor]:
    """Per pair, which events share the candidate's id.

    Args:
        pairs: P pairs from :func:`matching_pairs`.
        candidate: int64 ``[M]`` per feature name.
        history: int64 ``[M, L]`` per history input.
        mask: bool ``[M, L]``, true events.

    Returns:
        Weights ``[M, P, L]`` that average the matching events (all zero without a match), and
        log1p of the number of matches ``[M, P]``.
    """
    same = [(history[key] == candidate[name].unsqueeze(1)) & (history[key] >= FIRST_ROW) & mask for name, key in pairs]
    matches = torch.stack(same, dim=1).to(torch.float32)
    count = matches.sum(-1)
    return matches / count.clamp(min=1.0).unsqueeze(-1), torch.log1p(count)


class Events(nn.Module):
    """One sequence as event vectors ``[R, L, E]``: attribute embeddings, age, recency rank; zero where padded.

    The age enters as Gaussian bumps over log1p(seconds), so that a linear layer can be any smooth function of it.
    """

    centres: Tensor

    def __init__(self, sequence: Sequence, width: int, tables: Tables) -> None:
        super().__init__()
        self.sequence = sequence
        embedded = sum(tables.dim(a.table) for a in sequence.attributes)
        self.has_age = sequence.timestamp is not None
        self.project = nn.Linear(embedded + (len(AGE_CENTRES) if self.has_age else 0), width)
        self.recency = nn.Embedding(sequence.max_length, width)
        nn.init.normal_(self.recency.weight, std=0.05)
        self.norm = nn.LayerNorm(width)
        self.register_buffer("centres", torch.tensor(AGE_CENTRES), persistent=False)

    def forward(self, inputs: Mapping[str, Tensor], tables: Tables) -> tuple[Tensor, Tensor]:
        """Event vectors float32 ``[R, L, E]`` and the bool mask ``[R, L]`` of true events."""
        sequence, size = self.sequence, self.sequence.max_length
        lengths = inputs[f"{sequence.name}.length"]
        mask = length_mask(lengths, size)
        ids = torch.stack([inputs[sequence.key(a.name)] for a in sequence.attributes], dim=-1)
        parts = tables.lookup([a.table for a in sequence.attributes], ids)
        if self.has_age:
            gap = inputs[f"{sequence.name}.age"].unsqueeze(-1) - self.centres
            parts.append(torch.exp(-0.5 * gap * gap))
        rank = lengths.unsqueeze(1) - 1 - torch.arange(size, device=lengths.device).unsqueeze(0)
        events = self.project(torch.cat(parts, dim=-1)) + self.recency(rank.clamp(0, size - 1))
        return F.silu(self.norm(events)) * mask.unsqueeze(-1), mask


class Pooling(nn.Module):
    """The history of a request as one vector, once per request.

    Masked mean, H learned-query attention heads, and for each context or user feature that shares a table with
    the history the mean of the events with the same id (for example: events on the request's own surface).
    """

    def __init__(self, sequence: Sequence, features: tuple[Feature, ...], width: int, heads: int) -> None:
        super().__init__()
        self.sequence = sequence
        self.pairs = matching_pairs(features, sequence)
        self.queries = nn.Parameter(torch.randn(heads, width) / math.sqrt(width))
        self.out_width = (1 + heads + len(self.pairs)) * width + len(self.pairs) + 1

    def forward(self, inputs: Mapping[str, Tensor], events: Tensor, mask: Tensor) -> Tensor:
        """``[R, out_width]`` from ``events [R, L, E]`` and ``mask [R, L]``; zeros for an empty history."""
        held = mask.unsqueeze(1)
        count = mask.sum(1, keepdim=True).to(events.dtype)
        weights = [held / count.clamp(min=1.0).unsqueeze(-1)]
        scores = self.queries @ events.transpose(1, 2)
        weights.append(masked_softmax(scores, held))
        extra = [torch.log1p(count)]
        if self.pairs:
            candidate = {name: inputs[name] for name, _ in self.pairs}
            matched, matches = matched_weights(self.pairs, candidate, inputs, mask)
            weights.append(matched)
            extra.append(matches)
        pooled = torch.cat(weights, dim=1) @ events
        return torch.cat([pooled.flatten(1), *extra], dim=1)


class TargetAttention(nn.Module):
    """The history as one candidate sees it: H heads of dot-product attention, and matched-id means.

    Scores are taken against the event vectors themselves, so that one Gather of ``[N, L, E]`` by request serves
    keys and values. Matched means: for each item feature that shares a table with the history, the mean of the
    events with the candidate's own id.
    """

    def __init__(
        self, sequence: Sequence, features: tuple[Feature, ...], candidate_width: int, width: int, heads: int
    ) -> None:
        super().__init__()
        self.pairs = matching_pairs(features, sequence)
        self.heads = heads
        self.query = nn.Linear(candidate_width, heads * width)
        self.scale = 1.0 / math.sqrt(width)
        self.out_width = (heads + len(self.pairs)) * width + len(self.pairs)

    def forward(
        self, inputs: Mapping[str, Tensor], candidate: Tensor, events: Tensor, mask: Tensor, request_index: Tensor
    ) -> Tensor:
        """``[N, out_width]`` from ``candidate [N, C]``, ``events [R, L, E]``, ``mask [R, L]``."""
        width = events.shape[-1]
        seen = events.index_select(0, request_index)
        held = mask.index_select(0, request_index)
        query = self.query(candidate).view(-1, self.heads, width) * self.scale
        weights = [masked_softmax(query @ seen.transpose(1, 2), held.unsqueeze(1))]
        extra = []
        if self.pairs:
            history = {key: inputs[key].index_select(0, request_index) for _, key in self.pairs}
            matched, matches = matched_weights(self.pairs, inputs, history, held)
            weights.append(matched)
            extra.append(matches)
        attended = torch.cat(weights, dim=1) @ seen
        return torch.cat([attended.flatten(1), *extra], dim=1)


def masked_softmax(scores: Tensor, mask: Tensor) -> Tensor:
    """Softmax of ``scores [..., L]`` over the places where ``mask`` is true; all zeros where none is."""
    return F.softmax(scores.masked_fill(~mask, -1e9), dim=-1) * mask
