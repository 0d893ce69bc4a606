"""FSDP2 for everything but the tables: which modules are gathered together, and along which dim a parameter is cut."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from foundation.parallel.experts import arms, block_parameters
from foundation.parallel.tables import sharded_parameters

PADDED = 1 << 22
"""Most elements that a gathered parameter may take where padding makes it larger than it is."""


def shard_dense(
    model: nn.Module,
    mesh: DeviceMesh,
    expert_mesh: DeviceMesh | None,
    gathered: torch.dtype = torch.float32,
    reduced: torch.dtype = torch.float32,
) -> None:
    """Cuts parameters, their gradients and optimizer states over ranks, in place.

    A layer is gathered while the one before it runs, and let go after; what lies outside of layers is gathered once per
    step.

    Args:
        model: its tables are TorchRec's already, its arms hold their own blocks only where there is an expert mesh.
        mesh: `[shard]`, or `[replica, shard]` for HSDP.
        expert_mesh: `[replica, shard]` of the ranks that hold the same blocks; None without expert parallelism.
        gathered: what whole parameters are; their parts stay in float32.
        reduced: what gradients travel and are summed in.

    Raises:
        ValueError: a parameter cannot be cut evenly, naming it, its shape and the number of ranks.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    ignored = set(sharded_parameters(model))
    policy = MixedPrecisionPolicy(
        param_dtype=None if gathered == torch.float32 else gathered,
        reduce_dtype=reduced,
        cast_forward_inputs=False,
    )

    def cut(module: nn.Module, over: DeviceMesh, last: bool = False) -> None:
        fully_shard(
            module,
            mesh=over,
            shard_placement_fn=_placement(names, over),
            ignored_params=ignored,
            mp_policy=policy,
            reshard_after_forward=not last,
        )

    if expert_mesh is not None:
        for arm in arms(model).values():
            if arm.pre_norm is not None:  # of all ranks, unlike the blocks
                cut(arm.pre_norm, mesh)
            if expert_mesh.size() == 1:
                ignored |= {parameter for _, parameter in block_parameters(arm)}
            else:
                cut(arm, expert_mesh)
    layers = list(_layers(model))
    for layer in layers:
        cut(layer, mesh)
    cut(model, mesh, last=True)
    for layer, following in pairwise(layers):
        _units(layer)[0].set_modules_to_forward_prefetch(_units(following))
        _units(following)[0].set_modules_to_backward_prefetch(_units(layer))


def _units(layer: nn.Module) -> list[FSDPModule]:
    """The layer and what is gathered apart inside of it."""
    return [module for module in layer.modules() if isinstance(module, FSDPModule)]


def _layers(model: nn.Module) -> Iterator[nn.Module]:
    """Elements of the model's own lists of modules."""
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            yield from child


def _placement(names: dict[nn.Parameter, str], mesh: DeviceMesh) -> Callable[[nn.Parameter], Shard]:
    """The largest dim that the ranks divide; else dim 0, filled up to a multiple."""
    ranks = mesh.size(mesh.ndim - 1)

    def place(parameter: nn.Parameter) -> Shard:
        even = [dim for dim, size in enumerate(parameter.shape) if size % ranks == 0]
        if even:
            return Shard(max(even, key=lambda dim: parameter.shape[dim]))
        rows = parameter.shape[0]
        if -(-rows // ranks) * ranks * (parameter.numel() // max(1, rows)) > max(PADDED, 2 * parameter.numel()):
            raise ValueError(
                f"parallel.dense.shard: {ranks} ranks divide no dim of {names[parameter]} {tuple(parameter.shape)}; "
                "choose widths that are multiples of the number of ranks, or fewer ranks"
            )
        return Shard(0)

    return place
