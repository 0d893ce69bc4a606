"""Expert parallelism: the blocks of an interaction arm spread over ranks, each computing its own for all samples.

Blocks are dense: every one sees every sample, nothing is routed. An arm gathers the tokens of its group's ranks, runs
its own blocks on all of them, and sends each rank what they found for that rank's samples. Blocks stand side by side
in the arm's output rather than being summed, so the way back is an all-to-all, which moves as much as the
reduce-scatter of a sum would.

Legend: E ranks of an expert group, M ensemble members, G = M * experts blocks, N impressions of a rank, n tokens in,
o tokens out, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from foundation.data.batch import Batch
from foundation.model.gem import GEM
from foundation.model.interaction import InteractionArm


def arms(model: nn.Module) -> dict[str, InteractionArm]:
    """Interaction arms by their path."""
    return {path: module for path, module in model.named_modules() if isinstance(module, InteractionArm)}


def split_experts(model: nn.Module, group: dist.ProcessGroup, counts: dist.ProcessGroup) -> None:
    """Leaves this rank its share of the blocks of every arm, in place.

    Args:
        model: with equal weights on all ranks of the group.
        group: the E ranks.
        counts: the same ranks over a backend for tensors in main memory.

    Raises:
        ValueError: an arm's blocks cannot be dealt evenly, naming the arm and both numbers.
    """
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    longest = Longest(counts)
    model.register_forward_pre_hook(longest)
    of_users = {f"layers.{place}." for place in range(model.config.user_layers)} if isinstance(model, GEM) else set()
    for path, arm in arms(model).items():
        blocks = arm.members * arm.config.experts
        if blocks % size:
            raise ValueError(
                f"parallel.dense.expert: {size} ranks cannot share the {blocks} blocks of {path} evenly "
                f"({arm.members} members x {arm.config.experts} experts); change model.layer.interaction.experts"
            )
        first = rank * (blocks // size)
        of_user = any(path.startswith(start) for start in of_users)
        arm.exchange = ExpertExchange(group, longest, first, blocks, per_request=of_user)
        for name, parameter in list(block_parameters(arm)):
            assert parameter.shape[0] == blocks, (path, name)
            owner, _, own_name = name.rpartition(".")
            own = parameter.detach()[first : first + blocks // size].clone()
            setattr(arm.get_submodule(owner), own_name, nn.Parameter(own))


def block_parameters(arm: InteractionArm) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters of the blocks by name, which have the blocks as dim 0; the norm before them is no block's."""
    return ((name, p) for name, p in arm.named_parameters() if not name.startswith("pre_norm."))


def block_of(model: nn.Module) -> dict[str, tuple[int, int]]:
    """First block of this rank and number of all, by name of parameter, for split arms."""
    return {
        f"{path}.{name}": (arm.exchange.first, arm.exchange.blocks)
        for path, arm in arms(model).items()
        if isinstance(arm.exchange, ExpertExchange)
        for name, _ in block_parameters(arm)
    }


class Longest:
    """The most requests and impressions of a rank of a group, agreed on once per forward pass of the model.

    Args:
        group: for numbers in main memory: no device waits for them.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._size = group, dist.get_world_size(group)
        self.requests, self.impressions = 1, 1

    def __call__(self, model: nn.Module, inputs: tuple[Batch]) -> None:
        """Looks at the batch before the model does; a collective call of the group."""
        (batch,) = inputs
        counts = [torch.zeros(2, dtype=torch.int64) for _ in range(self._size)]
        dist.all_gather(counts, torch.tensor([batch.num_requests, batch.num_impressions]), group=self._group)
        self.requests, self.impressions = (max(1, *(int(own[i]) for own in counts)) for i in range(2))


class ExpertExchange:
    """Runs this rank's blocks on the tokens of all ranks of its group.

    Under autocast tokens travel in its type, to which matrix products round them anyway.

    Args:
        group: the E ranks.
        longest: the most rows of a rank.
        first: this rank's first block.
        blocks: of all ranks (G).
        per_request: rows are requests, not impressions.
    """

    def __init__(
        self, group: dist.ProcessGroup, longest: Longest, first: int, blocks: int, *, per_request: bool
    ) -> None:
        self.first, self.blocks = first, blocks
        self._group, self._longest, self._per_request = group, longest, per_request
        self._size = dist.get_world_size(group)
        self._own = range(first, first + blocks // self._size)

    def __call__(self, z: Tensor, sees: Callable[[Tensor, int], Tensor], blocks: Callable[[Tensor], Tensor]) -> Tensor:
        """Tokens `z [M, N, n, D]` of this rank to `[G, N, o, D]` of all blocks; a collective call of the group.

        Args:
            z: N may differ between ranks; shorter ones are filled up with zeros on the way.
            sees: what a block sees of `[M, E * N, n, D]`, by its number.
            blocks: this rank's blocks, `[G / E, E * N, n, D]` to `[G / E, E * N, o, D]`.
        """
        count = z.shape[1]
        most = self._longest.requests if self._per_request else self._longest.impressions
        assert count <= most, (count, most)
        kind = z.device.type
        wire = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        rows = F.pad(z.transpose(0, 1), (0, 0, 0, 0, 0, 0, 0, most - count))
        every: Tensor = _Gather.apply(rows.to(wire or rows.dtype), self._group).transpose(0, 1)
        out = blocks(torch.stack([sees(every, block) for block in self._own]))
        shape = (len(self._own), self._size, most, *out.shape[2:])
        back: Tensor = _Exchange.apply(out.to(wire or out.dtype).view(shape).transpose(0, 1), self._group)
        return back.to(out.dtype).reshape(self.blocks, most, *back.shape[3:])[:, :count]


class _Gather(torch.autograd.Function):
    """Rows of all ranks, `[N, ...]` to `[E * N, ...]`.

    Losses are means over all ranks, and gradients of parameters are averaged over the ranks that hold them: for blocks
    that is E times fewer than all. `_Exchange` divides what goes into a block by E, this multiplies what comes out.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        size = dist.get_world_size(group)
        out = rows.new_empty(size * rows.shape[0], *rows.shape[1:])
        dist.all_gather_into_tensor(out, rows.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        size = dist.get_world_size(ctx.group)
        out = gradient.new_empty(gradient.shape[0] // size, *gradient.shape[1:])
        dist.reduce_scatter_tensor(out, gradient.contiguous(), group=ctx.group)
        return out * size, None


class _Exchange(torch.autograd.Function):
    """Block `[e]` of dim 0 goes to rank e, `[E, ...]` to `[E, ...]`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_to_all(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _all_to_all(gradients[0], ctx.group) / dist.get_world_size(ctx.group), None


def _all_to_all(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x, group=group)
    return out
