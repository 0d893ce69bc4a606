"""How a model is spread over ranks: one function whose lines are the order of application.

A laptop with one process runs the code of a cluster: every line but the tables' then does nothing.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.profiler import record_function
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DefaultDataParallelWrapper, DistributedModelParallel
from torchrec.distributed.types import ModuleSharder, ShardingEnv, ShardingEnv2D

from foundation.parallel.dense import shard_dense
from foundation.parallel.experts import split_experts
from foundation.parallel.lookups import Lookups
from foundation.parallel.pieces import local_shards
from foundation.parallel.plan import (
    Collection,
    SparseConfig,
    collections_of,
    fuse_optimizer,
    sharding_plan,
    tables_of,
)
from foundation.parallel.ranges import FORWARD, GRADIENT_REDUCE
from foundation.parallel.recat import remember_permutations
from foundation.parallel.replica_parts import ReplicaParts
from foundation.parallel.tables import TableReplicas, load_tables, table_momentum
from foundation.parallel.topology import Layout, ParallelConfig, Topology, layout
from foundation.parallel.wire import codecs


class ParallelModel(DistributedModelParallel):
    """A model spread over ranks; `module` is the model itself.

    Attributes:
        layout: its groups of ranks.
        momentum_scale: what AdaGrad's sums of squares are divided by.
        replicas: averages the tables of replica groups; None where there is one group.
        parts: of rows that replicas keep where tables are fully sharded; None where they keep all.
        lookups: of the tables.
    """

    layout: Layout
    lookups: Lookups
    momentum_scale: float = 1.0
    replicas: TableReplicas | None = None
    parts: ReplicaParts | None = None
    _sync_every: int = 1
    _unsynced: int = 0

    def forward(self, *inputs: Any) -> Any:
        """What the model itself computes."""
        with record_function(FORWARD):
            return super().forward(*inputs)

    def average_tables(self) -> None:
        """To be called after every backward pass, which updates tables: makes replica groups equal again.

        With `parallel.sparse.sync_every` above 1 only after so many; `settle_tables` does it in between.
        """
        self._unsynced += 1
        if self._unsynced >= self._sync_every:
            self._average()

    def settle_tables(self) -> None:
        """Makes replica groups equal and tables whole, if they are not; a collective call.

        To be called before tables are evaluated or saved.
        """
        if self._unsynced:
            self._average()
        self.gather_tables()

    def gather_tables(self) -> None:
        """Makes tables whole where replicas keep parts; a collective call.

        To be called before tables are read or written from outside of a step. The next lookup lets them go again.
        """
        if self.parts is not None:
            self.parts.gather()

    def _average(self) -> None:
        if self.replicas is not None:
            with record_function(GRADIENT_REDUCE):
                self.replicas.average()
        self._unsynced = 0


def parallelize(
    model: nn.Module,
    sparse: SparseConfig,
    device: torch.device,
    config: ParallelConfig | None = None,
    topology: Topology | None = None,
    *,
    gathered: torch.dtype = torch.float32,
) -> ParallelModel:
    """Spreads a model over the ranks of the default process group.

    The result computes what the unsharded model computes, from the same weights: it holds `model` itself, its tables
    replaced in place by sharded ones, so `result.module` is `model` and names in `state_dict` stay as they were. Each
    rank must pass a model with equal weights, in main memory; peak memory is all tables plus this rank's share.

    Gradients of tables and of dense parameters are means over ranks. Every dense parameter must take part in every
    forward pass, an empty batch included.

    With several table replicas each group updates its tables from its own part of the batch, and
    `ParallelModel.average_tables` averages them: not what one group does, though close.

    Args:
        model: has its tables in TorchRec `EmbeddingCollection` or `EmbeddingBagCollection` modules, on CPU.
        sparse: optimizer and placement of the tables.
        device: where this rank computes.
        config: sizes of the five dimensions; by default the dense part is replicated and tables have one group.
        topology: the cluster; by default the launcher's hosts, in one zone.
        gathered: what FSDP gathers parameters in, and computes with; it keeps them in float32. bfloat16 is for training
            under autocast to it, where matrix products round parameters anyway.

    Raises:
        ValueError: sizes that do not fit the ranks or the model, `table_lr` names a table that does not exist, a
            table's dim is not a multiple of 4, or rows cannot travel as `wire` says.
    """
    config = config or ParallelConfig()
    groups = layout(config, topology or launched_topology())
    if groups.world != dist.get_world_size():
        raise ValueError(f"topology: it has {groups.world} ranks, but {dist.get_world_size()} were started")
    replicated = groups.world > 1 and groups.shard * groups.expert == 1
    if config.dense.wire == "bf16" and replicated and device.type != "cuda":
        raise ValueError(
            "parallel.dense.wire: bf16 needs CUDA where the dense part is replicated; DDP refuses it on CPU"
        )

    collections = collections_of(model)
    remember_permutations()
    weights = _weights(collections)
    scale = float(groups.table_replicas) if config.sparse.scale_momentum else 1.0
    fuse_optimizer(collections, sparse, scale)
    env = _table_environment(groups, device)
    dims = [table.embedding_dim for module in collections.values() for table in tables_of(module)]
    registry = codecs(config.sparse.wire, dims, device)
    sharders: list[ModuleSharder] = [
        # Dedup sends each id of a batch once. Its kernel exists on CUDA only, and the host waits for it.
        EmbeddingCollectionSharder(
            qcomm_codecs_registry=registry, use_index_dedup=device.type == "cuda" and groups.table_shard > 1
        ),
        EmbeddingBagCollectionSharder(qcomm_codecs_registry=registry),
    ]
    ranks = next(row for row in groups.table_ranks() if dist.get_rank() in row)
    spread = ParallelModel(
        module=model,
        env=env,
        device=device,
        plan=sharding_plan(collections, sparse, device.type, sharders, ranks, _numbered(groups, device)),
        sharders=sharders,
        init_data_parallel=False,
        data_parallel_wrapper=_Replicated(
            static_graph=False,
            bucket_cap_mb=_bucket_mb(model, collections),
            allreduce_comm_precision="bf16" if config.dense.wire == "bf16" else None,
        ),
    )
    spread.layout, spread.momentum_scale = groups, scale
    spread.lookups = Lookups(model, device)
    load_tables(spread, weights)
    reset_momentum(spread, sparse)
    spread.to(device)
    if isinstance(env, ShardingEnv2D):
        spread.replicas = TableReplicas(spread, env.replica_pg, rows=not config.sparse.fully_sharded)
        spread.parts = ReplicaParts(spread, env.replica_pg) if config.sparse.fully_sharded else None
        spread._sync_every = config.sparse.sync_every

    expert_mesh = _expert_mesh(groups, device)
    if expert_mesh is not None:
        split_experts(model, expert_mesh.get_group("expert"), _in_main_memory(groups, device, expert_mesh))

    if groups.shard * groups.expert > 1:
        mesh = _dense_mesh(groups, device)
        reduced = torch.bfloat16 if config.dense.wire == "bf16" else torch.float32
        shard_dense(model, mesh, expert_mesh and expert_mesh["replica", "shard"], gathered, reduced)
    elif replicated:
        spread.init_data_parallel()
    return spread


def _bucket_mb(model: nn.Module, collections: dict[str, Collection]) -> int:
    """MB of gradients that DDP reduces at once: its own 25 for small models, at most 40 parts of large ones.

    Parts wait for the slowest rank and for room on the device one by one, which adds up over hundreds of them.
    """
    tables = {p for module in collections.values() for p in module.parameters()}
    dense = sum(p.numel() * p.element_size() for p in model.parameters() if p not in tables)
    return max(25, dense // 40 // 2**20)


class _Replicated(DefaultDataParallelWrapper):
    """DDP over all ranks, on the default group rather than on that of the tables."""

    def wrap(self, dmp: DistributedModelParallel, env: ShardingEnv, device: torch.device) -> None:
        world = dist.group.WORLD
        assert world is not None
        super().wrap(dmp, ShardingEnv.from_process_group(world), device)


@torch.no_grad()
def reset_momentum(model: ParallelModel, sparse: SparseConfig) -> None:
    """Sets row-wise AdaGrad's sums of squares back to where training starts from."""
    for momentum in table_momentum(model).values():
        for _, shard in local_shards(momentum):
            shard.fill_(sparse.initial_accumulator * model.momentum_scale)


