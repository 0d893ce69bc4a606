"""Where an operator runs: its kernels are imported at the first tensor on a GPU, and asked whether they take it."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from kernels.common.backend import Backend
from kernels.gdpa import reference

ON_GPU: Any = SimpleNamespace(is_cuda=True)


def of_a_package(monkeypatch: pytest.MonkeyPatch, **functions: Any) -> tuple[Backend, ModuleType, ModuleType]:
    """The backend of a package that is not there, its reference and its kernels."""
    made, kernels = ModuleType("package.reference"), ModuleType("package.triton")
    vars(kernels).update(functions)
    monkeypatch.setitem(sys.modules, "package", ModuleType("package"))
    monkeypatch.setitem(sys.modules, "package.triton", kernels)
    return Backend(made), made, kernels


def test_tensors_on_a_cpu_import_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kernels.gdpa.triton", None)  # an import of it fails
    backend = Backend(reference)
    assert backend.of(torch.ones(1), torch.ones(1)) is reference
    with pytest.raises(ImportError):
        backend.of(ON_GPU)


def test_kernels_say_what_they_take(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, plain, kernels = of_a_package(monkeypatch, supports=lambda x, y: y == 1)
    assert backend.of(ON_GPU, 1) is kernels  # type: ignore[arg-type]
    assert backend.of(ON_GPU, 2) is plain  # type: ignore[arg-type]
    backend, plain, kernels = of_a_package(monkeypatch)
    assert backend.of(ON_GPU) is kernels
