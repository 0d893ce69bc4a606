"""Finds what is NaN or infinite when a loss is: columns of the batch, else weights of the model."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from foundation.data.batch import Batch
from foundation.data.schema import Feature, Schema
from foundation.parallel.pieces import local_shards
from foundation.parallel.tables import model_tensors

_MOST = 5


def culprits(batch: Batch, schema: Schema, model: nn.Module) -> str:
    """Names columns, and weights of this rank, that hold numbers which are not finite.

    Args:
        batch: the batch whose loss was not finite.
        schema: says which column a number came from.
        model: its `state_dict` is searched where no column is at fault.

    Returns:
        Text for a message; "nothing in the batch or the weights" when all is finite.
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
    return "nothing in the batch or the weights"


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


def _more(names: list[str]) -> str:
    return f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
