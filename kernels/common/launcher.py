"""Starts Triton kernels with little work on the host.

Triton's own launch binds and inspects every argument at every call: tens of microseconds for kernels with forty of
them. A ``Variant`` lets it do so once, and a ``Launch`` once for each kind of arguments; then they start the compiled
kernel themselves. A kernel takes tensors first, then numbers, then constants.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.runtime import driver


class Variant:
    """A kernel with its constants, for one device, dtype and set of strides.

    Args:
        kernel: a ``triton.jit`` function that specialises on none of its integers.
        constants: its ``constexpr`` arguments; others that it does not have are left out.
        options: ``num_warps`` and the like.
    """

    __slots__ = ("_compiled", "_descriptors", "_kernel", "_options", "_tail", "constants")

    def __init__(self, kernel: Any, constants: dict[str, Any], options: dict[str, int]) -> None:
        names = kernel.arg_names
        self._kernel, self._options = kernel, options
        self.constants = {name: value for name, value in constants.items() if name in names}
        self._tail = tuple(self.constants[name] for name in names if name in self.constants)
        self._descriptors = bool(constants.get("TMA"))
        self._compiled: Any = None

    def start(self, programs: int, tensors: tuple[Tensor | None, ...], numbers: tuple[float, ...]) -> None:
        """Queues ``programs`` programs of the kernel on the current stream of the device of the tensors.

        Args:
            tensors: the first is one.
            numbers: of the same types in every call.
        """
        if (device := _elsewhere(tensors)) is not None:
            with torch.cuda.device(device):
                self.start(programs, tensors, numbers)
            return
        if self._descriptors:
            triton.set_allocator(_scratch)  # of this thread; autograd has its own
        pointers = [0 if x is None else x.data_ptr() for x in tensors]
        aligned = not functools.reduce(operator.or_, pointers) & 15
        if aligned and self._compiled is not None:
            _run(self._compiled, programs, (*pointers, *numbers, *self._tail))
            return
        compiled = self._kernel[(programs,)](*tensors, *numbers, **self.constants, **self._options)
        if aligned:  # Triton compiles another for addresses that are no multiples of 16
            self._compiled = compiled  # None from the interpreter


class Launch:
    """A kernel with its constants on one device, for any dtypes, addresses and strides.

    Args:
        kernel: a ``triton.jit`` function.
        constants: its ``constexpr`` arguments and options, ``num_warps`` and the like.
    """

    __slots__ = ("_bound", "_kernel", "_tail", "constants")

    def __init__(self, kernel: Any, constants: dict[str, Any]) -> None:
        self._kernel, self.constants = kernel, constants
        self._tail = tuple(constants[name] for name in kernel.arg_names if name in constants)
        self._bound: dict[tuple[Any, ...], Any] = {}

    def start(
        self,
        programs: int,
        tensors: tuple[Tensor | None, ...],
        numbers: tuple[float, ...],
        strides: tuple[int, ...] = (),
    ) -> None:
        """Queues ``programs`` programs on the current stream of the device of the tensors, of which the first is one.

        Triton binds the arguments once for each kind of them: for dtypes, for addresses that are multiples of 16 or
        not, for strides, and for numbers that are whole or not, or need 64 bits.

        Args:
            numbers: what the kernel does not specialise on.
            strides: what it does, for which it so is bound anew: numbers that few batches change.
        """
        if (device := _elsewhere(tensors)) is not None:
            with torch.cuda.device(device):
                self.start(programs, tensors, numbers, strides)
            return
        kind: list[Any] = [*strides, *map(type, numbers)]
        pointers, odd = [], 0
        for x in tensors:  # once for all that is asked of them: this is host time of every call
            if x is None:
                pointers.append(0)
                kind.append(None)
                continue
            address = x.data_ptr()
            odd |= address
            pointers.append(address)
            kind.append(x.dtype)
        if odd & 15:
            kind.append(("odd", *[address & 15 == 0 for address in pointers]))
        if max(numbers) > 2147483647:
            kind.append(("large", *[number > 2147483647 for number in numbers]))
        bound = tuple(kind)
        compiled = self._bound.get(bound)
        if compiled is not None:
            _run(compiled, programs, (*pointers, *numbers, *strides, *self._tail))
            return
        compiled = self._kernel[(programs,)](*tensors, *numbers, *strides, **self.constants)
        if compiled is not None:  # as it is from the interpreter
            self._bound[bound] = compiled


def _elsewhere(tensors: tuple[Tensor | None, ...]) -> int | None:
    """The GPU of the tensors, if it is not the current one, on which Triton would start the kernel."""
    first = tensors[0]
    assert first is not None
    device = first.get_device()  # -1 on a CPU, for the interpreter
    return None if device < 0 or device == driver.active.get_current_device() else device


def _run(compiled: Any, programs: int, arguments: tuple[Any, ...]) -> None:
    """As ``compiled[(programs,)](*arguments)``, which at each call makes what only a profiler's hooks look at."""
    if knobs.runtime.launch_enter_hook.calls or knobs.runtime.launch_exit_hook.calls:
        compiled[(programs, 1, 1)](*arguments)
        return
    active = driver.active
    stream = active.get_current_stream(active.get_current_device())
    compiled.run(programs, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None, *arguments)


def _scratch(size: int, alignment: int, stream: int | None) -> Tensor:
    """Device memory for descriptors, from PyTorch's allocator, which aligns to 512 bytes."""
    return _bytes(driver.active.get_current_device()).new_empty(size)


@functools.cache
def _bytes(device: int) -> Tensor:
    """No bytes on a GPU: to ask one tensor for another takes the host half as long as to name type and device."""
    return torch.empty(0, dtype=torch.int8, device=torch.device("cuda", device))
