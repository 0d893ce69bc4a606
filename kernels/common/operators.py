"""Registers a function as a PyTorch operator with little cost per call.

``torch.library.custom_op`` and ``register_autograd`` check and wrap on every call what is known here: no output is an
input, and there are no keyword-only arguments. Registered directly, a call that records a gradient costs the host half
as much. What is returned goes past the dispatcher where nothing traces (``kernels/common/eager.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernels.common.eager import all_direct, refuse_transforms

_LIBRARY = torch.library.Library("opengem", "FRAGMENT")


def operator(
    name: str,
    function: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    backward: Callable[..., Any] | None = None,
    setup_context: Callable[..., None] | None = None,
) -> Callable[..., Any]:
    """Registers ``opengem::<name>`` and returns a function that calls it.

    Args:
        function: runs on every device; its annotations give the schema. It changes no argument and returns new tensors.
        fake: the shapes and dtypes of what ``function`` returns.
        backward, setup_context: as for ``torch.library.register_autograd``; an operator without refuses to be
            differentiated.
    """
    _LIBRARY.define(name + torch.library.infer_schema(function, mutates_args=()))
    _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"opengem::{name}", fake, lib=_LIBRARY)
    op = getattr(torch.ops.opengem, name).default
    if backward is None or setup_context is None:
        backward, setup_context = refusal(name), _nothing_kept

    def below(*args: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return op(*args)

    traced = _recorded(below, backward, setup_context)
    _LIBRARY.impl(name, lambda *args: traced(*args) if wanted(args) else below(*args), "Autograd")
    return _past_dispatcher(name, op, function, _recorded(function, backward, setup_context))


def refusal(name: str) -> Callable[..., Any]:
    """The backward of an operator without one.

    Without it what comes out of a backward counts as a constant, and a penalty on gradients would do nothing.
    """

    def refuse(ctx: Any, *grads: Any) -> Any:
        first = name.removesuffix("_backward")
        raise NotImplementedError(f"{first} has no second derivative; compute what you differentiate twice in PyTorch")

    return refuse


def undifferentiated(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, with outputs that refuse to be differentiated where its inputs want gradients."""
    recorded = _recorded(function, refusal(name), _nothing_kept)
    return lambda *args: recorded(*args) if wanted(args) else function(*args)


def _nothing_kept(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Saves nothing for a backward."""


def wanted(args: tuple[Any, ...]) -> bool:
    """Whether a gradient is."""
    if torch.is_grad_enabled():
        for x in args:
            if isinstance(x, Tensor) and x.requires_grad:
                return True
    return False


def _recorded(
    run: Callable[..., Any], backward: Callable[..., Any], setup_context: Callable[..., None]
) -> Callable[..., Any]:
    class Recorded(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            out = run(*args)
            setup_context(ctx, args, out)
            return out

    Recorded.backward = staticmethod(backward)  # type: ignore[method-assign, assignment]
    return Recorded.apply


def _past_dispatcher(
    name: str, op: Any, function: Callable[..., Any], recorded: Callable[..., Any]
) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        if not all_direct(args):
            refuse_transforms(name, args)
            return op(*args)
        if not wanted(args):
            return function(*args)
        return recorded(*args)

    return call
