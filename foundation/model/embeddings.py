"""Embedding tables: TorchRec collections over the one jagged tensor of a batch.

Every feature, sequence attribute and candidate of a table is looked up in the same `EmbeddingCollection`, all in one
pass over one ``KeyedJaggedTensor`` of stride R. TorchRec wants one dim per collection, so tables are grouped by dim.
A table that only multi-valued request features use goes to an `EmbeddingBagCollection`, which pools inside the
lookup. Collections are read by feature name only: sharded ones keep no order.

Legend: R requests, N impressions, T events of one sequence, K tasks, C = table dim.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from foundation.data.batch import Batch, sparse_keys
from foundation.data.schema import UNKNOWN_ROW, Feature, Schema
from kernels.jagged import offsets_from_lengths, segment_mean, segment_sum


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddingsConfig:
    """How tables start and how they are read.

    Args:
        dim: dim of every table; 0: what the schema says.
        dims: dim by table name, before ``dim``.
        init_std: standard deviation of the rows at the start.
        init_stds: the same by table name. Small values keep rare ids near one another; tables of few, frequent ids
            (what was done, where) learn faster from values that set their ids apart.
        pooling: how the values of a multi-valued feature become one; with weights ``mean`` divides by their sum.
        id_dropout: in training, the share of ids replaced by "unknown", by feature name or ``sequence.attribute``. It
            trains the unknown row and keeps single ids from being learned by heart.
        first_order: each id also has one weight per task that is added to the task's logit (a linear model beside the
            deep one), in tables of its own; features of requests and items only, not of events.
        request_bags: pool multi-valued request features in the lookup where their tables allow it.
    """

    dim: int = 0
    dims: dict[str, int] = field(default_factory=dict)
    init_std: float = 0.05
    init_stds: dict[str, float] = field(default_factory=dict)
    pooling: Literal["sum", "mean"] = "mean"
    id_dropout: dict[str, float] = field(default_factory=dict)
    first_order: bool = False
    request_bags: bool = True

    def __post_init__(self) -> None:
        for key, dim in {"dim": self.dim or 4, **{f"dims.{table}": dim for table, dim in self.dims.items()}}.items():
            if dim < 4 or dim % 4:
                raise ValueError(f"embeddings.{key}: must be a multiple of 4 (lookups move 16 bytes), got {dim}")
        for key, std in {"init_std": self.init_std, **{f"init_stds.{t}": s for t, s in self.init_stds.items()}}.items():
            if std < 0:
                raise ValueError(f"embeddings.{key}: must not be negative, got {std}")
        if self.pooling not in ("sum", "mean"):
            raise ValueError(f"embeddings.pooling: must be sum or mean, got {self.pooling!r}")
        for key, rate in self.id_dropout.items():
            if not 0 <= rate < 1:
                raise ValueError(f"embeddings.id_dropout.{key}: must be in [0, 1), got {rate}")


class Embedded(NamedTuple):
    """What the tables hold for a batch, by feature name or ``sequence.attribute``.

    ``request[name]`` ``[R, C]``, ``item[name]`` ``[N, C]``, ``events[key]`` ``[T, C]``. ``first_order`` holds the
    sums of first-order weights of requests ``[R, K]`` and items ``[N, K]``, or is ``None``.
    """

    request: dict[str, Tensor]
    item: dict[str, Tensor]
    events: dict[str, Tensor]
    first_order: tuple[Tensor, Tensor] | None


class Embeddings(nn.Module):
    """All tables of the foundation model.

    ``ec`` holds the `EmbeddingCollection` of each dim (``dim16``, ...), ``ebc`` the bags (or ``None``),
    ``first_order`` the linear weights (or ``None``).

    Args:
        table_rows: rows of each table, the reserved ones included.
        device: of the tables; by default the current one. On the meta device they are not drawn.

    Raises:
        ValueError: ``id_dropout``, ``dims`` or ``init_stds`` names what the schema does not have; the message lists
        what it has.
    """

    def __init__(
        self,
        config: EmbeddingsConfig,
        schema: Schema,
        table_rows: Mapping[str, int],
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.request_features = tuple(f for f in schema.request_features if f.table is not None)
        self.item_features = tuple(f for f in schema.item_features if f.table is not None)
        self.event_keys = tuple(s.key(a.name) for s in schema.sequences for a in s.attributes)
        features = (*self.request_features, *self.item_features)
        self.tables: dict[str, str] = {f.name: str(f.table) for f in features}
        self.tables |= {s.key(a.name): a.table for s in schema.sequences for a in s.attributes}
        unknown = config.id_dropout.keys() - self.tables.keys()
        if unknown:
            known = ", ".join(self.tables)
            raise ValueError(f"embeddings.id_dropout.{min(unknown)}: no such feature with ids; known: {known}")
        for option in ("dims", "init_stds"):
            odd = getattr(config, option).keys() - {table.name for table in schema.tables}
            if odd:
                known = ", ".join(table.name for table in schema.tables)
                raise ValueError(f"embeddings.{option}.{min(odd)}: no such table; known: {known}")
        self.order = sparse_keys(schema)
        dims = {table.name: config.dims.get(table.name, config.dim or table.dim) for table in schema.tables}
        self.dims: dict[str, int] = {key: dims[table] for key, table in self.tables.items()}

        keys_of = _keys_of(self.tables)
        bags = _bag_tables(self.request_features, keys_of) if config.request_bags else set()
        by_dim: dict[int, list[EmbeddingConfig]] = defaultdict(list)
        for table, keys in keys_of.items():
            if table not in bags:
                by_dim[dims[table]].append(_table(table, table_rows[table], dims[table], keys))
        self.ec = nn.ModuleDict(
            {f"dim{dim}": EmbeddingCollection(by_dim[dim], device=device) for dim in sorted(by_dim)}
        )
        self.ebc = _bag_collection(config, dims, table_rows, {t: keys_of[t] for t in sorted(bags)}, device)
        self.bag_features = tuple(f.name for f in self.request_features if f.table in bags)
        tasks = len(schema.tasks)
        self.tasks = tasks
        self._prepared: list[tuple[KeyedJaggedTensor, KeyedJaggedTensor]] = []
        self.first_order: EmbeddingCollection | None = None
        if config.first_order:
            width = -(-tasks // 4) * 4  # lookups want dims that are multiples of 4
            first = _keys_of({f.name: str(f.table) for f in features})
            self.first_order = EmbeddingCollection(
                [_table(f"first_order_{t}", table_rows[t], width, keys) for t, keys in first.items()], device=device
            )
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws the rows anew; first-order weights start at 0."""
        for name, weight in self.named_parameters():
            std = self.std_of(name)
            weight.normal_(0.0, std) if std else weight.zero_()

    def std_of(self, name: str) -> float:
        """Standard deviation at the start of a table by its parameter's name."""
        if "first_order." in name:
            return 0.0
        return self.config.init_stds.get(name.split(".")[-2], self.config.init_std)

    def forward(self, batch: Batch) -> Embedded:
        """Looks up and pools all ids of a batch."""
        sparse = next((ids for own, ids in self._prepared if own is batch.sparse), None)
        if sparse is None:
            sparse = self._ids(batch)
        else:
            self._prepared = [pair for pair in self._prepared if pair[0] is not batch.sparse]
        # All lookups start before the rows of the first are waited for.
        looked: dict[str, dict[str, JaggedTensor]] = {dim: own(sparse) for dim, own in self.ec.items()}
        bags = None if self.ebc is None else self.ebc(sparse)
        values: dict[str, Tensor] = {}
        for dim, found in looked.items():
            # A sharded collection answers by key only: it can be neither searched nor iterated.
            keys = [key for key in self.tables if f"dim{self.dims[key]}" == dim and key not in self.bag_features]
            values |= {key: found[key].values() for key in keys}
        request = {f.name: self._pooled(f, values, sparse, batch) for f in self.request_features if f.name in values}
        item = {f.name: self._pooled(f, values, sparse, batch) for f in self.item_features}
        if bags is not None:
            request |= {name: bags[name][: batch.num_requests] for name in self.bag_features}
        events = {key: values[key] for key in self.event_keys}
        return Embedded(request, item, events, self._first_order(sparse, batch))

    def prepare(self, batch: Batch) -> KeyedJaggedTensor:
        """What will be looked up for a batch, drawn before its turn; the forward pass of that batch then uses it."""
        ids = self._ids(batch)
        self._prepared.append((batch.sparse, ids))
        return ids

    def forget(self) -> None:
        """Drops what was prepared."""
        self._prepared = []

    def _ids(self, batch: Batch) -> KeyedJaggedTensor:
        if batch.num_requests == 0:
            return self._one_empty_request(batch.sparse)  # a jagged tensor of stride 0 cannot be looked up
        if self.training and self.config.id_dropout:
            return self._drop_ids(batch.sparse)
        return batch.sparse

    def _first_order(self, sparse: KeyedJaggedTensor, batch: Batch) -> tuple[Tensor, Tensor] | None:
        if self.first_order is None:
            return None
        looked: dict[str, JaggedTensor] = self.first_order(sparse)
        features = (*self.request_features, *self.item_features)
        values = {f.name: looked[f.name].values()[:, : self.tasks] for f in features}
        sides = ((self.request_features, batch.num_requests), (self.item_features, batch.num_impressions))
        request, item = (
            sum((self._pooled(f, values, sparse, batch) for f in side), batch.labels.new_zeros(rows, self.tasks))
            for side, rows in sides
        )
        return request, item

    def _pooled(
        self, feature: Feature, values: Mapping[str, Tensor], sparse: KeyedJaggedTensor, batch: Batch
    ) -> Tensor:
        """One row per request or impression."""
        rows = values[feature.name]
        if feature.kind != "multi":
            return rows
        if feature.side == "item":
            lengths = batch.item_multi_lengths[feature.name]
        else:
            lengths = sparse[feature.name].lengths()[: batch.num_requests]
        offsets = offsets_from_lengths(lengths)
        if feature.weights is None:
            return (segment_mean if self.config.pooling == "mean" else segment_sum)(rows, offsets)
        weight = batch.sparse_weights[feature.name].to(rows.dtype)[:, None]
        total = segment_sum(rows * weight, offsets)
        if self.config.pooling == "sum":
            return total
        divisor = segment_sum(weight, offsets)
        return total / torch.where(divisor.abs() < 1e-6, 1.0, divisor)

    def _drop_ids(self, sparse: KeyedJaggedTensor) -> KeyedJaggedTensor:
        assert tuple(sparse.keys()) == self.order
        values = sparse.values()
        drawn = torch.rand(values.shape, device=values.device).split(sparse.length_per_key())
        parts = [  # rates stay numbers: a tensor of them would have to be copied to the device
            torch.where(draw < self.config.id_dropout[key], UNKNOWN_ROW, ids) if key in self.config.id_dropout else ids
            for key, draw, ids in zip(self.order, drawn, values.split(sparse.length_per_key()), strict=True)
        ]
        return KeyedJaggedTensor(
            keys=list(self.order),
            values=torch.cat(parts),
            lengths=sparse.lengths(),
            stride=sparse.stride(),
            length_per_key=sparse.length_per_key(),
            offset_per_key=sparse.offset_per_key(),
        )

    def _one_empty_request(self, sparse: KeyedJaggedTensor) -> KeyedJaggedTensor:
        values = sparse.values()
        return KeyedJaggedTensor(
            keys=list(self.order), values=values, lengths=values.new_zeros(len(self.order)), stride=1
        )


