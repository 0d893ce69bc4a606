"""Real processes over Gloo: every way of spreading a model equals one process, and reads what another one wrote."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard

from foundation.data.batch import Batch
from foundation.model.gem import GEM
from foundation.parallel.benchmarks import equality
from foundation.parallel.benchmarks.equality import Case
from foundation.parallel.benchmarks.random_batches import dealt, random_batch, take
from foundation.parallel.benchmarks.steps import train_step
from foundation.parallel.dense import _placement
from foundation.parallel.parallelize import parallelize, rescale_momentum
from foundation.parallel.pieces import local_shards
from foundation.parallel.plan import SparseConfig
from foundation.parallel.tables import table_momentum, table_weights
from foundation.parallel.topology import DenseSizes, ParallelConfig, SparseSizes, Topology
from foundation.training.checkpoint_files import CheckpointError, read_tensors, saved_keys, write_checkpoint
from foundation.training.state import TrainState
from tests.foundation.parallel.ranks import on_ranks, one_rank

CPU = torch.device("cpu")
SHARDED = Case(parallel=ParallelConfig(dense=DenseSizes(shard=2)), plan="row-wise")
REPLICATED = Case(parallel=ParallelConfig(), plan="table-wise")
WHOLE = "whole.pt"
"""What a checkpoint holds, read without sharding: it takes seconds, and every rank of every reader compares with it."""
PARTS = SparseSizes(replicas=2, fully_sharded=True)
EXPERTS = Case(parallel=ParallelConfig(dense=DenseSizes(expert=2), sparse=PARTS), plan="mixed")


def wrong(world: int) -> list[str]:
    """Combinations that are not equal to one process."""
    references: dict[str, Any] = {}
    outcomes = {case.name(world): equality.check(case, 3, CPU, references) for case in equality.cases(world)}
    assert len(outcomes) > 2 or world == 1
    return [f"{name}: {outcome}" for name, outcome in outcomes.items() if not outcome.equal]


def spread(case: Case) -> TrainState:
    """Of a model whose one layer has as many keys as a checkpoint needs."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(equality, "MODEL", replace(equality.MODEL, layers=1))
        return equality._spread(case, CPU)


def save(folder: Path, case: Case) -> None:
    """Trains a little and writes a checkpoint."""
    state = spread(case)
    for seed in range(2):
        encoded = random_batch(equality.SIZES, seed)
        mine = take(encoded, dealt(len(encoded.request_time), dist.get_world_size())[dist.get_rank()])
        train_step(state, Batch.from_encoded(mine, equality.SIZES.schema()))
        assert state.ema is not None
        state.ema.update(seed + 1)
    state.model.settle_tables()
    checkpoint = write_checkpoint(folder, 2, state.tensors(), {}, {})
    whole = {key: torch.zeros(shape) for key, shape in saved_keys(checkpoint).items()}
    read_tensors(checkpoint, whole)
    if dist.get_rank() == 0:
        torch.save(whole, folder / WHOLE)
    dist.barrier()


def assert_loads(checkpoint: Path, case: Case) -> None:
    """Every tensor of a new state equals the whole one in the checkpoint, and at first did not."""
    state = spread(case)
    whole = torch.load(checkpoint.parent / WHOLE)
    different = 0
    for key, value in state.tensors().items():
        different += any(not torch.equal(shard, whole[key][place]) for place, shard in local_shards(value))
    assert different > 20
    read_tensors(checkpoint, state.tensors())
    for key, value in state.tensors().items():
        assert all(torch.equal(shard, whole[key][place]) for place, shard in local_shards(value)), key
    missing = {key: value for key, value in state.tensors().items() if not key.endswith("heads.bias")}
    with pytest.raises(CheckpointError, match=r"2 keys in it are not expected: ema\.heads\.bias, model\.heads\.bias"):
        read_tensors(checkpoint, missing)


