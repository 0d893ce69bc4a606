"""Keeps the tables from a step whose loss is not finite, where the host does not wait to learn that it is not.

Tables are updated inside the backward pass, so by the time the host knows of a loss that is not finite it would be too
late. The gradients of looked-up rows are therefore set to 0 on the device: row-wise AdaGrad then changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from foundation.model.embeddings import Embeddings


class TableGuard:
    """Watches the lookups of a model.

    Args:
        model: its `Embeddings` are watched from now on.
    """

    def __init__(self, model: nn.Module) -> None:
        self._usable: Tensor | None = None
        for module in model.modules():
            if isinstance(module, Embeddings):
                module.register_forward_hook(self._watch)

    def allow(self, usable: Tensor) -> None:
        """Says, as a bool scalar on the device, whether the coming backward pass may change the tables."""
        self._usable = usable

    def _watch(self, module: nn.Module, inputs: Any, output: Any) -> None:
        for rows in tensors_of(output):
            if rows.requires_grad:
                rows.register_hook(self._gate)

    def _gate(self, gradient: Tensor | None) -> Tensor | None:
        # None where a backward pass says that nothing depends on these rows, as compiled regions do.
        return gradient if gradient is None or self._usable is None else torch.where(self._usable, gradient, 0.0)


def tensors_of(value: Any) -> Iterator[Tensor]:
    """All tensors of a value that may hold them in dicts and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            yield from tensors_of(part)
