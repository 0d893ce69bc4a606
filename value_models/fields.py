"""Embedding tables and the fields of one side (request or item) as one vector per row.

Shapes: M rows of the side (R requests or N impressions), L ids per list, D a table's dim.
Everything here exports to ONNX as Gather and masked sums.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from foundation.data.schema import FIRST_ROW, UNKNOWN_ROW, Feature, Schema


def module_key(name: str) -> str:
    """The key of a schema name in a ``ModuleDict``, which refuses names of its own methods such as ``type``."""
    return f"{name}_"


class Tables(nn.Module):
    """One ``nn.Embedding`` per id space, shared by every feature and history that names it.

    Args:
        dims: embedding dim by table name.
        rows: rows by table name, the reserved rows 0 (missing) and 1 (unknown) included.
        id_dropout: in training, the probability that an id is read as "unknown", by table name.
        init_std: standard deviation of the initial weights.
    """

    def __init__(
        self,
        dims: Mapping[str, int],
        rows: Mapping[str, int],
        id_dropout: Mapping[str, float] | None = None,
        init_std: float = 0.01,
    ) -> None:
        super().__init__()
        self.id_dropout = dict(id_dropout or {})
        self.embeddings = nn.ModuleDict()
        for name, dim in dims.items():
            self.embeddings[module_key(name)] = nn.Embedding(rows[name], dim)
            nn.init.normal_(self.weight(name), std=init_std)

    def weight(self, table: str) -> nn.Parameter:
        """The weights of a table, float32 ``[rows, D]``."""
        embedding = self.embeddings[module_key(table)]
        assert isinstance(embedding, nn.Embedding)
        return cast(nn.Parameter, embedding.weight)

    def sparse_gradients(self, on: bool) -> None:
        """Whether backward makes a gradient of the rows that were read only, for optimizers that take such."""
        for embedding in self.embeddings.values():
            assert isinstance(embedding, nn.Embedding)
            embedding.sparse = on

    def dim(self, table: str) -> int:
        """The embedding dim D of a table."""
        return self.weight(table).shape[1]

    def forward(self, table: str, ids: Tensor) -> Tensor:
        """Embeddings ``[..., D]`` of int64 ids ``[...]`` of one table; see :meth:`lookup`."""
        return self.lookup((table,), ids.unsqueeze(-1))[0]

    def lookup(self, tables: Sequence[str], ids: Tensor) -> list[Tensor]:
        """Embeddings ``[..., D]`` of each column of int64 ``ids [..., F]``, column f from ``tables[f]``.

        An id outside its table reads the "unknown" row, inside an exported graph too: a negative index would
        otherwise wrap around to another id's row. All columns are checked at once, which keeps graphs small.
        """
        rows = torch.tensor([self.weight(table).shape[0] for table in tables], device=ids.device)
        ids = torch.where((ids >= 0) & (ids < rows), ids, UNKNOWN_ROW)
        rates = [self.id_dropout.get(table, 0.0) for table in tables]
        if self.training and any(rates):
            drop = torch.rand(ids.shape, device=ids.device) < torch.tensor(rates, device=ids.device)
            ids = torch.where(drop & (ids >= FIRST_ROW), UNKNOWN_ROW, ids)
        return [
            self.embeddings[module_key(table)](column) for table, column in zip(tables, ids.unbind(-1), strict=True)
        ]


def length_mask(lengths: Tensor, size: int) -> Tensor:
    """True where a left-aligned list ``[M, size]`` of the given int64 ``lengths [M]`` holds a value."""
    return torch.arange(size, device=lengths.device).unsqueeze(0) < lengths.unsqueeze(1)


def masked_mean(values: Tensor, weights: Tensor) -> Tensor:
    """Weighted mean ``[M, D]`` of ``values [M, L, D]`` by ``weights [M, L]``; zeros where the weights are all 0."""
    total = (values * weights.unsqueeze(-1)).sum(1)
    return total / weights.abs().sum(1, keepdim=True).clamp(min=1e-6)


class Fields(nn.Module):
    """The features of one side as one vector per row: embeddings of ids, means of lists, then the dense columns.

    Args:
        schema: for the tables of the features.
        features: the features of the side, in schema order.
        dense_name: the input that holds the side's dense columns, for example ``dense.item``.
        tables: the embedding tables, shared, not owned.
    """

    def __init__(self, features: tuple[Feature, ...], dense_name: str, tables: Tables) -> None:
        super().__init__()
        self.categorical = tuple(f for f in features if f.kind == "categorical")
        self.multi = tuple(f for f in features if f.kind == "multi")
        self.dense_name = dense_name
        self.dense_width = sum(f.dim for f in features if f.kind in ("dense", "embedding"))
        embedded = sum(tables.dim(str(f.table)) for f in (*self.categorical, *self.multi))
        self.width = self.dense_width + embedded

    def forward(self, inputs: Mapping[str, Tensor], tables: Tables) -> Tensor | None:
        """The side's vector, float32 ``[M, width]``; None where the side has no features."""
        parts = self._single(inputs, tables) + [self._pooled(f, inputs, tables) for f in self.multi]
        if self.dense_width:
            parts.append(inputs[self.dense_name])
        return torch.cat(parts, dim=1) if parts else None

    def _single(self, inputs: Mapping[str, Tensor], tables: Tables) -> list[Tensor]:
        if not self.categorical:
            return []
        ids = torch.stack([inputs[f.name] for f in self.categorical], dim=1)
        return tables.lookup([str(f.table) for f in self.categorical], ids)

    def _pooled(self, feature: Feature, inputs: Mapping[str, Tensor], tables: Tables) -> Tensor:
        vectors: Tensor = tables(str(feature.table), inputs[feature.name])
        mask = length_mask(inputs[f"{feature.name}.length"], feature.max_length).to(vectors.dtype)
        if feature.weights is not None:
            mask = mask * inputs[f"{feature.name}.weight"]
        return masked_mean(vectors, mask)


def used_tables(schema: Schema) -> tuple[str, ...]:
    """Names of the tables that some feature or history reads, in schema order."""
    used = {f.table for f in schema.features}
    used |= {a.table for s in schema.sequences for a in s.attributes}
    return tuple(t.name for t in schema.tables if t.name in used)