def assert_replicas_keep_parts() -> None:
    """Fully sharded replicas train as whole ones do and hold whole rows only where these are needed."""
    world = dist.get_world_size()
    error = {"rtol": 0.0, "atol": 0.0 if world == 2 else 1e-6}  # the order of two terms of a sum does not matter
    whole, parts = (
        parallelize(equality._model(), REPLICATED.sparse, CPU, ParallelConfig(sparse=replace(PARTS, **changes)))
        for changes in ({"replicas": world, "fully_sharded": False}, {"replicas": world})
    )
    assert parts.parts is not None
    rows = [piece.tensor for table in table_weights(parts).values() for piece in table.pieces]
    everything, one_part = parts.parts.numel * 4, -(-parts.parts.numel // world) * 4
    assert everything == sum(tensor.nbytes for tensor in rows) == parts.parts.held
    for seed in range(4):
        encoded = random_batch(equality.SIZES, seed)
        mine = take(encoded, dealt(len(encoded.request_time), world)[dist.get_rank()])
        batch = Batch.from_encoded(mine, equality.SIZES.schema())
        if seed == 2:  # an evaluation, which nothing but its lookups makes whole
            with torch.no_grad():
                torch.testing.assert_close(parts(batch).logits, whole(batch).logits, **error)
            assert everything <= parts.parts.held < everything + 4 * world
        if seed == 3:  # a step that is not usable has no backward pass
            parts(batch)
        for model in (whole, parts):
            output = model(batch)
            assert model is whole or parts.parts.held == one_part
            model.module.loss(output, batch).total.backward()
            model.average_tables()
            for parameter in model.parameters():
                parameter.grad = None
        assert parts.parts.held == one_part
        assert not any(tensor.untyped_storage().nbytes() for tensor in rows)
    with pytest.raises(AssertionError, match="rows were let go"):
        table_weights(parts)
    parts.settle_tables()
    for read in (table_weights, table_momentum):
        for name, value in read(parts).items():
            for a, b in zip(value.pieces, read(whole)[name].pieces, strict=True):
                torch.testing.assert_close(a.tensor, b.tensor, **error)


def save_both(folder: str) -> None:
    save(Path(folder) / "sharded", SHARDED)
    save(Path(folder) / "experts", EXPERTS)


def two(folder: str) -> list[str]:
    found = wrong(2)
    assert_replicas_keep_parts()
    save_both(folder)
    assert_loads(Path(folder) / "sharded" / "step-00000002", REPLICATED)
    assert_loads(Path(folder) / "sharded" / "step-00000002", EXPERTS)
    with pytest.raises(ValueError, match=r"expert: 2 ranks cannot share the 1 blocks of layers\.0\.interaction evenly"):
        single = equality.GEMConfig(width=8, layers=1)
        model = GEM(single, equality.SIZES.schema(), equality.SIZES.table_rows)
        parallelize(model, SparseConfig(), CPU, EXPERTS.parallel)
    return found


def read_both(folder: str) -> None:
    assert_loads(Path(folder) / "experts" / "step-00000002", SHARDED)
    assert_loads(Path(folder) / "sharded" / "step-00000002", EXPERTS)


@pytest.mark.distributed
@pytest.mark.timeout(1500)
def test_two_ranks_equal_one_process_and_others_read_their_checkpoints(tmp_path: Path) -> None:
    assert on_ranks(two, 2, tmp_path / "two", str(tmp_path)) == [[], []]
    on_ranks(read_both, 4, tmp_path / "four", str(tmp_path))
    with one_rank():
        for name in ("sharded", "experts"):
            assert_loads(tmp_path / name / "step-00000002", REPLICATED)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("world", [4, 8])
def test_more_ranks_equal_one_process(world: int, tmp_path: Path) -> None:
    assert on_ranks(wrong, world, tmp_path, world) == [[]] * world


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(1500)
def test_eight_ranks_read_what_two_wrote(tmp_path: Path) -> None:
    on_ranks(save_both, 2, tmp_path / "two", str(tmp_path))
    on_ranks(read_both, 8, tmp_path / "eight", str(tmp_path))


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(900)
def test_replicas_keep_parts_that_do_not_divide_their_rows(tmp_path: Path) -> None:
    on_ranks(assert_replicas_keep_parts, 3, tmp_path)


def test_one_rank_equals_the_reference() -> None:
    with one_rank():
        assert wrong(1) == []


def test_a_difference_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(parallel=ParallelConfig(), plan="mixed")
    step = TrainState.of
    with one_rank():
        monkeypatch.setattr(TrainState, "of", lambda model, dense, ema: step(model, equality.DenseConfig(lr=0.02), ema))
        assert not equality.check(case, 2, CPU).equal


def test_another_number_of_ranks_than_the_topology_has_is_refused() -> None:
    model = GEM(equality.MODEL, equality.SIZES.schema(), equality.SIZES.table_rows)
    with one_rank(), pytest.raises(ValueError, match="topology: it has 8 ranks, but 1 were started"):
        parallelize(model, SparseConfig(), CPU, topology=Topology(gpus_per_host=8))


def test_momentum_keeps_its_rates_when_the_number_of_replica_groups_changes() -> None:
    with one_rank():
        state = equality._spread(REPLICATED, CPU)
        before = {name: value.pieces[0].tensor.clone() for name, value in table_momentum(state.model).items()}
        rescale_momentum(state.model, 4.0)
        for name, value in table_momentum(state.model).items():
            torch.testing.assert_close(value.pieces[0].tensor, before[name] / 4)


def test_parameters_are_cut_along_the_largest_dim_that_the_ranks_divide() -> None:
    mesh: Any = SimpleNamespace(ndim=1, size=lambda dim=0: 4)
    names: dict[nn.Parameter, str] = {}

    def placed(*shape: int) -> Shard:
        parameter = nn.Parameter(torch.empty(shape, device="meta"))
        names[parameter] = "layers.0.weight"
        return _placement(names, mesh)(parameter)

    assert placed(1, 12, 16) == Shard(2)
    assert placed(1, 16, 10) == Shard(1)
    assert placed(1, 3) == Shard(0)  # small: filled up
    with pytest.raises(ValueError, match=r"shard: 4 ranks divide no dim of layers\.0\.weight \(1, 1999, 2001\)"):
        placed(1, 1999, 2001)
