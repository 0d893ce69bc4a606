"""Finds what is NaN or infinite when a loss is: columns of the batch, else weights of the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from foundation.data.batch import Batch
from foundation.data.schema import Feature, Schema
from foundation.parallel.pieces import local_shards
from foundation.parallel.tables import model_tensors

_MOST = 5
NOTHING = "nothing in the batch or the weights"


def culprits(batch: Batch, schema: Schema, model: nn.Module) -> str:
    """Names columns, and weights of this rank, that hold numbers which are not finite.

    Args:
        batch: the batch whose loss was not finite.
        schema: says which column a number came from.
        model: its `state_dict` is searched where no column is at fault.

    Returns:
        Text for a message; `NOTHING` when all is finite.
    """
    columns = list(_columns(batch, schema))
    if columns:
        return f"column {', '.join(columns[:_MOST])}{_more(columns)}"
    weights = [
        name
        for name, value in model_tensors(model).items()
        if any(not bool(torch.isfinite(shard).all()) for _, shard in local_shards(value))
    ]
    if weights:
        return f"weight {', '.join(weights[:_MOST])}{_more(weights)}"
    return NOTHING


def culprits_of_all(batch: Batch, schema: Schema, model: nn.Module) -> str:
    """`culprits` of every rank's batch and weights, with their ranks where there are several; a collective call."""
    own = culprits(batch, schema, model)
    if dist.get_world_size() == 1:
        return own
    everyone: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    ranks: dict[str, list[int]] = {}
    for rank, found in enumerate(everyone):
        if found != NOTHING:
            ranks.setdefault(found, []).append(rank)
    texts = [f"{found} on rank {', '.join(map(str, at[:_MOST]))}{_more(at)}" for found, at in ranks.items()]
    return "; ".join(texts[:_MOST]) + _more(texts) if texts else NOTHING


def _columns(batch: Batch, schema: Schema) -> Iterator[str]:
    for values, features in (
        (batch.request_dense, schema.request_features),
        (batch.item_dense, schema.item_features),
    ):
        start = 0
        for feature in features:
            if feature.kind in ("dense", "embedding"):
                width = _width(feature)
                if not torch.isfinite(values[:, start : start + width]).all():
                    yield feature.column
                start += width
    for name, weights in batch.sparse_weights.items():
        if not torch.isfinite(weights).all():
            yield schema.feature(name).weights or name
    for k, task in enumerate(schema.tasks):
        if not torch.isfinite(batch.labels[:, k][batch.label_valid[:, k]]).all():
            yield task.label
    if not torch.isfinite(batch.weight).all():
        yield schema.weight or "weight"


def _width(feature: Feature) -> int:
    return feature.dim if feature.kind == "embedding" else 1


def _more(names: Sequence[Any]) -> str:
    return f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
