"""Two Gloo ranks, each a process: losses of one process, ranks that stop together, resume at another size."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from foundation.data.batch import Batch
from foundation.data.dataset import Dataset
from foundation.data.encoding import EncodedBatch
from foundation.data.logs import LogReader, ReaderConfig
from foundation.model.gem import GEM
from foundation.parallel.parallelize import SparseConfig, parallelize
from foundation.parallel.topology import ParallelConfig, SparseSizes
from foundation.training.checkpoint_writer import CheckpointConfig
from foundation.training.ema import EMAConfig
from foundation.training.evaluate import EvaluationConfig, evaluate
from foundation.training.loop import agree, rank_share
from foundation.training.metrics import MetricSuite
from foundation.training.optimizer import DenseConfig
from foundation.training.schedule import ScheduleConfig
from foundation.training.state import TrainState
from foundation.training.train import train
from tests.foundation.parallel.ranks import on_ranks, one_rank
from tests.foundation.training import small_run

CPU = torch.device("cpu")
MODEL = small_run.GEMConfig(width=8, layers=1, heads=small_run.HeadsConfig(trunk=(16, 8), tower=4, adapter_rank=2))


def part(batch: EncodedBatch, rank: int, world: int) -> EncodedBatch:
    """Requests of one rank, uneven on purpose: the last rank gets all but the first few."""
    requests = len(batch.request_time)
    cut = [0, *(3 + i for i in range(world - 1)), requests]
    first, last = cut[rank], cut[rank + 1]
    rows = [i for i, r in enumerate(batch.request_index) if first <= r < last]
    take = torch.tensor(rows, dtype=torch.int64).numpy()
    own = range(first, last)
    return EncodedBatch(
        request=batch.request.take(torch.arange(first, last).numpy()),
        item=batch.item.take(take),
        request_index=batch.request_index[take] - first,
        **{name: getattr(batch, name)[own.start : own.stop] for name in ("request_time", "user_id", "surface")},
        **{
            name: getattr(batch, name)[take]
            for name in ("labels", "label_valid", "weight", "sampling_rate", "impression_id")
        },
    )


def steps(data: str, count: int) -> dict[str, Any]:
    """Losses and weights of some steps on this rank's part of the same global batches, and metrics of all ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    dataset = Dataset.open(data)
    torch.manual_seed(0)
    model = GEM(MODEL, dataset.schema, dataset.encoder.table_rows)
    sharded = parallelize(model, SparseConfig(lr=0.05, row_wise_from=20), CPU)
    # A large eps, since Adam divides by the root of a gradient's square: it would blow rounding up to a full step.
    state = TrainState.of(sharded, DenseConfig(lr=0.01, eps=1e-3), EMAConfig())
    losses, skipped = [], 0
    suite = MetricSuite(dataset.schema.task_names, dataset.schema.surface_names)
    for encoded in list(LogReader(dataset, "train", ReaderConfig(batch_size=32, workers=0)))[:count]:
        batch = Batch.from_encoded(part(encoded, rank, world), dataset.schema)
        output = state.model(batch)
        loss = state.model.module.loss(output, batch).total * rank_share(batch)
        # In the third step the last rank's loss is taken for broken: all ranks must skip it.
        usable, impressions = agree(torch.tensor(len(losses) != 2 or rank < world - 1), batch.num_impressions)
        assert impressions == len(encoded.impression_id)
        if usable:
            loss.backward()
            state.dense.clip()
            state.dense.step()
        state.dense.zero_grad()
        skipped += not bool(usable)
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / world)
        surface, user = batch.surface[batch.request_index], batch.user_id[batch.request_index]
        suite.update(output.logits, batch.labels, batch.label_valid, batch.weight, surface, user)
    dense = {name: p.detach().clone() for name, p in state.dense.parameters.items()}
    return {"losses": losses, "skipped": skipped, "dense": dense, "metrics": suite.compute()}


@pytest.mark.distributed
@pytest.mark.timeout(900)
def test_two_ranks_equal_one_process_on_the_same_global_batches(tmp_path: Path) -> None:
    small_run.dataset(tmp_path / "data")
    with one_rank():
        alone = steps(str(tmp_path / "data"), 5)
    together = on_ranks(steps, 2, tmp_path / "ranks", str(tmp_path / "data"), 5)
    for answer in together:
        assert answer["skipped"] == alone["skipped"] == 1
        assert answer["losses"] == pytest.approx(alone["losses"], abs=2e-6)
        for name, value in alone["dense"].items():
            torch.testing.assert_close(answer["dense"][name], value, rtol=1e-3, atol=1e-5)
    assert str(together[0]["metrics"]) == str(together[1]["metrics"])
    for task, surfaces in alone["metrics"].items():
        for surface, slice_ in surfaces.items():
            other = together[0]["metrics"][task][surface]
            numbers = {key: value for key, value in slice_.items() if key not in ("note", "gauc", "auc")}
            assert {key: other[key] for key in numbers} == pytest.approx(numbers, rel=1e-4, nan_ok=True)


