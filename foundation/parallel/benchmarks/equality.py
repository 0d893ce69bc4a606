"""Does every way of spreading a model compute what one process computes, and how long does a step take?

    torchrun --nproc_per_node 2 -m foundation.parallel.benchmarks.equality [--device cpu] [--steps 4] [--only TEXT]

Each line of the table is one combination of the five dimensions with a placement of the tables. The same batches, dealt
unevenly to ranks (one rank gets nothing in the last step), are trained on by all ranks and by one process; the table
shows the largest difference of a loss, a weight, or an optimizer state. NCCL on CUDA, Gloo on CPU.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from itertools import product, zip_longest
from pathlib import Path

import torch
import torch.distributed as dist

from foundation.data.batch import Batch
from foundation.model.gem import GEM, GEMConfig
from foundation.model.heads import HeadsConfig
from foundation.model.interaction import InteractionConfig
from foundation.model.layer import LayerConfig
from foundation.parallel.benchmarks.over_ranks import joined
from foundation.parallel.benchmarks.random_batches import Sizes, dealt, random_batch, take
from foundation.parallel.benchmarks.reference import Trained, train_plain
from foundation.parallel.benchmarks.steps import mean_loss, train_step
from foundation.parallel.parallelize import ParallelModel, parallelize
from foundation.parallel.pieces import Spread, local_shards
from foundation.parallel.plan import SparseConfig
from foundation.parallel.topology import DenseSizes, ParallelConfig, SparseSizes, Topology, layout
from foundation.training.activations import recompute, regions
from foundation.training.compile import Compile, compile_regions
from foundation.training.ema import EMAConfig
from foundation.training.optimizer import DenseConfig
from foundation.training.state import TrainState

PLANS = {"row-wise": 1, "mixed": 150, "table-wise": 1000}
"""`row_wise_from` by name of the plan; tables have 60, 90 and 5 rows, and row-wise 4 ranks or more share the last."""
PARTS = {"model": "weights", "momentum": "momentum", "optimizer": "moments", "ema": "averages"}
"""Names of the parts of a `TrainState` and of a `Trained`."""
TOLERANCE = 2e-5
"""Of float32 after a few steps."""

SIZES = Sizes()
MODEL = GEMConfig(
    width=8,
    layers=2,
    layer=LayerConfig(
        interaction=InteractionConfig(
            experts=2, partition="split", pre_norm=True, block_tokens=2, linear_tokens=2, hidden=(16,)
        )
    ),
    heads=HeadsConfig(trunk=(16, 8), tower=4, adapter_rank=2),
)
# A large eps, since Adam divides by the root of a gradient's square: it would blow rounding up to a full step.
# A small norm, so that every step is clipped.
DENSE = DenseConfig(lr=0.01, eps=1e-3, clip_norm=0.05)
AVERAGES = EMAConfig(decay=0.5, warm_up=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One combination.

    Args:
        parallel: sizes of the dimensions, and whether ids travel ahead.
        plan: name of a placement of the tables.
        compile: regions that are compiled, with the backend that changes no number.
        again: arms compute their activations again in the backward pass.
    """

    parallel: ParallelConfig
    plan: str
    compile: Compile = "none"
    again: bool = False

    @property
    def sparse(self) -> SparseConfig:
        """The tables' optimizer and placement."""
        return SparseConfig(lr=0.05, eps=1e-6, initial_accumulator=0.01, row_wise_from=PLANS[self.plan])

    def name(self, world: int) -> str:
        """Sizes in words."""
        found = layout(self.parallel, Topology(gpus_per_host=world))
        return (
            f"replica {found.replica} shard {found.shard} expert {found.expert}, "
            f"table replicas {found.table_replicas} shard {found.table_shard}, {self.plan}"
            + (", fully sharded" if self.parallel.sparse.fully_sharded else "")
            + (f", averaged every {every} steps" if (every := self.parallel.sparse.sync_every) > 1 else "")
            + ("" if self.compile == "none" else f", compile {self.compile}")
            + (", recomputed" if self.again else "")
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How far a combination was from one process: largest differences over all ranks and steps, and its speed."""

    loss: float
    weight: float
    state: float
    step_ms: float

    @property
    def equal(self) -> bool:
        """Within float error."""
        return max(self.loss, self.weight, self.state) <= TOLERANCE


def cases(world: int) -> list[Case]:
    """Every combination of sizes 1 and 2 that multiplies to the number of ranks, and 1D and 2D tables.

    With 2 ranks each dense combination meets each of the tables, one group of them table-wise and row-wise; beyond that
    it meets two groups of them, and the other numbers of groups meet one. Plans take turns else.
    """
    dense = [
        DenseSizes(replica=r, shard=s, expert=e) for r, s, e in product((1, 2), (1, 2), (1, 2)) if r * s * e == world
    ]
    sparse = [SparseSizes(replicas=m) for m in sorted({1, 2, world // 2, world}) if m and world % m == 0]
    plans = list(PLANS)
    if world <= 2:
        pairs = list(product(dense, sparse))
        pairs += [(dense[-1], SparseSizes(replicas=world, scale_momentum=False))]
        if world == 2:
            pairs += [
                (dense[-1], SparseSizes(replicas=2, sync_every=2)),
                (dense[-1], SparseSizes(replicas=2, fully_sharded=True)),
            ]
    else:
        pairs = [(d, SparseSizes(replicas=2)) for d in dense]
        pairs += [(dense[i % len(dense)], s) for i, s in enumerate(s for s in sparse if s.replicas != 2)]
    every = [
        Case(parallel=ParallelConfig(dense=d, sparse=s), plan=plans[(i + i // 3) % 3]) for i, (d, s) in enumerate(pairs)
    ]
    if world == 2:
        other = {"row-wise": "table-wise", "table-wise": "row-wise"}
        one_group = every[: len(dense) * len(sparse) : len(sparse)]
        every += [Case(parallel=case.parallel, plan=other[case.plan]) for case in one_group]
    if world > 2:
        for dense_sizes, count, plan in ((dense[0], 2, "mixed"), (dense[-1], world, "row-wise")):
            parts = SparseSizes(replicas=count, fully_sharded=True)
            every.append(Case(parallel=ParallelConfig(dense=dense_sizes, sparse=parts), plan=plan))
    if world > len(SIZES.table_rows):  # a rank without a table
        every.append(Case(parallel=ParallelConfig(dense=dense[-1], sparse=sparse[0]), plan="table-wise"))
    return every


def check(case: Case, steps: int, device: torch.device, references: dict[str, Trained] | None = None) -> Outcome:
    """Trains spread and alone, and compares; a collective call.

    Args:
        case: the combination.
        steps: batches.
        device: of this rank.
        references: results of single processes that later calls may use again.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    batches = [random_batch(SIZES, seed) for seed in range(steps - 1)]
    batches.append(random_batch(SIZES, steps, requests=max(1, world - 1)))  # not every rank has something
    state = _spread(case, device)
    if case.again:
        recompute(state.model.module, regions(state.model.module))
    compile_regions(state.model.module, case.compile, backend="eager")
    shares = [take(encoded, dealt(len(encoded.request_time), world)[rank]) for encoded in batches]
    mine = [Batch.from_encoded(share, SIZES.schema(), device) for share in shares]
    losses, seconds = [], 0.0
    for step, (batch, following) in enumerate(zip_longest(mine, mine[1:])):
        start = time.perf_counter()
        losses.append(mean_loss(train_step(state, batch, following if case.parallel.overlap else None)))
        assert state.ema is not None
        state.ema.update(step + 1)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start  # of the last step: the others warm up
    state.model.settle_tables()
    expected = _alone(case, batches, state.model, device, references if references is not None else {})
    loss = max(abs(a - b) for a, b in zip(losses, expected.losses, strict=True))
    weight, other = 0.0, 0.0
    for key, value in state.tensors().items():
        part, name = key.split(".", 1)
        if part == "ema" and case.parallel.sparse.sync_every > 1 and name.startswith("embeddings."):
            continue  # of a group's own rows
        difference = _difference(value, getattr(expected, PARTS[part])[name])
        weight, other = (max(weight, difference), other) if part == "model" else (weight, max(other, difference))
    worst = torch.tensor([loss, weight, other, seconds * 1e3], device=device, dtype=torch.float64)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    loss, weight, other, step_ms = worst.tolist()
    return Outcome(loss=loss, weight=weight, state=other, step_ms=step_ms)


def _model() -> GEM:
    torch.manual_seed(0)
    return GEM(MODEL, SIZES.schema(), SIZES.table_rows)


def _spread(case: Case, device: torch.device) -> TrainState:
    topology = Topology(gpus_per_host=dist.get_world_size())
    model = parallelize(_model(), case.sparse, device, case.parallel, topology)
    return TrainState.of(model, DENSE, AVERAGES)


def _alone(
    case: Case, batches: list, model: ParallelModel, device: torch.device, references: dict[str, Trained]
) -> Trained:
    """What one process comes to: computed by rank 0, known to all."""
    groups = model.layout.table_ranks() if model.layout.table_replicas > 1 else [list(range(model.layout.world))]
    every = case.parallel.sparse.sync_every
    key = str((groups, model.momentum_scale, len(batches), every))
    if key not in references:
        shared: list[Trained | None] = [None]
        if dist.get_rank() == 0:
            steps = []
            for encoded in batches:
                shares = dealt(len(encoded.request_time), model.layout.world)
                parts = [take(encoded, [r for rank in group for r in shares[rank]]) for group in groups]
                steps.append([Batch.from_encoded(part, SIZES.schema(), device) for part in parts])
            plain = _model().to(device)
            shared[0] = train_plain(plain, steps, case.sparse, DENSE, model.momentum_scale, AVERAGES.decay, every)
        dist.broadcast_object_list(shared, device=device)
        assert shared[0] is not None
        references[key] = shared[0]
    return references[key]


def _difference(value: Spread, whole: torch.Tensor) -> float:
    worst = 0.0
    for place, shard in local_shards(value):
        worst = max(worst, float((shard.detach().cpu().double() - whole[place].double()).abs().max()))
    return worst


def main() -> None:
    """Prints the table; fails if a combination is not equal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--only", default="", help="combinations with this text in their names")
    parser.add_argument("--out", type=Path, help="write the outcomes as JSON")
    options = parser.parse_args()
    device = joined(options.device)
    world = dist.get_world_size()
    references: dict[str, Trained] = {}
    lines = []
    for case in (case for case in cases(world) if options.only in case.name(world)):
        found = check(case, options.steps, device, references)
        lines.append({"case": case.name(world), **{f: getattr(found, f) for f in found.__slots__}})
        if dist.get_rank() == 0:
            verdict = "equal" if found.equal else "DIFFERS"
            print(
                f"{case.name(world):<80} loss {found.loss:.1e}  weight {found.weight:.1e}  state {found.state:.1e}  "
                f"{verdict}  {found.step_ms:7.1f} ms",
                flush=True,
            )
    if dist.get_rank() == 0 and options.out:
        options.out.write_text(json.dumps(lines, indent=1))
    dist.destroy_process_group()
    wrong = [line["case"] for line in lines if max(line["loss"], line["weight"], line["state"]) > TOLERANCE]
    if wrong:
        raise SystemExit(f"not equal: {wrong}")


if __name__ == "__main__":
    main()
