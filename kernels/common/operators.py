"""Registers a function as a PyTorch operator with little cost per call.

``torch.library.custom_op`` and ``register_autograd`` check and wrap on every call what is known here: no output is an
input, and there are no keyword-only arguments. Registered directly, a call that records a gradient costs the host half
as much.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("opengem", "FRAGMENT")


def operator(
    name: str,
    function: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    backward: Callable[..., Any] | None = None,
    setup_context: Callable[..., None] | None = None,
) -> Any:
    """Registers ``opengem::<name>`` and returns it.

    Args:
        function: runs on every device; its annotations give the schema. It changes no argument and returns new tensors.
        fake: the shapes and dtypes of what ``function`` returns.
        backward, setup_context: as for ``torch.library.register_autograd``; an operator without has no gradient.
    """
    _LIBRARY.define(name + torch.library.infer_schema(function, mutates_args=()))
    _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"opengem::{name}", fake, lib=_LIBRARY)
    op = getattr(torch.ops.opengem, name).default
    if backward is not None and setup_context is not None:
        _LIBRARY.impl(name, _differentiable(op, backward, setup_context), "Autograd")
    return op


def _differentiable(op: Any, backward: Callable[..., Any], setup_context: Callable[..., None]) -> Callable[..., Any]:
    """The operator's autograd kernel: the op itself, recorded only where a gradient is wanted."""

    class Recorded(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                out = op(*args)
            setup_context(ctx, args, out)
            return out

    Recorded.backward = staticmethod(backward)  # type: ignore[method-assign, assignment]

    def call(*args: Any) -> Any:
        if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in args):
            return Recorded.apply(*args)
        with torch._C._AutoDispatchBelowAutograd():
            return op(*args)

    return call
