"""What a save costs the training thread: ``python -m foundation.training.benchmarks.checkpoint --gb 1``.

The same tensors are saved blocking and in the background, to the same folder. Between background saves the training
thread works until the save is on disk, so that no save waits for another; the time of that work says what the thread
that writes takes away from training.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

from foundation.data.commands import run_command
from foundation.data.options import parse_config
from foundation.training.checkpoint_writer import CheckpointConfig, CheckpointWriter
from foundation.training.launch import Device, pick_device

_DIM = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveConfig:
    """What to measure.

    Args:
        gb: size of all tensors, nine tenths of them in tables.
        tables: number of tables, each with one number per row beside it.
        dense: number of other tensors.
        saves: measured saves of each kind, after a first one.
        folder: where checkpoints go, on the file system to be measured; empty: a temporary folder.
        device: auto, cpu or cuda.
        out: JSON file with everything that was measured; empty: none.
    """

    gb: float = 1.0
    tables: int = 8
    dense: int = 400
    saves: int = 5
    folder: str = ""
    device: Device = "auto"
    out: str = ""


def main(arguments: list[str]) -> None:
    """Measures and prints."""
    config: SaveConfig = parse_config(SaveConfig, arguments, name="python -m foundation.training.benchmarks.checkpoint")
    found = run(config)
    print(
        f"{config.gb:g} GB in {found['tensors']} tensors on {found['device']}, {config.saves} saves of each kind\n\n"
        "| save | stall of training, s | on disk after, s | stall over blocking |\n|---|---|---|---|"
    )
    for kind in ("blocking", "first in the background", "in the background"):
        row = found[kind]
        print(f"| {kind} | {row['stall']:.3f} | {row['whole']:.2f} | {row['stall'] / found['blocking']['stall']:.1%} |")
    print(
        f"\na step of work while nothing is written {found['step_alone'] * 1e3:.1f} ms, while a save is written "
        f"{found['step_beside'] * 1e3:.1f} ms ({found['step_beside'] / found['step_alone'] - 1:+.0%})"
    )
    if config.out:
        Path(config.out).write_text(json.dumps(found, indent=1) + "\n")


def run(config: SaveConfig) -> dict[str, Any]:
    """Medians in seconds."""
    device = pick_device(config.device)
    tensors = make_tensors(config, device)
    found: dict[str, Any] = {"device": device.type, "tensors": len(tensors)}
    with TemporaryDirectory(dir=config.folder or None) as folder, _process_group():
        blocking = _save(folder, tensors, asynchronous=False, steps=1 + config.saves)
        background = _save(folder, tensors, asynchronous=True, steps=1 + config.saves)
    alone = [_work(device) for _ in range(20)]
    found["blocking"] = {key: median(row[key] for row in blocking[1:]) for key in ("stall", "whole")}
    found["first in the background"] = {key: background[0][key] for key in ("stall", "whole")}
    found["in the background"] = {key: median(row[key] for row in background[1:]) for key in ("stall", "whole")}
    found["step_alone"] = median(alone)
    found["step_beside"] = median(seconds for row in background[1:] for seconds in row["work"])
    found["saves"] = {"blocking": blocking, "background": background}
    return found


def make_tensors(config: SaveConfig, device: torch.device) -> dict[str, torch.Tensor]:
    """Tensors by the keys of a checkpoint."""
    numbers = config.gb * 1e9 / 4
    rows = max(1, int(0.9 * numbers / config.tables / (_DIM + 1)))
    width = max(1, int((0.1 * numbers / config.dense) ** 0.5))
    tensors = {}
    for table in range(config.tables):
        tensors[f"model.table-{table}"] = torch.randn(rows, _DIM, device=device)
        tensors[f"momentum.table-{table}"] = torch.rand(rows, device=device)
    return tensors | {f"model.dense-{n}": torch.randn(width, width, device=device) for n in range(config.dense)}


def _save(folder: str, tensors: dict[str, torch.Tensor], *, asynchronous: bool, steps: int) -> list[dict[str, Any]]:
    """Seconds that each save stalled the caller, until it was whole, and of the steps of work beside it."""
    rows: list[dict[str, Any]] = []
    device = next(iter(tensors.values())).device
    latest = Path(folder) / "latest"
    with CheckpointWriter(Path(folder), CheckpointConfig(keep=1, asynchronous=asynchronous)) as writer:
        writer.reserve(tensors)
        writer.wait()  # as a run has it by the time of its first save
        for step in range(1, steps + 1):
            _synchronize(device)
            number = step if asynchronous else 1000 + step
            started = time.perf_counter()
            path = writer.save(number, tensors, {}, {})
            work = []
            while not (latest.is_file() and latest.read_text() == path.name):
                work.append(_work(device))
            rows.append({"stall": writer.stall_seconds, "whole": time.perf_counter() - started, "work": work})
            writer.wait()  # for what is removed after the commit
    return rows


def _work(device: torch.device) -> float:
    """Seconds of a step that is no more than a matrix product."""
    started = time.perf_counter()
    size = 512 if device.type == "cpu" else 8192
    one = torch.ones(size, size, device=device)
    (one @ one).sum().item()
    return time.perf_counter() - started


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


@contextmanager
def _process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
