"""Steps on a GPU that nothing waits for, eagerly and as CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Step = Callable[[], Sequence[Tensor]]


def without_waiting(step: Step) -> Sequence[Tensor]:
    """What a step gives; fails if the host waits for the device in it."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        return step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def check_graph(step: Step, want: Sequence[Tensor]) -> None:
    """The step as a CUDA graph gives the same bits."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step()
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
