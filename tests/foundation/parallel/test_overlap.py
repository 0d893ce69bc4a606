"""Two Gloo ranks: ids that travel ahead, rows that are rounded for the way, and parameters gathered in bf16."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from foundation.data.batch import Batch
from foundation.parallel.benchmarks import equality
from foundation.parallel.benchmarks.equality import SIZES, Case
from foundation.parallel.benchmarks.random_batches import dealt, random_batch, take
from foundation.parallel.benchmarks.steps import mean_loss, train_step
from foundation.parallel.parallelize import parallelize
from foundation.parallel.tables import table_momentum
from foundation.parallel.topology import DenseSizes, ParallelConfig, SparseSizes, Topology
from foundation.parallel.trace import Trace, exposure
from foundation.parallel.wire import codecs, row_bytes, row_length
from foundation.training.state import TrainState
from foundation.training.train import train
from tests.foundation.parallel.ranks import on_ranks, one_rank
from tests.foundation.training import small_run
from tests.foundation.training.test_distributed import QUICK, as_torchrun_starts_it

CPU = torch.device("cpu")
BF16 = 2.0**-8  # the largest relative error of rounding to 8 significant bits


def batches(count: int) -> list[Batch]:
    """Of this rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    every = [random_batch(SIZES, seed) for seed in range(count)]
    return [Batch.from_encoded(take(one, dealt(len(one.request_time), world)[rank]), SIZES.schema()) for one in every]


def exchanges(folder: str, overlap: bool) -> tuple[int, int]:
    """Exchanges of ids in three steps, and how many of them were exposed."""
    state = equality._spread(Case(parallel=ParallelConfig(), plan="row-wise"), CPU)
    own = batches(4)
    train_step(state, own[0], own[1] if overlap else None)
    path = Path(folder) / f"trace-{dist.get_rank()}-{overlap}.json.gz"
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for place in (1, 2, 3):
            train_step(state, own[place], own[place + 1] if overlap and place < 3 else None)
    profiler.export_chrome_trace(str(path))
    found = exposure(Trace.load(path))
    assert found.share is None and {"dense forward", "backward", "optimizer", "lookup"} <= found.host.keys()
    return found.exchanges, found.exposed_exchanges


def rounded_rows() -> dict[str, Any]:
    """Rows of users and AdaGrad's sums after one gradient, and the bytes that rows took, with each wire."""
    world = dist.get_world_size()
    encoded = random_batch(SIZES, 5)
    shares = [take(encoded, share) for share in dealt(len(encoded.request_time), world)]
    batch = Batch.from_encoded(shares[dist.get_rank()], SIZES.schema())
    weights = equality._model().embeddings.state_dict()["ec.dim8.embeddings.user.weight"]
    gradients = [
        torch.randn(len(share.user_id), SIZES.dim, generator=torch.Generator().manual_seed(r))
        for r, share in enumerate(shares)
    ]
    sent: list[int] = []
    real = dist.all_to_all_single

    def counted(*args: Any, **options: Any) -> Any:
        moved = options.get("input", args[1] if len(args) > 1 else None)
        sent.append(moved.numel() * moved.element_size() if moved.is_floating_point() else 0)
        return real(*args, **options)

    found: dict[str, Any] = {}
    for wire in ("fp32", "bf16"):
        sent.clear()
        case = Case(parallel=ParallelConfig(sparse=SparseSizes(wire=wire)), plan="row-wise")
        model = equality._spread(case, CPU).model
        dist.all_to_all_single = counted
        rows = model.module.embeddings(batch).request["user_id"]
        forward = sum(sent)
        (rows * gradients[dist.get_rank()]).sum().backward()
        dist.all_to_all_single = real
        to_wire = (lambda x: x.bfloat16().float()) if wire == "bf16" else (lambda x: x)
        assert torch.equal(rows, to_wire(weights)[batch.user_id])
        whole = torch.zeros_like(weights)
        for share, gradient in zip(shares, gradients, strict=True):
            whole.index_add_(0, torch.from_numpy(share.user_id), to_wire(gradient) / world)
        expected = case.sparse.initial_accumulator + whole.square().mean(1)
        name = next(key for key in table_momentum(model) if key.endswith("user.weight"))
        for piece in table_momentum(model)[name].pieces:
            torch.testing.assert_close(piece.tensor, expected[piece.place], rtol=1e-6, atol=1e-7)
        found[wire] = {"forward": forward, "both": sum(sent), "sums": expected}
    return found


