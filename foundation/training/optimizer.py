"""The dense optimizer: AdamW with gradient clipping. Tables have their own, see `foundation.parallel`.

On CUDA it is PyTorch's fused AdamW, which can leave a step out without the host knowing; elsewhere its foreach form.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn


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

    Args:
        parameters: by name; order does not matter.
        config: rates and clipping.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], config: DenseConfig) -> None:
        self.parameters = dict(parameters)
        self._config = config
        decayed = [p for p in self.parameters.values() if p.ndim >= 2]
        others = [p for p in self.parameters.values() if p.ndim < 2]
        self._fused = all(p.is_cuda for p in self.parameters.values())
        groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
        self._adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            foreach=not self._fused,
            fused=self._fused,
        )
        for p in self.parameters.values():
            self._adamw.state[p] = {
                "step": torch.zeros((), dtype=torch.float32, device=p.device if self._fused else None),
                "exp_avg": torch.zeros_like(p),
                "exp_avg_sq": torch.zeros_like(p),
            }

    def scale(self, factor: float) -> None:
        """Sets the learning rate to the configured one times `factor`."""
        for group in self._adamw.param_groups:
            group["lr"] = self._config.lr * factor

    def clip(self) -> torch.Tensor:
        """Clips the gradients and returns their norm before that, a scalar."""
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients, foreach=True)
        if self._config.clip_norm:
            present = [p for p in self.parameters.values() if p.grad is not None]
            torch.nn.utils.clip_grads_with_norm_(present, self._config.clip_norm, norm, foreach=True)
        return norm

    def step(self, usable: torch.Tensor | bool = True) -> None:
        """One update, or none where `usable`, a bool scalar, is false; a parameter without a gradient stays.

        On CUDA the device decides and the host does not wait for it.
        """
        if self._fused and isinstance(usable, torch.Tensor):
            skip = usable.logical_not().to(torch.float32)
            setattr(self._adamw, "found_inf", skip)  # noqa: B010 (what its kernels ask for, as with GradScaler)
            self._adamw.step()
        elif usable:
            self._adamw.step()

    def zero_grad(self) -> None:
        """Forgets the gradients."""
        self._adamw.zero_grad(set_to_none=True)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The state by `parameter.moment`, sharing memory with the optimizer."""
        return {
            f"{name}.{key}": value for name, p in self.parameters.items() for key, value in self._adamw.state[p].items()
        }
