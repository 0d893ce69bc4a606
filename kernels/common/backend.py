"""Chooses where an operator runs: in its Triton kernels or in its reference."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from types import ModuleType

from torch import Tensor


class Backend:
    """The reference of an operator, and the file ``triton.py`` beside it, whose functions have the same names.

    That file is imported when the first tensor on a GPU comes: Triton is not installed with PyTorch for CPU. Its
    function ``supports``, if it has one, says whether its kernels take such tensors.

    Args:
        reference: the module ``reference`` of the operator's package.
    """

    def __init__(self, reference: ModuleType) -> None:
        self._reference = reference
        self._kernels: ModuleType | None = None
        self._supports: Callable[..., bool] | None = None

    def of(self, *tensors: Tensor) -> ModuleType:
        """The module for tensors on the device of the first."""
        if not tensors[0].is_cuda:
            return self._reference
        kernels = self._kernels or self._load()
        return kernels if self._supports is None or self._supports(*tensors) else self._reference

    def _load(self) -> ModuleType:
        kernels = import_module(self._reference.__name__.removesuffix("reference") + "triton")
        self._supports = getattr(kernels, "supports", None)
        self._kernels = kernels  # last: another thread may come by
        return kernels
