"""Which ranks work together: a cluster's shape and five sizes become groups of ranks on the fastest links that fit.

Ranks are numbered as launchers do it: all GPUs of a host, then the next host, all hosts of a zone, then the next zone.
Ranks that are neighbours therefore share the fastest links, and the dimension that moves most gets them.

Dense part, from the outside in: replica (all-reduce of gradients), shard (all-gather and reduce-scatter of parameters),
expert (exchange of activations, inside a layer). Tables: replica groups (averages of rows), model-parallel shards
(all-to-all of ids and rows).
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal

import yaml

from foundation.data import settings
from foundation.data.yaml_text import load_yaml, yaml_fault

Link = Literal["none", "host", "zone", "cluster"]
Wire = Literal["fp32", "bf16", "fp8"]
MOST_RANKS = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """A cluster: zones of hosts of GPUs (or of processes, on CPU).

    Args:
        gpus_per_host: ranks that share a host's fast links.
        hosts_per_zone: hosts behind one full-speed network.
        zones: such networks, joined by slower links.
        host_gbs: GB/s that a GPU sends to GPUs of its host, in each direction.
        zone_gbs: the same to another host of its zone.
        cluster_gbs: the same to another zone.
    """

    gpus_per_host: int = 1
    hosts_per_zone: int = 1
    zones: int = 1
    host_gbs: float = 10.0
    zone_gbs: float = 1.0
    cluster_gbs: float = 1.0

    def __post_init__(self) -> None:
        for key in ("gpus_per_host", "hosts_per_zone", "zones"):
            if getattr(self, key) < 1:
                raise ValueError(f"topology.{key}: must be at least 1, got {getattr(self, key)}")
        if self.ranks > MOST_RANKS:
            raise ValueError(
                f"topology: {self.gpus_per_host} GPUs per host x {self.hosts_per_zone} hosts per zone x {self.zones}"
                f" zones are {self.ranks:,} ranks; at most {MOST_RANKS:,} can be planned for"
            )
        for key in ("host_gbs", "zone_gbs", "cluster_gbs"):
            if not getattr(self, key) > 0:
                raise ValueError(f"topology.{key}: must be above 0, got {getattr(self, key)}")

    @property
    def ranks(self) -> int:
        """All GPUs."""
        return self.gpus_per_host * self.hosts_per_zone * self.zones

    @staticmethod
    def load(name: str | Path) -> Topology:
        """Reads a topology file, given by path or as a preset such as `topology/one-host-8`.

        Raises:
            FileNotFoundError: there is no such file; the message lists the presets.
            ValueError: a key is not known or a value is not a number, naming file and key.
        """
        path = settings.preset(name, "topology", "topology")
        try:
            values = load_yaml(path.read_text(encoding="utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ValueError(f"{path}: {yaml_fault(error)}") from None
        known = {f.name: f.type for f in fields(Topology)}
        if not isinstance(values, dict):
            raise ValueError(f"{path}: expected keys and numbers, such as gpus_per_host: 8")
        for key, value in values.items():
            if key not in known:
                raise ValueError(f"{path}: {key}: no such key; known: {', '.join(known)}")
            whole = known[key] == "int"
            if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
                raise ValueError(f"{path}: {key}: expected a {'whole ' if whole else ''}number, got {value!r}")
        return Topology(**values)

    @staticmethod
    def of_ranks(world: int, per_host: int) -> Topology:
        """Hosts of one zone, as a launcher describes them: ranks in all, and ranks of a host."""
        if world % per_host:
            return Topology(gpus_per_host=world)
        return Topology(gpus_per_host=per_host, hosts_per_zone=world // per_host)

    def link(self, ranks: list[int]) -> Link:
        """The slowest link that a collective over these ranks must cross."""
        if len(ranks) < 2:
            return "none"
        hosts = {rank // self.gpus_per_host for rank in ranks}
        if len(hosts) == 1:
            return "host"
        return "zone" if len({host // self.hosts_per_zone for host in hosts}) == 1 else "cluster"

    def gbs(self, link: Link) -> float:
        """GB/s of a link; infinite for none."""
        speeds = {"host": self.host_gbs, "zone": self.zone_gbs, "cluster": self.cluster_gbs}
        return speeds.get(link, float("inf"))


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseSizes:
    """How many ways the dense part is spread; the product is the number of ranks.

    Args:
        replica: copies, whose gradients are averaged (DDP, or the outer dimension of HSDP); 0: what the others leave.
        shard: ranks over which parameters, gradients and optimizer states of a copy are cut (FSDP2); 0: all ranks of a
            zone. 1 keeps them whole, which is faster while they fit.
        expert: ranks over which the interaction arms' blocks are spread; every block sees the samples of all of them.
            What lies outside of the arms is cut over `shard x expert` ranks.
        wire: how gradients travel and are summed over ranks: fp32, or rounded to bf16, half the bytes.
    """

    replica: int = 0
    shard: int = 1
    expert: int = 1
    wire: Literal["fp32", "bf16"] = "fp32"

    def __post_init__(self) -> None:
        if self.wire not in ("fp32", "bf16"):
            raise ValueError(f"parallel.dense.wire: must be fp32 or bf16, got {self.wire!r}")
        for key, least in (("replica", 0), ("shard", 0), ("expert", 1)):
            if getattr(self, key) < least:
                raise ValueError(f"parallel.dense.{key}: must be at least {least}, got {getattr(self, key)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class SparseSizes:
    """How many ways the tables are spread; the product is the number of ranks.

    Args:
        replicas: groups of ranks that each hold all tables and average them after every step; 0: one per zone.
        shard: ranks of a group; 0: what `replicas` leaves.
        neighbours: which ranks lie next to one another: those of a `group` (fast all-to-all), or the `replicas` of the
            same rows (fast averages); auto takes the first unless the second costs the all-to-all nothing.
        scale_momentum: divide AdaGrad's sums by the number of replica groups when a rate is computed. They grow that
            much faster when each group squares the gradient of its own part of the batch (arXiv 2508.03854).
        wire: how rows and their gradients travel between ranks: fp32, or rounded to bf16 or fp8 (CUDA only).
        fully_sharded: replicas keep a part of their rows each, and put them together for lookup and update: less memory
            while activations are there, for half as much traffic again; the same numbers.
        sync_every: average replicas after so many steps, and before an evaluation or a checkpoint. Above 1 replicas
            differ in between, so that results depend on how many there are.
    """

    replicas: int = 1
    shard: int = 0
    neighbours: Literal["auto", "group", "replicas"] = "auto"
    scale_momentum: bool = True
    wire: Wire = "fp32"
    fully_sharded: bool = False
    sync_every: int = 1

    def __post_init__(self) -> None:
        if self.sync_every < 1:
            raise ValueError(f"parallel.sparse.sync_every: must be at least 1, got {self.sync_every}")
        if self.fully_sharded and self.sync_every > 1:
            raise ValueError(
                f"parallel.sparse.sync_every: {self.sync_every} with fully_sharded, whose replicas put rows together "
                "from their parts in every step; set one of them only"
            )
        for key in ("replicas", "shard"):
            if getattr(self, key) < 0:
                raise ValueError(f"parallel.sparse.{key}: must not be negative, got {getattr(self, key)}")
        if self.neighbours not in ("auto", "group", "replicas"):
            raise ValueError(f"parallel.sparse.neighbours: must be auto, group or replicas, got {self.neighbours!r}")
        if self.wire not in ("fp32", "bf16", "fp8"):
            raise ValueError(f"parallel.sparse.wire: must be fp32, bf16 or fp8, got {self.wire!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """The five dimensions, and how communication is arranged.

    Args:
        dense: sizes for everything but the tables.
        sparse: sizes for the tables.
        overlap: send the ids of the next batch to the ranks of their rows while the current batch is computed.
    """

    dense: DenseSizes = field(default_factory=DenseSizes)
    sparse: SparseSizes = field(default_factory=SparseSizes)
    overlap: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Groups of ranks, derived from a topology.

    Args:
        topology: the cluster.
        replica, shard, expert: sizes of the dense part.
        table_replicas, table_shard: sizes of the tables.
        replicas_adjacent: replicas of the same rows are neighbouring ranks; else the ranks of a group are.
    """

    topology: Topology
    replica: int
    shard: int
    expert: int
    table_replicas: int
    table_shard: int
    replicas_adjacent: bool

    @property
    def world(self) -> int:
        """All ranks."""
        return self.topology.ranks

    def dense_ranks(self) -> list[list[int]]:
        """`[replica][shard x expert]`: where parameters outside of the interaction arms are copied and cut."""
        width = self.shard * self.expert
        return [list(range(start, start + width)) for start in range(0, self.world, width)]

    def expert_ranks(self) -> list[list[list[int]]]:
        """`[expert][replica][shard]`: the ranks `[e]` hold the same blocks, copied and cut among them."""
        width = self.shard * self.expert
        return [
            [[r * width + s * self.expert + e for s in range(self.shard)] for r in range(self.replica)]
            for e in range(self.expert)
        ]

    def table_ranks(self) -> list[list[int]]:
        """`[table_replicas][table_shard]`: each row is a group that holds all tables."""
        count, size = self.table_replicas, self.table_shard
        if self.replicas_adjacent:
            return [[shard * count + group for shard in range(size)] for group in range(count)]
        return [list(range(group * size, (group + 1) * size)) for group in range(count)]

    def links(self) -> dict[str, Link]:
        """The slowest link that each dimension's collectives cross, over all groups of ranks."""
        dense, experts, tables = self.dense_ranks(), self.expert_ranks(), self.table_ranks()
        groups = {
            "replica": [[row[i] for row in dense] for i in range(len(dense[0]))],
            "shard": dense if self.expert == 1 else [row for block in experts for row in block],
            "expert": [[block[r][s] for block in experts] for r in range(self.replica) for s in range(self.shard)],
            "table replicas": [[row[i] for row in tables] for i in range(self.table_shard)],
            "table shard": tables,
        }
        order: list[Link] = ["none", "host", "zone", "cluster"]
        return {
            name: max((self.topology.link(ranks) for ranks in some), key=order.index) for name, some in groups.items()
        }

    def describe(self) -> str:
        """One line per dimension: its size, its collective, the slowest link it crosses and that link's speed."""
        sizes = {
            "replica": (self.replica, "all-reduce of gradients"),
            "shard": (self.shard, "all-gather and reduce-scatter of parameters"),
            "expert": (self.expert, "exchange of activations"),
            "table replicas": (self.table_replicas, "average of rows"),
            "table shard": (self.table_shard, "all-to-all of ids and rows"),
        }
        lines = []
        for name, link in self.links().items():
            size, what = sizes[name]
            over = "" if link == "none" else f", {what} over {link} links, {self.topology.gbs(link):g} GB/s"
            lines.append(f"{name} {size}{over}")
        return "\n".join(lines)


