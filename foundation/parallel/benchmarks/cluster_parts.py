"""What `foundation.parallel.benchmarks.cluster` measures: its parts, run on every rank.

A part is a line of the results when it begins and lines of what was found, so that what hangs is known by name and the
rest is kept.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, schedule

from foundation.data.batch import Batch
from foundation.parallel.benchmarks import equality, fully_sharded
from foundation.parallel.benchmarks.cluster_bench import BATCHES, Bench, Options, ways
from foundation.parallel.benchmarks.over_ranks import most, total, wait
from foundation.parallel.benchmarks.random_batches import dealt, random_batch, take
from foundation.parallel.benchmarks.steps import mean_loss, train_step
from foundation.parallel.join import join_ranks
from foundation.parallel.topology import DenseSizes, ParallelConfig
from foundation.parallel.trace import Trace, exposure, picture
from foundation.training.checkpoint_files import find_checkpoint, read_manifest, read_tensors, write_checkpoint
from foundation.training.peaks import device_peak
from foundation.training.state import TrainState

SAVED, TRAINED, EVERY = 4, 10, 3
"""Steps until a checkpoint and in all where runs go on elsewhere; steps between checkpoints where a rank is killed."""


UNREDUCED = ("replica", "bf16", "bf16 compiled")
"""Ways of which steps without reduced gradients are measured too."""


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
        self._bench: tuple[str, Bench] | None = None

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
        elif kind in ("weak", "again", "strong"):
            found = self.speed(which, kind)
        elif kind == "layers":
            found = self.layers(which)
        elif kind == "waits":
            found = self._built(which).waits()
        elif kind == "fully sharded":
            found = fully_sharded.compare(self.device, **fully_sharded.CASES[which])
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
                wait(self.device)
                start = time.perf_counter()
                call()
                wait(self.device)
                seconds.append(time.perf_counter() - start)
            found[f"{name} GB/s"] = times * 4 * sent.numel() / sorted(seconds)[2] / 1e9
        return found

    def speed(self, which: str, kind: str) -> dict[str, Any]:
        """Steps per second; batches are on the device already."""
        bench = self._built(which, strong=kind == "strong")
        bench.steps(self.options.warm)
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        count = max(1, self.options.steps // BATCHES) * BATCHES  # every batch as often
        seconds = bench.steps(count)
        flops, impressions, heaviest = bench.work(count)
        peak = device_peak(self.device, "bf16")
        rate = flops / seconds / self.world
        found = {
            "step_ms": seconds / count * 1e3,
            "samples_per_second": impressions / seconds,
            "tflops": rate / 1e12,
            "mfu": rate / peak if peak else None,
            "imbalance": heaviest,
            "memory_gb": most(torch.cuda.max_memory_allocated() / 1e9 if self.cuda else 0.0, self.device),
            "held_before_gb": most(bench.held / 1e9, self.device),
            "loss": bench.loss,
        }
        self.tell(measured=f"{kind}:{which}", found=found)
        few = max(1, count // 2)
        unreduced = bench.unreduced(few) if kind == "weak" and which in UNREDUCED else None
        if unreduced is not None:
            found["step_ms_gradients_unreduced"] = unreduced / few * 1e3
        return found

    def layers(self, which: str) -> dict[str, Any]:
        """Local MFU by type of layer."""
        bench = self._built(which)
        bench.steps(1)
        return bench.layers()

    def trace(self, which: str) -> dict[str, Any]:
        """Exposed communication of some steps, means over ranks, and a picture of the last."""
        bench = self._built(which)
        bench.steps(BATCHES, last=False)
        # Watching the host slows it, so what the device hides is read from a trace of the device alone.
        device = self._profiled(bench, BATCHES, ProfilerActivity.CUDA) if self.cuda else None
        trace = self._profiled(bench, 2, ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.cuda else []))
        found = exposure(trace)
        if device is not None:
            alone = exposure(device)
            seen = ("seconds", "computing", "communicating", "exposed")
            found = replace(found, **{name: getattr(alone, name) for name in seen})
            end = max(span.end for span in (*device.compute, *device.communication))
            self._draw(f"{which} device", device, end - alone.seconds / BATCHES, end)
        starts = [span.start for span in trace.ranges if span.name == "dense forward"]
        ends = [span.end for span in (*trace.ranges, *trace.compute, *trace.communication)]
        self._draw(which, trace, starts[-1], max(ends))
        share = found.share if found.share is not None else float("nan")
        return {
            **asdict(found),
            "share_mean": total(share, self.device) / self.world,
            "computing_mean": total(found.computing, self.device) / self.world,
            "seconds_mean": total(found.seconds, self.device) / self.world,
        }

    def _draw(self, name: str, trace: Trace, start: float, end: float) -> None:
        """A picture of a stretch of a trace, from rank 0."""
        if self.rank == 0:
            (self.options.out / f"trace-{name.replace(' ', '-')}.svg").write_text(picture(trace, start, end))

    def _profiled(self, bench: Bench, count: int, *activities: ProfilerActivity) -> Trace:
        """A trace of some steps; the profiler may leave the process slower than it was.

        Ranks start their profilers at different times. So a step is not recorded, in which the first wait for the last,
        and the ranks do not wait for one another before or behind what is, which would count as communication.
        """
        wait(self.device)
        with profile(activities=activities, schedule=schedule(wait=0, warmup=1, active=count, repeat=1)) as profiler:
            for _ in range(1 + count):
                bench.queue(1, last=False)
                profiler.step()
        path = Path(f"/tmp/trace-{os.getpid()}.json")
        profiler.export_chrome_trace(str(path))
        trace = Trace.load(path)
        path.unlink()
        return trace

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

    def _built(self, which: str, strong: bool = False) -> Bench:
        """The measured model; that of the part before if it is spread in the same way."""
        key = f"{which} {strong}"
        if self._bench is None or self._bench[0] != key:
            self._bench = None
            gc.collect()
            if self.cuda:
                torch.cuda.empty_cache()
            requests = self.options.requests // self.world if strong else self.options.requests
            self._bench = key, Bench(self.options, ways(self.world)[which], requests, self.device)
        return self._bench[1]

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


def work(options: Options, launch: int, parts: list[str]) -> None:
    """Joins the other ranks, as the environment tells, and runs parts in order."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.backends.cuda.matmul.allow_tf32 = False
    else:
        torch.set_num_threads(1)
    join_ranks("nccl" if torch.cuda.is_available() else "gloo", timedelta(seconds=180))
    (options.out / f"pid-{launch}-{dist.get_rank()}").write_text(str(os.getpid()))
    rank = Rank(options, launch)
    for part in parts:
        rank.tell(begin=part)
        rank.run(part)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Runs the parts that are named, in order."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--launch", type=int, required=True)
    parser.add_argument("--options", required=True)
    parser.add_argument("parts", nargs="+")
    arguments = parser.parse_args()
    values = json.loads(arguments.options)
    work(Options(**{**values, "out": Path(values["out"])}), arguments.launch, arguments.parts)


if __name__ == "__main__":
    main()
