"""What `foundation.parallel.benchmarks.cluster` measures: its parts, run on every rank by `torchrun`.

A part is a line of the results when it begins and lines of what was found, so that what hangs is known by name and the
rest is kept.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from foundation.data.batch import Batch
from foundation.data.schema import Schema
from foundation.model.benchmarks.presets import model_config, table_rows
from foundation.model.flops import TRAINING, Load, forward_flops
from foundation.model.gem import GEM
from foundation.parallel.benchmarks import equality
from foundation.parallel.benchmarks.random_batches import dealt, random_batch, take
from foundation.parallel.benchmarks.steps import mean_loss, train_step
from foundation.parallel.join import join_ranks
from foundation.parallel.parallelize import parallelize
from foundation.parallel.plan import SparseConfig
from foundation.parallel.topology import DenseSizes, ParallelConfig, SparseSizes, Topology
from foundation.parallel.trace import Trace, exposure, picture
from foundation.training.benchmarks.step import StepConfig, make_batch
from foundation.training.checkpoint_files import find_checkpoint, read_manifest, read_tensors, write_checkpoint
from foundation.training.ema import EMAConfig
from foundation.training.optimizer import DenseConfig
from foundation.training.peaks import device_peak
from foundation.training.state import TrainState

SAVED, TRAINED, EVERY = 4, 10, 3
"""Steps until a checkpoint and in all where runs go on elsewhere; steps between checkpoints where a rank is killed."""
BATCHES = 4
"""Different batches of a rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What all parts know.

    Args:
        out: folder of the results.
        preset, schema: the model that is measured, and of what data.
        requests: of a rank's batch; with strong scaling of all ranks' batches together.
        impressions, mean, longest, sigma: as in `foundation.training.benchmarks.step`.
        most_rows: no table has more.
        warm, steps: steps before measuring, and measured.
        pause: seconds of each step of the run whose rank is killed, so that there is time to kill it.
    """

    out: Path
    preset: str
    schema: str
    requests: int
    impressions: int
    mean: int
    longest: int
    sigma: float
    most_rows: int
    warm: int
    steps: int
    pause: float


def ways(world: int) -> dict[str, ParallelConfig]:
    """Ways to spread the measured model, by name; the first is the one that others are compared with."""
    plain = ParallelConfig()
    found = {"replica": plain}
    if world > 1:
        found |= {
            "no overlap": replace(plain, overlap=False),
            "bf16 rows": replace(plain, sparse=SparseSizes(wire="bf16")),
            "shard": replace(plain, dense=DenseSizes(shard=world)),
            "expert": replace(plain, dense=DenseSizes(expert=2, shard=1 if world == 2 else world // 2)),
            "table replicas": replace(plain, sparse=SparseSizes(replicas=2)),
        }
        if torch.cuda.is_available():
            found["bf16 gradients"] = replace(plain, dense=DenseSizes(wire="bf16"))
            found["fp8 rows"] = replace(plain, sparse=SparseSizes(wire="fp8"))
    return found


class Rank:
    """One rank of a launch.

    Args:
        options: what to do.
        launch: number of the launch, which its results carry.
    """

    def __init__(self, options: Options, launch: int) -> None:
        self.options, self.launch = options, launch
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.device = (
            torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        )
        self.cuda = self.device.type == "cuda"

    def tell(self, **line: Any) -> None:
        """Appends a line to the results, from rank 0."""
        if self.rank == 0:
            with (self.options.out / "results.jsonl").open("a") as file:
                file.write(json.dumps({"launch": self.launch, "ranks": self.world, "time": time.time(), **line}) + "\n")

    def run(self, part: str) -> None:
        """Runs a part by name; a collective call."""
        kind, _, which = part.partition(":")
        found: dict[str, Any]
        if kind == "equality":
            found = self.equality()
        elif kind == "links":
            found = self.links()
        elif kind in ("weak", "strong"):
            found = self.speed(ways(self.world)[which], strong=kind == "strong")
        elif kind == "trace":
            found = self.trace(which)
        elif kind == "save":
            found = self.save()
        elif kind == "resume":
            found = self.resume()
        else:
            assert kind == "survive", part
            found = self.survive()
        self.tell(part=part, found=found)
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()

    def equality(self) -> dict[str, Any]:
        """Every combination against one process, in float32."""
        references: dict[str, Any] = {}
        worst, unequal, count = 0.0, [], 0
        for case in equality.cases(self.world):
            outcome = equality.check(case, 4, self.device, references)
            name = case.name(self.world)
            self.tell(case=name, **asdict(outcome), equal=outcome.equal)
            worst, count = max(worst, outcome.loss, outcome.weight, outcome.state), count + 1
            unequal += [] if outcome.equal else [name]
        return {"cases": count, "largest difference": worst, "unequal": unequal}

    def links(self) -> dict[str, float]:
        """GB/s that a rank sends in large collectives, with nothing else going on."""
        sent = torch.ones(2**26 if self.cuda else 2**20, device=self.device)
        received, share = torch.empty_like(sent), (self.world - 1) / self.world
        found = {}
        for name, times, call in (
            ("all-reduce", 2 * share, lambda: dist.all_reduce(received)),
            ("all-to-all", share, lambda: dist.all_to_all_single(received, sent)),
        ):
            seconds = []
            for _ in range(6):
                self._wait()
                start = time.perf_counter()
                call()
                self._wait()
                seconds.append(time.perf_counter() - start)
            found[f"{name} GB/s"] = times * 4 * sent.numel() / sorted(seconds)[2] / 1e9
        return found

    def speed(self, way: ParallelConfig, strong: bool = False) -> dict[str, Any]:
        """Steps per second; batches are on the device already."""
        bench = _Bench(self, way, self.options.requests // self.world if strong else self.options.requests)
        bench.steps(self.options.warm)
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        seconds = bench.steps(self.options.steps)
        flops, impressions, heaviest = bench.work(self.options.steps)
        peak = device_peak(self.device, "bf16")
        rate = flops / seconds / self.world
        return {
            "step_ms": seconds / self.options.steps * 1e3,
            "samples_per_second": impressions / seconds,
            "tflops": rate / 1e12,
            "mfu": rate / peak if peak else None,
            "imbalance": heaviest,
            "memory_gb": self._most(torch.cuda.max_memory_allocated() / 1e9 if self.cuda else 0.0),
            "loss": bench.loss,
        }

    def trace(self, which: str) -> dict[str, Any]:
        """Exposed communication of two steps, means over ranks, and a picture of the second."""
        bench = _Bench(self, ways(self.world)[which], self.options.requests)
        bench.steps(self.options.warm)
        kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if self.cuda else [])
        bench.steps(1, last=False)
        with profile(activities=kinds) as profiler:
            bench.steps(2, last=False)
        path = Path(f"/tmp/trace-{os.getpid()}.json")
        profiler.export_chrome_trace(str(path))
        trace = Trace.load(path)
        path.unlink()
        found = exposure(trace)
        if self.rank == 0:
            starts = [span.start for span in trace.ranges if span.name == "dense forward"]
            ends = [span.end for span in (*trace.ranges, *trace.compute, *trace.communication)]
            svg = picture(trace, starts[-1], max(ends))
            (self.options.out / f"trace-{which.replace(' ', '-')}.svg").write_text(svg)
        share = found.share if found.share is not None else float("nan")
        return {
            **asdict(found),
            "share_mean": self._sum(share) / self.world,
            "computing_mean": self._sum(found.computing) / self.world,
            "seconds_mean": self._sum(found.seconds) / self.world,
        }

    def save(self) -> dict[str, Any]:
        """Losses of a run, and a checkpoint in it."""
        state, losses = self._small(), []
        for step in range(TRAINED):
            losses.append(self._small_step(state, step))
            if step + 1 == SAVED:
                write_checkpoint(self.options.out / "saved", SAVED, state.tensors(), {}, {"losses": losses})
        return {"losses": losses}

    def resume(self) -> dict[str, Any]:
        """Losses of the rest of that run, on another number of ranks."""
        state = self._small()
        read_tensors(find_checkpoint(self.options.out / "saved"), state.tensors())
        return {"losses": [self._small_step(state, step) for step in range(SAVED, TRAINED)]}

    def survive(self) -> dict[str, Any]:
        """The same run with checkpoints; started anew, it goes on from the last."""
        state, folder, start = self._small(), self.options.out / "survived", 0
        losses: list[float] = []
        if (folder / "latest").is_file():
            path = find_checkpoint(folder)
            read_tensors(path, state.tensors())
            manifest = read_manifest(path)
            start, losses = manifest["step"], manifest["losses"]
        for step in range(start, TRAINED):
            losses.append(self._small_step(state, step))
            self.tell(step=step + 1, loss=losses[-1], restarts=int(os.environ["TORCHELASTIC_RESTART_COUNT"]))
            if (step + 1) % EVERY == 0:
                write_checkpoint(folder, step + 1, state.tensors(), {}, {"losses": losses})
            time.sleep(self.options.pause)
        return {"losses": losses}

    def _small(self) -> TrainState:
        """A small model on tables that are cut by rows."""
        dense = DenseSizes(shard=min(2, self.world))
        return equality._spread(equality.Case(parallel=ParallelConfig(dense=dense), plan="row-wise"), self.device)

    def _small_step(self, state: TrainState, step: int) -> float:
        """One step on this rank's part of a batch that does not depend on the number of ranks."""
        encoded = random_batch(equality.SIZES, step)
        mine = take(encoded, dealt(len(encoded.request_time), self.world)[self.rank])
        loss = train_step(state, Batch.from_encoded(mine, equality.SIZES.schema(), self.device))
        assert state.ema is not None
        state.ema.update(step + 1)
        return mean_loss(loss)

    def _wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()
        dist.barrier()

    def _sum(self, value: float) -> float:
        total = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return total.item()

    def _most(self, value: float) -> float:
        most = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        return most.item()


