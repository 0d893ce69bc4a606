"""Table replicas whole, fully sharded, and fully sharded by TorchRec: memory and time of a step, and what is computed.

    torchrun --nproc_per_node 2 -m foundation.parallel.benchmarks.fully_sharded [--preset tiny moderate] [--references]

Three parts. `cases`: the combinations of `equality` with replicas, fully sharded. `equal`: every rank is a replica of
tables that are large beside the rest of the preset; whole and fully sharded replicas train side by side in float32 on
batches of their own, and losses, rows, AdaGrad's sums and dense parameters must be the same within float error; beside
it by how much whole replicas differ from themselves when requests stand in another order. `measure`: in the preset's
precision, for each way the GB that a step holds at most, behind the forward pass and between steps, what replicas let
go of their rows, and the median time of a step. The command fails, after everything is measured, if one of the first
two parts finds a difference or if another number of bytes is let go than the parts of the others.

Losses of the third part are not compared with a limit: in bfloat16 a sum in another order is another number by 2^-9 of
it, and AdamW and AdaGrad divide by what they saw, so runs that differ by rounding alone part within a few steps. By how
much is printed for two ways that compute what whole replicas do: the same once more, for atomic additions of a GPU have
no order, and with the requests of each batch backwards.

`compare` says what TorchRec's strategy `ShardingStrategy.FULLY_SHARDED`, which is for CUDA only, computes: two table
groups on the batches of `equality`, as TorchRec does it, and with rows and AdaGrad's sums averaged after every step
too, as without the strategy. Its numbers are the largest differences of losses, rows and sums to one process that
simulates the groups, and of rows between the groups.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torchrec.distributed.types import ShardingEnv2D, ShardingStrategy

from foundation.data.batch import Batch
from foundation.data.encoding import EncodedBatch
from foundation.model.gem import GEM
from foundation.parallel import parallelize as spreading
from foundation.parallel.benchmarks import equality
from foundation.parallel.benchmarks.over_ranks import joined, most, wait
from foundation.parallel.benchmarks.random_batches import backwards, dealt, random_batch, take
from foundation.parallel.benchmarks.reference import Trained
from foundation.parallel.benchmarks.scaling import PRESETS, Preset
from foundation.parallel.benchmarks.steps import mean_loss, train_step
from foundation.parallel.draw import draw_tables
from foundation.parallel.pieces import local_shards
from foundation.parallel.plan import SparseConfig
from foundation.parallel.tables import table_momentum, table_weights
from foundation.parallel.topology import ParallelConfig, SparseSizes, Topology
from foundation.training.ema import EMAConfig
from foundation.training.optimizer import DenseConfig
from foundation.training.state import TrainState

STEPS = 6
ROWS = {"moderate": 12_000_000, "tiny": 1_000_000}
"""Of the tables of users and items in each preset."""
WAYS = ("whole", "fully sharded", "TorchRec", "whole again", "whole backwards")
PARTS = ("cases", "equal", "measure")
REQUESTS = 32
"""Of a rank and step where numbers are compared."""
SPARSE = SparseConfig(lr=0.05, eps=1e-6, initial_accumulator=0.01)
"""Where numbers are compared: sums that start from 0 would blow the rounding of small gradients up to full updates."""
KERNELS = ("block_attention", "gdpa", "interaction", "jagged", "jagged_attention", "norms", "token_mixing")
ROUNDED = 4 << 20
"""Bytes by which the allocator may round what is let go."""


class _FullySharded(ShardingEnv2D):
    """The environment of 2D tables with the strategy set."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, sharding_strategy=ShardingStrategy.FULLY_SHARDED)


CASES: dict[str, dict[str, bool]] = {
    "as it is": {"averaged": False},
    "averaged after steps": {"averaged": True},
    "averaged, evaluated before the last step": {"averaged": True, "evaluate": True},
}
"""Ways by name; the last may end the process with an error of CUDA."""


