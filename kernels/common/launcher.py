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


def _scratch(size: int, alignment: int, stream: int | None) -> Tensor:
    """Device memory for descriptors, from PyTorch's allocator, which aligns to 512 bytes."""
    return torch.empty(size, dtype=torch.int8, device="cuda")
