"""Heads: a shared trunk, then one small tower per task with adapters per surface.

An impression trains only the adapter of its own surface, and only the tasks that are valid for it. The tower of a
task with ``given`` also reads the tower of that task, and its label is valid only where the other one is 1: its
probability is conditional.

Legend: M ensemble members, N impressions, I inputs, E trunk width, K tasks, t tower width, P surfaces, r adapter rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foundation.data.schema import Schema
from foundation.model.grouped import GroupedLinear, GroupedMLP, GroupedNorm


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadsConfig:
    """The trunk and what stands on it.

    Args:
        reads: ``summaries``, the last X_sum and S_sum (InterFormer), or ``tokens``, all tokens of the last layer and
            the last S_sum (Kunlun). Ensemble members need ``tokens``.
        norm: normalise what the trunk reads.
        trunk: widths of the trunk's layers; empty: the trunk is what it reads. What comes out is also the embedding
            that is handed to other models.
        tower: hidden units of each task; 0: tasks are linear in the trunk.
        adapter_rank: rank of what each surface adds to the trunk; 0: none.
        surface_bias: a bias per surface and task.
        dropout: in the trunk.
        base_rate: share of positives by task name, from which the task's bias starts; 0.5 for a task that is not named.
    """

    reads: Literal["summaries", "tokens"] = "tokens"
    norm: bool = True
    trunk: tuple[int, ...] = (256, 128)
    tower: int = 32
    adapter_rank: int = 8
    surface_bias: bool = True
    dropout: float = 0.0
    base_rate: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.reads not in ("summaries", "tokens"):
            raise ValueError(f"heads.reads: must be summaries or tokens, got {self.reads!r}")
        if any(width < 1 for width in self.trunk):
            raise ValueError(f"heads.trunk: expected widths of at least 1, got {list(self.trunk)}")
        for key, least in (("tower", 0), ("adapter_rank", 0)):
            if getattr(self, key) < least:
                raise ValueError(f"heads.{key}: must be at least {least}, got {getattr(self, key)}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"heads.dropout: must be in [0, 1), got {self.dropout}")
        for task, rate in self.base_rate.items():
            if not 0 < rate < 1:
                raise ValueError(f"heads.base_rate.{task}: must be between 0 and 1, got {rate}")


class Heads(nn.Module):
    """``[M, N, I]`` to logits ``[M, N, K]`` and the trunk's output ``[M, N, E]``.

    Raises:
        ValueError: ``base_rate`` names an unknown task.
    """

    def __init__(self, config: HeadsConfig, schema: Schema, inputs: int, members: int) -> None:
        super().__init__()
        unknown = config.base_rate.keys() - set(schema.task_names)
        if unknown:
            raise ValueError(f"heads.base_rate.{min(unknown)}: no such task; known: {', '.join(schema.task_names)}")
        self.tasks, self.surfaces, self.tower = len(schema.tasks), len(schema.surface_names), max(1, config.tower)
        self.width = width = config.trunk[-1] if config.trunk else inputs
        self.norm = GroupedNorm(members, inputs) if config.norm else None
        self.trunk = GroupedMLP(members, inputs, config.trunk, config.dropout)
        self.adapters = (
            _SurfaceAdapters(members, self.surfaces, width, config.adapter_rank) if config.adapter_rank else None
        )
        gain = 1.0 if config.tower else 0.3
        self.towers = GroupedLinear(members, width, self.tasks * self.tower, gain=gain)
        names = schema.task_names
        self.given = [(k, names.index(task.given)) for k, task in enumerate(schema.tasks) if task.given is not None]
        self.conditions = nn.ModuleList(
            GroupedLinear(members, self.tower, self.tower, bias=False, gain=gain) for _ in self.given
        )
        self.out: nn.Parameter | None = None
        if config.tower:
            self.out = nn.Parameter(torch.randn(members, 1, self.tasks, config.tower) * 0.3 * config.tower**-0.5)
        rates = [config.base_rate.get(name, 0.5) for name in names]
        start = torch.tensor([math.log(rate / (1 - rate)) for rate in rates])
        self.bias = nn.Parameter(start.expand(members, 1, -1).clone())
        self.surface_bias: nn.Parameter | None = None
        if config.surface_bias:
            self.surface_bias = nn.Parameter(torch.zeros(members, self.surfaces, self.tasks))

    def forward(self, x: Tensor, surface: Tensor) -> tuple[Tensor, Tensor]:
        """``x [M, N, I]`` and the surface of each impression, int64 ``[N]``."""
        members, count = x.shape[:2]
        trunk = self.trunk(x if self.norm is None else self.norm(x))
        own = F.one_hot(surface, self.surfaces).to(trunk.dtype)
        adapted = trunk if self.adapters is None else self.adapters(trunk, own)
        towers = list(self.towers(adapted).view(members, count, self.tasks, self.tower).unbind(2))
        for (task, given), condition in zip(self.given, self.conditions, strict=True):
            towers[task] = towers[task] + condition(F.silu(towers[given]) if self.out is not None else towers[given])
        stacked = torch.stack(towers, dim=2)
        logits = (stacked[..., 0] if self.out is None else (F.silu(stacked) * self.out).sum(3)) + self.bias
        if self.surface_bias is not None:
            logits = logits + torch.matmul(own, self.surface_bias.to(own.dtype))
        return logits, trunk


class _SurfaceAdapters(nn.Module):
    """``x + B_s silu(A_s x)`` with the rank-r maps A_s and B_s of the row's surface; starts near the identity."""

    def __init__(self, members: int, surfaces: int, width: int, rank: int) -> None:
        super().__init__()
        self.surfaces, self.rank = surfaces, rank
        self.down = GroupedLinear(members, width, surfaces * rank)
        self.up = GroupedLinear(members, surfaces * rank, width, bias=False, gain=0.1)

    def forward(self, x: Tensor, own: Tensor) -> Tensor:
        """``x [M, N, E]``; ``own [N, P]`` is 1 at the row's surface."""
        members, count, _ = x.shape
        low = F.silu(self.down(x)).view(members, count, self.surfaces, self.rank) * own[:, :, None]
        return x + self.up(low.flatten(2))