def compare(device: torch.device, *, averaged: bool, steps: int = STEPS, evaluate: bool = False) -> dict[str, Any]:
    """Trains with TorchRec's strategy and compares; a collective call.

    Args:
        device: CUDA.
        averaged: average rows and sums after every step too.
        steps: of training.
        evaluate: do a forward pass without a backward pass before the last step, as an evaluation does.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    case = equality.Case(parallel=ParallelConfig(sparse=SparseSizes(replicas=2)), plan="row-wise")
    with mock.patch.object(spreading, "ShardingEnv2D", _FullySharded):
        state = equality._spread(case, device)
    replicas = state.model.replicas
    assert replicas is not None
    if not averaged:
        state.model.replicas = None
    batches = [random_batch(equality.SIZES, seed) for seed in range(steps)]
    losses = []
    for number, encoded in enumerate(batches):
        mine = take(encoded, dealt(len(encoded.request_time), world)[rank])
        batch = Batch.from_encoded(mine, equality.SIZES.schema(), device)
        if evaluate and number == steps - 1:
            with torch.no_grad():
                state.model(batch)
        losses.append(mean_loss(train_step(state, batch)))
        assert state.ema is not None
        state.ema.update(number + 1)
    expected = equality._alone(case, batches, state.model, device, {})
    rows, between, sums = 0.0, 0.0, 0.0
    group = state.model._env.replica_pg
    for name, table in table_weights(state.model).items():
        rows = max(rows, equality._difference(table, expected.weights[name]))
        for piece in table.pieces:
            mean = piece.tensor.clone()
            dist.all_reduce(mean, op=dist.ReduceOp.AVG, group=group)
            between = max(between, 2.0 * float((piece.tensor - mean).abs().max()))  # of two groups
    for name, momentum in table_momentum(state.model).items():
        sums = max(sums, equality._difference(momentum, expected.momentum[name]))
    worst = torch.tensor([rows, between, sums], device=device, dtype=torch.float64)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    rows, between, sums = worst.tolist()
    return {
        "losses": [abs(a - b) for a, b in zip(losses, expected.losses, strict=True)],
        "rows": rows,
        "between groups": between,
        "sums": sums,
    }


def differences(preset: Preset, way: str, device: torch.device, *, steps: int = STEPS) -> dict[str, float]:
    """Trains whole replicas and those of `way` side by side, in float32; a collective call.

    Returns:
        Largest difference over ranks and steps of a loss, and after the last step of a row, of a `sum` of AdaGrad, and
        of a dense parameter or its optimizer's state.
    """
    ways = ("whole", way)
    states = [_state(preset, one, device, SPARSE, equality.DENSE) for one in ways]
    batches = [_batches(preset, one, device) for one in ways]
    worst = dict.fromkeys(("loss", "row", "sum", "dense"), 0.0)
    for step in range(steps):
        losses = []
        for state, own in zip(states, batches, strict=True):
            following = own[(step + 1) % len(own)] if step + 1 < steps else None
            losses.append(mean_loss(train_step(state, own[step % len(own)], following)))
        worst["loss"] = max(worst["loss"], abs(losses[0] - losses[1]))
    for state in states:
        state.model.settle_tables()
    others = states[1].tensors()
    for key, value in states[0].tensors().items():
        table = "embeddings." in key
        kind = "sum" if key.startswith("momentum.") else "row" if table else "dense"
        for (_, one), (_, other) in zip(local_shards(value), local_shards(others[key]), strict=True):
            if one.numel():
                worst[kind] = max(worst[kind], float((one.detach() - other.detach()).abs().max()))
    return {kind: most(value, device) for kind, value in worst.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What a way of holding replicas costs; bytes of the fullest rank. On CPU they are those of the process.

    Args:
        rows: of all tables.
        peak, reserved: most that tensors took in a step, and that the allocator took for them.
        forward, between: what tensors take behind the forward pass and between steps.
        let_go: of rows, between steps; by what the device's memory says, on CPU by the sizes of the tensors.
        step_ms: median time of a step, of the slower rank.
        times: of each step of this rank in ms, those before the measured ones included.
        losses: of all steps.
    """

    rows: int
    peak: int
    reserved: int
    forward: int
    between: int
    let_go: int
    step_ms: float
    times: list[float]
    losses: list[float]

    def differs(self, other: Found) -> list[float]:
        """By how much the loss of each step does."""
        return [abs(a - b) for a, b in zip(self.losses, other.losses, strict=True)]

    def describe(self, whole: Found | None) -> str:
        """In words."""
        gb = {key: f"{getattr(self, key) / 1e9:.3f}" for key in ("rows", "peak", "reserved", "forward", "between")}
        losses = ""
        if whole is not None and whole is not self:
            losses = ", losses differ by " + " ".join(f"{loss:.0e}" for loss in self.differs(whole))
        return (
            f"rows {gb['rows']} GB, peak {gb['peak']} GB (reserved {gb['reserved']}), behind the forward pass "
            f"{gb['forward']}, between steps {gb['between']}, let go {self.let_go / 1e9:.3f}, step {self.step_ms:.1f} "
            f"ms{losses}"
        )


