"""Where the time of a training step goes: ``python -m foundation.training.benchmarks.step --preset foundation/large``.

Random batches with heavy-tailed histories go through the training loop's own step. The table says how much of the peak
rate useful operations reach (MFU; padding and what is computed again do not count), end to end and for each type of
layer alone, what of data, forward, backward and optimizer takes the time, and which of them bounds the step.
"""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import numpy as np
import torch

from foundation.data.batch import Batch
from foundation.data.commands import run_command
from foundation.data.logs import LogReader
from foundation.data.options import parse_config
from foundation.data.schema import Schema
from foundation.model.benchmarks.batches import random_batch
from foundation.model.benchmarks.presets import model_config, table_rows
from foundation.model.flops import TRAINING, Load, forward_flops
from foundation.model.gem import GEM
from foundation.parallel.draw import draw_tables
from foundation.parallel.parallelize import parallelize
from foundation.parallel.plan import SparseConfig
from foundation.training.activations import choose, measure, recompute
from foundation.training.benchmarks.padded import Kernels, Lengths, kernels_of
from foundation.training.compile import Compile, compile_regions
from foundation.training.ema import EMAConfig
from foundation.training.evaluate import EvaluationConfig
from foundation.training.launch import Device, Precision, launched
from foundation.training.layers_alone import layers_alone
from foundation.training.loop import CheckpointConfig, Loop, LoopConfig
from foundation.training.optimizer import DenseConfig
from foundation.training.peaks import device_peak
from foundation.training.pipeline import Delivered, work_of
from foundation.training.rng import seed_all
from foundation.training.schedule import ScheduleConfig
from foundation.training.state import TrainState
from foundation.training.window import LogWindow


@dataclass(frozen=True, kw_only=True, slots=True)
class StepConfig:
    """What to measure.

    Args:
        preset: training preset whose model is taken.
        schema: of the random data.
        padded: every history is as long as the batch's longest, as in a model of padded tensors throughout; what
            counts as useful stays what was drawn.
        requests: of a batch. impressions: of a request.
        mean, longest, sigma: events of a request over all sequences: log-normal with this mean and sigma, cut there;
            shared out in proportion to the sequences' greatest lengths.
        most_rows: no table has more rows; 0: as the schema says.
        precision, device, compile, activation_memory_gb: as in training.
        kernels: `ours`; `padded` attention in their place; `torch`, no kernel of the project where something is
            computed.
        warmup, steps: steps before measuring, and measured ones.
        local: also measure each type of layer alone, compiled where `compile` is parts; not with layers or dense.
        top: GPU kernels to list.
        batches: of different lengths, one after another.
        out: JSON file with everything that was measured; empty: none.
    """

    preset: str = "foundation/large"
    schema: str = "configs/datasets/streams.yaml"
    padded: bool = False
    requests: int = 256
    impressions: int = 16
    mean: int = 512
    longest: int = 4096
    sigma: float = 1.0
    most_rows: int = 0
    precision: Precision = "bf16"
    device: Device = "auto"
    compile: Compile = "none"
    activation_memory_gb: float = 0.0
    kernels: Kernels = "ours"
    warmup: int = 4
    steps: int = 8
    local: bool = True
    top: int = 20
    batches: int = 4
    out: str = ""


@dataclass(slots=True)
class _Data:
    """Stands for a dataset: the loop asks for its schema only."""

    schema: Schema


@dataclass(slots=True)
class _Endless:
    """Stands for a reader."""

    dataset: _Data


def main(arguments: list[str]) -> None:
    """Measures and prints."""
    config: StepConfig = parse_config(StepConfig, arguments, name="python -m foundation.training.benchmarks.step")
    found = run(config)
    _print(config, found)
    if config.out:
        Path(config.out).write_text(json.dumps(found, indent=1) + "\n")


