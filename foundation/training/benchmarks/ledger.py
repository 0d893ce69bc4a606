"""What the ledger costs: ``python -m foundation.training.benchmarks.ledger``.

CPU time of everything that a step asks of the ledger, its line on disk included, and of its parts. On CUDA the marks
between kernels are part of it, as the time that they take on the host.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from foundation.data.commands import run_command
from foundation.data.options import parse_config
from foundation.training.launch import Device, launched
from foundation.training.ledger import LEDGER, Ledger
from foundation.training.phases import DATA


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerBenchConfig:
    """What to measure.

    Args:
        steps: of a measurement; the shortest of five counts.
        waits: for collectives in a step.
        device: auto, cpu or cuda.
    """

    steps: int = 2000
    waits: int = 20
    device: Device = "auto"


def run(config: LedgerBenchConfig) -> dict[str, float | str]:
    """Microseconds of CPU time by what is done."""
    with (
        TemporaryDirectory() as folder,
        launched(device=config.device, precision="fp32", log_folder=Path(folder) / "log") as fabric,
    ):
        ledger = Ledger()
        waits = ledger.open(Path(folder) / LEDGER, fabric.device, {"world": 1, "step": 0, "samples": 0})
        ledger.compiling()
        ledger.step_done(1, 0, 0.0)
        number = [1]

        def switch() -> None:
            with ledger.phase(DATA):
                pass

        def wait() -> None:
            with waits.waiting():
                pass

        def step() -> None:
            switch()
            with ledger.step():
                for _ in range(config.waits):
                    wait()
                with ledger.optimizer():
                    pass
            number[0] += 1
            ledger.step_done(number[0], 1000, 1e9)

        def interval() -> None:
            ledger.interval(number[0], number[0])

        found: dict[str, float | str] = {"device": str(fabric.device)}
        found["phase"] = _microseconds(switch, config.steps, interval)
        with ledger.step():
            found["wait"] = _microseconds(wait, config.steps)
        interval()
        found["step"] = _microseconds(step, config.steps, interval)
        found["interval"] = _microseconds(interval, 50)
        return found


def _microseconds(what: Callable[[], object], count: int, after: Callable[[], object] = nullcontext) -> float:
    """CPU time of one call: the shortest mean of five."""
    best = float("inf")
    for _ in range(5):
        start = time.process_time()
        for _ in range(count):
            what()
        best = min(best, (time.process_time() - start) / count * 1e6)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        after()
    return best


def main(arguments: list[str]) -> None:
    """Measures and prints."""
    config: LedgerBenchConfig = parse_config(
        LedgerBenchConfig, arguments, name="python -m foundation.training.benchmarks.ledger"
    )
    found = run(config)
    print(json.dumps(found))
    print(f"CPU time on {found['device']}, microseconds:")
    print(f"  one phase begun and ended    {found['phase']:8.2f}")
    print(f"  one wait seen                {found['wait']:8.2f}")
    print(f"  a step with {config.waits:3d} waits        {found['step']:8.2f}")
    print(f"  a line per log interval      {found['interval']:8.2f}")


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
