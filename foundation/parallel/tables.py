"""Embedding tables of a spread model: where the rows of this rank lie, how to fill them, how to set their rate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.shards_wrapper import LocalShardsWrapper
from torchrec.distributed.types import ShardedModule

from foundation.parallel.experts import block_of
from foundation.parallel.pieces import Sharded, Spread, local_shards, spread


def model_tensors(model: nn.Module) -> dict[str, Spread]:
    """Everything in a model's `state_dict`, by its name in the unsharded model, in the memory that training uses."""
    blocks = block_of(model.module if isinstance(model, DistributedModelParallel) else model)
    return {name: spread(value, blocks.get(name)) for name, value in model.state_dict().items()}


def table_weights(model: DistributedModelParallel) -> dict[str, Sharded]:
    """Tables by their name in the unsharded model, each `[rows, dim]` over all ranks."""
    return {name: _sharded(value) for name, value in model.state_dict().items() if _is_table(value)}


def table_momentum(model: DistributedModelParallel) -> dict[str, Sharded]:
    """Row-wise AdaGrad's sums of squares by table name, each `[rows]` over all ranks.

    A rank that holds no row of a table has no entry for it.
    """
    momentum = {}
    for name, state in model.fused_optimizer.state_dict()["state"].items():
        for key, value in state.items():
            assert key.endswith("momentum1"), (name, key)
            momentum[name] = _sharded(value)
    return momentum


def dense_parameters(model: DistributedModelParallel) -> dict[str, nn.Parameter]:
    """Parameters outside of tables by their name in the unsharded model; FSDP's are `DTensor`."""
    tables = table_weights(model)
    return {name: p for name, p in model.named_parameters() if name not in tables}


def dense_tensors(model: DistributedModelParallel) -> dict[str, Spread]:
    """This rank's part of `dense_parameters`, sharing their memory."""
    blocks = block_of(model.module)
    return {name: spread(p, blocks.get(name)) for name, p in dense_parameters(model).items()}


def sharded_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """What TorchRec trains."""
    for module in model.modules():
        if isinstance(module, ShardedModule):
            yield from module.parameters()


@torch.no_grad()
def load_tables(model: DistributedModelParallel, weights: Mapping[str, torch.Tensor]) -> None:
    """Copies whole tables into this rank's shards.

    Args:
        model: the sharded model.
        weights: `[rows, dim]` per table, by the name in the unsharded model; every table must be there. One on the
            meta device has nothing to copy.
    """
    tables = table_weights(model)
    assert tables.keys() == weights.keys(), tables.keys() ^ weights.keys()
    for name, table in tables.items():
        assert table.shape == tuple(weights[name].shape), name
        for place, shard in local_shards(table) if not weights[name].is_meta else ():
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


class TableReplicas:
    """Averages tables over replica groups: rows and sums of squares, as TorchRec's 2D parallelism does it.

    Args:
        model: whose shards lie where they will stay.
        group: ranks that hold the same rows.
        rows: False where something else averages the rows.
    """

    def __init__(self, model: DistributedModelParallel, group: dist.ProcessGroup, rows: bool = True) -> None:
        self._group, self._size = group, dist.get_world_size(group)
        self._mean = dist.get_backend(group) == "nccl"  # Gloo only sums
        self._tensors = [
            shard.tensor
            for tables in (table_weights(model) if rows else {}, table_momentum(model))
            for _, table in sorted(tables.items())
            for shard in table.pieces
        ]

    @torch.no_grad()
    def average(self) -> None:
        """Makes all replicas equal; a collective call of their group."""
        op = dist.ReduceOp.AVG if self._mean else dist.ReduceOp.SUM
        for work in [dist.all_reduce(t, op=op, group=self._group, async_op=True) for t in self._tensors]:
            work.wait()
        if not self._mean:
            torch._foreach_div_(self._tensors, self._size)


def _is_table(value: object) -> bool:
    return isinstance(value, ShardedTensor) or (
        isinstance(value, DTensor) and isinstance(value._local_tensor, LocalShardsWrapper)
    )


def _sharded(value: object) -> Sharded:
    table = spread(value)
    assert isinstance(table, Sharded)
    return table
