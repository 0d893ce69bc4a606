"""How long each type of layer takes alone: forward and backward pass on the inputs that it has in the model."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from foundation.data.batch import Batch
from foundation.model.cross import FeatureSummary, SequenceSummary
from foundation.model.flops import TRAINING
from foundation.model.gem import GEM
from foundation.model.heads import Heads
from foundation.model.interaction import InteractionArm
from foundation.model.sequence import GeneratedNetwork

KINDS: dict[type, str] = {
    InteractionArm: "interaction",
    GeneratedNetwork: "gdpa",
    FeatureSummary: "cross",
    SequenceSummary: "cross",
    Heads: "heads",
}
"""By class; classes whose name ends with Attention are of the kind attention."""


def layers_alone(
    model: GEM,
    batch: Batch,
    autocast: Callable[[], AbstractContextManager[Any]],
    flops: Mapping[str, float],
    peak: float | None,
    repeats: int = 5,
) -> dict[str, dict[str, float | None]]:
    """Each type of layer alone, without tables, copies, collectives or optimizer. Gradients of parameters are left.

    Args:
        model: whose layers are whole on this rank.
        batch: on its device.
        autocast: a context for forward passes.
        flops: useful operations of a forward pass on the batch, by kind.
        peak: rate of the device, for `mfu`; None leaves it out.
        repeats: of each layer, one behind the other after one that is not counted: the host is then ahead of the
            device, unless the layer has too little work for that.

    Returns:
        by kind `seconds`, `useful_gflop` and `mfu` of forward and backward pass of all layers of the kind.
    """
    calls: list[tuple[str, nn.Module, tuple[Any, ...]]] = []
    handles = []
    for module in model.modules():
        kind = KINDS.get(type(module)) or ("attention" if type(module).__name__.endswith("Attention") else None)
        if kind:
            handles.append(module.register_forward_pre_hook(_Keeper(kind, calls)))
    with autocast():  # with gradients, for which compiled layers have graphs
        model(batch)
    for handle in handles:
        handle.remove()
    device = batch.labels.device
    seconds: dict[str, float] = defaultdict(float)
    for kind, module, inputs in calls:
        begun, gradients = _mark(device), None
        for turn in range(repeats + 1):
            if turn == 1:
                begun = _mark(device)
            with autocast():
                results = [x for x in _tensors(module(*_leaves(inputs))) if x.requires_grad]
            gradients = gradients or [torch.ones_like(x) for x in results]
            if results:
                torch.autograd.backward(results, gradients)
            for parameter in module.parameters():
                parameter.grad = None
        seconds[kind] += _between(begun, _mark(device)) / repeats
    return {
        kind: {
            "seconds": taken,
            "useful_gflop": TRAINING * flops[kind] / 1e9,
            "mfu": TRAINING * flops[kind] / taken / peak if peak else None,
        }
        for kind, taken in seconds.items()
    }


def _mark(device: torch.device) -> Any:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(begun: Any, ended: Any) -> float:
    if isinstance(begun, float):
        return float(ended - begun)
    torch.cuda.synchronize()
    return float(begun.elapsed_time(ended)) / 1e3


class _Keeper:
    def __init__(self, kind: str, calls: list[tuple[str, nn.Module, tuple[Any, ...]]]) -> None:
        self.kind, self.calls = kind, calls

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        self.calls.append((self.kind, module, _leaves(inputs)))


def _leaves(value: Any) -> Any:
    """The same inputs as leaves of a graph of their own; a gradient is wanted of those of which one was."""
    if isinstance(value, torch.Tensor):
        base = value._base
        if base is not None and base.numel() == value.numel() and base.is_contiguous():
            view = base.detach().requires_grad_(value.requires_grad).view(value.shape)
            if view.stride() == value.stride():
                return view  # a view stays one, or a compiled layer would make another graph
        return value.detach().requires_grad_(value.requires_grad)
    if isinstance(value, dict):
        return {key: _leaves(part) for key, part in value.items()}
    if isinstance(value, tuple):
        parts = [_leaves(part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _tensors(part)