def run(config: StepConfig) -> dict[str, Any]:
    """Measures a step; seconds unless a name says otherwise."""
    with prepared(config) as (bench, found):
        found |= bench.end_to_end() | bench.phases()
        if config.local and config.compile in ("none", "parts") and not config.activation_memory_gb:
            found["local"] = bench.local()
        found["kernels"] = bench.top_kernels() if config.top else []
        return found


@contextmanager
def prepared(config: StepConfig) -> Iterator[tuple[Bench, dict[str, Any]]]:
    """A model that has done its first steps, and what these took."""
    started = time.perf_counter()
    schema = Schema.load(config.schema)
    rows = table_rows(schema, config.most_rows or None)
    drawn = [make_batch(config, schema, rows, seed) for seed in range(config.batches)]
    batches = drawn
    if config.padded:
        batches = [make_batch(config, schema, rows, seed, padded=True) for seed in range(config.batches)]
    with (
        TemporaryDirectory() as folder,
        kernels_of(config.kernels),
        launched(device=config.device, precision=config.precision, log_folder=Path(folder) / "log") as fabric,
    ):
        seed_all(0)
        with fabric.device:  # random numbers are drawn there, in less than a second instead of minutes
            gem = GEM(model_config(config.preset), schema, rows, torch.device("meta"))
        model = parallelize(gem, SparseConfig(), fabric.device)
        draw_tables(model, gem.embeddings.std_of, seed=0)
        state = TrainState.of(model, DenseConfig(), EMAConfig())
        loop = Loop(
            fabric=fabric,
            config=LoopConfig(
                steps=1_000_000,
                schedule=ScheduleConfig(decay="constant"),
                evaluation=EvaluationConfig(),
                checkpoint=CheckpointConfig(),
                log_every=1_000_000,
                max_skipped=3,
            ),
            state=state,
            reader=cast(LogReader, _Endless(cast(Any, _Data(schema)))),
            validation=None,
            log=cast(Any, _Silent()),
            checkpoints=Path(folder),
            manifest={},
        )
        bench = Bench(config, loop, batches, drawn, Lengths(gem) if config.kernels != "ours" else None)
        built = time.perf_counter()
        print(f"built in {built - started:.1f} s", file=sys.stderr)
        found: dict[str, Any] = {"build": built - started}
        if config.activation_memory_gb:
            costs = measure(gem, drawn[0].to(fabric.device), fabric.autocast)
            again = choose(costs, config.activation_memory_gb * 1e9)
            recompute(gem, again)
            found["again"] = sorted(again)
            found["costs"] = [cost._asdict() for cost in costs]
        compile_regions(gem, config.compile)
        bench.step(0)
        bench.wait()
        found["first_step"] = time.perf_counter() - built
        print(f"first step in {found['first_step']:.1f} s", file=sys.stderr)
        start = time.perf_counter()
        for number in range(config.warmup):
            bench.step(number)
        bench.wait()
        found["warm_up"] = time.perf_counter() - start
        print(f"{config.warmup} steps in {found['warm_up']:.1f} s", file=sys.stderr)
        found["parameters"] = sum(p.numel() for p in state.dense.parameters.values())
        yield bench, found


def make_batch(config: StepConfig, schema: Schema, rows: dict[str, int], seed: int, padded: bool = False) -> Batch:
    """A random batch in main memory; padded, all its histories have the length of the longest."""
    rng = np.random.default_rng(seed)
    drawn = rng.lognormal(0.0, config.sigma, config.requests)
    events = np.minimum(drawn * (config.mean / np.exp(config.sigma**2 / 2)), config.longest)
    for _ in range(20):  # cutting lowers the mean
        events = np.minimum(events * (config.mean / events.mean()), config.longest)
    if padded:
        events = np.full_like(events, events.max())
    whole = sum(sequence.max_length for sequence in schema.sequences)
    histories = {s.name: np.rint(events * s.max_length / whole).astype(np.int64) for s in schema.sequences}
    sizes = [config.impressions] * config.requests
    return Batch.from_encoded(random_batch(schema, sizes, rows, seed=seed, histories=cast(Any, histories)), schema)


