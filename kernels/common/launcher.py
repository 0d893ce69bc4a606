"""Starts Triton kernels with little work on the host.

Triton's own launch binds and inspects every argument at every call: tens of microseconds for kernels with forty of
them. A ``Variant`` lets it do so once and then starts the compiled kernel itself. Its kernel takes tensors first, then
numbers, then constants.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch
import triton
from torch import Tensor


class Variant:
    """A kernel with its constants, for one device, dtype and set of strides.

    Args:
        kernel: a ``triton.jit`` function that specialises on none of its integers.
        constants: its ``constexpr`` arguments; others that it does not have are left out.
        options: ``num_warps`` and the like.
    """

    __slots__ = ("_compiled", "_kernel", "_options", "_tail", "constants")

    def __init__(self, kernel: Any, constants: dict[str, Any], options: dict[str, int]) -> None:
        names = kernel.arg_names
        self._kernel, self._options = kernel, options
        self.constants = {name: value for name, value in constants.items() if name in names}
        self._tail = tuple(self.constants[name] for name in names if name in self.constants)
        self._compiled: Any = None

    def start(self, programs: int, tensors: tuple[Tensor | None, ...], numbers: tuple[float, ...]) -> None:
        """Queues ``programs`` programs of the kernel on the current stream."""
        if self.constants.get("TMA"):
            triton.set_allocator(_scratch)  # of this thread; autograd has its own
        pointers = [0 if x is None else x.data_ptr() for x in tensors]
        aligned = not functools.reduce(operator.or_, pointers) & 15
        if aligned and self._compiled is not None:
            self._compiled[(programs, 1, 1)](*pointers, *numbers, *self._tail)
            return
        compiled = self._kernel[(programs,)](*tensors, *numbers, **self.constants, **self._options)
        if aligned:  # Triton compiles another for addresses that are no multiples of 16
            self._compiled = compiled  # None from the interpreter


_BOUND: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...], Any]] = {}
"""Compiled kernels, their constants and their source, whose id so stays theirs, by all that Triton compiles for."""


def queue(kernel: Any, programs: int, arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
    """Queues ``programs`` programs of a kernel, as ``kernel[(programs,)](*arguments, **constants)`` does.

    Triton binds the arguments once for each kind of them: for dtypes, for addresses and integers that are multiples of
    16 or not, for integers that are 1 or need 64 bits. More kinds are told apart here than Triton does.

    Args:
        kernel: a ``triton.jit`` function whose constants come last.
        arguments: tensors, of which the first is one, ``None`` and numbers, in order.
        constants: its ``constexpr`` arguments and options, ``num_warps`` and the like.
    """
    values, kinds = [], [id(kernel), arguments[0].get_device()]
    for x in arguments:
        if isinstance(x, Tensor):
            address = x.data_ptr()
            values.append(address)
            kinds += (x.dtype, address & 15 == 0)
        else:
            values.append(x)
            kinds.append((x & 15 == 0, x == 1, x > 2147483647) if type(x) is int else type(x))
    key = (*kinds, *constants.items())
    bound = _BOUND.get(key)
    if bound is not None:
        compiled, tail, _ = bound
        compiled[(programs, 1, 1)](*values, *tail)
        return
    compiled = kernel[(programs,)](*arguments, **constants)
    if compiled is not None:  # as it is from the interpreter
        tail = tuple(constants[name] for name in kernel.arg_names if name in constants)
        _BOUND[key] = compiled, tail, kernel


def _scratch(size: int, alignment: int, stream: int | None) -> Tensor:
    """Device memory for descriptors, from PyTorch's allocator, which aligns to 512 bytes."""
    return torch.empty(size, dtype=torch.int8, device="cuda")
