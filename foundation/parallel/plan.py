"""Where the rows of every table live, and the optimizer that runs inside backward."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torch.distributed.optim.apply_optimizer_in_backward import param_to_acc_grad_map
from torch.distributed.remote_device import _remote_device
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, placement, row_wise, table_wise
from torchrec.distributed.types import EnumerableShardingSpec, ModuleSharder, ShardingPlan
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from foundation.parallel.placement import TableSize, place_tables

Collection: TypeAlias = EmbeddingCollection | EmbeddingBagCollection


@dataclass(frozen=True, kw_only=True, slots=True)
class SparseConfig:
    """Embedding tables: row-wise AdaGrad, fused into the backward pass, and where the rows live.

    Args:
        lr: learning rate of every table that `table_lr` does not name.
        eps: added to the root of the row's sum of squares.
        table_lr: learning rate by table name.
        initial_accumulator: what the sums of squares start from; larger makes the first updates of a row smaller.
        row_wise_from: tables whose rows times the ranks of a table group (for bags: whose rows) come to this are cut by
            rows over the group, as one rank would have to send so many; others are placed whole, the largest first,
            each on the rank that holds least so far.
    """

    lr: float = 0.02
    eps: float = 1e-8
    table_lr: dict[str, float] = field(default_factory=dict)
    initial_accumulator: float = 0.0
    row_wise_from: int = 100_000

    def __post_init__(self) -> None:
        for key in ("lr", "eps", "initial_accumulator"):
            if getattr(self, key) < 0:
                raise ValueError(f"sparse.{key}: must not be negative, got {getattr(self, key)}")
        for table, lr in self.table_lr.items():
            if lr < 0:
                raise ValueError(f"sparse.table_lr.{table}: must not be negative, got {lr}")
        if self.row_wise_from < 1:
            raise ValueError(f"sparse.row_wise_from: must be at least 1, got {self.row_wise_from}")


def collections_of(model: nn.Module) -> dict[str, Collection]:
    """Modules with tables by their path in the model."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Collection)}


def sharding_plan(
    collections: dict[str, Collection],
    config: SparseConfig,
    device_type: str,
    sharders: list[ModuleSharder],
    ranks: list[int],
    per_host: int,
) -> ShardingPlan:
    """The placement of every table, the same on every rank of a group.

    Args:
        collections: modules with tables by their path in the model.
        config: which tables are cut by rows.
        device_type: what the ranks compute on.
        sharders: one per kind of module.
        ranks: those of the group, in its order.
        per_host: devices of a host, in the numbers that processes know them by.
    """
    size = len(ranks)
    sizes = [table_size(path, module, table) for path, module in collections.items() for table in tables_of(module)]
    owner = place_tables(sizes, config.row_wise_from, size)
    choices: dict[str, dict[str, object]] = {path: {} for path in collections}
    for path, module in collections.items():
        for table in tables_of(module):
            rank = owner[f"{path}.{table.name}"]
            choices[path][table.name] = row_wise() if rank is None else table_wise(rank=rank)
    by_type = {sharder.module_type: sharder for sharder in sharders}
    plan = ShardingPlan(
        plan={
            path: construct_module_sharding_plan(
                module,
                per_param_sharding=choices[path],
                sharder=by_type[type(module)],
                local_size=min(per_host, size),
                world_size=size,
                device_type=device_type,
            )
            for path, module in collections.items()
        }
    )
    _name_global_ranks(plan, device_type, ranks, per_host)
    return plan


def fuse_optimizer(collections: dict[str, Collection], config: SparseConfig, momentum_scale: float) -> None:
    """Row-wise AdaGrad inside the backward pass of every table.

    With c = `momentum_scale` a row moves by `lr g / (sqrt(v / c) + eps)`, written as
    `(lr sqrt(c)) g / (sqrt(v) + eps sqrt(c))`, which needs no other kernel.

    Raises:
        ValueError: `table_lr` names a table that does not exist, or a table's dim is not a multiple of 4.
    """
    unknown = set(config.table_lr)
    root = math.sqrt(momentum_scale)
    for module in collections.values():
        parameters = dict(module.named_parameters())
        group = "embeddings" if isinstance(module, EmbeddingCollection) else "embedding_bags"
        for table in tables_of(module):
            if table.embedding_dim % 4:
                raise ValueError(
                    f"table {table.name}: dim {table.embedding_dim} is not a multiple of 4, as the fused kernels need"
                )
            unknown.discard(table.name)
            lr = config.table_lr.get(table.name, config.lr)
            weight = parameters[f"{group}.{table.name}.weight"]
            # A dict of its own: the call changes it. TorchRec reads what the call leaves at the parameter.
            rates = {"lr": lr * root, "eps": config.eps * root}
            apply_optimizer_in_backward(RowWiseAdagrad, [weight], rates, register_hook=False)
            param_to_acc_grad_map.pop(weight)  # it would hold the unsharded table for ever
    if unknown:
        names = sorted(table.name for module in collections.values() for table in tables_of(module))
        raise ValueError(f"sparse.table_lr.{min(unknown)}: no such table; the model has {', '.join(names)}")


def table_size(path: str, module: Collection, table: Any) -> TableSize:
    """Name and size of a table of the module at this path."""
    pooled = isinstance(module, EmbeddingBagCollection)
    return TableSize(f"{path}.{table.name}", table.num_embeddings, table.embedding_dim, pooled)


def tables_of(module: Collection) -> list[Any]:
    """The configs of a collection's tables."""
    if isinstance(module, EmbeddingCollection):
        return list(module.embedding_configs())
    return list(module.embedding_bag_configs())


def _name_global_ranks(plan: ShardingPlan, device_type: str, ranks: list[int], per_host: int) -> None:
    """Plans are made for ranks 0, 1, ... of a group; TorchRec wants them by their number in the whole job."""
    for module in plan.plan.values():
        for placed in module.values():
            placed.ranks = [ranks[rank] for rank in placed.ranks]
            assert isinstance(placed.sharding_spec, EnumerableShardingSpec)
            for shard in placed.sharding_spec.shards:
                rank = ranks[shard.placement.rank()]
                shard.placement = _remote_device(placement(device_type, rank, per_host))