class _Silent:
    def note(self, kind: str, step: int, text: str) -> None:
        """Tells of a skipped step."""
        print(kind, step, text, file=sys.stderr)


class Bench:
    """Steps of a loop on batches that lie in main memory.

    Args:
        drawn: the same batches with histories as drawn, whose work counts.
        lengths: told which batch comes next.
    """

    def __init__(
        self, config: StepConfig, loop: Loop, batches: list[Batch], drawn: list[Batch], lengths: Lengths | None = None
    ) -> None:
        self.config, self.loop, self.lengths = config, loop, lengths
        self.fresh_labels = 0.0
        """Share of labels that are 1, drawn anew for each step; 0: a batch keeps its own."""
        self.device = loop.fabric.device
        self.cuda = self.device.type == "cuda"
        self.model = loop.state.model.module
        self.parts = [forward_flops(self.model, Load.of(batch)) for batch in drawn]
        self.flops = [TRAINING * sum(parts.values()) for parts in self.parts]
        self.peak = device_peak(self.device, config.precision)
        self.batches = [batch.pin_memory() if self.cuda else batch for batch in batches]
        self.work = [work_of(batch) for batch in drawn]

    def wait(self) -> None:
        """Until the device is done."""
        if self.cuda:
            torch.cuda.synchronize()

    def delivered(self, number: int) -> Delivered:
        """The batch of a step, on its way to the device."""
        place = number % len(self.batches)
        if self.lengths is not None:
            self.lengths.batch = place
        batch = self.batches[place].to(self.device, non_blocking=True)
        if self.fresh_labels:
            labels = (torch.rand_like(batch.labels) < self.fresh_labels).to(batch.labels.dtype)
            batch = replace(batch, labels=labels)
        return Delivered(batch, {}, self.work[place], 0.0)

    def step(self, number: int) -> None:
        """Queues a step as training does."""
        self.loop._step(self.delivered(number))
        self.loop._settle(self.loop._run_ahead)

    def settled_loss(self) -> float:
        """Mean loss of the steps since this was asked last; waits for them."""
        self.loop._settle()
        window, self.loop._window = self.loop._window, LogWindow()
        return window._loss / max(1, window._steps)

    def end_to_end(self) -> dict[str, Any]:
        """Steps one behind the other as in training; the copy of a batch to the device included."""
        self.settled_loss()
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        self.wait()
        count = self.config.steps
        start = time.perf_counter()
        for number in range(count):
            self.step(number)
        queued = time.perf_counter() - start
        self.wait()
        seconds = time.perf_counter() - start
        works = [self.work[number % len(self.work)] for number in range(count)]
        rate = sum(self.flops[number % len(self.flops)] for number in range(count)) / seconds
        return {
            "step": seconds / count,
            "queue": queued / count,
            "samples_per_second": sum(work.impressions for work in works) / seconds,
            "tokens_per_second": sum(work.tokens for work in works) / seconds,
            "useful_tflops": rate / 1e12,
            "mfu": rate / self.peak if self.peak else None,
            "peak_memory_gb": torch.cuda.max_memory_allocated() / 1e9 if self.cuda else None,
            "reserved_memory_gb": torch.cuda.memory_reserved() / 1e9 if self.cuda else None,
            "loss": self.settled_loss(),
        }

    def phases(self) -> dict[str, Any]:
        """Seconds of the parts of a step on the device, and of what the host does for the next batch."""
        state, fabric = self.loop.state, self.loop.fabric
        sums: dict[str, float] = defaultdict(float)
        for number in range(self.config.steps):
            batch = self.delivered(number).batch
            marks = [self._mark()]
            with fabric.autocast():
                output = state.model(batch)
            loss = state.model.module.loss(output, batch).total
            marks.append(self._mark())
            if self.loop._guard:
                self.loop._guard.allow(torch.isfinite(loss.detach()))
            fabric.backward(loss)
            marks.append(self._mark())
            state.dense.clip()
            state.dense.step(torch.isfinite(loss.detach()))
            state.dense.zero_grad()
            marks.append(self._mark())
            for name, seconds in zip(("forward", "backward", "optimizer"), self._between(marks), strict=True):
                sums[name] += seconds / self.config.steps
        start = time.perf_counter()
        for batch in self.batches:
            batch.to(self.device, non_blocking=True)
        self.wait()
        sums["copy"] = (time.perf_counter() - start) / len(self.batches)
        return dict(sums)

    def local(self) -> dict[str, dict[str, float | None]]:
        """Each type of layer alone."""
        found = layers_alone(self.model, self.delivered(0).batch, self.loop.fabric.autocast, self.parts[0], self.peak)
        self.loop.state.dense.zero_grad()
        return found

    def top_kernels(self) -> list[dict[str, Any]]:
        """GPU kernels by their time in two steps."""
        if not self.cuda:
            return []
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            for number in range(2):
                self.step(number)
            self.wait()
        # Named ranges are on the device's time line too; their time is that of the kernels in them.
        events = [
            e
            for e in profiler.key_averages()
            if e.self_device_time_total > 0 and e.device_type.name == "CUDA" and not e.is_user_annotation
        ]
        events.sort(key=lambda e: -e.self_device_time_total)
        whole = sum(e.self_device_time_total for e in events)
        rows = [{"kernel": "all", "ms": whole / 2e3, "calls": sum(e.count for e in events) / 2}]
        for e in events[: self.config.top]:
            rows.append({"kernel": e.key[:90], "ms": e.self_device_time_total / 2e3, "calls": e.count / 2})
        self.loop._settle()
        return rows

    def _mark(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, marks: list[Any]) -> list[float]:
        self.wait()
        return [a.elapsed_time(b) / 1e3 if self.cuda else b - a for a, b in pairwise(marks)]


