"""The foundation model.

Embeddings -> tokens and events -> layers of two arms that exchange summaries -> heads. The first layers can be of the
user alone (one row per request); the later ones are joint (one row per impression).

Legend: M ensemble members, R requests, N impressions, K tasks, T events, F feature tokens, D width, E event width,
S summary tokens, c CLS tokens, V width of the representation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from foundation.data.batch import Batch
from foundation.data.schema import Schema
from foundation.model.cross import FeatureSummary
from foundation.model.embeddings import Embedded, Embeddings, EmbeddingsConfig
from foundation.model.events import Events, EventsConfig, EventTokens, History
from foundation.model.heads import Heads, HeadsConfig
from foundation.model.layer import Layer, LayerConfig, SequenceSummaries
from foundation.model.loss import LossConfig, LossOutput, masked_loss
from foundation.model.match import MatchConfig, MatchStatistics
from foundation.model.streams import MERGED, MergeStreams, Stream, StreamsConfig, by_stream, check_names, resolve
from foundation.model.surfaces import Surfaces, SurfacesConfig
from foundation.model.tokens import FeatureTokens, TokensConfig
from kernels.jagged import gather_rows


@dataclass(frozen=True, kw_only=True, slots=True)
class GEMConfig:
    """A foundation model.

    Args:
        width: width of feature tokens (D).
        layers: number of layers.
        user_layers: the first so many of them see only the user's side (features of user and context, surface, events)
            and run once per request.
        joint: how the other layers treat a history: ``copies``, each impression has its own, which its layers change;
            ``shared``, it stays as the user layers left it, and CLS tokens of the impression read it through keys and
            values that exist once per request.
        members: ensemble members inside the model: each has its own token projections, interaction arms and heads and
            its own loss; tables and sequence arms are shared; the model's probability is the mean over members.
        streams: what differs between event streams, and where they are merged.
        embeddings, tokens, events, match, layer, heads, loss: the parts.
        surfaces: which of them share parameters, and what they weigh in the loss.
    """

    width: int = 64
    layers: int = 2
    user_layers: int = 0
    joint: Literal["copies", "shared"] = "copies"
    members: int = 1
    embeddings: EmbeddingsConfig = field(default_factory=EmbeddingsConfig)
    tokens: TokensConfig = field(default_factory=TokensConfig)
    events: EventsConfig = field(default_factory=EventsConfig)
    match: MatchConfig = field(default_factory=MatchConfig)
    streams: StreamsConfig = field(default_factory=StreamsConfig)
    layer: LayerConfig = field(default_factory=LayerConfig)
    heads: HeadsConfig = field(default_factory=HeadsConfig)
    surfaces: SurfacesConfig = field(default_factory=SurfacesConfig)
    loss: LossConfig = field(default_factory=LossConfig)

    def __post_init__(self) -> None:
        for key in ("width", "layers", "members"):
            if getattr(self, key) < 1:
                raise ValueError(f"model.{key}: must be at least 1, got {getattr(self, key)}")
        if not 0 <= self.user_layers < self.layers:
            raise ValueError(f"model.user_layers: must be at least 0 and below layers, got {self.user_layers}")
        if self.joint not in ("copies", "shared"):
            raise ValueError(f"model.joint: must be copies or shared, got {self.joint!r}")
        merge = self.streams.merge_after
        if merge is not None and merge > (self.user_layers if self.joint == "shared" else self.layers):
            what = "user_layers when the history is shared" if self.joint == "shared" else "layers"
            raise ValueError(f"model.streams.merge_after: must be at most {what}, got {merge}")
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
        table_device: where the tables are; by default where the rest is. On the meta device they are not drawn, which
            ``foundation.parallel.draw`` can do once they are sharded.

    Raises:
        ValueError: an option names something that the schema does not have, or sizes that do not go together.
    """

    task_weights: Tensor

    def __init__(
        self,
        config: GEMConfig,
        schema: Schema,
        table_rows: Mapping[str, int],
        table_device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.config, self.schema = config, schema
        width, members, bias = config.width, config.members, config.layer.bias
        cross, user_layers, layers = config.layer.cross, config.user_layers, config.layers
        event_width = config.layer.sequence.width or width
        sequences = config.streams.seen(schema.sequences)
        names = tuple(sequence.name for sequence in sequences)
        check_names(config.streams, names)
        apart = resolve(config.streams, names, config.layer.sequence, cross, event_width, layers)
        merged = self._merged(apart, event_width)
        self.merge_after = config.streams.merge_after if merged else None
        self.phases = tuple(
            merged if self.merge_after is not None and place >= self.merge_after else apart
            for place in range(layers + 1)
        )
        first, joint = self.phases[0], self.phases[user_layers]
        if config.joint == "shared" and any(not stream.cross.cls_tokens for stream in joint):
            raise ValueError("model.joint: shared histories are read by CLS tokens; set cross.cls_tokens above 0")

        self.embeddings = Embeddings(config.embeddings, schema, table_rows, table_device)
        dims = self.embeddings.dims
        self.tokens = FeatureTokens(config.tokens, schema, dims, width, members)
        self.match = MatchStatistics(config.match, schema)
        self.match_token = nn.Linear(self.match.width, members * width) if self.match.width else None
        self.events = nn.ModuleDict(
            {s.name: EventTokens(config.events, s, dims, e.width) for s, e in zip(sequences, apart, strict=True)}
        )
        self.merge: MergeStreams | None = None
        if merged:
            kept = {s.name: s.cross.cls_tokens if self.merge_after else 0 for s in apart}
            self.merge = MergeStreams(apart, merged[0].width, kept, bias=bias)
        own = len(self.tokens.names) - self.tokens.item_count
        if not (own if user_layers else len(self.tokens.names) + (1 if self.match.width else 0)):
            side = "user or context feature" if user_layers else "feature"
            raise ValueError(f"{schema.source}: features: the model needs at least one {side}")

        self.target: nn.Linear | None = None
        self.own_targets = nn.ModuleDict()
        if self.tokens.item_count:
            aiming = {s for streams in self.phases[user_layers:] for s in streams if s.cross.reads_target}
            inputs = members * self.tokens.item_count * width
            if any(s.width == event_width for s in aiming):
                self.target = nn.Linear(inputs, event_width)
            for stream in sorted(aiming):
                if stream.width != event_width:
                    self.own_targets[stream.name] = nn.Linear(inputs, stream.width)
        joint_tokens = (config.layer.interaction.tokens_out if user_layers else own) + self.tokens.item_count
        joint_tokens += 1 if self.match.width else 0
        self.cls, self.own_cls = self._cls(joint, joint_tokens)
        self.user_cls: FeatureSummary | None = None
        self.own_user_cls = nn.ModuleDict()
        if user_layers:
            self.user_cls, self.own_user_cls = self._cls(first, own)
        stack = []
        count = own if user_layers else joint_tokens
        fresh_starts = (0, user_layers, self.merge_after or 0)
        for place in range(layers):
            if place == user_layers:
                count = joint_tokens
            turn = place - max(start for start in fresh_starts if start <= place)
            shared = config.joint == "shared" and place >= user_layers
            streams = self.phases[place]
            stack.append(
                Layer(config.layer, count, streams, width, event_width, members, place=place, turn=turn, shared=shared)
            )
            count = config.layer.interaction.tokens_out
        self.layers = nn.ModuleList(stack)
        self.feature_summary: FeatureSummary | None = None
        inputs = count
        if config.heads.reads == "summaries":
            inputs = cross.feature_tokens
            self.feature_summary = FeatureSummary(cross.feature_hidden, inputs, count, members, width, width, bias=bias)
        last = self.phases[layers]
        self.sequence_summary = SequenceSummaries(last, width, bias=bias)
        inputs += sum(stream.cross.sequence_tokens for stream in last)
        self.heads = Heads(config.heads, schema, inputs * width, members)
        self.embedding_width = members * self.heads.width
        self.surfaces = Surfaces(config.surfaces, schema)
        weights = torch.tensor([task.weight for task in schema.tasks])
        self.register_buffer("task_weights", weights, persistent=False)

    def forward(self, batch: Batch) -> GEMOutput:
        """Logits of every impression and task."""
        batch = self.surfaces.pool(batch)
        embedded = self.embeddings(batch)
        if self.config.user_layers:
            x, histories, item = self._user(embedded, batch)
        else:
            x = self.tokens(embedded, batch)
            item = x[:, :, x.shape[2] - self.tokens.item_count :]
        targets = self._targets(item, self.phases[self.config.user_layers :])
        if self.match_token is not None:
            token = self.match_token(self.match(batch)).view(x.shape[1], x.shape[0], 1, x.shape[3])
            x = torch.cat([x, token.transpose(0, 1).to(x.dtype)], dim=2)
        if not self.config.user_layers:
            histories = self._histories(embedded, batch)
        histories = self._join(histories, x, batch)
        x, histories = self._run(range(self.config.user_layers, self.config.layers), x, histories, targets)
        logits, trunk = self.heads(self._read(x, histories, targets), self._surface(batch))
        if embedded.first_order is not None:
            request, item_weights = embedded.first_order
            logits = logits + gather_rows(request, batch.request_index, rising=True) + item_weights
        return _combine(logits, trunk)

    def _histories(self, embedded: Embedded, batch: Batch) -> dict[str, History]:
        """The streams of the requests as the first layer sees them."""
        events: dict[str, Events] = {name: tokens(embedded, batch) for name, tokens in self.events.items()}
        if self.merge is not None and self.merge_after == 0:
            events = {MERGED: self.merge(events)}
        return {name: History(own) for name, own in events.items()}

    def _user(self, embedded: Embedded, batch: Batch) -> tuple[Tensor, dict[str, History], Tensor]:
        """User layers: tokens of the impressions behind them ``[M, N, n, D]``, histories, the item's tokens."""
        x, item = self.tokens.sides(embedded, batch)
        cls = by_stream(self.phases[0], self.user_cls, self.own_user_cls, x)
        histories = {name: _append(own, cls[name]) for name, own in self._histories(embedded, batch).items()}
        targets = self._targets(x[:, :, :0], self.phases[: self.config.user_layers])
        x, histories = self._run(range(self.config.user_layers), x, histories, targets)
        if self.merge is not None and self.merge_after == self.config.user_layers:
            histories = self._merge(histories)
        own = gather_rows(x.transpose(0, 1), batch.request_index, rising=True).transpose(0, 1)
        return torch.cat([own, item.to(own.dtype)], dim=2), histories, item

    def _join(self, histories: dict[str, History], x: Tensor, batch: Batch) -> dict[str, History]:
        """From histories of requests to those of their impressions, whose features add to the CLS tokens."""
        streams, index = self.phases[self.config.user_layers], batch.request_index
        totals = dict(batch.impression_events)
        if self.merge is not None:
            totals[MERGED] = sum(totals.values())
        cls = by_stream(streams, self.cls, self.own_cls, x)
        joined = {}
        for stream in streams:
            own, events = cls[stream.name], histories[stream.name].events
            if own is not None and self.config.user_layers:
                events, before = events.drop_last(stream.cross.cls_tokens)
                own = own + gather_rows(before, index).to(own.dtype)
            if self.config.joint == "shared":
                joined[stream.name] = History(events, own, index)
            else:
                joined[stream.name] = _append(History(events.gather(index, totals[stream.name])), own)
        return joined

    def _run(
        self, places: range, x: Tensor, histories: dict[str, History], targets: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, History]]:
        """Some of the layers, and the merge where it falls between them."""
        summaries: Tensor | None = None
        for place in places:
            if self.merge is not None and place == self.merge_after and place > places.start:
                histories = self._merge(histories)
            own = {stream.name: targets[stream.name] for stream in self.phases[place]}
            x, histories, summaries = self.layers[place](x, histories, own, summaries)
        if self.merge is not None and self.merge_after == self.config.layers == places.stop:
            histories = self._merge(histories)
        return x, histories

    def _merge(self, histories: dict[str, History]) -> dict[str, History]:
        assert self.merge is not None
        return {MERGED: History(self.merge({name: history.events for name, history in histories.items()}))}

    def loss(self, output: GEMOutput, batch: Batch) -> LossOutput:
        """The training loss, see ``foundation.model.loss.masked_loss``."""
        logits = output.logits if output.member_logits is None else output.member_logits
        weight = self.surfaces.weight(self._surface(batch))
        return masked_loss(logits, batch, self.task_weights, self.config.loss, weight)

    def dense_parameters(self) -> Iterator[nn.Parameter]:
        """All parameters but the tables."""
        return (p for name, p in self.named_parameters() if not name.startswith("embeddings."))

    def _merged(self, apart: tuple[Stream, ...], event_width: int) -> tuple[Stream, ...]:
        """The stream into which the others are merged, if they are."""
        config = self.config
        merge_after = config.streams.merge_after
        if merge_after is None or not apart:
            return ()
        cross = config.layer.cross
        if merge_after:  # CLS tokens of all streams come along
            cross = replace(cross, cls_tokens=sum(stream.cross.cls_tokens for stream in apart))
        return resolve(config.streams, [MERGED], config.layer.sequence, cross, event_width, config.layers)

    def _cls(self, streams: tuple[Stream, ...], tokens: int) -> tuple[FeatureSummary | None, nn.ModuleDict]:
        """What makes CLS tokens: one module for streams of the usual sizes, one each for others."""
        config = self.config
        cross, usual = config.layer.cross, config.layer.sequence.width or config.width
        base: FeatureSummary | None = None
        own = nn.ModuleDict()
        for stream in streams:
            count = stream.cross.cls_tokens
            plain = (stream.width, count) == (usual, cross.cls_tokens)
            if not count or (plain and base is not None):
                continue
            module = FeatureSummary(
                cross.feature_hidden, count, tokens, config.members, config.width, stream.width, bias=config.layer.bias
            )
            if plain:
                base = module
            else:
                own[stream.name] = module
        return base, own

    def surface_parameters(self) -> dict[str, int]:
        """Names of parameters with a part for each surface, and the dim along which these lie, as many for each."""
        dims = {
            "tokens.surface": 0,
            "heads.adapters.down.weight": 2,
            "heads.adapters.down.bias": 2,
            "heads.adapters.up.weight": 1,
            "heads.surface_bias": 1,
        }
        return {name: dims[name] for name, _ in self.named_parameters() if name in dims}

    def _targets(self, item: Tensor, phases: tuple[tuple[Stream, ...], ...]) -> dict[str, Tensor]:
        """A vector of the candidate for each stream ``[N, E]`` from its tokens ``[M, N, n, D]``; 0 where not needed."""
        rows = item.transpose(0, 1).flatten(1)
        usual = self.config.layer.sequence.width or self.config.width
        known = item.shape[2] > 0
        base = self.target(rows) if known and self.target is not None else item.new_zeros((item.shape[1], usual))
        targets = {}
        for stream in {s.name: s for streams in phases for s in streams}.values():
            if stream.width == usual:
                targets[stream.name] = base
            elif known and stream.name in self.own_targets:
                targets[stream.name] = self.own_targets[stream.name](rows)
            else:
                targets[stream.name] = item.new_zeros((item.shape[1], stream.width))
        return targets

    def _read(self, x: Tensor, histories: Mapping[str, History], targets: Mapping[str, Tensor]) -> Tensor:
        """What the heads read: ``[M, N, tokens * D]``."""
        members = x.shape[0]
        if self.feature_summary is not None:
            x = self.feature_summary(x).unsqueeze(0)
        summaries = self.sequence_summary(histories, targets, x)
        return torch.cat([x, summaries.to(x.dtype).expand(members, -1, -1, -1)], dim=2).flatten(2)

    def _surface(self, batch: Batch) -> Tensor:
        return batch.surface.index_select(0, batch.request_index)


def _append(history: History, cls: Tensor | None) -> History:
    """Puts CLS tokens behind each sequence."""
    if cls is None:
        return history
    return history._replace(events=history.events.append(cls.to(history.events.values.dtype)))


def _combine(logits: Tensor, trunk: Tensor) -> GEMOutput:
    """One logit from those of the members: that of their mean probability."""
    if logits.shape[0] == 1:
        return GEMOutput(logits[0], trunk[0])
    positive = torch.logsumexp(nn.functional.logsigmoid(logits.float()), dim=0)
    negative = torch.logsumexp(nn.functional.logsigmoid(-logits.float()), dim=0)
    return GEMOutput(positive - negative, trunk.transpose(0, 1).flatten(1), logits)
