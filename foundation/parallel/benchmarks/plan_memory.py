"""Planned memory beside measured memory, on one CUDA device.

    python -m foundation.parallel.benchmarks.plan_memory --presets "[foundation/small, foundation/base]"

Each preset is planned in a process of its own while others train a few steps on random batches of the very sizes that
the plan counts with. Printed are what is held between steps, at the end of the forward pass, and at most
(`torch.cuda.max_memory_allocated`), each planned and measured.
"""

from __future__ import annotations

import json
import sys
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from foundation.data import settings
from foundation.data.commands import run_command
from foundation.data.options import parse_config
from foundation.data.processes import ProcessPool
from foundation.data.schema import Schema
from foundation.model.benchmarks.presets import model_config, table_rows
from foundation.model.gem import GEM
from foundation.parallel.draw import draw_tables
from foundation.parallel.parallelize import parallelize
from foundation.parallel.plan import SparseConfig
from foundation.parallel.preview.load import Requests
from foundation.parallel.preview.memory import BATCHES, OUTSIDE
from foundation.parallel.preview.plan import PlanConfig, work_out
from foundation.parallel.preview.rehearsal import parts_of
from foundation.training.ema import EMAConfig
from foundation.training.launch import launched
from foundation.training.optimizer import DenseConfig
from foundation.training.rng import seed_all
from foundation.training.state import TrainState

MOMENT = ("gradients", "activations", "weights for products")
"""Terms of a plan that come and go within a step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryConfig:
    """What to measure.

    Args:
        presets: training presets whose models are taken.
        schema: of the random data.
        most_rows: no table has more, here and in the plan.
        batch_size: impressions. impressions: of a request. events: of a request on average.
        steps: training steps of each preset; the memory of the last one counts.
        out: JSON file with all numbers; empty: none.
    """

    presets: tuple[str, ...] = ("foundation/small", "foundation/base", "foundation/large")
    schema: str = "configs/datasets/streams.yaml"
    most_rows: int = 1_000_000
    batch_size: int = 1024
    impressions: float = 8.0
    events: float = 512.0
    steps: int = 3
    out: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bytes:
    """Held between steps, after the forward pass, at most in forward pass, backward pass and optimizer; and beyond what
    is held between steps, when the forward pass of each module ended."""

    rest: float
    forward: float
    forward_most: float
    backward_most: float
    optimizer_most: float
    trail: tuple[tuple[str, float], ...]

    @property
    def most(self) -> float:
        """At most in a step."""
        return max(self.forward_most, self.backward_most, self.optimizer_most)


def planned(config: MemoryConfig, preset: str) -> tuple[Bytes, dict[str, float]]:
    """What the plan says, and its terms."""
    arguments = ["--config", preset, "--schema", config.schema, "--most_rows", str(config.most_rows)]
    arguments += ["--impressions", str(config.impressions), "--events", str(config.events)]
    arguments += ["--reader.batch_size", str(config.batch_size), "--precision", "bf16"]
    plan = work_out(parse_config(PlanConfig, arguments, name="plan"))
    terms = {name: count for name, count in plan.memory.terms.items() if name != OUTSIDE}
    rest = sum(count for name, count in terms.items() if name not in MOMENT)
    most = plan.memory.allocated
    held = rest + sum(plan.kept.values())
    found = Bytes(rest=rest, forward=held, forward_most=most, backward_most=most, optimizer_most=most, trail=plan.trail)
    return found, terms


def measured(config: MemoryConfig, preset: str) -> Bytes:
    """Trains a few steps on the device."""
    schema = Schema.load(settings.preset(config.schema, "schema", "datasets"))
    rows = table_rows(schema, config.most_rows)
    requests = Requests.stated(schema, config.impressions, config.events, 1.0)
    with (
        TemporaryDirectory() as folder,
        launched(device="cuda", precision="bf16", log_folder=Path(folder) / "log") as fabric,
    ):
        seed_all(0)
        with fabric.device:
            gem = GEM(model_config(preset), schema, rows, torch.device("meta"))
        model = parallelize(gem, SparseConfig(), fabric.device)
        draw_tables(model, gem.embeddings.std_of, seed=0)
        state = TrainState.of(model, DenseConfig(), EMAConfig())
        batch = requests.batch(schema, rows, config.batch_size).pin_memory()
        ahead: deque = deque(maxlen=BATCHES)
        found: Bytes | None = None
        trail: list[tuple[str, float]] = []
        for name, module in parts_of(gem).items():
            module.register_forward_hook(
                lambda *_, name=name: trail.append((name, float(torch.cuda.memory_allocated())))
            )
        model.train()
        for _ in range(config.steps):
            while len(ahead) < BATCHES:
                ahead.append(batch.to(fabric.device, non_blocking=True))
            here = ahead.popleft()
            ahead.append(batch.to(fabric.device, non_blocking=True))
            trail.clear()
            rest = _now()
            with fabric.autocast():
                output = model(here)
            loss = gem.loss(output, here).total
            forward_most, forward = _most(), _now()
            fabric.backward(loss)
            backward_most = _most()
            state.dense.clip()
            state.dense.step()
            state.dense.zero_grad()
            found = Bytes(
                rest=rest,
                forward=forward,
                forward_most=forward_most,
                backward_most=backward_most,
                optimizer_most=_most(),
                trail=tuple((name, held - rest) for name, held in trail),
            )
            del output, loss
        assert found is not None
    return found


def _now() -> float:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    return float(torch.cuda.memory_allocated())


def _most() -> float:
    torch.cuda.synchronize()
    most = float(torch.cuda.max_memory_allocated())
    torch.cuda.reset_peak_memory_stats()
    return most


def main(arguments: list[str]) -> None:
    """Prints the table."""
    config: MemoryConfig = parse_config(
        MemoryConfig, arguments, name="python -m foundation.parallel.benchmarks.plan_memory"
    )
    if not torch.cuda.is_available():
        raise SystemExit("plan_memory: needs a CUDA device")
    results: dict[str, dict[str, Any]] = {}
    with ProcessPool(len(config.presets)) as pool:
        plans = {preset: pool.submit(planned, config, preset) for preset in config.presets}
        for preset in config.presets:
            found = measured(config, preset)
            print(f"{preset}: measured {found.most / 1e9:.3f} GB", flush=True)
            results[preset] = {"measured": _plain(found)}
            _write(config, results)
            plan, terms = plans[preset].result()
            print(f"{preset}: planned {plan.most / 1e9:.3f} GB, {plan.most / found.most - 1:+.1%}", flush=True)
            for name in ("rest", "forward", "forward_most", "backward_most", "optimizer_most"):
                print(f"  {name:15} {getattr(plan, name) / 1e9:9.3f} {getattr(found, name) / 1e9:9.3f}", flush=True)
            results[preset] |= {"planned": _plain(plan), "terms": terms}
            _write(config, results)


def _write(config: MemoryConfig, results: dict[str, dict[str, Any]]) -> None:
    if config.out:
        Path(config.out).write_text(json.dumps(results, indent=1) + "\n")


def _plain(found: Bytes) -> dict[str, Any]:
    names = ("rest", "forward", "forward_most", "backward_most", "optimizer_most", "most", "trail")
    return {name: getattr(found, name) for name in names}


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
