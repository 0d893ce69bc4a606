"""Activation checkpointing: which regions keep what their backward pass needs, and which compute it again.

A region is an arm of a layer. Its cost is measured once: the bytes that it keeps and the time of its forward pass,
which is what computing again costs. Under a budget the regions that save most time per byte keep their activations.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from foundation.data.batch import Batch
from foundation.model.gem import GEM


class Cost(NamedTuple):
    """Of a region: the bytes that it keeps for its backward pass, and the seconds of its forward pass."""

    region: str
    bytes: int
    seconds: float


def regions(model: GEM) -> dict[str, nn.Module]:
    """The arms of all layers, by their name in the model."""
    found: dict[str, nn.Module] = {}
    for place, layer in enumerate(model.layers):
        for name, child in layer.named_children():
            parts = child.items() if isinstance(child, nn.ModuleDict) else [("", child)]
            found |= {f"layers.{place}.{name}.{part}".rstrip("."): module for part, module in parts}
    return found


def measure(
    model: GEM, batch: Batch, autocast: Callable[[], AbstractContextManager] = nullcontext, passes: int = 2
) -> list[Cost]:
    """Runs forward passes and counts, region by region; weights and gradients stay as they are.

    Bytes are those of tensors that the region saves beyond its inputs and parameters, each memory once.

    Args:
        model: in the mode in which it is trained.
        batch: on the model's device; costs hold for batches of about its size.
        autocast: a context for the forward pass.
        passes: the shortest time of so many counts, since the first pass compiles kernels.
    """
    found = regions(model)
    meters = {name: _Meter(module) for name, module in found.items()}
    try:
        for _ in range(passes):
            with autocast():
                model(batch)
    finally:
        for meter in meters.values():
            meter.remove()
    return [Cost(name, meter.bytes, meter.seconds) for name, meter in meters.items()]


def choose(costs: Iterable[Cost], budget: float) -> set[str]:
    """The regions that compute again: all but those that save most seconds per byte and fit the budget together.

    Args:
        budget: bytes that the regions may keep.
    """
    again = set()
    for cost in sorted(costs, key=lambda cost: (-cost.seconds / max(1, cost.bytes), cost.region)):
        if cost.bytes > budget:
            again.add(cost.region)
        else:
            budget -= cost.bytes
    return again


def recompute(model: GEM, names: Iterable[str]) -> None:
    """Makes these regions compute their activations again in the backward pass; gradients stay what they were.

    Random numbers (dropout) are drawn again as they were.
    """
    found = regions(model)
    for name in names:
        module = found[name]
        module.forward = _checkpointed(module.forward)


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    def again(*inputs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*inputs)
        return checkpoint(forward, *inputs, use_reentrant=False)

    return again


class _Meter:
    """Stands in front of a module's forward until it is removed."""

    def __init__(self, module: nn.Module) -> None:
        self.bytes, self.seconds = 0, float("inf")
        self._module, self._forward = module, module.forward
        self._own = {p.untyped_storage().data_ptr() for p in (*module.parameters(), *module.buffers())}
        module.forward = self._measured

    def remove(self) -> None:
        self._module.forward = self._forward

    def _measured(self, *inputs: Any) -> Any:
        known = self._own | {t.untyped_storage().data_ptr() for t in _tensors(inputs)}
        kept: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in known:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        start = _now()
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            result = self._forward(*inputs)
        self.seconds = min(self.seconds, _now() - start)
        self.bytes = sum(kept.values())
        return result


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def _tensors(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _tensors(part)
