"""One layer: the arms exchange summaries, then work side by side (InterFormer, arXiv 2411.09852).

Legend: M ensemble members, N impressions, n feature tokens, D token width, E event width, S summary tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from foundation.model.cross import CrossConfig, FeatureSummary, SequenceSummary
from foundation.model.events import Events
from foundation.model.interaction import InteractionArm, InteractionConfig
from foundation.model.sequence import SequenceArm, SequenceConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerConfig:
    """The three arms of a layer."""

    cross: CrossConfig = field(default_factory=CrossConfig)
    interaction: InteractionConfig = field(default_factory=InteractionConfig)
    sequence: SequenceConfig = field(default_factory=SequenceConfig)


class SequenceSummaries(nn.Module):
    """Summaries of all sequences, one after another: ``[N, S, D]``."""

    def __init__(self, config: CrossConfig, names: Iterable[str], event_width: int, width: int) -> None:
        super().__init__()
        self.summaries = nn.ModuleDict({name: SequenceSummary(config, event_width, width) for name in names})

    def forward(self, events: Mapping[str, Events], target: Tensor, like: Tensor) -> Tensor:
        """``like [M, N, n, D]`` gives the shape if there are no sequences."""
        parts = [summary(events[name], target) for name, summary in self.summaries.items()]
        return torch.cat(parts, dim=1) if parts else like.new_zeros((like.shape[1], 0, like.shape[3]))


class Layer(nn.Module):
    """Feature tokens ``[M, N, n, D]`` and events to the next layer's, of ``interaction.tokens_out`` tokens."""

    def __init__(
        self, config: LayerConfig, tokens: int, names: tuple[str, ...], width: int, event_width: int, members: int
    ) -> None:
        super().__init__()
        cross = config.cross
        self.feature_summary: FeatureSummary | None = None
        if names:
            self.feature_summary = FeatureSummary(
                cross.feature_hidden, cross.feature_tokens, tokens, members, width, event_width
            )
        self.sequence_summary = SequenceSummaries(cross, names, event_width, width)
        tokens += len(names) * cross.sequence_tokens
        self.interaction = InteractionArm(config.interaction, tokens, width, members)
        self.sequences = nn.ModuleDict({name: SequenceArm(config.sequence, event_width) for name in names})

    def forward(self, x: Tensor, events: Mapping[str, Events], target: Tensor) -> tuple[Tensor, dict[str, Events]]:
        """Runs the cross arm, then both others on what it found; ``target [N, E]`` is a vector of the candidate."""
        after = {}
        if self.feature_summary is not None:
            x_sum = self.feature_summary(x)
            target = target + x_sum.mean(1)
            after = {name: arm(events[name], x_sum) for name, arm in self.sequences.items()}
        summaries = self.sequence_summary(events, target, x)
        return self.interaction(x, summaries), after
