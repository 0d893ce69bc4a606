"""Feature tokens: from looked-up rows and numbers to vectors of one width.

Legend: M ensemble members, R requests, N impressions, F tokens, D width, C table dim; B rows of one side (R or N),
f features of one dim.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from foundation.data.batch import Batch
from foundation.data.schema import Feature, Schema
from foundation.model.embeddings import Embedded
from kernels.jagged import gather_rows


@dataclass(frozen=True, kw_only=True, slots=True)
class TokensConfig:
    """How inputs become tokens.

    Args:
        dense_tokens: tokens made from all dense numbers of a side (request or item); each embedding feature has its
            own.
        surface_token: a learned token of the row's surface.
        project_equal: project also the rows of tables whose dim is the width already; otherwise they are tokens as they
            are, the same for all ensemble members.
        dropout: share of token elements dropped in training.
    """

    dense_tokens: int = 1
    surface_token: bool = True
    project_equal: bool = True
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.dense_tokens < 1:
            raise ValueError(f"tokens.dense_tokens: must be at least 1, got {self.dense_tokens}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"tokens.dropout: must be in [0, 1), got {self.dropout}")


class FeatureTokens(nn.Module):
    """One token per feature with ids, per group of dense numbers and for the surface: ``[M, N, F, D]``.

    Tokens of requests come first and are made R times, then handed to their impressions. ``names`` lists the tokens.
    """

    def __init__(self, config: TokensConfig, schema: Schema, dims: Mapping[str, int], width: int, members: int) -> None:
        super().__init__()
        self.request = _SideTokens(config, schema.request_features, dims, width, members)
        self.item = _SideTokens(config, schema.item_features, dims, width, members)
        self.surface: nn.Parameter | None = None
        surface: tuple[str, ...] = ()
        if config.surface_token:
            rows = len(schema.surface_names)
            self.surface = nn.Parameter(torch.randn(rows, members, 1, width) * width**-0.5)
            surface = ("surface",)
        self.names = (*self.request.names, *surface, *self.item.names)
        self.item_count = len(self.item.names)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, embedded: Embedded, batch: Batch) -> Tensor:
        """Tokens ``[M, N, F, D]``; the last ``item_count`` are the item's."""
        request, item = self._sides(embedded, batch)
        tokens = torch.cat([gather_rows(request, batch.request_index, rising=True), item], dim=2)
        return self.dropout(tokens.transpose(0, 1))

    def sides(self, embedded: Embedded, batch: Batch) -> tuple[Tensor, Tensor]:
        """The request's tokens ``[M, R, F_r, D]`` and the item's ``[M, N, F_i, D]``."""
        request, item = self._sides(embedded, batch)
        return self.dropout(request.transpose(0, 1)), self.dropout(item.transpose(0, 1))

    def _sides(self, embedded: Embedded, batch: Batch) -> tuple[Tensor, Tensor]:
        request = self.request(embedded.request, batch.request_dense)
        if self.surface is not None:
            request = torch.cat([request, gather_rows(self.surface, batch.surface).to(request.dtype)], dim=2)
        return request, self.item(embedded.item, batch.item_dense)


class _SideTokens(nn.Module):
    """Tokens ``[rows, M, F, D]`` of the request's or the item's features."""

    dense_places: Tensor

    def __init__(
        self,
        config: TokensConfig,
        features: tuple[Feature, ...],
        dims: Mapping[str, int],
        width: int,
        members: int,
    ) -> None:
        super().__init__()
        self.members, self.width = members, width
        by_dim: dict[int, list[str]] = defaultdict(list)
        for feature in features:
            if feature.table is not None:
                by_dim[dims[feature.name]].append(feature.name)
        self.groups = {f"dim{dim}": tuple(names) for dim, names in sorted(by_dim.items())}
        self.projections = nn.ParameterDict(
            {
                f"dim{dim}": nn.Parameter(torch.randn(len(names), dim, members * width) * dim**-0.5)
                for dim, names in sorted(by_dim.items())
                if dim != width or config.project_equal
            }
        )
        names = [name for group in self.groups.values() for name in group]
        self.id_tokens = len(names)

        dense_places: list[int] = []
        self.embedding_places: list[tuple[str, int, int]] = []
        place = 0
        for feature in features:
            if feature.kind == "dense":
                dense_places.append(place)
            elif feature.kind == "embedding":
                self.embedding_places.append((feature.name, place, feature.dim))
            place += feature.dim if feature.kind in ("dense", "embedding") else 0
        self.register_buffer("dense_places", torch.tensor(dense_places, dtype=torch.int64), persistent=False)
        self.dense_tokens = config.dense_tokens if dense_places else 0
        self.dense: nn.Linear | None = None
        if dense_places:
            self.dense = nn.Linear(len(dense_places), members * self.dense_tokens * width)
        self.numbers = nn.ModuleDict({name: nn.Linear(dim, members * width) for name, _, dim in self.embedding_places})
        names += [f"dense.{i}" for i in range(self.dense_tokens)] + [name for name, _, _ in self.embedding_places]
        self.names = tuple(names)
        self.bias = nn.Parameter(torch.randn(members, len(names), width) * width**-0.5 * 0.1)

    def forward(self, rows: Mapping[str, Tensor], numbers: Tensor) -> Tensor:
        """Rows ``[B, C]`` by feature and all numbers ``[B, U]`` to tokens ``[B, M, F, D]``."""
        parts = [self._project(key, torch.stack([rows[name] for name in names])) for key, names in self.groups.items()]
        count = numbers.shape[0]
        if self.dense is not None:
            dense = self.dense(numbers.index_select(1, self.dense_places))
            parts.append(dense.view(count, self.members, self.dense_tokens, self.width))
        for name, place, dim in self.embedding_places:
            token = self.numbers[name](numbers[:, place : place + dim])
            parts.append(token.view(count, self.members, 1, self.width))
        if not parts:
            return numbers.new_zeros((count, self.members, 0, self.width))
        return torch.cat(parts, dim=2) + self.bias

    def _project(self, key: str, stacked: Tensor) -> Tensor:
        """Rows ``[f, B, C]`` to tokens ``[B, M, f, D]``."""
        features, count, _ = stacked.shape
        if key not in self.projections:
            return stacked.transpose(0, 1).unsqueeze(1).expand(-1, self.members, -1, -1)
        tokens = torch.bmm(stacked, self.projections[key])
        return tokens.view(features, count, self.members, self.width).permute(1, 2, 0, 3)
