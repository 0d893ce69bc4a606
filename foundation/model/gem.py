"""The foundation model.

Embeddings -> tokens and events -> layers of two arms that exchange summaries -> heads.

Legend: M ensemble members, R requests, N impressions, K tasks, T events, F feature tokens, D width, E event width,
S summary tokens, V width of the representation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from foundation.data.batch import Batch
from foundation.data.schema import Schema
from foundation.model.cross import FeatureSummary
from foundation.model.embeddings import Embeddings, EmbeddingsConfig
from foundation.model.events import Events, EventsConfig, EventTokens
from foundation.model.heads import Heads, HeadsConfig
from foundation.model.layer import Layer, LayerConfig, SequenceSummaries
from foundation.model.loss import LossOutput, masked_loss
from foundation.model.match import MatchConfig, MatchStatistics
from foundation.model.tokens import FeatureTokens, TokensConfig
from kernels.jagged import gather_rows


@dataclass(frozen=True, kw_only=True, slots=True)
class GEMConfig:
    """A foundation model.

    Args:
        width: width of feature tokens (D).
        layers: number of layers.
        members: ensemble members inside the model: each has its own token projections, interaction arms and heads and
            its own loss; tables and sequence arms are shared; the model's probability is the mean over members.
        embeddings, tokens, events, match, layer, heads: the parts.
    """

    width: int = 64
    layers: int = 2
    members: int = 1
    embeddings: EmbeddingsConfig = field(default_factory=EmbeddingsConfig)
    tokens: TokensConfig = field(default_factory=TokensConfig)
    events: EventsConfig = field(default_factory=EventsConfig)
    match: MatchConfig = field(default_factory=MatchConfig)
    layer: LayerConfig = field(default_factory=LayerConfig)
    heads: HeadsConfig = field(default_factory=HeadsConfig)

    def __post_init__(self) -> None:
        for key in ("width", "layers", "members"):
            if getattr(self, key) < 1:
                raise ValueError(f"model.{key}: must be at least 1, got {getattr(self, key)}")
        if self.members > 1 and self.heads.reads != "tokens":
            raise ValueError("model.heads.reads: must be tokens when there are several members")


class GEMOutput(NamedTuple):
    """``logits`` ``[N, K]`` and the trunk's representation ``embedding`` ``[N, V]``.

    ``member_logits`` ``[M, N, K]`` is there when the model has several members, whose mean probability ``logits`` are.
    """

    logits: Tensor
    embedding: Tensor
    member_logits: Tensor | None = None


class GEM(nn.Module):
    """The foundation model of a schema.

    Args:
        config: sizes and options.
        schema: inputs, tasks and surfaces.
        table_rows: rows of each table, the reserved ones included (``Encoder.table_rows``).

    Raises:
        ValueError: an option names something that the schema does not have, or sizes that do not go together.
    """

    task_weights: Tensor

    def __init__(self, config: GEMConfig, schema: Schema, table_rows: Mapping[str, int]) -> None:
        super().__init__()
        self.config, self.schema = config, schema
        width, members = config.width, config.members
        cross = config.layer.cross
        event_width = config.layer.sequence.width or width
        names = tuple(sequence.name for sequence in schema.sequences)
        self.embeddings = Embeddings(config.embeddings, schema, table_rows)
        dims = self.embeddings.dims
        self.tokens = FeatureTokens(config.tokens, schema, dims, width, members)
        self.match = MatchStatistics(config.match, schema)
        self.match_token = nn.Linear(self.match.width, members * width) if self.match.width else None
        self.events = nn.ModuleDict(
            {s.name: EventTokens(config.events, s, dims, event_width) for s in schema.sequences}
        )
        count = len(self.tokens.names) + (1 if self.match.width else 0)
        if not count:
            raise ValueError(f"{schema.source}: features: the model needs at least one feature")

        self.target: nn.Linear | None = None
        if names and cross.reads_target and self.tokens.item_count:
            self.target = nn.Linear(members * self.tokens.item_count * width, event_width)
        self.cls: FeatureSummary | None = None
        if names and cross.cls_tokens:
            self.cls = FeatureSummary(cross.feature_hidden, cross.cls_tokens, count, members, width, event_width)
        layers = []
        for _ in range(config.layers):
            layers.append(Layer(config.layer, count, names, width, event_width, members))
            count = config.layer.interaction.tokens_out
        self.layers = nn.ModuleList(layers)
        self.feature_summary: FeatureSummary | None = None
        inputs = count
        if config.heads.reads == "summaries":
            inputs = cross.feature_tokens
            self.feature_summary = FeatureSummary(cross.feature_hidden, inputs, count, members, width, width)
        self.sequence_summary = SequenceSummaries(cross, names, event_width, width)
        inputs += len(names) * cross.sequence_tokens
        self.heads = Heads(config.heads, schema, inputs * width, members)
        self.embedding_width = members * self.heads.width
        weights = torch.tensor([task.weight for task in schema.tasks])
        self.register_buffer("task_weights", weights, persistent=False)

    def forward(self, batch: Batch) -> GEMOutput:
        """Logits of every impression and task."""
        embedded = self.embeddings(batch)
        x = self.tokens(embedded, batch)
        target = self._target(x)
        if self.match_token is not None:
            token = self.match_token(self.match(batch)).view(x.shape[1], x.shape[0], 1, x.shape[3])
            x = torch.cat([x, token.transpose(0, 1).to(x.dtype)], dim=2)
        # The last place where a request's history exists once; from here on each impression has its own.
        events: dict[str, Events] = {
            name: tokens(embedded, batch).gather(batch.request_index, batch.impression_events[name])
            for name, tokens in self.events.items()
        }
        if self.cls is not None:
            cls = self.cls(x)
            events = {name: own.append(cls.to(own.values.dtype)) for name, own in events.items()}
        for layer in self.layers:
            x, events = layer(x, events, target)
        logits, trunk = self.heads(self._read(x, events, target), self._surface(batch))
        if embedded.first_order is not None:
            request, item = embedded.first_order
            logits = logits + gather_rows(request, batch.request_index) + item
        return _combine(logits, trunk)

    def loss(self, output: GEMOutput, batch: Batch) -> LossOutput:
        """The training loss, see ``foundation.model.loss.masked_loss``."""
        logits = output.logits if output.member_logits is None else output.member_logits
        return masked_loss(logits, batch, self.task_weights)

    def dense_parameters(self) -> Iterator[nn.Parameter]:
        """All parameters but the tables."""
        return (p for name, p in self.named_parameters() if not name.startswith("embeddings."))

    def _target(self, x: Tensor) -> Tensor:
        """A vector of the candidate, ``[N, E]``, from the item's tokens of all members; 0 where it is not needed."""
        if self.target is None:
            return x.new_zeros((x.shape[1], self.config.layer.sequence.width or x.shape[3]))
        item = x[:, :, x.shape[2] - self.tokens.item_count :]
        return self.target(item.transpose(0, 1).flatten(1))

    def _read(self, x: Tensor, events: Mapping[str, Events], target: Tensor) -> Tensor:
        """What the heads read: ``[M, N, tokens * D]``."""
        members = x.shape[0]
        if self.feature_summary is not None:
            x = self.feature_summary(x).unsqueeze(0)
        summaries = self.sequence_summary(events, target, x)
        return torch.cat([x, summaries.to(x.dtype).expand(members, -1, -1, -1)], dim=2).flatten(2)

    def _surface(self, batch: Batch) -> Tensor:
        return batch.surface.index_select(0, batch.request_index)


def _combine(logits: Tensor, trunk: Tensor) -> GEMOutput:
    """One logit from those of the members: that of their mean probability."""
    if logits.shape[0] == 1:
        return GEMOutput(logits[0], trunk[0])
    positive = torch.logsumexp(nn.functional.logsigmoid(logits.float()), dim=0)
    negative = torch.logsumexp(nn.functional.logsigmoid(-logits.float()), dim=0)
    return GEMOutput(positive - negative, trunk.transpose(0, 1).flatten(1), logits)