def bf16_losses(case: Case, gathered: torch.dtype) -> list[float]:
    """Of three steps under autocast."""
    topology = Topology(gpus_per_host=dist.get_world_size())
    model = parallelize(equality._model(), case.sparse, CPU, case.parallel, topology, gathered=gathered)
    assert all(p.dtype == torch.float32 for p in model.module.parameters())
    state = TrainState.of(model, equality.DENSE, equality.AVERAGES)
    autocast = partial(torch.autocast, "cpu", torch.bfloat16)
    return [mean_loss(train_step(state, batch, None, autocast)) for batch in batches(3)]


def both(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {"exchanges": [exchanges(folder, overlap) for overlap in (False, True)]}
    found["rows"] = rounded_rows()
    as_torchrun_starts_it()
    for overlap in (True, False):
        out = Path(folder) / f"overlap-{overlap}"
        parallel = ParallelConfig(overlap=overlap)
        train(small_run.config(Path(folder) / "data", out, epochs=1, parallel=parallel, **QUICK))
    return found


def precision() -> dict[str, Any]:
    found: dict[str, Any] = {}
    cases = {"replica": DenseSizes(), "shard": DenseSizes(shard=2), "expert": DenseSizes(expert=2)}
    for name, dense in cases.items():
        case = Case(parallel=ParallelConfig(dense=dense), plan="row-wise")
        found[name] = bf16_losses(case, torch.float32 if name == "replica" else torch.bfloat16)
        if name != "replica":
            again = Case(parallel=ParallelConfig(dense=dense), plan="mixed", again=True)
            found[f"{name} again"] = equality.check(again, 3, CPU, {}).equal
            rounded = Case(parallel=ParallelConfig(dense=replace(dense, wire="bf16")), plan="row-wise")
            outcome = equality.check(rounded, 3, CPU, {})
            # A step of Adam is at most its rate, and rounding changes it by a few times the error of a gradient.
            found[f"{name} wire"] = (outcome.weight, outcome.loss)
    with pytest.raises(ValueError, match="bf16 needs CUDA where the dense part is replicated"):
        equality._spread(Case(parallel=ParallelConfig(dense=DenseSizes(wire="bf16")), plan="row-wise"), CPU)
    compiled = Case(parallel=ParallelConfig(dense=cases["shard"]), plan="mixed", compile="layers", again=True)
    parts = Case(parallel=ParallelConfig(), plan="mixed", compile="parts")
    found["compiled"] = [equality.check(case, 3, CPU, {}).equal for case in (compiled, parts)]
    return found


@pytest.mark.distributed
@pytest.mark.timeout(900)
def test_two_ranks(tmp_path: Path) -> None:
    small_run.dataset(tmp_path / "data", train_requests=25)
    for found in on_ranks(both, 2, tmp_path / "ranks", str(tmp_path)):
        # Of three exchanges the first departs before the trace begins.
        assert found["exchanges"] == [(3, 3), (2, 0)]
        rows = found["rows"]
        assert rows["fp32"]["forward"] == 2 * rows["bf16"]["forward"] > 0
        assert rows["fp32"]["both"] == 2 * rows["bf16"]["both"] > rows["fp32"]["forward"]
        torch.testing.assert_close(rows["fp32"]["sums"], rows["bf16"]["sums"], rtol=4 * BF16, atol=1e-6)
        assert not torch.equal(rows["fp32"]["sums"], rows["bf16"]["sums"])
    on, off = tmp_path / "overlap-True", tmp_path / "overlap-False"
    assert small_run.lines(on) == small_run.lines(off) and small_run.lines(on, "train")
    small_run.assert_same_tensors(small_run.tensors(on), small_run.tensors(off))


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(900)
def test_parameters_gathered_in_bf16_and_activations_computed_again(tmp_path: Path) -> None:
    for found in on_ranks(precision, 2, tmp_path):
        for name in ("shard", "expert"):
            weight, loss = found[f"{name} wire"]
            assert 0.0 < weight <= 3 * equality.DENSE.lr * 4 * BF16 and loss <= 4 * BF16
            assert found[f"{name} again"] and found["compiled"] == [True, True]
            assert found[name] == pytest.approx(found["replica"], rel=4 * BF16)
            assert found[name] != found["replica"]


def test_one_rank_is_the_same_with_and_without_overlap(tmp_path: Path) -> None:
    small_run.dataset(tmp_path / "data", train_requests=25)
    runs = [tmp_path / str(overlap) for overlap in (True, False)]
    for run in runs:
        parallel = ParallelConfig(overlap=run.name == "True")
        train(small_run.config(tmp_path / "data", run, epochs=1, parallel=parallel, **QUICK))
    assert small_run.lines(runs[0]) == small_run.lines(runs[1])
    small_run.assert_same_tensors(*(small_run.tensors(run) for run in runs))


def test_what_was_sent_ahead_is_left_alone_by_another_batch_and_can_be_dropped() -> None:
    with one_rank():
        state = equality._spread(Case(parallel=ParallelConfig(), plan="mixed"), CPU)
        first, second = batches(2)
        alone = state.model(first).logits
        state.model.lookups.announce(first)
        state.model(second)
        state.model.lookups.send()
        assert not torch.equal(state.model(second).logits[: len(alone)], alone[: len(first.labels)])
        assert torch.equal(state.model(first).logits, alone)
        state.model.lookups.announce(first)
        state.model.lookups.send()
        state.model.lookups.drop()
        assert torch.equal(state.model(first).logits, alone)


def test_formats_that_cannot_be_used_are_refused() -> None:
    with pytest.raises(ValueError, match="wire: must be fp32, bf16 or fp8, got 'int8'"):
        SparseSizes(wire="int8")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="fp8 needs CUDA"):
        codecs("fp8", [16], CPU)
    with pytest.raises(ValueError, match=r"one scale per 8 numbers, the common divisor of the tables' dims \[64, 72\]"):
        row_length([64, 72, 64])
    assert row_length([64, 128]) == 64
    assert [row_bytes(wire, 128, 64) for wire in ("fp32", "bf16", "fp8")] == [512, 256, 144]