def measure(preset: Preset, way: str, warm: int, steps: int, device: torch.device) -> Found:
    """Trains in one of `WAYS`; a collective call."""
    cuda = device.type == "cuda"
    before = _allocated(device)
    state = _state(preset, way, device, SparseConfig(), DenseConfig())
    spread = state.model
    rows = sum(p.tensor.nbytes for table in table_weights(spread).values() for p in table.pieces)
    batches = _batches(preset, way, device)
    forward = 0

    def looked_up(*_: Any) -> None:
        nonlocal forward
        forward = max(forward, _allocated(device))

    spread.module.register_forward_hook(looked_up)
    losses: list[torch.Tensor] = []
    times: list[float] = []

    def run(first: int, count: int) -> None:
        wait(device)
        marks = [_mark(device)]
        for step in range(first, first + count):
            following = batches[(step + 1) % 4] if step + 1 < warm + steps else None
            losses.append(train_step(state, batches[step % 4], following, lambda: _autocast(preset, device)))
            marks.append(_mark(device))
        wait(device)
        times.extend(_ms(a, b) for a, b in pairwise(marks))

    run(0, warm)
    _reset_peaks(device)
    run(warm, steps)
    peak, reserved = _peaks(device)
    between, let_go = _allocated(device), 0
    if spread.parts is not None:
        let_go = rows - spread.parts.held
        spread.gather_tables()
        let_go = _allocated(device) - between if cuda else let_go
    return Found(
        rows=rows,
        peak=int(most(peak - before, device)),
        reserved=int(most(reserved, device)),
        forward=int(most(forward - before, device)),
        between=int(most(between - before, device)),
        let_go=int(most(let_go, device)),
        step_ms=most(statistics.median(times[warm:]), device),
        times=times,
        losses=[mean_loss(loss) for loss in losses],
    )


def _state(preset: Preset, way: str, device: torch.device, sparse: SparseConfig, dense: DenseConfig) -> TrainState:
    """Every rank is a replica."""
    world = dist.get_world_size()
    torch.manual_seed(0)
    model = GEM(preset.model, preset.sizes.schema(), preset.sizes.table_rows, torch.device("meta"))
    parallel = ParallelConfig(sparse=SparseSizes(replicas=world, fully_sharded=way == "fully sharded"))
    theirs = mock.patch.object(spreading, "ShardingEnv2D", _FullySharded) if way == "TorchRec" else nullcontext()
    with theirs:
        spread = spreading.parallelize(model, sparse, device, parallel, Topology(gpus_per_host=world))
    if way == "TorchRec":
        spread.replicas = None
    draw_tables(spread, model.embeddings.std_of, seed=0)
    return TrainState.of(spread, dense, EMAConfig())


def _batches(preset: Preset, way: str, device: torch.device) -> list[Batch]:
    order: Callable[[EncodedBatch], EncodedBatch] = backwards if way == "whole backwards" else lambda batch: batch
    drawn = (random_batch(preset.sizes, seed=1000 * dist.get_rank() + i) for i in range(4))
    return [Batch.from_encoded(order(encoded), preset.sizes.schema(), device) for encoded in drawn]


def _mark(device: torch.device) -> torch.cuda.Event | float:
    """Now; on CUDA when the device comes to it, for which nobody waits."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _ms(start: torch.cuda.Event | float, end: torch.cuda.Event | float) -> float:
    if isinstance(start, float) or isinstance(end, float):
        assert isinstance(start, float) and isinstance(end, float)
        return (end - start) * 1e3
    return float(start.elapsed_time(end))


def references() -> ExitStack:
    """A context in which the project's kernels are PyTorch's operators: more memory, but nothing to compile."""
    stack = ExitStack()
    for name in KERNELS:
        op = importlib.import_module(f"kernels.{name}.op")
        stack.enter_context(mock.patch.object(op.BACKEND, "of", partial(_reference, op)))
    return stack


def _reference(op: ModuleType, *_: torch.Tensor) -> ModuleType:
    return op.reference


def _allocated(device: torch.device) -> int:
    """Bytes of tensors on the device; on CPU what the process holds in main memory (Linux)."""
    return torch.cuda.memory_allocated() if device.type == "cuda" else _kilobytes("VmRSS") * 1024


def _reset_peaks(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")


def _peaks(device: torch.device) -> tuple[int, int]:
    """Most bytes since the reset: of tensors, and that their allocator took."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return _kilobytes("VmHWM") * 1024, 0


