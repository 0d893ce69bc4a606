"""`torch.compile` for regions of the model, so that a new length of histories compiles nothing anew.

Tables, their input and the match statistics stay as they are: they depend on data in ways that a graph cannot hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.fx.experimental import _config as shape_config

from foundation.model.cross import FeatureSummary, SequenceSummary
from foundation.model.events import Events, History
from foundation.model.gem import GEM
from foundation.model.heads import Heads
from foundation.model.interaction import InteractionArm
from foundation.model.joint import HistoryAttention
from foundation.model.layer import Layer, SequenceSummaries
from foundation.model.sequence import GeneratedNetwork, SelfAttention

Compile = Literal["none", "parts", "layers", "dense"]

Plain = dict[str, tuple[tuple[Tensor, Tensor, Tensor], Tensor | None, Tensor | None]]
"""Histories without their names: events, CLS tokens and requests by stream."""

GRAPHS = 64
"""Graphs that one method may have. Layers of one shape share one; training, evaluation and layers of other shapes have
their own."""


def compile_regions(model: GEM, what: Compile, backend: str = "inductor") -> int:
    """Compiles regions in place; each is compiled when it first runs.

    Args:
        model: names of its parameters stay.
        what: `parts`, the parts of the arms, of which those of one shape share a graph; `layers`, whole layers;
            `dense`, also the summaries and heads around them; `none`.
        backend: of `torch.compile`.

    Returns:
        The number of regions.

    Raises:
        ValueError: `what` is none of the four.
    """
    if what not in ("none", "parts", "layers", "dense"):
        raise ValueError(f"compile: must be none, parts, layers or dense, got {what!r}")
    regions = list(_regions(model, what))
    if regions:
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, GRAPHS)
        # Two lengths that happen to be equal in the first batch need not be so in the next.
        shape_config.use_duck_shape = False
        # Layers that differ in their number of tokens have a graph each, not one for any number.
        torch._dynamo.config.automatic_dynamic_shapes = False
        # Else a region with more parameters than DDP reduces at once would be cut into several graphs.
        torch._dynamo.config.optimize_ddp = False
    for region in regions:
        forward, named = region.forward, _FORMS.get(type(region))
        compiled = torch.compile(named[0](forward) if named else forward, backend=backend, fullgraph=True)
        marked = _marking(compiled, rows=1 if isinstance(region, Heads) else 0)
        region.forward = named[1](marked) if named else marked
    return len(regions)


def _regions(model: GEM, what: Compile) -> Iterator[nn.Module]:
    if what == "parts":
        yield from (module for module in model.modules() if isinstance(module, _PARTS))
    if what in ("layers", "dense"):
        yield from model.layers
    if what == "dense":
        yield model.heads
        for name, module in model.named_modules():
            inside = name.startswith("layers.")
            if isinstance(module, FeatureSummary | SequenceSummaries) and not inside:
                yield module


def _plain(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A layer whose histories are plain tuples: torch 2.11 gives named tuples back incomplete."""

    def plain(x: Tensor, histories: Plain, targets: dict[str, Tensor], summaries: Tensor | None) -> Any:
        x, after, summaries = forward(x, _from_plain(histories), targets, summaries)
        return x, _to_plain(after), summaries

    return plain


def _named(plain: Callable[..., Any]) -> Callable[..., Any]:
    """The other way round, outside of the graph."""

    def named(x: Tensor, histories: dict[str, History], targets: dict[str, Tensor], summaries: Tensor | None) -> Any:
        x, after, summaries = plain(x, _to_plain(histories), targets, summaries)
        return x, _from_plain(after), summaries

    return named


def _plain_events(forward: Callable[..., Any]) -> Callable[..., Any]:
    def plain(values: Tensor, offsets: Tensor, gap: Tensor) -> Any:
        return forward(Events(values, offsets, gap))

    return plain


def _named_events(plain: Callable[..., Any]) -> Callable[..., Any]:
    def named(events: Events) -> Any:
        return plain(*events)

    return named


def _plain_history(forward: Callable[..., Any]) -> Callable[..., Any]:
    def plain(values: Tensor, offsets: Tensor, gap: Tensor, cls: Any, request: Any, *more: Tensor) -> Any:
        return forward(History(Events(values, offsets, gap), cls, request), *more)

    return plain


def _named_history(plain: Callable[..., Any]) -> Callable[..., Any]:
    def named(history: History, *more: Tensor) -> Any:
        return plain(*history.events, history.cls, history.request, *more)

    return named


_PARTS = (FeatureSummary, SequenceSummary, GeneratedNetwork, SelfAttention, HistoryAttention, InteractionArm, Heads)

_FORMS: dict[type, tuple[Callable[..., Any], Callable[..., Any]]] = {
    Layer: (_plain, _named),
    SelfAttention: (_plain_events, _named_events),
    HistoryAttention: (_plain_history, _named_history),
    SequenceSummary: (_plain_history, _named_history),
}
"""Modules whose inputs are named tuples: what takes them apart, and what puts them together again inside of a graph."""


def _to_plain(histories: dict[str, History]) -> Plain:
    return {
        name: ((own.events.values, own.events.offsets, own.events.gap), own.cls, own.request)
        for name, own in histories.items()
    }


def _from_plain(histories: Plain) -> dict[str, History]:
    return {name: History(Events(*events), cls, request) for name, (events, cls, request) in histories.items()}


def _marking(compiled: Callable[..., Any], rows: int) -> Callable[..., Any]:
    """Says which dim of each input is a number of rows, before the first graph is made."""

    def forward(*inputs: Any) -> Any:
        for place, value in enumerate(inputs):
            for tensor in _tensors(value):
                if tensor.dim():
                    # Tokens [M, N, n, D] have their rows in dim 1, like the input of the heads; all else in dim 0.
                    torch._dynamo.maybe_mark_dynamic(tensor, 1 if tensor.dim() == 4 or (rows and not place) else 0)
        return compiled(*inputs)

    return forward


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _tensors(part)
