"""When an operator may run without PyTorch's dispatcher.

An operator of ``torch.library`` goes through several layers of Python at each call, hundreds of microseconds with
gradients. They serve tracing: where nothing traces, its implementation and an ``autograd.Function`` do the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

_PLAIN = (Tensor, Parameter)
_KNOWN = frozenset((*_PLAIN, int, float, bool, str, type(None), torch.dtype, tuple, list))


def direct(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether nothing traces, fakes or transforms these tensors: no compiler, subclass, dispatch mode or functorch."""
    return (
        not torch.compiler.is_compiling()
        and type(q) in _PLAIN
        and type(k) in _PLAIN
        and type(v) in _PLAIN
        and not is_in_torch_dispatch_mode()
        and not torch._C._are_functorch_transforms_active()
    )


def all_direct(args: tuple[Any, ...]) -> bool:
    """The same for any arguments of an operator."""
    return (
        not torch.compiler.is_compiling()
        and _KNOWN.issuperset(map(type, args))
        and not is_in_torch_dispatch_mode()
        and not torch._C._are_functorch_transforms_active()
    )
