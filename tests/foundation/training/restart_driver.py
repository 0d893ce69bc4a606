"""What torchrun starts on each rank: a run that is left alone, then the same run with rank 1 killed in its middle.

torchrun --nproc_per_node 2 --max-restarts 1 -m tests.foundation.training.restart_driver FOLDER
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

from foundation.training.checkpoint_writer import CheckpointConfig
from foundation.training.evaluate import EvaluationConfig
from foundation.training.loop import Loop
from foundation.training.train import train
from tests.foundation.training import small_run

DIES_AT = 6
"""The step in which it does; step 4 is saved by then."""


def main(folder: Path) -> None:
    """Trains; the command is the same at every start."""
    settings: dict[str, Any] = {
        "max_steps": 8,
        "resume": True,
        "checkpoint": CheckpointConfig(every=2),
        "evaluation": EvaluationConfig(every=1000, batch_size=128),
    }
    train(small_run.config(folder / "data", folder / "whole", **settings))
    step, first = Loop._step, os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"

    def dies(loop: Loop, delivered: Any) -> None:
        if first and loop.state.progress.step + 1 == DIES_AT:
            loop.writer.wait()  # else this rank could take the save of step 4 with it
            dist.barrier()
            if dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
        step(loop, delivered)

    Loop._step = dies  # type: ignore[method-assign]
    train(small_run.config(folder / "data", folder / "killed", **settings))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
