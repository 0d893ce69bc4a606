"""Does the step of a bundle again, on one device.

    python -m foundation.training.reproduce --bundle RUN/failures/step-00000012 [--rank 1]

The model is whole, so that a rank's batch gives the loss that the rank had, whatever the number of ranks was.
"""

from __future__ import annotations

import json
import math
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from foundation.data.batch_file import load_batch
from foundation.data.commands import run_command
from foundation.data.options import parse_config
from foundation.training.bundle import BUNDLE, batch_file, weights_hash
from foundation.training.checkpoint import load_model
from foundation.training.checkpoint_files import CheckpointError, read_rank_state
from foundation.training.guard import tensors_of
from foundation.training.launch import Device, pick_device
from foundation.training.nonfinite import culprits
from foundation.training.rng import set_rng_state


@dataclass(frozen=True, kw_only=True, slots=True)
class ReproduceConfig:
    """Which step to do again.

    Args:
        bundle: folder that a run left under `failures`.
        rank: whose batch and random generators to take.
        device: auto, cpu or cuda.
    """

    bundle: Path
    rank: int = 0
    device: Device = "auto"


@dataclass(frozen=True, kw_only=True, slots=True)
class Reproduction:
    """What the step did.

    Args:
        step: its number.
        reason: why the run skipped it.
        loss, recorded: now, and then on this rank; the one of a run of several ranks is weighted by the rank's share.
        found: columns or weights that are not finite.
        module: the first module whose output is not finite, None if there is none.
        gradients: parameters whose gradients are not finite; empty where the loss is not.
        same_weights: the weights are those that the rank hashed; None after a run of several ranks, each of which
            hashed its own part.
    """

    step: int
    reason: str
    loss: float
    recorded: float
    found: str
    module: str | None
    gradients: list[str]
    same_weights: bool | None


def reproduce(config: ReproduceConfig) -> Reproduction:
    """Does the step of a bundle again, up to its gradients.

    Raises:
        CheckpointError: it is not a bundle, has no such rank, or is damaged.
        ValueError: its batch cannot be read, or there is no such device.
    """
    path = config.bundle / BUNDLE
    try:
        about = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error}); this is not a whole bundle") from None
    world = about["world_size"]
    if not 0 <= config.rank < world:
        raise CheckpointError(f"{config.bundle}: rank: must be in 0 .. {world - 1}, got {config.rank}")
    device = pick_device(config.device)
    loaded = load_model(config.bundle, "latest", device)
    own = read_rank_state(loaded.checkpoint, config.rank)
    batch = load_batch(batch_file(config.bundle, config.rank)).to(device)
    model = loaded.model.train()
    same = weights_hash(dict(model.state_dict())) == own["weights_sha256"] if world == 1 else None

    first = _First(model)
    set_rng_state(own["rng"], device)
    bf16 = about["config"]["precision"] == "bf16"
    with torch.autocast(device.type, torch.bfloat16) if bf16 else nullcontext():
        output = model(batch)
    first.remove()
    loss = model.loss(output, batch).total
    gradients: list[str] = []
    if math.isfinite(loss.item()):
        loss.backward()
        gradients = [
            name
            for name, parameter in model.named_parameters()
            if parameter.grad is not None and not bool(torch.isfinite(parameter.grad).all())
        ]
    return Reproduction(
        step=about["step"],
        reason=about["reason"],
        loss=loss.item(),
        recorded=float(own["loss"]),
        found=culprits(batch, loaded.schema, model),
        module=first.name,
        gradients=gradients,
        same_weights=same,
    )


class _First:
    """The first module that is done with an output that is not finite."""

    def __init__(self, model: nn.Module) -> None:
        self.name: str | None = None
        self._handles = [
            module.register_forward_hook(self._hook(f"{name} ({type(module).__name__})"))
            for name, module in model.named_modules()
        ]

    def _hook(self, name: str) -> Any:
        def look(module: nn.Module, inputs: Any, output: Any) -> None:
            if self.name is None and any(not bool(torch.isfinite(value).all()) for value in tensors_of(output)):
                self.name = name

        return look

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


def main(arguments: list[str]) -> None:
    """Prints what the step did."""
    found = reproduce(parse_config(ReproduceConfig, arguments, name="python -m foundation.training.reproduce"))
    same = {True: "the same", False: "not the same", None: "of several ranks, not compared"}[found.same_weights]
    print(f"step {found.step}: {found.reason}")
    print(f"loss {found.loss}, recorded {found.recorded}; weights: {same}")
    print(f"not finite: {found.found}")
    print(f"first module whose output is not finite: {found.module or 'none'}")
    print(f"gradients that are not finite: {', '.join(found.gradients) or 'none'}")


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
