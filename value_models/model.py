"""The value model: a small ranking network whose user side runs once per request.

Shapes: R requests, N impressions, K tasks, D_r and D_c widths of the request and the candidate vector,
W width of the joint layer, X rank of the cross term. Inputs are the named padded tensors of
``foundation.data.encoding.model_inputs``; the same names are the inputs of the exported graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foundation.data.schema import Schema
from value_models.fields import Fields, Tables, module_key, used_tables
from value_models.history import Events, Pooling, TargetAttention


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueModelConfig:
    """Sizes of a value model.

    Attributes:
        embedding_dim: embedding dim of every table; None takes each table's ``dim`` from the schema.
        table_dims: embedding dim by table name, above ``embedding_dim``.
        event_dim: width of an event vector.
        pooling_heads: learned-query attention heads over a history, per request.
        target_heads: attention heads of a candidate over a history.
        request_hidden: widths of the request tower, which runs R times.
        cross_rank: rank of the request x candidate product; 0 leaves it out.
        hidden: widths of the joint layers, which run N times.
        dropout: share of joint units dropped in training.
        id_dropout: share of ids read as "unknown" in training, by table name.
        init_std: standard deviation of the initial embeddings.
    """

    embedding_dim: int | None = None
    table_dims: dict[str, int] = field(default_factory=dict)
    event_dim: int = 32
    pooling_heads: int = 2
    target_heads: int = 2
    request_hidden: tuple[int, ...] = (128,)
    cross_rank: int = 32
    hidden: tuple[int, ...] = (256, 128)
    dropout: float = 0.1
    id_dropout: dict[str, float] = field(default_factory=dict)
    init_std: float = 0.01

    def __post_init__(self) -> None:
        sizes: dict[str, int] = {
            "event_dim": self.event_dim,
            "pooling_heads": self.pooling_heads,
            "target_heads": self.target_heads,
            **{f"table_dims.{name}": dim for name, dim in self.table_dims.items()},
            **{f"request_hidden[{i}]": width for i, width in enumerate(self.request_hidden)},
            **{f"hidden[{i}]": width for i, width in enumerate(self.hidden)},
        }
        if self.embedding_dim is not None:
            sizes["embedding_dim"] = self.embedding_dim
        for key, size in sizes.items():
            if size < 1:
                raise ValueError(f"{key} must be at least 1, got {size}")
        if not self.hidden:
            raise ValueError("hidden needs at least one width")
        if self.cross_rank < 0:
            raise ValueError(f"cross_rank must not be negative, got {self.cross_rank}")
        if self.init_std < 0:
            raise ValueError(f"init_std must not be negative, got {self.init_std}")
        for key, share in {
            "dropout": self.dropout,
            **{f"id_dropout.{name}": share for name, share in self.id_dropout.items()},
        }.items():
            if not 0.0 <= share < 1.0:
                raise ValueError(f"{key} must be in [0, 1), got {share}")

    def dims(self, schema: Schema) -> dict[str, int]:
        """Embedding dim of every used table. Raises ValueError for a table name that the schema lacks."""
        names = used_tables(schema)
        for key, given in (("table_dims", self.table_dims), ("id_dropout", self.id_dropout)):
            for name in given:
                if name not in names:
                    raise ValueError(f"{key}.{name}: no feature reads such a table; used: {', '.join(names)}")
        default = self.embedding_dim
        return {name: self.table_dims.get(name, default or schema.table(name).dim) for name in names}


class ValueModel(nn.Module):
    """Ranks N candidates of R requests: logits ``[N, K]``.

    The request side (user and context fields, pooled histories, a small tower) and its share of the first joint
    layer are computed R times; candidates read it by Gather. The first joint layer is the usual dense layer over
    the concatenation of both sides, written as a sum of its two halves, so nothing is lost by the split.

    Args:
        config: sizes.
        schema: features, histories and tasks.
        table_rows: rows of every table, from the encoder.
    """

    def __init__(self, config: ValueModelConfig, schema: Schema, table_rows: Mapping[str, int]) -> None:
        super().__init__()
        self.config = config
        self.task_names = schema.task_names
        self.sequences = schema.sequences
        self.tables = Tables(config.dims(schema), table_rows, config.id_dropout, config.init_std)
        self.request_fields = Fields(schema.request_features, "dense.request", self.tables)
        self.item_fields = Fields(schema.item_features, "dense.item", self.tables)
        width = config.event_dim
        self.events = nn.ModuleDict({module_key(s.name): Events(s, width, self.tables) for s in schema.sequences})
        pooling = {
            module_key(s.name): Pooling(s, schema.request_features, width, config.pooling_heads)
            for s in schema.sequences
        }
        item_width = self.item_fields.width
        attention = {
            module_key(s.name): TargetAttention(s, schema.item_features, item_width, width, config.target_heads)
            for s in schema.sequences
            if item_width
        }
        self.pooling = nn.ModuleDict(pooling)
        self.attention = nn.ModuleDict(attention)
        base_width = self.request_fields.width + sum(p.out_width for p in pooling.values())
        candidate_width = item_width + sum(a.out_width for a in attention.values())
        tower_width = config.request_hidden[-1] if config.request_hidden and base_width else 0
        self.tower = mlp(base_width, config.request_hidden, config.dropout) if tower_width else None
        request_width = base_width + tower_width
        first = config.hidden[0]
        self.from_request = nn.Linear(request_width, first) if request_width else None
        self.from_candidate = nn.Linear(candidate_width, first) if candidate_width else None
        rank = config.cross_rank if request_width and candidate_width else 0
        self.cross_request = nn.Linear(request_width, rank) if rank else None
        self.cross_candidate = nn.Linear(candidate_width, rank) if rank else None
        self.from_cross = nn.Linear(rank, first, bias=False) if rank else None
        self.dropout = nn.Dropout(config.dropout)
        self.joint = mlp(first, config.hidden[1:], config.dropout)
        self.heads = nn.Linear(config.hidden[-1], len(self.task_names))

    @property
    def feature_dim(self) -> int:
        """Width of :meth:`features`."""
        return self.config.hidden[-1]

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Logits float32 ``[N, K]``. The logit of a task with ``given`` is conditional on that task's event."""
        logits: Tensor = self.heads(self.features(inputs))
        return logits

    def features(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """The last shared representation ``[N, hidden[-1]]``, which the task heads read."""
        index = inputs["request_index"]
        events = {s.name: self.events[module_key(s.name)](inputs, self.tables) for s in self.sequences}
        request = self._request(inputs, events)
        candidate = self._candidate(inputs, events, index)
        hidden: Tensor | None = None
        if request is not None:
            assert self.from_request is not None
            hidden = self.from_request(request).index_select(0, index)
        if candidate is not None:
            assert self.from_candidate is not None
            part = self.from_candidate(candidate)
            hidden = part if hidden is None else hidden + part
        if self.from_cross is not None:
            assert self.cross_request is not None and self.cross_candidate is not None
            product = self.cross_request(request).index_select(0, index) * self.cross_candidate(candidate)
            hidden = hidden + self.from_cross(product)
        assert hidden is not None, "a schema has at least one feature"
        joint: Tensor = self.joint(self.dropout(F.silu(hidden)))
        return joint

    def _request(self, inputs: Mapping[str, Tensor], events: Mapping[str, tuple[Tensor, Tensor]]) -> Tensor | None:
        """The request vector ``[R, D_r]``: fields, pooled histories, tower."""
        fields = self.request_fields(inputs, self.tables)
        parts = [] if fields is None else [fields]
        parts += [self.pooling[module_key(s.name)](inputs, *events[s.name]) for s in self.sequences]
        if not parts:
            return None
        base = torch.cat(parts, dim=1)
        return base if self.tower is None else torch.cat([base, self.tower(base)], dim=1)

    def _candidate(
        self, inputs: Mapping[str, Tensor], events: Mapping[str, tuple[Tensor, Tensor]], index: Tensor
    ) -> Tensor | None:
        """The candidate vector ``[N, D_c]``: item fields, and the request's histories as this candidate sees them."""
        fields = self.item_fields(inputs, self.tables)
        if fields is None:
            return None
        attended = [self.attention[module_key(s.name)](inputs, fields, *events[s.name], index) for s in self.sequences]
        return torch.cat([fields, *attended], dim=1)


def mlp(width: int, hidden: tuple[int, ...], dropout: float) -> nn.Sequential:
    """Linear, SiLU, dropout for each width of ``hidden``; the identity when ``hidden`` is empty."""
    layers: list[nn.Module] = []
    for size in hidden:
        layers += [nn.Linear(width, size), nn.SiLU(), nn.Dropout(dropout)]
        width = size
    return nn.Sequential(*layers)
