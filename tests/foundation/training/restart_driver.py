"""What torchrun starts on each rank: a run in whose middle rank 1 is killed; after the restart also one left alone.

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

DIES_AT = 5
"""The step in which it does; step 4 is saved by then."""


def main(folder: Path) -> None:
    """Trains; the command is the same at every start."""
    settings: dict[str, Any] = {
        "max_steps": 6,
        "resume": True,
        "checkpoint": CheckpointConfig(every=2),
        "evaluation": EvaluationConfig(every=1000, batch_size=128),
    }
    step, first = Loop._step, os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"

    def dies(loop: Loop, delivered: Any) -> None:
        if loop.state.progress.step + 1 == DIES_AT:
            loop.writer.wait()  # else this rank could take the save of step 4 with it
            dist.barrier()
            if dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
        step(loop, delivered)

    if first:
        Loop._step = dies  # type: ignore[method-assign]
    train(small_run.config(folder / "data", folder / "killed", **settings))
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), world), rank=rank, world_size=world)
    train(small_run.config(folder / "data", folder / "whole", **settings))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