@torch.no_grad()
def rescale_momentum(model: ParallelModel, saved_scale: float) -> None:
    """Makes sums of squares that were trained with another `momentum_scale` mean the same rates here."""
    if saved_scale != model.momentum_scale:
        for momentum in table_momentum(model).values():
            for _, shard in local_shards(momentum):
                shard.mul_(model.momentum_scale / saved_scale)


def launched_topology() -> Topology:
    """The ranks that were started, as hosts of one zone."""
    world = dist.get_world_size()
    return Topology.of_ranks(world, int(os.environ.get("LOCAL_WORLD_SIZE", world)))


def _weights(collections: dict[str, Collection]) -> dict[str, torch.Tensor]:
    """Initial weights by name. They outlive the modules, which sharding replaces by ones with their own memory."""
    return {
        f"{path}.{name}" if path else name: parameter.detach()
        for path, module in collections.items()
        for name, parameter in module.named_parameters()
    }


def _numbered(groups: Layout, device: torch.device) -> int:
    """Devices of a host as a process numbers them: one where each sees only its own."""
    return 1 if device.type == "cuda" and torch.cuda.device_count() == 1 else groups.topology.gpus_per_host


def _table_environment(groups: Layout, device: torch.device) -> ShardingEnv:
    world = dist.group.WORLD
    assert world is not None
    if groups.world == 1:
        return ShardingEnv.from_process_group(world)
    if groups.table_replicas == 1:
        # A group of its own: on CUDA a group works off its collectives in order, and nothing of the tables shall wait
        # for gradients or parameters of the dense part.
        return ShardingEnv.from_process_group(dist.new_group(list(range(groups.world))))
    mesh = DeviceMesh(device.type, groups.table_ranks(), mesh_dim_names=("replicate", "shard"))
    return ShardingEnv2D(
        sharding_pg=mesh.get_group("shard"),
        replica_pg=mesh.get_group("replicate"),
        global_pg=world,
        device_mesh=mesh,
        node_group_size=min(groups.topology.gpus_per_host, groups.table_shard),
        use_inter_host_allreduce=not groups.replicas_adjacent,
    )


def _dense_mesh(groups: Layout, device: torch.device) -> DeviceMesh:
    ranks = groups.dense_ranks()
    if groups.replica == 1:
        return DeviceMesh(device.type, ranks[0], mesh_dim_names=("shard",))
    return DeviceMesh(device.type, ranks, mesh_dim_names=("replica", "shard"))


def _expert_mesh(groups: Layout, device: torch.device) -> DeviceMesh | None:
    if groups.expert == 1:
        return None
    return DeviceMesh(device.type, groups.expert_ranks(), mesh_dim_names=("expert", "replica", "shard"))


def _in_main_memory(groups: Layout, device: torch.device, mesh: DeviceMesh) -> dist.ProcessGroup:
    """This rank's expert group for tensors in main memory."""
    if device.type == "cpu":
        return mesh.get_group("expert")
    own: dist.ProcessGroup | None = None
    for r in range(groups.replica):
        for s in range(groups.shard):
            ranks = [block[r][s] for block in groups.expert_ranks()]
            group = dist.new_group(ranks, backend="gloo")  # every rank makes every group
            own = group if dist.get_rank() in ranks else own
    assert own is not None
    return own
