"""A plan adds up, holds each table once, fits its GPUs, and says what does not fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

import opengem
from foundation.data.commands import USAGE_ERROR
from foundation.data.options import parse_config
from foundation.model.benchmarks.presets import model_config, table_rows
from foundation.model.gem import GEM
from foundation.parallel.placement import TableSize, place_tables, rows_of_ranks
from foundation.parallel.preview.load import Requests
from foundation.parallel.preview.plan import PlanConfig, plan, work_out
from foundation.parallel.preview.rehearsal import rehearse
from foundation.parallel.preview.result import Plan
from tests.foundation.data.builders import small_schema, small_table, write_dataset

SMALL = ("--config", "foundation/tiny", "--precision", "bf16", "--reader.batch_size", "64", "--events", "64")


@pytest.fixture(scope="module")
def schema_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A schema with one short history, which is quick to rehearse."""
    path = tmp_path_factory.mktemp("plan") / "schema.yaml"
    small_schema().save(path)
    return str(path)


Planned = Callable[..., Plan]


@pytest.fixture(scope="module")
def planned(schema_file: str) -> Planned:
    """Plans, each worked out once."""

    @cache
    def found(*arguments: str) -> Plan:
        config = parse_config(PlanConfig, [*SMALL, "--schema", schema_file, *arguments], name="plan")
        return work_out(config)

    return found