def _keys_of(tables: Mapping[str, str]) -> dict[str, list[str]]:
    """Keys by table."""
    keys: dict[str, list[str]] = defaultdict(list)
    for key, table in tables.items():
        keys[table].append(key)
    return dict(keys)


def _bag_tables(request_features: Iterable[Feature], keys_of: Mapping[str, list[str]]) -> set[str]:
    """Tables that only unweighted multi-valued request features use.

    Bags with per-id weights are left out: their mean pooling differs between devices.
    """
    able = {f.name for f in request_features if f.kind == "multi" and f.weights is None}
    return {table for table, keys in keys_of.items() if able.issuperset(keys)}


def _table(name: str, rows: int, dim: int, keys: list[str]) -> EmbeddingConfig:
    return EmbeddingConfig(name=name, num_embeddings=rows, embedding_dim=dim, feature_names=list(keys))


def _bag_collection(
    config: EmbeddingsConfig,
    dims: Mapping[str, int],
    table_rows: Mapping[str, int],
    keys_of: Mapping[str, list[str]],
    device: torch.device | None,
) -> EmbeddingBagCollection | None:
    if not keys_of:
        return None
    return EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=table,
                num_embeddings=table_rows[table],
                embedding_dim=dims[table],
                feature_names=list(keys),
                pooling=PoolingType.MEAN if config.pooling == "mean" else PoolingType.SUM,
            )
            for table, keys in keys_of.items()
        ],
        device=device,
    )
