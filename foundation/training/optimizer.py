"""The dense optimizer: AdamW with gradient clipping. Tables have their own, see `foundation.parallel`.

On CUDA it is PyTorch's fused AdamW, which can leave a step out without the host knowing; elsewhere its foreach form.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.profiler import record_function

from foundation.parallel.pieces import Sharded, Spread
from foundation.parallel.ranges import GRADIENT_REDUCE, OPTIMIZER


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseConfig:
    """AdamW for everything but the tables.

    Args:
        lr: learning rate before the schedule.
        betas: decay of the two moments.
        eps: added to the root of the second moment.
        weight_decay: decoupled, only on weights of two or more dimensions (not on biases, norms and scales).
        clip_norm: gradients are scaled down to this norm over all dense parameters; 0 does not clip.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float = 1.0

    def __post_init__(self) -> None:
        for key in ("lr", "eps", "weight_decay", "clip_norm"):
            if getattr(self, key) < 0:
                raise ValueError(f"dense.{key}: must not be negative, got {getattr(self, key)}")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"dense.betas: must be two numbers in [0, 1), got {self.betas}")


class DenseOptimizer:
    """AdamW over named parameters; its state exists from the start, so a checkpoint can be loaded into it.

    The update is element by element, so each rank runs it on its own part of what is spread over ranks.

    Args:
        parameters: by name; order does not matter.
        config: rates and clipping.
        spread: the parameters' parts, for those that this rank does not hold whole.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], config: DenseConfig, spread: Mapping[str, Spread] | None = None
    ) -> None:
        self.parameters = dict(parameters)
        self._config = config
        self._spread = {name: value for name, value in (spread or {}).items() if isinstance(value, Sharded)}
        # FSDP's parameters are DTensors; their local memory stays where it is.
        self._local = {name: _local(p) for name, p in self.parameters.items()}
        decayed = [p for p in self._local.values() if p.ndim >= 2]
        others = [p for p in self._local.values() if p.ndim < 2]
        self._fused = all(p.is_cuda for p in self._local.values())
        groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
        self._adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            foreach=not self._fused,
            fused=self._fused,
        )
        for p in self._local.values():
            self._adamw.state[p] = {
                "step": torch.zeros((), dtype=torch.float32, device=p.device if self._fused else None),
                "exp_avg": torch.zeros_like(p),
                "exp_avg_sq": torch.zeros_like(p),
            }

    def scale(self, factor: float) -> None:
        """Sets the learning rate to the configured one times `factor`."""
        for group in self._adamw.param_groups:
            group["lr"] = self._config.lr * factor

    def clip(self, batches: int = 1) -> torch.Tensor:
        """Clips the gradients and returns their norm before that, a scalar; a collective call if any is spread.

        Args:
            batches: whose gradients were added up; they are averaged first.
        """
        self._hand_over_gradients()
        present = {name: p for name, p in self._local.items() if p.grad is not None}
        if batches > 1:
            torch._foreach_div_([p.grad for p in present.values() if p.grad is not None], float(batches))
        norm = self._norm({name: p.grad for name, p in present.items() if p.grad is not None})
        if self._config.clip_norm:
            torch.nn.utils.clip_grads_with_norm_(present.values(), self._config.clip_norm, norm, foreach=True)
        return norm

    def step(self, usable: torch.Tensor | bool = True) -> None:
        """One update, or none where `usable`, a bool scalar, is false; a parameter without a gradient stays.

        On CUDA the device decides and the host does not wait for it.
        """
        self._hand_over_gradients()
        with record_function(OPTIMIZER):
            if self._fused and isinstance(usable, torch.Tensor):
                skip = usable.logical_not().to(torch.float32)
                setattr(self._adamw, "found_inf", skip)  # noqa: B010 (what its kernels ask for, as with GradScaler)
                self._adamw.step()
            elif usable:
                self._adamw.step()

    def zero_grad(self) -> None:
        """Forgets the gradients."""
        self._adamw.zero_grad(set_to_none=True)
        for p in self.parameters.values():
            p.grad = None

    def tensors(self) -> dict[str, Spread]:
        """The state by `parameter.moment`, sharing memory with the optimizer."""
        tensors: dict[str, Spread] = {}
        for name, p in self._local.items():
            for key, value in self._adamw.state[p].items():
                layout = self._spread.get(name) if key != "step" else None
                tensors[f"{name}.{key}"] = value if layout is None else layout.over([value] * len(layout.pieces))
        return tensors

    def _hand_over_gradients(self) -> None:
        for name, p in self.parameters.items():
            if self._local[name] is not p:
                self._local[name].grad = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad

    def _norm(self, gradients: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Norm of all gradients; parts that several ranks hold count once."""
        if not self._spread:
            return torch.nn.utils.get_total_norm(gradients.values(), foreach=True)
        world = dist.get_world_size()
        filled = {name: g for name, g in gradients.items() if g.numel()}
        total = next(iter(self._local.values())).new_zeros(())
        if filled:
            norms = torch.stack(torch._foreach_norm(list(filled.values())))
            copies = [self._spread[name].copies if name in self._spread else world for name in filled]
            total += (norms.square() / norms.new_tensor(copies)).sum()
        with record_function(GRADIENT_REDUCE):
            dist.all_reduce(total)
        return total.sqrt()


def _local(parameter: nn.Parameter) -> nn.Parameter:
    """The parameter, or its part on this rank as one that shares its memory."""
    if not isinstance(parameter, DTensor):
        return parameter
    return nn.Parameter(parameter.to_local().detach(), requires_grad=False)