LAYOUTS = {
    "one": (),
    "replicas": ("--topology", "topology/one-host-8"),
    "fsdp": ("--topology", "topology/two-hosts-8", "--parallel.dense.shard", "8", "--parallel.sparse.replicas", "2"),
    "experts": (
        *("--topology", "topology/one-host-8", "--parallel.dense.shard", "2", "--parallel.dense.expert", "4"),
        *("--model.layer.interaction.experts", "4"),
    ),
    "trillion": ("--schema", "datasets/trillion", "--topology", "topology/512-hosts", "--model.embeddings.dim", "256"),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_plan_adds_up(name: str, planned: Planned) -> None:
    found = planned(*LAYOUTS[name])
    memory, time = found.memory, found.time
    assert sum(memory.terms.values()) == pytest.approx(memory.total)
    assert all(count >= 0 for count in memory.terms.values())
    assert memory.allocated < memory.total < found.capacity
    assert time.step == pytest.approx(max(time.beside.values()) + sum(time.alone.values()))
    assert time.bound in {*time.beside, *time.alone}
    tables = [t.name for t in found.tables]
    assert len(set(tables)) == len(tables) == (13 if name == "trillion" else 5)
    whole = sum(t.bytes for t in found.tables) * found.layout.table_replicas
    assert memory.tables_mean * found.layout.world <= whole <= memory.tables_mean * found.layout.world * 1.3
    assert found.table_imbalance >= 1 and found.token_imbalance >= 1
    collectives = {c.name for c in found.collectives}
    assert bool(collectives) == (found.layout.world > 1)
    assert ("average of table replicas" in collectives) == (found.layout.table_replicas > 1)
    for collective in found.collectives:
        slowest = max(count / (found.layout.topology.gbs(link) * 8e8) for link, count in collective.bytes.items())
        assert collective.seconds == pytest.approx(slowest)


def test_fully_sharded_replicas_hold_parts_of_rows_and_send_half_as_much_again(planned: Planned) -> None:
    topology = ("--topology", "topology/one-host-8", "--parallel.sparse.replicas", "4", "--reader.batch_size")
    key = "--parallel.sparse.fully_sharded"
    whole, parts = (planned(*topology, "512", key, value) for value in ("false", "true"))
    other = {name: count for name, count in whole.memory.terms.items() if name != "tables"}
    assert parts.memory.terms == other | {"tables": whole.memory.terms["tables"] / 4}
    before, after = ({c.name: sum(c.bytes.values()) for c in plan.collectives} for plan in (whole, parts))
    gathered = after.pop("gather rows of table replicas")
    average = "average of table replicas"
    assert after.pop(average) + gathered == pytest.approx(before.pop(average) + gathered / 2)
    assert after == before
    # Few activations make no room for whole rows, which are there once in a step, with a part beside.
    few = planned(*topology, "1", "--model.embeddings.dim", "8192", key, "true").memory
    assert 1.0 < few.terms["tables"] / few.tables_heaviest <= 1.25


def test_four_thousand_gpus_hold_a_trillion_numbers(planned: Planned) -> None:
    found = planned(*LAYOUTS["trillion"])
    assert found.layout.world == 4096
    assert sum(t.rows * t.dim for t in found.tables) > 1e12


def test_cutting_the_dense_part_takes_memory_from_weights_and_optimizer(planned: Planned) -> None:
    one, cut = planned(), planned(*LAYOUTS["fsdp"])
    for term in ("dense weights", "AdamW moments"):
        assert cut.memory.terms[term] == pytest.approx(one.memory.terms[term] / 8)


def test_experts_hold_the_blocks_of_their_rank_only(planned: Planned) -> None:
    arguments = ("--model.layer.interaction.experts", "4", "--topology", "topology/one-host-8")
    spread = planned(*LAYOUTS["experts"])
    whole = planned(*arguments)
    assert spread.parameters == whole.parameters
    assert spread.memory.terms["dense weights"] == pytest.approx(whole.memory.terms["dense weights"] / 8, rel=1e-6)


def test_recomputing_lowers_what_is_kept(planned: Planned) -> None:
    everything = planned()
    some = planned("--activation_memory_gb", "1e-4")
    assert some.again and sum(some.kept.values()) < sum(everything.kept.values())
    assert some.parameters == everything.parameters


def test_a_limit_on_events_makes_batches_smaller_and_balance_makes_ranks_alike(planned: Planned) -> None:
    ranks = ("--topology", "topology/one-host-8")
    plain = planned(*ranks)
    bounded = planned(*ranks, "--reader.balance", "request", "--reader.max_tokens", "128")
    assert sum(bounded.kept.values()) < sum(plain.kept.values())
    assert 1 <= bounded.token_imbalance < plain.token_imbalance


def test_a_rehearsal_holds_what_autograd_saves() -> None:
    schema = small_schema()
    rows = table_rows(schema, 1000)
    batch = Requests.stated(schema, 8, 3, 1.0).batch(schema, rows, 2048)
    rehearsal = rehearse(model_config("foundation/tiny"), schema, rows, batch)
    model = GEM(model_config("foundation/tiny"), schema, rows)
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    batch._map(lambda t: own.add(t.untyped_storage().data_ptr()), lambda k: own.add(k.values().data_ptr()))  # type: ignore[func-returns-value,arg-type,return-value]
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model.loss(model(batch), batch).total
    assert torch.isfinite(loss)
    saved = sum(tensor.untyped_storage().nbytes() for place, tensor in kept.items() if place not in own)
    assert sum(rehearsal.kept.values()) == pytest.approx(saved, rel=0.03)


def test_a_dataset_says_what_its_requests_are_like(tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path / "data", {"train/part-0.parquet": small_table([1, 2, 3] * 20)})
    requests = Requests.of_dataset(dataset, 1.0)
    assert requests.impressions == 2
    found = plan(
        parse_config(
            PlanConfig,
            ["--config", "foundation/tiny", "--dataset", str(tmp_path / "data"), "--out", str(tmp_path / "plan")],
            name="plan",
        )
    )
    values = json.loads((tmp_path / "plan" / "plan.json").read_text())
    assert values["memory"]["total"] == found.memory.total and values["time"]["bound"] == found.time.bound
    assert "Plan of a training step" in (tmp_path / "plan" / "plan.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--gpu", "abacus"), ["gpu", "abacus", "H200"]),
        (("--gpu", "A100", "--precision", "fp8"), ["precision"]),
        (("--topology", "topology/one-host-8", "--parallel.dense.shard", "3"), ["3", "8 ranks"]),
        (("--topology", "topology/one-host-8", "--parallel.dense.expert", "8"), ["expert", "8 ranks", "1 blocks"]),
        (("--gpu_memory_gb", "4"), ["GB do not fit a GPU of 4.0 GB", "the most is outside of the allocator"]),
        (("--impressions", "0"), ["impressions", "at least 1"]),
        (("--parallel.dense.shard", "8"), ["does not divide the 1 ranks", "topology: none is given"]),
        (("--reader.batch_size", "100000000000"), ["reader.batch_size: 100,000,000,000", "plan a smaller batch"]),
        (("--topology", "nosuch"), ["topology: nosuch does not exist; presets are: topology/512-hosts.yaml"]),
        (("--out", __file__), ["test_plan.py is a file", "choose another output"]),
    ],
)
def test_what_cannot_be_is_one_line_with_the_numbers(
    arguments: tuple[str, ...], words: list[str], schema_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert opengem.main(["plan", *SMALL, "--schema", schema_file, *arguments]) == USAGE_ERROR
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert all(word in line for word in words), line


def test_tables_are_placed_once_and_evenly() -> None:
    tables = [TableSize(f"t{i}", rows, 8) for i, rows in enumerate([1000, 64, 30, 20, 10, 7])]
    owner = place_tables(tables, 400, 4)
    assert owner == {"t0": None, "t1": 0, "t2": 1, "t3": 2, "t4": 3, "t5": 3}
    for table in tables:
        assert rows_of_ranks(table, owner[table.name], 4).sum() == table.rows
    assert rows_of_ranks(TableSize("odd", 10, 8), None, 4).tolist() == [3, 3, 3, 1]
    # In a large group one rank would have to send the rows of a small table to thousands; bags are sent summed.
    small = [TableSize("rows", 1000, 8), TableSize("bags", 1000, 8, pooled=True)]
    assert place_tables(small, 100_000, 4096) == {"rows": None, "bags": 0}
    assert place_tables(small, 100_000, 8) == {"bags": 0, "rows": 1}
    assert place_tables(small, 1, 1) == {"bags": 0, "rows": 0}


@pytest.mark.slow
def test_the_preset_of_a_trillion_numbers_fits() -> None:
    arguments = ["--config", "foundation/trillion", "--schema", "datasets/trillion", "--topology", "topology/512-hosts"]
    found = work_out(parse_config(PlanConfig, arguments, name="plan"))
    assert found.memory.total < found.capacity and found.layout.world == 4096