def event(name: str, start: float, end: float, cat: str = "kernel", **details: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": end - start, "tid": 1, "args": details}


def test_exposed_communication_of_a_device() -> None:
    trace = Trace.of(
        [
            event("ncclDevKernel_SendRecv", 0, 10, stream=20),
            event("gemm", 4, 8, stream=7),
            event("norm", 7, 9, stream=8),
            event("ncclDevKernel_AllReduce", 30, 40, stream=21),
            event("gemm", 20, 34, stream=7),
            event("Memcpy", 50, 90, "gpu_memcpy"),
            event(
                "record_param_comms",
                0,
                1,
                "cpu_op",
                **{"Collective name": "allreduce", "In msg nelems": 6, "dtype": "BFloat16"},
            ),
            event("sparse dist", 0, 5, "user_annotation"),
            event("dense forward", 5, 30, "user_annotation"),
            event("all-to-all wait", 10, 14, "user_annotation"),
        ]
    )
    found = exposure(trace)
    assert found.seconds == pytest.approx(40e-6)
    assert found.computing == pytest.approx(19e-6)
    assert found.communicating == pytest.approx(20e-6)
    assert found.exposed == pytest.approx((4 + 1 + 6) * 1e-6)
    assert found.share == pytest.approx(11 / 40)
    assert found.bytes == {"allreduce": 12}
    assert found.host == pytest.approx({"sparse dist": 5e-6, "all-to-all wait": 4e-6, "dense forward": 21e-6})
    assert (found.exchanges, found.exposed_exchanges) == (0, 0)
