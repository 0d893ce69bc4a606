"""Registers a function as a PyTorch operator with little cost per call.

``torch.library.custom_op`` checks after every call that no output is an input; here the functions are ours, and a
registration without the check saves ten microseconds of host time per call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

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
        backward, setup_context: as for ``torch.library.register_autograd``.
    """
    _LIBRARY.define(name + torch.library.infer_schema(function, mutates_args=()))
    _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    qualified = f"opengem::{name}"
    torch.library.register_fake(qualified, fake, lib=_LIBRARY)
    if backward is not None:
        torch.library.register_autograd(qualified, backward, setup_context=setup_context, lib=_LIBRARY)
    return getattr(torch.ops.opengem, name).default
