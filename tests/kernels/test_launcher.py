"""Kernels that start without Triton's binding: once for each kind of arguments, and then with the same arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from kernels.common import launch, launcher


class Kernel:
    """In place of a ``triton.jit`` function; what it compiles notes what it is started with."""

    arg_names = ("X", "Y", "rows", "stride", "scale", "WIDTH", "ROWS")

    def __init__(self) -> None:
        self.bound: list[tuple[Any, ...]] = []
        self.started: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def call(*arguments: Any, **constants: Any) -> Compiled:
            self.bound.append((grid, arguments, constants))
            return Compiled(self)

        return call


class Compiled:
    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments: self.kernel.started.append((grid, arguments))


def test_each_kind_of_arguments_is_bound_once() -> None:
    kernel, x = Kernel(), torch.zeros(1000)
    odd = x[1:]
    assert x.data_ptr() % 16 == 0
    constants = {"ROWS": 4, "WIDTH": 8, "num_warps": 2}
    launcher.queue(kernel, 3, (x, None, 32, 64, 0.5), constants)
    launcher.queue(kernel, 5, (x[4:], None, 48, 160, 0.25), constants)
    assert kernel.bound == [((3,), (x, None, 32, 64, 0.5), constants)]
    assert kernel.started == [((5, 1, 1), (x[4:].data_ptr(), None, 48, 160, 0.25, 8, 4))]
    others: list[tuple[tuple[Any, ...], dict[str, int]]] = [
        ((odd, None, 32, 64, 0.5), constants),
        ((x.double(), None, 32, 64, 0.5), constants),
        ((x, x, 32, 64, 0.5), constants),
        ((x, None, 33, 64, 0.5), constants),
        ((x, None, 1, 64, 0.5), constants),
        ((x, None, 2**32, 64, 0.5), constants),
        ((x, None, 32, 65, 0.5), constants),
        ((x, None, 32, 64, 0.5), {**constants, "ROWS": 8}),
        ((x, None, 32, 64, 0.5), {**constants, "num_warps": 4}),
    ]
    for count, (arguments, choice) in enumerate(others, start=2):
        for _ in range(2):
            launcher.queue(kernel, 1, arguments, choice)
        assert len(kernel.bound) == count, arguments
        assert len(kernel.started) == count


@pytest.mark.parametrize(("batch", "fit"), [(2**18, True), (2**20, False)])
def test_descriptors_are_left_out_where_they_would_not_fit(batch: int, fit: bool) -> None:
    """Each program makes its own, in memory that Triton addresses with 32 bits."""
    rows = torch.empty(batch, 8, 64, dtype=torch.bfloat16, device="meta")
    offsets = torch.empty(batch + 1, dtype=torch.int64, device="meta")
    call = launch.Call(rows, rows, rows, offsets, offsets, "silu", 1.0, 1.0, False, -1, -1)
    assert launch._descriptors_fit(call.signature()) == fit
