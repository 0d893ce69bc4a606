"""What it saves to compute the user once per request: ``python -m foundation.model.benchmarks.sharing --preset ...``.

Takes the same impressions twice: in requests of 1, 4, 16 and 64, and each in a request of its own. Prints operations
and time of a training step (forward and backward) of both, and on a GPU the time of its kernels, which does not grow
with the host's work. Histories are heavy-tailed (log-normal), tables small.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from foundation.data.batch import Batch
from foundation.data.commands import run_command
from foundation.data.encoding import EncodedBatch
from foundation.data.options import parse_config
from foundation.data.schema import Schema
from foundation.model.benchmarks.batches import one_impression_each, random_batch
from foundation.model.benchmarks.presets import model_config, table_rows
from foundation.model.flops import TRAINING, Load, forward_flops
from foundation.model.gem import GEM

TABLE_ROWS = 10_000
"""At most so many rows a table: lookups are not what is measured."""


WARM_UP = 2
"""Steps before the timed ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SharingConfig:
    """What to measure.

    Args:
        preset: training preset; one with user layers, or there is nothing to share.
        schema: of the data.
        impressions: of a batch.
        per_request: impressions of a request, each a line of the table.
        events: mean number of events of a request over all sequences.
        spread: standard deviation of the logarithm of that number.
        device: cpu or cuda.
        repeats: timed steps, of which the median counts; 0 times none.
    """

    preset: str = "foundation/base"
    schema: str = "configs/datasets/streams.yaml"
    impressions: int = 64
    per_request: tuple[int, ...] = (1, 4, 16, 64)
    events: int = 512
    spread: float = 1.0
    device: str = "cpu"
    repeats: int = 5

    def __post_init__(self) -> None:
        for size in self.per_request:
            if size < 1 or self.impressions % size:
                raise ValueError(f"per_request: {self.impressions} impressions are no multiple of {size}")


def heavy_tailed(schema: Schema, requests: int, mean: float, spread: float, seed: int = 0) -> dict[str, list[int]]:
    """Events of each request by sequence: a log-normal total, shared out by the sequences' greatest lengths."""
    rng = np.random.default_rng(seed)
    totals = rng.lognormal(np.log(mean) - spread**2 / 2, spread, requests)
    whole = sum(sequence.max_length for sequence in schema.sequences)
    return {s.name: np.round(totals * s.max_length / whole).astype(int).tolist() for s in schema.sequences}


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """Impressions of a request; TFLOP, seconds and seconds of kernels of a training step, the user shared and not."""

    per_request: int
    shared_tflop: float
    apart_tflop: float
    shared_s: float
    apart_s: float
    shared_kernels_s: float
    apart_kernels_s: float


def build(config: SharingConfig) -> GEM:
    """The model, with small tables."""
    schema = Schema.load(config.schema)
    torch.manual_seed(0)
    with torch.device(config.device):
        return GEM(model_config(config.preset), schema, table_rows(schema, TABLE_ROWS))


def measure(config: SharingConfig, model: GEM) -> Iterator[Line]:
    """Measures every size of request."""
    schema = Schema.load(config.schema)
    for size in config.per_request:
        requests = config.impressions // size
        histories = heavy_tailed(schema, requests, config.events, config.spread)
        together = random_batch(schema, [size] * requests, table_rows(schema, TABLE_ROWS), histories=histories)
        shared, apart = (_step(config, model, encoded, schema) for encoded in (together, one_impression_each(together)))
        yield Line(
            per_request=size,
            shared_tflop=shared[0],
            apart_tflop=apart[0],
            shared_s=shared[1],
            apart_s=apart[1],
            shared_kernels_s=shared[2],
            apart_kernels_s=apart[2],
        )


def _step(config: SharingConfig, model: GEM, encoded: EncodedBatch, schema: Schema) -> tuple[float, float, float]:
    """TFLOP, seconds and seconds of kernels of one step."""
    batch = Batch.from_encoded(encoded, schema).to(config.device)
    flops = TRAINING * sum(forward_flops(model, Load.of(batch)).values())
    cuda = config.device.startswith("cuda")

    def step() -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16) if cuda else nullcontext():
            output = model(batch)
        model.loss(output, batch).total.backward()
        model.zero_grad(set_to_none=True)

    seconds = _median_seconds(step, config.repeats, cuda) if config.repeats else math.nan
    return flops / 1e12, seconds, _kernel_seconds(step) if config.repeats and cuda else math.nan


def _median_seconds(step: Callable[[], None], repeats: int, cuda: bool) -> float:
    times = []
    for turn in range(repeats + WARM_UP):
        if cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        if cuda:
            torch.cuda.synchronize()
        if turn >= WARM_UP:
            times.append(time.perf_counter() - start)
    return float(np.median(times))


def _kernel_seconds(step: Callable[[], None]) -> float:
    """Sum over the kernels of a step."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    events = (e for e in profiler.key_averages() if e.device_type.name == "CUDA" and not e.is_user_annotation)
    return sum(e.self_device_time_total for e in events) / 1e6


def main(arguments: list[str]) -> None:
    """Prints the table."""
    config: SharingConfig = parse_config(SharingConfig, arguments, name="python -m foundation.model.benchmarks.sharing")
    where = torch.cuda.get_device_name() if config.device.startswith("cuda") else "cpu, float32"
    print(f"{config.preset} on {config.schema}, {config.impressions} impressions, mean {config.events} events, {where}")
    times = "ms shared | apart | ratio | kernels' ms shared | apart | ratio"
    print(f"| impressions a request | TFLOP shared | apart | ratio | {times} |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for line in measure(config, build(config)):
        print(
            f"| {line.per_request} | {line.shared_tflop:.4f} | {line.apart_tflop:.4f} "
            f"| {line.apart_tflop / line.shared_tflop:.2f} | {line.shared_s * 1e3:.1f} | {line.apart_s * 1e3:.1f} "
            f"| {line.apart_s / line.shared_s:.2f} | {line.shared_kernels_s * 1e3:.1f} "
            f"| {line.apart_kernels_s * 1e3:.1f} | {line.apart_kernels_s / line.shared_kernels_s:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
