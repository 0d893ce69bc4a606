"""Samples per second of a model of moderate size, at the number of ranks that were started.

    torchrun --nproc_per_node 1 -m foundation.parallel.benchmarks.scaling --out one.json
    torchrun --nproc_per_node 4 -m foundation.parallel.benchmarks.scaling --baseline one.json

Weak scaling: every rank has batches of the same size, from its own seed, with heavy-tailed histories. The ratio is the
samples per second and rank over those of the baseline with the same name, or with the plain one.
"""

from __future__ import annotations

import argparse
import json
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from foundation.data.batch import Batch
from foundation.model.cross import CrossConfig
from foundation.model.gem import GEM, GEMConfig
from foundation.model.heads import HeadsConfig
from foundation.model.interaction import InteractionConfig
from foundation.model.layer import LayerConfig
from foundation.model.sequence import SequenceConfig
from foundation.parallel.benchmarks.over_ranks import joined, most, wait
from foundation.parallel.benchmarks.random_batches import Sizes, random_batch
from foundation.parallel.parallelize import parallelize
from foundation.parallel.plan import SparseConfig
from foundation.parallel.topology import DenseSizes, ParallelConfig, SparseSizes, Topology
from foundation.training.ema import EMAConfig
from foundation.training.loop import rank_share
from foundation.training.optimizer import DenseConfig
from foundation.training.state import TrainState


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """A model and batches: `requests` per rank and step; `autocast` to bfloat16."""

    model: GEMConfig
    sizes: Sizes
    autocast: bool


PRESETS = {
    "moderate": Preset(
        model=GEMConfig(
            width=128,
            layers=4,
            layer=LayerConfig(
                cross=CrossConfig(feature_tokens=8, pooled_tokens=4, recent_tokens=8),
                interaction=InteractionConfig(
                    block="fm", experts=4, block_tokens=8, linear_tokens=8, fm_rank=32, hidden=(2048, 1024)
                ),
                sequence=SequenceConfig(width=128, heads=2),
            ),
            heads=HeadsConfig(trunk=(1024, 512)),
        ),
        sizes=Sizes(
            users=4_000_000, items=2_000_000, dim=64, requests=1024, impressions=4, history=128, tail=1.2, longest=1024
        ),
        autocast=True,
    ),
    "tiny": Preset(
        model=GEMConfig(width=16, layers=1, layer=LayerConfig(interaction=InteractionConfig(experts=4))),
        sizes=Sizes(users=1000, items=1000, dim=16, requests=32, history=8, longest=32),
        autocast=False,
    ),
}


def ways(world: int) -> dict[str, ParallelConfig]:
    """What is measured, by name."""
    found = {"replicated": ParallelConfig()}
    if world > 1:
        found["shard"] = ParallelConfig(dense=DenseSizes(shard=world))
        found["expert"] = ParallelConfig(dense=DenseSizes(expert=world))
        found["table replicas"] = ParallelConfig(sparse=SparseSizes(replicas=world))
    return found


def measure(preset: Preset, way: ParallelConfig, steps: int, warm: int, device: torch.device) -> dict[str, float]:
    """Steps per second of this way, on all ranks; a collective call.

    Returns:
        `samples_per_second` over all ranks, `step_ms`, `gb` (largest peak of CUDA memory), and `imbalance`: events of
        the heaviest rank over the mean.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    schema = preset.sizes.schema()
    torch.manual_seed(0)
    model = GEM(preset.model, schema, preset.sizes.table_rows)
    spread = parallelize(model, SparseConfig(), device, way, Topology(gpus_per_host=world))
    state = TrainState.of(spread, DenseConfig(), EMAConfig())
    encoded = [random_batch(preset.sizes, seed=1000 * rank + i) for i in range(4)]
    batches = [Batch.from_encoded(one, schema, device) for one in encoded]
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    seconds = 0.0
    for step in range(warm + steps):
        if step == warm:
            wait(device)
            seconds = -time.perf_counter()
        batch = batches[step % len(batches)]
        share = rank_share(batch)
        with torch.autocast(device.type, torch.bfloat16) if preset.autocast else nullcontext():
            output = state.model(batch)
        (state.model.module.loss(output, batch).total * share).backward()
        state.model.average_tables()
        state.dense.clip()
        state.dense.step()
        state.dense.zero_grad()
    wait(device)
    seconds += time.perf_counter()
    samples = sum(batches[step % len(batches)].num_impressions for step in range(warm, warm + steps)) * world
    events = torch.tensor([float(one.request.lengths["shown.item"].sum()) for one in encoded], device=device)
    heaviest, mean = events.clone(), events
    dist.all_reduce(heaviest, op=dist.ReduceOp.MAX)
    dist.all_reduce(mean)
    return {
        "samples_per_second": samples / seconds,
        "step_ms": seconds / steps * 1e3,
        "gb": most(torch.cuda.max_memory_allocated() / 1e9 if cuda else 0.0, device),
        "imbalance": float((heaviest / (mean / world)).mean()),
    }


def main() -> None:
    """Prints a line per way of spreading."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--preset", choices=tuple(PRESETS), default="moderate")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--warm", type=int, default=8)
    parser.add_argument("--out", type=Path, help="write what was measured as JSON")
    parser.add_argument("--baseline", type=Path, help="what --out wrote at another number of ranks")
    options = parser.parse_args()
    device = joined(options.device)
    world = dist.get_world_size()
    baseline = json.loads(options.baseline.read_text()) if options.baseline else None
    found: dict[str, dict[str, float]] = {}
    for name, way in ways(world).items():
        found[name] = line = measure(PRESETS[options.preset], way, options.steps, options.warm, device)
        if dist.get_rank() == 0:
            text = (
                f"{name:<16} {world} ranks {line['samples_per_second']:>12,.0f} samples/s {line['step_ms']:>8.1f} ms  "
                f"{line['gb']:6.1f} GB  imbalance {line['imbalance']:.2f}"
            )
            if baseline:
                one = baseline["found"].get(name, baseline["found"]["replicated"])["samples_per_second"]
                text += f"  scaling {line['samples_per_second'] / world / (one / baseline['ranks']):.3f}"
            print(text, flush=True)
    if dist.get_rank() == 0 and options.out:
        options.out.write_text(json.dumps({"ranks": world, "found": found}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
