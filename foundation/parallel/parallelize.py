"""How a model is spread over ranks: one function whose lines are the order of application.

Tables are model-parallel with TorchRec at any world size, one included, so that a laptop runs the code of a cluster:
large ones are cut by rows over all ranks, small ones live whole on one rank. The rest is replicated.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DefaultDataParallelWrapper, DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.types import ModuleSharder, ShardingPlan
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from foundation.parallel.tables import load_tables, table_momentum

Collection: TypeAlias = EmbeddingCollection | EmbeddingBagCollection


@dataclass(frozen=True, kw_only=True, slots=True)
class SparseConfig:
    """Embedding tables: row-wise AdaGrad, fused into the backward pass, and where the rows live.

    Args:
        lr: learning rate of every table that `table_lr` does not name.
        eps: added to the root of the row's sum of squares.
        table_lr: learning rate by table name.
        initial_accumulator: what the sums of squares start from; larger makes the first updates of a row smaller.
        row_wise_from: tables of at least this many rows are cut by rows over all ranks; others are placed whole, the
            largest first, each on the rank that holds least so far.
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


def parallelize(model: nn.Module, config: SparseConfig, device: torch.device) -> DistributedModelParallel:
    """Spreads a model over the ranks of the default process group.

    The result computes what the unsharded model computes, from the same weights: it holds `model` itself, its tables
    replaced in place by sharded ones, so `result.module` is `model` and names in `state_dict` stay as they were. Each
    rank must pass a model with equal weights, in main memory; peak memory is all tables plus this rank's share.

    Gradients of tables and of dense parameters are means over ranks. Every dense parameter must take part in every
    forward pass, an empty batch included.

    Args:
        model: has its tables in TorchRec `EmbeddingCollection` or `EmbeddingBagCollection` modules, on CPU.
        config: optimizer and placement of the tables.
        device: where this rank computes.

    Raises:
        ValueError: `table_lr` names a table that does not exist, or a table's dim is not a multiple of 4.
    """
    collections = {name: module for name, module in model.named_modules() if isinstance(module, Collection)}
    weights = _weights(collections)
    _fuse_optimizer(collections, config)
    sharders: list[ModuleSharder] = [
        # Dedup sends each id of a batch once. Its kernel exists on CUDA only, and the host waits for it.
        EmbeddingCollectionSharder(use_index_dedup=device.type == "cuda" and dist.get_world_size() > 1),
        EmbeddingBagCollectionSharder(),
    ]
    sharded = DistributedModelParallel(
        module=model,
        device=device,
        plan=sharding_plan(collections, config, device, sharders),
        sharders=sharders,
        init_data_parallel=False,
        data_parallel_wrapper=DefaultDataParallelWrapper(static_graph=False),
    )
    load_tables(sharded, weights)
    reset_momentum(sharded, config)
    sharded.to(device)
    if dist.get_world_size() > 1:
        sharded.init_data_parallel()
    return sharded


def sharding_plan(
    collections: dict[str, Collection],
    config: SparseConfig,
    device: torch.device,
    sharders: list[ModuleSharder],
) -> ShardingPlan:
    """The placement of every table, the same on every rank.

    Args:
        collections: modules with tables by their path in the model.
        config: which tables are cut by rows.
        device: what the ranks compute on.
        sharders: one per kind of module.
    """
    world = dist.get_world_size()
    held = [0] * world
    choices: dict[str, dict[str, object]] = {path: {} for path in collections}
    sizes = {
        (path, table.name): (table.num_embeddings, table.num_embeddings * table.embedding_dim)
        for path, module in collections.items()
        for table in _tables(module)
    }
    for (path, name), (rows, elements) in sorted(sizes.items(), key=lambda item: (-item[1][1], item[0])):
        if world > 1 and rows >= max(config.row_wise_from, world):  # to deal ids by row, TorchRec waits for the device
            choices[path][name] = row_wise()
            continue
        rank = held.index(min(held))
        held[rank] += elements
        choices[path][name] = table_wise(rank=rank)
    by_type = {sharder.module_type: sharder for sharder in sharders}
    return ShardingPlan(
        plan={
            path: construct_module_sharding_plan(
                module,
                per_param_sharding=choices[path],
                sharder=by_type[type(module)],
                local_size=_local_size(world),
                world_size=world,
                device_type=device.type,
            )
            for path, module in collections.items()
        }
    )


@torch.no_grad()
def reset_momentum(model: DistributedModelParallel, config: SparseConfig) -> None:
    """Sets row-wise AdaGrad's sums of squares back to where training starts from."""
    for momentum in table_momentum(model).values():
        for shard in momentum.local_shards():
            shard.tensor.fill_(config.initial_accumulator)


def _weights(collections: dict[str, Collection]) -> dict[str, torch.Tensor]:
    """Initial weights by name. They outlive the modules, which sharding replaces by ones with their own memory."""
    return {
        f"{path}.{name}" if path else name: parameter.detach()
        for path, module in collections.items()
        for name, parameter in module.named_parameters()
    }


def _fuse_optimizer(collections: dict[str, Collection], config: SparseConfig) -> None:
    unknown = set(config.table_lr)
    for module in collections.values():
        parameters = dict(module.named_parameters())
        group = "embeddings" if isinstance(module, EmbeddingCollection) else "embedding_bags"
        for table in _tables(module):
            if table.embedding_dim % 4:
                raise ValueError(
                    f"table {table.name}: dim {table.embedding_dim} is not a multiple of 4, as the fused kernels need"
                )
            unknown.discard(table.name)
            lr = config.table_lr.get(table.name, config.lr)
            apply_optimizer_in_backward(
                RowWiseAdagrad,
                [parameters[f"{group}.{table.name}.weight"]],
                {"lr": lr, "eps": config.eps},  # a dict of its own: the call changes it
            )
    if unknown:
        names = sorted(table.name for module in collections.values() for table in _tables(module))
        raise ValueError(f"sparse.table_lr.{min(unknown)}: no such table; the model has {', '.join(names)}")


def _tables(module: Collection) -> list[Any]:
    """The tables' configs."""
    if isinstance(module, EmbeddingCollection):
        return list(module.embedding_configs())
    return list(module.embedding_bag_configs())


def _local_size(world: int) -> int:
    """Ranks per host, as the launcher says."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world))