def layout(config: ParallelConfig, topology: Topology) -> Layout:
    """Derives groups of ranks.

    Raises:
        ValueError: the sizes do not multiply to the number of ranks; the message names all numbers.
    """
    world = topology.ranks
    dense, sparse = config.dense, config.sparse
    expert = dense.expert
    if world % expert:
        raise ValueError(f"parallel.dense.expert: {expert} does not divide the {world} ranks ({_shape(topology)})")
    zone = world // topology.zones
    if not dense.shard and zone % expert:
        raise ValueError(f"parallel.dense.expert: {expert} does not divide the {zone} ranks of a zone; set dense.shard")
    shard = dense.shard or zone // expert
    if world % (shard * expert):
        raise ValueError(
            f"parallel.dense: shard {shard} x expert {expert} = {shard * expert} does not divide the {world} ranks "
            f"({_shape(topology)})"
        )
    replica = dense.replica or world // (shard * expert)
    if replica * shard * expert != world:
        raise ValueError(
            f"parallel.dense: replica {replica} x shard {shard} x expert {expert} = {replica * shard * expert}, but "
            f"there are {world} ranks ({_shape(topology)})"
        )
    replicas = sparse.replicas or (max(1, world // sparse.shard) if sparse.shard else topology.zones)
    size = sparse.shard or max(1, world // replicas)
    if sparse.fully_sharded and replicas == 1:
        raise ValueError(
            "parallel.sparse.fully_sharded: there is one group, so no replica that could keep a part; set "
            "parallel.sparse.replicas to 2 or more"
        )
    if replicas * size != world:
        raise ValueError(
            f"parallel.sparse: replicas {replicas} x shard {size} = {replicas * size}, but there are {world} ranks "
            f"({_shape(topology)})"
        )

    def derived(adjacent: bool) -> Layout:
        return Layout(
            topology=topology,
            replica=replica,
            shard=shard,
            expert=expert,
            table_replicas=replicas,
            table_shard=size,
            replicas_adjacent=adjacent,
        )

    if sparse.neighbours != "auto":
        return derived(sparse.neighbours == "replicas")
    group, adjacent = derived(False), derived(True)
    # The all-to-all is waited for in every forward and backward pass, the average of rows once.
    speed = [topology.gbs(choice.links()["table shard"]) for choice in (group, adjacent)]
    return adjacent if replicas > 1 and speed[1] >= speed[0] else group


def _shape(topology: Topology) -> str:
    return f"{topology.gpus_per_host} GPUs per host x {topology.hosts_per_zone} hosts per zone x {topology.zones} zones"
