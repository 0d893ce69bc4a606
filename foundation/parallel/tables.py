"""Embedding tables of a sharded model: where the rows of this rank lie, how to fill them, how to set their rate.

A sharded table is a `ShardedTensor` in the model's `state_dict`, under the name that it has in the unsharded model.
Its local shards share memory with the weights that the fused kernels update.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel


def table_weights(model: DistributedModelParallel) -> dict[str, ShardedTensor]:
    """Sharded tables by their name in the unsharded model, each `[rows, dim]` over all ranks."""
    return {name: value for name, value in model.state_dict().items() if isinstance(value, ShardedTensor)}


def table_momentum(model: DistributedModelParallel) -> dict[str, ShardedTensor]:
    """Row-wise AdaGrad's sums of squares by table name, each `[rows]` over all ranks.

    A rank that holds no row of a table has no entry for it.
    """
    states = model.fused_optimizer.state_dict()["state"]
    momentum = {}
    for name, state in states.items():
        for key, value in state.items():
            assert key.endswith("momentum1") and isinstance(value, ShardedTensor), (name, key, type(value))
            momentum[name] = value
    return momentum


def dense_parameters(model: DistributedModelParallel) -> dict[str, torch.nn.Parameter]:
    """Parameters that every rank holds whole, by their name in the unsharded model."""
    tables = table_weights(model)
    return {name: p for name, p in model.named_parameters() if name not in tables}


def local_shards(value: torch.Tensor | ShardedTensor) -> Iterator[tuple[tuple[slice, ...], torch.Tensor]]:
    """This rank's pieces of a tensor: the place in the whole one and the memory that holds them."""
    if not isinstance(value, ShardedTensor):
        yield tuple(slice(0, size) for size in value.shape), value
        return
    for shard in value.local_shards():
        offsets, sizes = shard.metadata.shard_offsets, shard.metadata.shard_sizes
        yield tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True)), shard.tensor


def clone(value: torch.Tensor | ShardedTensor) -> torch.Tensor | ShardedTensor:
    """A copy in fresh memory; sharded like the original."""
    if not isinstance(value, ShardedTensor):
        return value.detach().clone()
    shards = [Shard(shard.tensor.detach().clone(), shard.metadata) for shard in value.local_shards()]
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        shards, value.metadata(), process_group=value._process_group
    )


@torch.no_grad()
def load_tables(model: DistributedModelParallel, weights: Mapping[str, torch.Tensor]) -> None:
    """Copies whole tables into this rank's shards.

    Args:
        model: the sharded model.
        weights: `[rows, dim]` per table, by the name in the unsharded model; every table must be there.
    """
    tables = table_weights(model)
    assert tables.keys() == weights.keys(), tables.keys() ^ weights.keys()
    for name, table in tables.items():
        assert tuple(table.metadata().size) == tuple(weights[name].shape), name
        for place, shard in local_shards(table):
            shard.copy_(weights[name][place])


class TableRates:
    """Learning rates of the fused optimizers, which step inside backward and so must be set before it.

    Args:
        model: the sharded model; the rates it was built with count as factor 1.
    """

    def __init__(self, model: DistributedModelParallel) -> None:
        self._optimizer = model.fused_optimizer
        self._base = [group["lr"] for group in self._optimizer.param_groups]

    def scale(self, factor: float) -> None:
        """Sets every table's rate to its configured rate times `factor`."""
        for group, base in zip(self._optimizer.param_groups, self._base, strict=True):
            group["lr"] = base * factor
        self._optimizer.step()  # hands the rates to the kernels; the weights do not move
