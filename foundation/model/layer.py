"""One layer: the arms exchange summaries, then work side by side (InterFormer, arXiv 2411.09852).

With ``skip: alternate`` the expensive halves take turns (computation skip of Kunlun, arXiv 2602.10016): even layers
make fresh summaries and run the generated network, odd ones run self-attention and use the summaries again.

Legend: M ensemble members, N rows (impressions, or requests in user layers), n feature tokens, D token width, E event
width, S summary tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor, nn

from foundation.model.cross import CrossConfig, FeatureSummary, SequenceSummary
from foundation.model.events import History
from foundation.model.interaction import InteractionArm, InteractionConfig
from foundation.model.joint import JointArm
from foundation.model.sequence import SequenceArm, SequenceConfig
from foundation.model.streams import Stream, by_stream


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerConfig:
    """The three arms of a layer.

    Args:
        cross, interaction, sequence: the arms.
        bias: linear maps have a bias and norms a shift; without, as in Wukong Turbo.
        skip: ``none``, or ``alternate``: every second layer goes without the generated network and uses the summaries
            of the layer before, every other one goes without self-attention.
    """

    cross: CrossConfig = field(default_factory=CrossConfig)
    interaction: InteractionConfig = field(default_factory=InteractionConfig)
    sequence: SequenceConfig = field(default_factory=SequenceConfig)
    bias: bool = True
    skip: Literal["none", "alternate"] = "none"

    def __post_init__(self) -> None:
        if self.skip not in ("none", "alternate"):
            raise ValueError(f"layer.skip: must be none or alternate, got {self.skip!r}")


class SequenceSummaries(nn.Module):
    """Summaries of all streams, one after another: ``[N, S, D]``."""

    def __init__(self, streams: tuple[Stream, ...], width: int, *, bias: bool) -> None:
        super().__init__()
        self.summaries = nn.ModuleDict(
            {stream.name: SequenceSummary(stream.cross, stream.width, width, bias=bias) for stream in streams}
        )

    def forward(self, histories: Mapping[str, History], targets: Mapping[str, Tensor], like: Tensor) -> Tensor:
        """``targets[stream] [N, E]``; ``like [M, N, n, D]`` gives the shape if there are no streams."""
        parts = [summary(histories[name], targets[name]) for name, summary in self.summaries.items()]
        return torch.cat(parts, dim=1) if parts else like.new_zeros((like.shape[1], 0, like.shape[3]))


class Layer(nn.Module):
    """Feature tokens ``[M, N, n, D]`` and histories to the next layer's, of ``interaction.tokens_out`` tokens.

    Args:
        tokens: n.
        streams: those that there are in this layer.
        width: D.
        event_width: event width of streams that have none of their own.
        place: number of the layer in the model.
        turn: number of layers since the last fresh start (the first user layer, the first joint layer, the merge).
        shared: histories are shared between the impressions of a request.
    """

    def __init__(
        self,
        config: LayerConfig,
        tokens: int,
        streams: tuple[Stream, ...],
        width: int,
        event_width: int,
        members: int,
        *,
        place: int = 0,
        turn: int = 0,
        shared: bool = False,
    ) -> None:
        super().__init__()
        cross, bias = config.cross, config.bias
        self.streams = streams
        self.fresh = config.skip == "none" or turn % 2 == 0
        arms: dict[str, SequenceConfig] = {}
        for stream in streams:
            if place < stream.layers:
                arms[stream.name] = stream.sequence if config.skip == "none" else _half(stream.sequence, self.fresh)
        need = [
            stream
            for stream in streams
            if (self.fresh and stream.cross.reads_target) or (stream.name in arms and arms[stream.name].kv_per_summary)
        ]

        def features(out_width: int) -> FeatureSummary:
            return FeatureSummary(
                cross.feature_hidden, cross.feature_tokens, tokens, members, width, out_width, bias=bias
            )

        self.feature_summary = features(event_width) if any(s.width == event_width for s in need) else None
        self.own_summaries = nn.ModuleDict({s.name: features(s.width) for s in need if s.width != event_width})
        self.sequence_summary = SequenceSummaries(streams if self.fresh else (), width, bias=bias)
        tokens += sum(stream.cross.sequence_tokens for stream in streams)
        self.interaction = InteractionArm(config.interaction, tokens, width, members, bias=bias)
        kind = JointArm if shared else SequenceArm
        self.sequences = nn.ModuleDict(
            {s.name: kind(arms[s.name], s.width, bias=bias) for s in streams if s.name in arms}
        )

    def forward(
        self, x: Tensor, histories: Mapping[str, History], targets: Mapping[str, Tensor], summaries: Tensor | None
    ) -> tuple[Tensor, dict[str, History], Tensor]:
        """Runs the cross arm, then both others on what it found.

        Args:
            targets: a vector of the candidate by stream, ``[N, E]``.
            summaries: those of the layer before ``[N, S, D]``, for a layer that makes none.

        Returns:
            tokens, histories, and the summaries that were used.
        """
        after = dict(histories)
        sums = by_stream(self.streams, self.feature_summary, self.own_summaries, x)
        aims = self._aims(sums, targets)
        for name, arm in self.sequences.items():
            history, x_sum = histories[name], sums[name]
            if isinstance(arm, JointArm):
                after[name] = arm(history, x_sum)
            else:
                after[name] = History(arm(history.events, x_sum), history.cls, history.request)
        if self.fresh:
            summaries = self.sequence_summary(histories, aims, x)
        assert summaries is not None
        return self.interaction(x, summaries), after, summaries

    def _aims(self, sums: Mapping[str, Tensor | None], targets: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The candidate's vectors with the feature summary added; streams that share both share the result."""
        made: dict[tuple[str, int], Tensor] = {}
        aims = {}
        for name, target in targets.items():
            x_sum = sums[name]
            if x_sum is None:
                aims[name] = target
                continue
            key = (name if name in self.own_summaries else "", target.shape[1])
            if key not in made:
                made[key] = target + x_sum.mean(1)
            aims[name] = made[key]
        return aims


def _half(config: SequenceConfig, fresh: bool) -> SequenceConfig:
    """The half of the sequence arm that a layer keeps."""
    return replace(config, attention="none") if fresh else replace(config, kv_per_summary=0)