def _share(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.1%}"


def _print(config: StepConfig, found: dict[str, Any]) -> None:
    print(f"{config.preset}, {config.precision}, kernels {config.kernels}, compile {config.compile}")
    print(f"{found['parameters'] / 1e6:.0f} M dense parameters; built in {found['build']:.1f} s")
    print(f"first step, kernels compiled, {found['first_step']:.1f} s; {config.warmup} more {found['warm_up']:.1f} s")
    step = found["step"] * 1e3
    print(
        f"step {step:.1f} ms ({found['queue'] * 1e3:.1f} ms to queue), MFU {_share(found['mfu'])}, "
        f"{found['useful_tflops']:.1f} useful TFLOP/s, {found['samples_per_second']:,.0f} samples/s, "
        f"{found['tokens_per_second']:,.0f} tokens/s, peak memory {found['peak_memory_gb'] or 0:.1f} GB, "
        f"loss {found['loss']:.4f}"
    )
    phases = {name: found[name] * 1e3 for name in ("forward", "backward", "optimizer", "copy")}
    print(", ".join(f"{name} {ms:.1f} ms" for name, ms in phases.items()))
    bound = max(phases, key=phases.__getitem__)
    if found["kernels"]:
        busy = found["kernels"][0]["ms"]
        other = max(0.0, step - phases["forward"] - phases["backward"] - phases["optimizer"])
        print(f"GPU busy {busy:.1f} ms of {step:.1f}, other {other:.1f} ms")
        bound = "host" if busy < 0.85 * step else bound
    print(f"bound by: {bound}")
    for kind, row in found.get("local", {}).items():
        print(f"alone {kind}: {row['seconds'] * 1e3:.1f} ms, {row['useful_gflop']:.0f} GFLOP, MFU {_share(row['mfu'])}")
    for row in found["kernels"]:
        print(f"{row['ms']:9.2f} ms {row['calls']:7.0f}  {row['kernel']}")


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