def _kilobytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def _autocast(preset: Preset, device: torch.device) -> AbstractContextManager[Any]:
    return torch.autocast(device.type, torch.bfloat16) if preset.autocast else nullcontext()


def main() -> None:
    """Prints a line for each way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--parts", choices=PARTS, nargs="+", default=PARTS)
    parser.add_argument("--preset", choices=tuple(ROWS), nargs="+", default=["moderate"])
    parser.add_argument("--references", action="store_true", help="measure without the kernels: nothing to compile")
    parser.add_argument("--ways", choices=WAYS, nargs="+", help="on CPU give one, as memory of the first is kept")
    parser.add_argument("--more_rows", type=int, nargs="+", default=[], help="measure tables of so many rows too")
    parser.add_argument("--requests", type=int, help="of a measured batch; otherwise those of the preset")
    parser.add_argument("--warm", type=int, default=3)
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--out", type=Path, help="write what was found as JSON")
    options = parser.parse_args()
    device = joined(options.device)
    wrong = _run(options, device)
    dist.destroy_process_group()
    if wrong:
        raise SystemExit("; ".join(wrong))


def _run(options: argparse.Namespace, device: torch.device) -> list[str]:
    """Prints everything; returns what is wrong."""
    world, first = dist.get_world_size(), dist.get_rank() == 0
    values: dict[str, Any] = {}
    wrong: list[str] = []

    def tell(line: str) -> None:
        if first:
            print(line, flush=True)
            if options.out:
                options.out.write_text(json.dumps(values, indent=1))

    trained: dict[str, Trained] = {}
    for case in _cases(world) if "cases" in options.parts else ():
        with references():
            outcome = equality.check(case, 4, device, trained)
        wrong += [] if outcome.equal else [f"{case.name(world)} differs"]
        tell(f"{case.name(world)}: {outcome}")
    for name in options.preset:
        preset, rows = PRESETS[name], ROWS[name]
        # Histories of one length, since references pad them.
        preset = replace(preset, sizes=replace(preset.sizes, users=rows, items=rows, tail=0.0))
        if "equal" in options.parts:
            sizes = replace(preset.sizes, requests=min(REQUESTS, preset.sizes.requests))
            for way in ("fully sharded", "whole backwards"):
                with references():
                    worst = differences(replace(preset, sizes=sizes), way, device)
                gc.collect()
                values.setdefault(f"{name}, float32", {})[way] = worst
                wide = way == "fully sharded" and max(worst.values()) > equality.TOLERANCE
                wrong += [f"{name}, float32: {way} differs by {worst}"] if wide else []
                tell(f"{name}, float32, {way} from whole: " + ", ".join(f"{k} {v:.1e}" for k, v in worst.items()))
        if "measure" in options.parts:
            requests = options.requests or preset.sizes.requests
            ways = options.ways or [way for way in WAYS if way != "TorchRec" or device.type == "cuda"]
            for count in (rows, *options.more_rows):
                sizes = replace(preset.sizes, users=count, items=count, requests=requests)
                key = name if count == rows else f"{name}, {count:,} rows"
                found: dict[str, Found] = {}
                for way in ways if count == rows else ("whole", "fully sharded"):
                    with references() if options.references else nullcontext():
                        found[way] = measure(replace(preset, sizes=sizes), way, options.warm, options.steps, device)
                    gc.collect()
                    one = found[way]
                    values.setdefault(key, {})[way] = {part: getattr(one, part) for part in one.__slots__}
                    tell(f"{key}, {way}: {one.describe(found.get('whole'))}")
                wrong += [f"{key}: {why}" for why in _wrong(found, world)]
    return wrong


def _cases(world: int) -> list[equality.Case]:
    """Those of `equality` with replicas, fully sharded; each once."""
    found = {}
    for case in equality.cases(world):
        sparse = case.parallel.sparse
        if sparse.replicas > 1 and sparse.sync_every == 1:
            parts = replace(case.parallel, sparse=replace(sparse, fully_sharded=True))
            one = replace(case, parallel=parts)
            found[one.name(world)] = one
    return list(found.values())


def _wrong(found: dict[str, Found], world: int) -> list[str]:
    if "fully sharded" not in found:
        return []
    own = found["fully sharded"]
    expected = own.rows - own.rows // world
    if abs(own.let_go - expected) > ROUNDED:
        return [f"{own.let_go:,} bytes of rows are let go, expected are {expected:,}"]
    return []


if __name__ == "__main__":
    main()
