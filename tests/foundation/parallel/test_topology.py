from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from foundation.data.settings import PRESETS
from foundation.parallel.topology import DenseSizes, Layout, ParallelConfig, SparseSizes, Topology, layout

TWO_HOSTS = Topology(gpus_per_host=4, hosts_per_zone=2, host_gbs=100, zone_gbs=10)
BIG = Topology.load("topology/512-hosts")


def derive(topology: Topology, dense: dict[str, int] | None = None, **sparse: Any) -> Layout:
    return layout(ParallelConfig(dense=DenseSizes(**(dense or {})), sparse=SparseSizes(**sparse)), topology)


def test_one_process_is_one_of_everything() -> None:
    alone = derive(Topology.load("topology/laptop"))
    assert (alone.replica, alone.shard, alone.expert, alone.table_replicas, alone.table_shard) == (1, 1, 1, 1, 1)
    assert set(alone.links().values()) == {"none"}


def test_experts_get_the_nearest_ranks_and_replicas_the_farthest() -> None:
    found = derive(TWO_HOSTS, {"shard": 2, "expert": 2})
    assert found.replica == 2
    assert found.dense_ranks() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert found.expert_ranks() == [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]
    links = found.links()
    assert (links["expert"], links["shard"], links["replica"]) == ("host", "host", "zone")
    assert "replica 2, all-reduce of gradients over zone links, 10 GB/s" in found.describe()


def test_zero_derives_a_shard_per_zone_and_a_table_replica_per_zone() -> None:
    found = derive(BIG, {"shard": 0, "expert": 8}, replicas=0)
    assert (found.replica, found.shard, found.expert) == (16, 32, 8)
    assert (found.table_replicas, found.table_shard) == (16, 256)
    assert found.links() == {
        "replica": "cluster",
        "shard": "zone",
        "expert": "host",
        "table replicas": "cluster",
        "table shard": "zone",
    }


@pytest.mark.parametrize(
    ("topology", "sparse", "groups", "links"),
    [
        # A group fits a host: its all-to-all stays there.
        (TWO_HOSTS, {"replicas": 2}, [[0, 1, 2, 3], [4, 5, 6, 7]], ("zone", "host")),
        (TWO_HOSTS, {"shard": 2, "replicas": 0}, [[0, 1], [2, 3], [4, 5], [6, 7]], ("zone", "host")),
        # On one host nothing is slower than anything else.
        (Topology(gpus_per_host=4), {"replicas": 2}, [[0, 2], [1, 3]], ("host", "host")),
        # A group that spans hosts anyway: replicas become neighbours.
        (Topology(gpus_per_host=2, hosts_per_zone=4), {"replicas": 2}, [[0, 2, 4, 6], [1, 3, 5, 7]], ("host", "zone")),
        # Said otherwise.
        (TWO_HOSTS, {"replicas": 2, "neighbours": "replicas"}, [[0, 2, 4, 6], [1, 3, 5, 7]], ("host", "zone")),
        (Topology(gpus_per_host=4), {"replicas": 2, "neighbours": "group"}, [[0, 1], [2, 3]], ("host", "host")),
    ],
)
def test_table_groups_keep_the_all_to_all_on_the_fastest_link(
    topology: Topology, sparse: dict[str, Any], groups: list[list[int]], links: tuple[str, str]
) -> None:
    found = derive(topology, **sparse)
    assert found.table_ranks() == groups
    assert (found.links()["table replicas"], found.links()["table shard"]) == links


def test_every_rank_is_in_every_dimension_once() -> None:
    for shard, expert, replicas, neighbours in ((32, 8, 16, "auto"), (64, 2, 4, "replicas"), (1, 1, 1, "group")):
        found = derive(BIG, {"shard": shard, "expert": expert}, replicas=replicas, neighbours=neighbours)
        everyone = list(range(4096))
        assert sorted(chain.from_iterable(found.dense_ranks())) == everyone
        assert sorted(chain.from_iterable(chain.from_iterable(found.expert_ranks()))) == everyone
        assert sorted(chain.from_iterable(found.table_ranks())) == everyone


@pytest.mark.parametrize(
    ("dense", "sparse", "message"),
    [
        ({"expert": 3}, {}, r"dense\.expert: 3 does not divide the 8 ranks \(4 GPUs per host x 2 hosts per zone"),
        ({"shard": 3}, {}, r"shard 3 x expert 1 = 3 does not divide the 8 ranks"),
        ({"replica": 3, "shard": 2}, {}, r"replica 3 x shard 2 x expert 1 = 6, but there are 8 ranks"),
        ({}, {"replicas": 3}, r"replicas 3 x shard 2 = 6, but there are 8 ranks"),
        ({}, {"replicas": 2, "shard": 2}, r"replicas 2 x shard 2 = 4, but there are 8 ranks"),
        ({}, {"replicas": 16}, r"replicas 16 x shard 1 = 16, but there are 8 ranks"),
        ({}, {"replicas": 0, "shard": 16}, r"replicas 1 x shard 16 = 16, but there are 8 ranks"),
        ({}, {"fully_sharded": True}, r"fully_sharded: there is one group, .* set parallel\.sparse\.replicas"),
        ({}, {"replicas": 2, "sync_every": 4, "fully_sharded": True}, r"sync_every: 4 with fully_sharded"),
        ({}, {"replicas": 2, "sync_every": 0}, r"sync_every: must be at least 1, got 0"),
    ],
)
def test_impossible_shapes_name_the_numbers(dense: dict[str, int], sparse: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        derive(TWO_HOSTS, dense, **sparse)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gpus: 8", "gpus: no such key; known: gpus_per_host"),
        ("zones: two", "zones: expected a whole number, got 'two'"),
        ("zones: 1.5", "zones: expected a whole number"),
        ("host_gbs: true", "host_gbs: expected a number"),
        ("zones: [", "not a YAML file"),
        ("zones: 1 # \udcff", "not a YAML file"),
        ("- 8", "expected keys and numbers"),
        ("zones: 0", r"topology\.zones: must be at least 1, got 0"),
        ("zones: 9000000", r"x 9000000 zones are 9,000,000 ranks; at most 1,048,576 can be planned for"),
        ("zone_gbs: 0", r"topology\.zone_gbs: must be above 0"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "topology.yaml"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=message):
        Topology.load(path)


@pytest.mark.parametrize("path", sorted((PRESETS / "topology").glob("*.yaml")), ids=lambda path: path.stem)
def test_presets_load_and_lay_out(path: Path) -> None:
    topology = Topology.load(path)
    found = derive(topology, {"shard": 0}, replicas=0)
    assert found.world == topology.ranks


def test_topology_as_the_launcher_describes_it() -> None:
    assert Topology.of_ranks(8, 4).hosts_per_zone == 2
    assert Topology.of_ranks(6, 4) == Topology(gpus_per_host=6)