class _Bench:
    """The measured model and its batches, on this rank."""

    def __init__(self, rank: Rank, way: ParallelConfig, requests: int) -> None:
        options, self.rank, self.way = rank.options, rank, way
        schema = Schema.load(options.schema)
        rows = table_rows(schema, options.most_rows)
        shape = StepConfig(
            preset=options.preset,
            schema=options.schema,
            requests=requests,
            impressions=options.impressions,
            mean=options.mean,
            longest=options.longest,
            sigma=options.sigma,
        )
        own = [make_batch(shape, schema, rows, seed=rank.rank * 100 + number) for number in range(BATCHES)]
        torch.manual_seed(0)
        with rank.device:  # the same numbers on every device of a kind, and much sooner
            model = GEM(model_config(options.preset), schema, rows)
        self.flops = [TRAINING * sum(forward_flops(model, Load.of(batch)).values()) for batch in own]
        self.events = [sum(int(o[-1]) for o in batch.sequence_offsets.values()) for batch in own]
        topology = Topology(gpus_per_host=rank.world)
        spread = parallelize(model, SparseConfig(), rank.device, way, topology, gathered=torch.bfloat16)
        self.state = TrainState.of(spread, DenseConfig(), EMAConfig(decay=0.0))
        self.batches = [batch.to(rank.device) for batch in own]
        self.state.model.train()
        self.done = 0
        self.loss = float("nan")

    def steps(self, count: int, last: bool = True) -> float:
        """Seconds of some steps, together; with `last` no ids are sent out behind the last one."""
        self.rank._wait()
        start = time.perf_counter()
        loss = torch.zeros(())
        for left in range(count, 0, -1):
            batch = self.batches[self.done % BATCHES]
            following = self.batches[(self.done + 1) % BATCHES] if self.way.overlap and (left > 1 or not last) else None
            loss = train_step(self.state, batch, following, self._autocast)
            self.done += 1
        self.rank._wait()
        seconds = time.perf_counter() - start
        self.loss = mean_loss(loss)
        return seconds

    def work(self, count: int) -> tuple[float, int, float]:
        """Useful operations and impressions of all ranks in the last steps; events of the heaviest over the mean."""
        places = [number % BATCHES for number in range(self.done - count, self.done)]
        flops = self.rank._sum(sum(self.flops[place] for place in places))
        impressions = int(self.rank._sum(sum(self.batches[place].num_impressions for place in places)))
        ratios = [self.rank._most(self.events[p]) / (self.rank._sum(self.events[p]) / self.rank.world) for p in places]
        return flops, impressions, sum(ratios) / len(ratios)

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.rank.device.type, torch.bfloat16)


def main() -> None:
    """Runs the parts that are named, in order."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--launch", type=int, required=True)
    parser.add_argument("--options", required=True)
    parser.add_argument("parts", nargs="+")
    arguments = parser.parse_args()
    values = json.loads(arguments.options)
    options = Options(**{**values, "out": Path(values["out"])})
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.backends.cuda.matmul.allow_tf32 = False
    else:
        torch.set_num_threads(1)
    join_ranks("nccl" if torch.cuda.is_available() else "gloo", timedelta(seconds=180))
    (options.out / f"pid-{arguments.launch}-{dist.get_rank()}").write_text(str(os.getpid()))
    rank = Rank(options, arguments.launch)
    for part in arguments.parts:
        rank.tell(begin=part)
        rank.run(part)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