def as_torchrun_starts_it() -> None:
    world = str(dist.get_world_size())
    os.environ |= {
        "TORCHELASTIC_RUN_ID": "test",
        "RANK": str(dist.get_rank()),
        "LOCAL_RANK": str(dist.get_rank()),
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": world,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }


READER = ReaderConfig(batch_size=16, shuffle_window=16, workers=0)
PARTS = ParallelConfig(sparse=SparseSizes(replicas=2, fully_sharded=True))
# One evaluation and one checkpoint, at the end.
QUICK: dict[str, Any] = {"reader": READER, "evaluation": EvaluationConfig(every=1000, batch_size=128)}


def train_on_ranks(folder: str, names: list[str]) -> list[dict[str, Any]]:
    as_torchrun_starts_it()
    answers = []
    for name in names:
        data, out = Path(folder) / name, Path(folder) / f"{name}-run"
        parallel = PARTS if name == "uneven" else ParallelConfig()
        result = train(small_run.config(data, out, epochs=2, parallel=parallel, **QUICK))
        share = LogReader(Dataset.open(data), "train", READER, rank=dist.get_rank(), world_size=dist.get_world_size())
        rows = sum(len(batch.impression_id) for batch in share)
        answers.append({"result": str(result), "steps": result.steps, "rows": rows})
    return answers


@pytest.mark.distributed
@pytest.mark.timeout(900)
def test_ranks_with_unequal_rows_stop_together_and_one_rank_goes_on(tmp_path: Path) -> None:
    small_run.dataset(tmp_path / "uneven", train_requests=25)
    small_run.dataset(tmp_path / "dry", train_requests=1)
    one, other = on_ranks(train_on_ranks, 2, tmp_path / "ranks", str(tmp_path), ["uneven", "dry"])
    for mine, theirs in zip(one, other, strict=True):
        assert mine["result"] == theirs["result"]
        assert mine["rows"] != theirs["rows"]
    assert one[1]["rows"] + other[1]["rows"] == 1, "one rank has nothing to read"
    data, out = tmp_path / "uneven", tmp_path / "uneven-run"
    rows = Dataset.open(data).split("train").rows
    assert one[0]["rows"] + other[0]["rows"] == rows
    lines = small_run.lines(out, "train")
    assert lines[-1]["samples"] == 2 * rows and len(lines) == one[0]["steps"]
    # The checkpoint of two ranks fits one, which goes on with the next epoch.
    before = small_run.tensors(out)
    assert train(small_run.config(data, out, resume=True, epochs=3, **QUICK)).samples == 3 * rows
    after = small_run.tensors(out)
    assert before.keys() == after.keys()
    changed = {key.split(".")[0] for key, value in before.items() if not torch.equal(value, after[key])}
    assert changed == {"model", "momentum", "optimizer", "ema"}


def train_replicas(folder: str) -> None:
    as_torchrun_starts_it()
    settings: dict[str, Any] = {
        "reader": READER,
        "epochs": 2,
        "ema": EMAConfig(decay=0.9, tables=False),  # else it makes tables whole after every step
        "evaluation": EvaluationConfig(every=3, batch_size=128),
        "checkpoint": CheckpointConfig(every=2, keep=9),
        "reset_tables": True,
        "schedule": ScheduleConfig(decay="constant"),
    }
    for name, parallel in (("whole", ParallelConfig(sparse=SparseSizes(replicas=2))), ("parts", PARTS)):
        train(small_run.config(Path(folder) / "data", Path(folder) / name, parallel=parallel, **settings))
    again = small_run.config(Path(folder) / "data", Path(folder) / "again", parallel=PARTS, **settings)
    train(replace(again, max_steps=7))
    train(replace(again, resume=True))


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(900)
def test_fully_sharded_replicas_evaluate_save_and_go_on_as_whole_ones(tmp_path: Path) -> None:
    small_run.dataset(tmp_path / "data", train_requests=50)
    on_ranks(train_replicas, 2, tmp_path / "ranks", str(tmp_path))
    whole = small_run.lines(tmp_path / "whole")
    assert len(small_run.lines(tmp_path / "whole", "validation")) > 2
    assert small_run.lines(tmp_path / "parts") == whole
    for step in (4, "latest"):
        expected = small_run.tensors(tmp_path / "whole", step)
        small_run.assert_same_tensors(small_run.tensors(tmp_path / "parts", step), expected)
    small_run.assert_same_tensors(small_run.tensors(tmp_path / "again"), expected)


def test_evaluate_reads_from_the_start_and_restores_the_mode(tmp_path: Path) -> None:
    dataset = small_run.dataset(tmp_path / "data")
    model = GEM(MODEL, dataset.schema, dataset.encoder.table_rows).train()
    reader = LogReader(dataset, "validation", ReaderConfig(batch_size=16, shuffle_window=0, workers=0))
    one, again = evaluate(model, reader, CPU), evaluate(model, reader, CPU)
    assert str(one) == str(again) and model.training
    assert one["click"]["all"]["rows"] == dataset.split("validation").rows
    assert evaluate(model, reader, CPU, max_batches=2)["click"]["all"]["rows"] <= 32
    assert str(evaluate(model, reader, CPU)) == str(one)
