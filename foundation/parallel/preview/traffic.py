"""Bytes that a rank sends in a step, by collective and by link, and the seconds that they take.

A ring over g ranks of a host, on h hosts of each of z zones, sends `(g - 1) / g` of what is gathered within the host;
every one of the host's g network cards sends `1 / g` of `(h z - 1) / (h z)` of it to the next host. An all-to-all sends
each peer its part directly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from foundation.parallel.placement import TableSize, rows_of_ranks
from foundation.parallel.preview.memory import FLOAT, gathered_bytes
from foundation.parallel.preview.rehearsal import Lookup, Rehearsal
from foundation.parallel.topology import Layout, Link, ParallelConfig, Topology
from foundation.parallel.wire import row_bytes, row_length
from foundation.training.launch import Precision

ID = 8
"""Bytes of an id on its way to the rank that holds its row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Collective:
    """What one kind of collective does in a step.

    Args:
        name: what moves.
        ranks: that take part.
        bytes: that a rank sends, by link.
        seconds: that they take.
        waited: nothing is computed meanwhile; else it runs beside the backward or forward pass.
    """

    name: str
    ranks: int
    bytes: Mapping[Link, float]
    seconds: float
    waited: bool


def traffic_of(
    rehearsal: Rehearsal,
    layout: Layout,
    tables: Sequence[TableSize],
    owner: Mapping[str, int | None],
    config: ParallelConfig,
    precision: Precision,
    links_share: float,
) -> list[Collective]:
    """The collectives of a step of the fullest rank, those of one rank only left out.

    Args:
        config: whether ids travel early, and how rows and gradients travel.
        precision: what FSDP gathers parameters in.
        links_share: part of a link's speed that collectives reach.
    """
    topology = layout.topology
    dense, experts, groups = layout.dense_ranks(), layout.expert_ranks(), layout.table_ranks()
    found: list[Collective] = []

    def add(name: str, ranks: list[int], sent: Mapping[Link, float], waited: bool) -> None:
        if len(ranks) > 1:
            slowest = max(
                (count / (topology.gbs(link) * 1e9 * links_share) for link, count in sent.items()), default=0.0
            )
            found.append(Collective(name=name, ranks=len(ranks), bytes=dict(sent), seconds=slowest, waited=waited))

    def ring(ranks: list[int], gathered: float) -> dict[Link, float]:
        return _ring(topology, ranks, gathered)

    def exchange(ranks: list[int], own: float) -> dict[Link, float]:
        return _exchange(topology, ranks, own)

    width = layout.shard * layout.expert
    number = FLOAT if config.dense.wire == "fp32" else FLOAT // 2
    whole = number * float(rehearsal.rest)
    blocks = number * float(rehearsal.blocks)
    # Layers are gathered for the forward and again for the backward pass, what lies outside of them once.
    twice = gathered_bytes(precision) * float(rehearsal.rest + sum(rest for rest, _ in rehearsal.layers))
    twice_blocks = 2.0 * gathered_bytes(precision) * rehearsal.blocks
    column = [row[0] for row in dense]
    same_blocks = experts[0][0] if layout.expert > 1 else []
    block_copies = [row[0] for row in experts[0]] if layout.expert > 1 else []
    if width > 1:
        add("gather parameters", dense[0], ring(dense[0], twice), False)
        add("reduce-scatter gradients", dense[0], ring(dense[0], whole), False)
        add("gather parameters of blocks", same_blocks, ring(same_blocks, twice_blocks), False)
        add("reduce-scatter gradients of blocks", same_blocks, ring(same_blocks, blocks), False)
    add("all-reduce gradients", column, ring(column, 2 * whole / width), False)
    add("all-reduce gradients of blocks", block_copies, ring(block_copies, 2 * blocks / layout.shard), False)
    if layout.expert > 1:
        peers = [block[0][0] for block in experts]
        tokens = sum(float(arm.tokens) for arm in rehearsal.arms)
        results = sum(float(arm.results) for arm in rehearsal.arms)
        add("gather tokens for experts", peers, ring(peers, 2 * tokens * layout.expert), True)
        add("exchange results of experts", peers, exchange(peers, 2 * results), True)

    group = groups[0]
    asked = {t.name: rehearsal.lookups[t.name.rsplit(".", 1)[-1]] for t in tables}
    # Tables of single rows are asked for each id of a batch once; bags for all.
    sent_ids = sum(look.ids if look.pooled else look.unique for look in asked.values())
    add("ids to tables", group, exchange(group, float(ID * sent_ids)), not config.overlap)
    length = row_length(t.dim for t in tables) if config.sparse.wire == "fp8" else 1
    row = {t.name: row_bytes(config.sparse.wire, t.dim, length) for t in tables}
    add("rows from tables", group, exchange(group, _answered(asked, owner, row, layout.table_shard)), True)
    back = sum(row[name] * _returned(look, owner[name], layout.table_shard) for name, look in asked.items())
    add("gradients of rows", group, exchange(group, float(back)), True)
    most = {t.name: float(rows_of_ranks(t, owner[t.name], layout.table_shard).max()) for t in tables}
    sums, numbers = sum(most.values()), sum(most[t.name] * t.dim for t in tables)
    replicas = [row[0] for row in groups]
    if config.sparse.fully_sharded:  # parts of the averages, put together for the lookup and for the update
        add("average of table replicas", replicas, ring(replicas, FLOAT * (2 * sums + numbers)), True)
        add("gather rows of table replicas", replicas, ring(replicas, 2 * FLOAT * numbers), True)
    else:
        held = (numbers + sums) / config.sparse.sync_every
        add("average of table replicas", replicas, ring(replicas, 2 * FLOAT * held), True)
    return found


def _returned(look: Lookup, owner: int | None, ranks: int) -> int:
    """Rows, or gradients of rows, that go between a rank and the table's ranks in one direction.

    Pooled rows of a table that is cut by rows are sums of what every rank has: each sends its part of all of them.
    """
    return look.unique if not look.pooled else look.pooled * (ranks if owner is None else 1)


def _answered(
    asked: Mapping[str, Lookup], owner: Mapping[str, int | None], row: Mapping[str, int], ranks: int
) -> float:
    """Bytes that the busiest rank sends as rows: its share of tables that are cut, all of those that it has whole."""
    even = 0
    whole: Counter[int] = Counter()
    for name, look in asked.items():
        rank = owner[name]
        numbers = row[name] * _returned(look, rank, ranks)
        if rank is None:
            even += numbers
        else:
            whole[rank] += numbers * ranks
    return float(even + max(whole.values(), default=0))


def _ring(topology: Topology, ranks: list[int], gathered: float) -> dict[Link, float]:
    if len(ranks) < 2:
        return {}
    hosts = Counter(rank // topology.gpus_per_host for rank in ranks)
    zones = {host // topology.hosts_per_zone for host in hosts}
    each = max(hosts.values())
    sent: dict[Link, float] = {}
    if each > 1:
        sent["host"] = gathered * (each - 1) / each
    if len(hosts) > 1:
        link: Link = "zone" if len(zones) == 1 else "cluster"
        sent[link] = gathered * (len(hosts) - 1) / len(hosts) / each
    return sent


def _exchange(topology: Topology, ranks: list[int], own: float) -> dict[Link, float]:
    sent: dict[Link, float] = {}
    for peer in ranks[1:]:
        link = topology.link([ranks[0], peer])
        sent[link] = sent.get(link, 0.0) + own / len(ranks)
    return sent
