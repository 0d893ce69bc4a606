"""When an operator may run without PyTorch's dispatcher.

An operator of ``torch.library`` goes through several layers of Python at each call, hundreds of microseconds with
gradients. They serve tracing: where nothing traces, its implementation and an ``autograd.Function`` do the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

_PLAIN = (Tensor, Parameter)
_VMAP_MODE = torch._C._dispatch_key_parse("VmapMode")
"""On while ``torch.autograd.grad(is_grads_batched=True)`` runs."""

_KNOWN = frozenset((*_PLAIN, int, float, bool, str, type(None), torch.dtype, tuple, list))


def direct(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether nothing traces, fakes or transforms these: no meta tensor, subclass or tangent, and ``_plain``."""
    return (
        _plain()
        and forward_ad._current_level < 0
        and type(q) in _PLAIN
        and type(k) in _PLAIN
        and type(v) in _PLAIN
        and not q.is_meta
    )


def all_direct(args: tuple[Any, ...]) -> bool:
    """The same for any arguments of an operator, of which the first is a tensor."""
    return _plain() and forward_ad._current_level < 0 and _KNOWN.issuperset(map(type, args)) and not args[0].is_meta


def readable(numbers: Tensor) -> bool:
    """Whether the numbers in a tensor can be looked at: nothing traces, and no device is waited for."""
    return numbers.is_cpu and type(numbers) in _PLAIN and _plain()


def _plain() -> bool:
    """Whether PyTorch only computes: no compiler, trace, mode, transform of functorch, or batch of gradients."""
    return (
        not torch.compiler.is_compiling()
        and not torch._C._is_tracing()
        and not is_in_torch_dispatch_mode()
        and not torch._C._are_functorch_transforms_active()
        and not torch._C._dispatch_tls_is_dispatch_key_included(_VMAP_MODE)
    )


def refuse_transforms(operator: str, args: tuple[Any, ...]) -> None:
    """Refuses inputs that ``torch.func`` or forward mode differentiates.

    PyTorch would take tangents of the latter for zero without a word, and does not name the operator for the former.

    Raises:
        NotImplementedError: names the operator.
    """
    if torch.compiler.is_compiling():
        return
    if torch._C._are_functorch_transforms_active():
        for x in args:
            if isinstance(x, Tensor) and _followed(x):
                raise NotImplementedError(
                    f"{operator} has no derivative for torch.func (grad, vjp, jacrev): use torch.autograd.grad"
                )
    if forward_ad._current_level < 0:
        return
    for x in args:
        if isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None:
            raise NotImplementedError(
                f"{operator} has no forward-mode derivative (jvp): use reverse mode, torch.autograd.grad"
            )


def _followed(x: Tensor) -> bool:
    """Whether a transform of ``torch.func`` wants the gradient of a tensor, also where ``vmap`` stands between."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(x):
        if functorch.is_gradtrackingtensor(x) and x.requires_grad:
            return torch.is_grad_enabled()
        x = functorch.get_unwrapped(x)
    return False
