"""The model that `foundation.parallel.benchmarks.cluster` measures, on one rank: how it is spread, and its steps."""

from __future__ import annotations

import time
import warnings
from collections import Counter
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from foundation.data.schema import Schema
from foundation.model.benchmarks.presets import model_config, table_rows
from foundation.model.flops import TRAINING, Load, forward_flops
from foundation.model.gem import GEM
from foundation.parallel.benchmarks.heavy_tail import Shape, heavy_batches
from foundation.parallel.benchmarks.over_ranks import most, total, wait
from foundation.parallel.benchmarks.steps import mean_loss, train_step
from foundation.parallel.parallelize import parallelize
from foundation.parallel.plan import SparseConfig
from foundation.parallel.topology import DenseSizes, ParallelConfig, SparseSizes, Topology
from foundation.training.compile import Compile, compile_regions
from foundation.training.ema import EMAConfig
from foundation.training.layers_alone import layers_alone
from foundation.training.optimizer import DenseConfig
from foundation.training.peaks import device_peak
from foundation.training.state import TrainState

BATCHES = 4
"""Different batches of a rank."""
COMPILED = " compiled"
"""What names of ways end with whose model is compiled."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What all parts know.

    Args:
        out: folder of the results.
        preset, schema: the model that is measured, and of what data.
        requests: of a rank's batch; with strong scaling of all ranks' batches together.
        impressions, mean, longest, sigma: as in `foundation.parallel.benchmarks.heavy_tail`.
        most_rows: no table has more.
        warm, steps: steps before measuring, and measured.
        compile: what ways that are compiled compile, as in training.
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
    compile: Compile
    pause: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """How the measured model is spread and what its batches are.

    Args:
        parallel: sizes of the dimensions, and how things travel.
        balance: batches hold nearly as many events as one another.
        capped: no batch holds more events than an average one.
        compiled: parts of the model are compiled.
    """

    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    balance: bool = True
    capped: bool = False
    compiled: bool = False


def ways(world: int) -> dict[str, Way]:
    """Ways by name; `replica` is the plain one, `bf16` the same with everything rounded that may be.

    Each is there a second time, `compiled`, but those with experts, which cannot be.
    """
    plain = ParallelConfig()
    found = {"replica": Way()}
    if world > 1:
        cuda = torch.cuda.is_available()
        gradients = DenseSizes(wire="bf16" if cuda else "fp32")  # DDP refuses bf16 on CPU
        bf16 = replace(plain, dense=gradients, sparse=SparseSizes(wire="bf16"))
        fp8 = {"fp8 rows": Way(parallel=replace(bf16, sparse=SparseSizes(wire="fp8")))} if cuda else {}
        found |= {
            "bf16": Way(parallel=bf16),
            "bf16 no overlap": Way(parallel=replace(bf16, overlap=False)),
            "bf16 unbalanced": Way(parallel=bf16, balance=False),
            "bf16 capped": Way(parallel=bf16, capped=True),
            **fp8,
            "shard": Way(parallel=replace(bf16, dense=DenseSizes(shard=world, wire="bf16"))),
            "table replicas": Way(parallel=replace(bf16, sparse=SparseSizes(replicas=2, wire="bf16"))),
            "fully sharded": Way(
                parallel=replace(bf16, sparse=SparseSizes(replicas=2, wire="bf16", fully_sharded=True))
            ),
            "expert": Way(parallel=replace(bf16, dense=DenseSizes(expert=2, shard=max(1, world // 2), wire="bf16"))),
            "bf16 rows": Way(parallel=replace(plain, sparse=SparseSizes(wire="bf16"))),
        }
        if cuda:
            found["bf16 gradients"] = Way(parallel=replace(plain, dense=gradients))
    whole = {name: way for name, way in found.items() if way.parallel.dense.expert == 1}
    return found | {f"{name}{COMPILED}": replace(way, compiled=True) for name, way in whole.items()}


class Bench:
    """The measured model and its batches, on this rank; everything here is a collective call.

    Args:
        options: of the model and its batches.
        way: how it is spread.
        requests: of a rank's batch.
        device: of this rank.
    """

    def __init__(self, options: Options, way: Way, requests: int, device: torch.device) -> None:
        self.way, self.device, self.world = way, device, dist.get_world_size()
        self.held = torch.cuda.memory_allocated() if device.type == "cuda" else 0
        schema = Schema.load(options.schema)
        rows = table_rows(schema, options.most_rows)
        shape = Shape(
            requests=requests,
            impressions=options.impressions,
            mean=options.mean,
            longest=options.longest,
            sigma=options.sigma,
        )
        most = requests * options.mean if way.capped else 0
        own = heavy_batches(shape, schema, rows, BATCHES, dist.get_rank(), balance=way.balance, most_events=most)
        torch.manual_seed(0)
        with device:  # the same numbers on every device of a kind, and much sooner
            model = GEM(model_config(options.preset), schema, rows)
        self.parts = [forward_flops(model, Load.of(batch)) for batch in own]
        self.events = [sum(int(o[-1]) for o in batch.sequence_offsets.values()) for batch in own]
        topology = Topology(gpus_per_host=self.world)
        spread = parallelize(model, SparseConfig(), device, way.parallel, topology, gathered=torch.bfloat16)
        self.state = TrainState.of(spread, DenseConfig(), EMAConfig(decay=0.0))
        self.batches = [batch.to(device) for batch in own]
        self.state.model.train()
        if way.compiled:
            compile_regions(model, options.compile)
        self.done = 0
        self.loss = float("nan")

    def steps(self, count: int, last: bool = True) -> float:
        """Seconds of some steps, together; with `last` no ids are sent out behind the last one."""
        wait(self.device)
        start = time.perf_counter()
        loss = self.queue(count, last)
        wait(self.device)
        seconds = time.perf_counter() - start
        self.loss = mean_loss(loss)
        return seconds

    def queue(self, count: int, last: bool) -> torch.Tensor:
        """The same without waiting for them; returns this rank's share of the last loss."""
        loss = torch.zeros(())
        for left in range(count, 0, -1):
            batch = self.batches[self.done % BATCHES]
            ahead = self.way.parallel.overlap and (left > 1 or not last)
            following = self.batches[(self.done + 1) % BATCHES] if ahead else None
            loss = train_step(self.state, batch, following, self.autocast)
            self.done += 1
        return loss

    def unreduced(self, count: int) -> float | None:
        """Seconds of steps whose gradients stay where they are, which is no training: what reducing them costs."""
        dense = self.state.model._dmp_wrapped_module
        if not isinstance(dense, DistributedDataParallel):
            return None
        with dense.no_sync():
            self.steps(1)
            return self.steps(count)

    def waits(self) -> dict[str, int]:
        """Where the host waits for the device in a step, as far as torch tells (not for collectives): times by line."""
        self.steps(1, last=False)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            here, after = (self.batches[(self.done + ahead) % BATCHES] for ahead in (0, 1))
            train_step(self.state, here, after if self.way.parallel.overlap else None, self.autocast)
            torch.cuda.set_sync_debug_mode("default")
        self.done += 1
        told = [warning for warning in seen if "synchronizing" in str(warning.message)]
        return dict(Counter(f"{'/'.join(w.filename.split('/')[-3:])}:{w.lineno}" for w in told))

    def work(self, count: int) -> tuple[float, int, float]:
        """Useful operations and impressions of all ranks in the last steps; events of the heaviest over the mean."""
        places = [number % BATCHES for number in range(self.done - count, self.done)]
        flops = total(TRAINING * sum(sum(self.parts[place].values()) for place in places), self.device)
        impressions = int(total(sum(self.batches[place].num_impressions for place in places), self.device))
        ratios = [most(self.events[p], self.device) / (total(self.events[p], self.device) / self.world) for p in places]
        return flops, impressions, sum(ratios) / len(ratios)

    def layers(self) -> dict[str, dict[str, float | None]]:
        """Each type of layer alone on this rank, all ranks at once; mean MFU over ranks."""
        peak = device_peak(self.device, "bf16")
        found = layers_alone(self.state.model.module, self.batches[0], self.autocast, self.parts[0], peak)
        for kind in sorted(found):
            for key in ("seconds", "mfu"):
                value = found[kind][key]
                found[kind][key] = None if value is None else total(value, self.device) / self.world
        return found

    def autocast(self) -> AbstractContextManager[Any]:
        """To bfloat16."""
        return torch.autocast(self.device.type, torch.bfloat16)
