from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from foundation.parallel.parallelize import parallelize
from foundation.parallel.pieces import clone, local_shards
from foundation.parallel.plan import SparseConfig
from foundation.parallel.tables import TableRates, dense_parameters, table_momentum, table_weights
from tests.foundation.parallel import small_model
from tests.foundation.parallel.ranks import on_ranks, one_rank

CPU = torch.device("cpu")
EPS = 1e-6


def train_sharded(steps: int, config: SparseConfig, factors: list[float] | None = None) -> dict[str, Any]:
    """Trains on this rank's part of each batch; losses are means over ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = parallelize(small_model.build(), config, CPU)
    rates = TableRates(model)
    start = {name: [(p, s.clone()) for p, s in local_shards(t)] for name, t in table_weights(model).items()}
    sgd = torch.optim.SGD(dense_parameters(model).values(), lr=0.1)
    losses = []
    for step in range(steps):
        if factors:
            rates.scale(factors[step])
        part = small_model.batch(step).part(rank, world)
        loss = small_model.loss_of(model(part), part.label)
        sgd.zero_grad()
        loss.backward()
        sgd.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / world)
    end = {name: [(p, s.clone()) for p, s in local_shards(t)] for name, t in table_weights(model).items()}
    momentum = {name: [(p, s.clone()) for p, s in local_shards(t)] for name, t in table_momentum(model).items()}
    dense = {name: p.detach().clone() for name, p in dense_parameters(model).items()}
    return {"losses": losses, "start": start, "end": end, "momentum": momentum, "dense": dense}


def assert_same_tables(answers: list[dict[str, Any]], key: str, whole: dict[str, torch.Tensor]) -> None:
    seen = {name: torch.zeros_like(value) for name, value in whole.items() if "embedding" in name}
    for answer in answers:
        for name, shards in answer[key].items():
            for place, shard in shards:
                torch.testing.assert_close(shard, whole[name][place], rtol=1e-5, atol=1e-6)
                seen[name][place] += 1
    assert all((count == 1).all() for count in seen.values())


def expected(steps: int, lr: float) -> tuple[list[float], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    model = small_model.build()
    start = small_model.state(model)
    losses = small_model.train_plain(model, [small_model.batch(i) for i in range(steps)], lr, EPS)
    return losses, start, small_model.state(model)


@pytest.mark.parametrize("row_wise_from", [1, 20, 1000], ids=["row-wise", "mixed", "table-wise"])
def test_one_rank_equals_plain_embeddings_with_row_wise_adagrad(row_wise_from: int) -> None:
    losses, start, end = expected(6, lr=0.05)
    with one_rank():
        answer = train_sharded(6, SparseConfig(lr=0.05, eps=EPS, row_wise_from=row_wise_from))
    assert answer["losses"] == pytest.approx(losses, abs=1e-6)
    assert_same_tables([answer], "start", start)
    assert_same_tables([answer], "end", end)
    for name, value in answer["dense"].items():
        torch.testing.assert_close(value, end[name], rtol=1e-5, atol=1e-6)


def train_each(steps: int, configs: list[SparseConfig]) -> list[dict[str, Any]]:
    return [train_sharded(steps, config) for config in configs]


@pytest.mark.distributed
@pytest.mark.timeout(900)
def test_two_ranks_equal_one_process_on_the_whole_batch(tmp_path: Path) -> None:
    losses, start, end = expected(6, lr=0.05)
    # All tables cut by rows, one of three cut, none cut: the ranks are started once for all.
    configs = [SparseConfig(lr=0.05, eps=EPS, row_wise_from=rows) for rows in (1, 20, 1000)]
    by_rank = on_ranks(train_each, 2, tmp_path, 6, configs)
    for answers in zip(*by_rank, strict=True):
        for answer in answers:
            assert answer["losses"] == pytest.approx(losses, abs=1e-6)
            for name, value in answer["dense"].items():
                torch.testing.assert_close(value, end[name], rtol=1e-5, atol=1e-6)
        assert_same_tables(list(answers), "start", start)
        assert_same_tables(list(answers), "end", end)


def test_rates_of_tables() -> None:
    with one_rank():
        config = SparseConfig(lr=0.05, eps=EPS, table_lr={"topic": 0.0})
        answer = train_sharded(3, config)
        still = train_sharded(2, config, factors=[0.0, 0.0])
        halved = train_sharded(1, SparseConfig(lr=0.05, eps=EPS), factors=[0.5])
    topic = "bags.embedding_bags.topic.weight"
    assert torch.equal(answer["end"][topic][0][1], answer["start"][topic][0][1])
    for name, shards in answer["end"].items():
        assert name == topic or not torch.equal(shards[0][1], answer["start"][name][0][1])
        assert torch.equal(still["end"][name][0][1], still["start"][name][0][1])
    _, _, end = expected(1, lr=0.025)
    assert_same_tables([halved], "end", end)


def test_momentum_starts_from_the_configured_value() -> None:
    with one_rank():
        model = parallelize(small_model.build(), SparseConfig(initial_accumulator=0.25), CPU)
        momentum = table_momentum(model)
        assert momentum.keys() == table_weights(model).keys()
        for value in momentum.values():
            for _, shard in local_shards(value):
                assert (shard == 0.25).all() and shard.ndim == 1


def test_names_are_those_of_the_unsharded_model_and_the_model_stays_reachable() -> None:
    plain = small_model.build()
    names = set(plain.state_dict())
    dense = {name for name, _ in plain.named_parameters() if "embedding" not in name}
    with one_rank():
        model = parallelize(plain, SparseConfig(), CPU)
        assert set(model.state_dict()) == names
        assert set(dense_parameters(model)) == dense
        assert model.module is plain


def test_clone_is_apart_from_the_original() -> None:
    with one_rank():
        model = parallelize(small_model.build(), SparseConfig(), CPU)
        table = table_weights(model)["sequence.embeddings.item.weight"]
        copy = clone(table)
        (_, original), (_, copied) = next(local_shards(table)), next(local_shards(copy))
        assert torch.equal(original, copied)
        original.add_(1)
        assert not torch.equal(original, copied)
        assert copy.shape == table.shape == (23, 8)


def test_unknown_table_and_odd_dim_are_refused() -> None:
    with one_rank():
        with pytest.raises(ValueError, match=r"table_lr\.nothing: no such table; the model has item, topic, user"):
            parallelize(small_model.build(), SparseConfig(table_lr={"nothing": 0.1}), CPU)
        odd = small_model.build()
        odd.bags.embedding_bag_configs()[0].embedding_dim = 6
        with pytest.raises(ValueError, match="table topic: dim 6 is not a multiple of 4"):
            parallelize(odd, SparseConfig(), CPU)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"lr": -1.0}, "sparse.lr"),
        ({"table_lr": {"a": -0.1}}, "sparse.table_lr.a"),
        ({"row_wise_from": 0}, "row_wise_from"),
    ],
)
def test_config_names_the_wrong_key(settings: dict[str, Any], key: str) -> None:
    with pytest.raises(ValueError, match=key):
        SparseConfig(**settings)


def test_unsharded_tables_are_let_go() -> None:
    with one_rank():
        plain = small_model.build()
        held = {name: weakref.ref(p) for name, p in plain.named_parameters() if "embedding" in name}
        assert len(held) == 3
        model = parallelize(plain, SparseConfig(), CPU)
        gc.collect()
        # TorchRec keeps what bags were made of as long as there are any.
        assert [name for name, ref in held.items() if ref() is not None] == ["bags.embedding_bags.topic.weight"]
        del plain, model
        gc.collect()
        assert all(ref() is None for ref in held.values())
