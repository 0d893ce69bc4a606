"""Kernels that start without Triton's binding: once for each kind of arguments, and then with the same arguments."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from triton import JITFunction

from kernels.block_attention import persistent
from kernels.block_attention import triton as block_attention
from kernels.common import launch, launcher
from kernels.jagged import short_sums_triton, sums_triton, tables_hopper, tables_triton
from kernels.jagged import triton as jagged
from kernels.norms import triton as norms


class Kernel:
    """In place of a ``triton.jit`` function; what it compiles notes what it is started with."""

    arg_names = ("X", "Y", "rows", "scale", "stride", "WIDTH", "ROWS")

    def __init__(self) -> None:
        self.bound: list[tuple[Any, ...]] = []
        self.started: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def call(*arguments: Any, **constants: Any) -> Compiled:
            self.bound.append((grid, arguments, constants))
            return Compiled(self)

        return call


class Compiled:
    function, packed_metadata = 3, (4, 1, 0)

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments: self.kernel.started.append(("watched", grid, arguments))

    def run(self, x: int, y: int, z: int, stream: int, function: int, metadata: object, *rest: Any) -> None:
        assert (stream, function, metadata, rest[:3]) == (7, self.function, self.packed_metadata, (None, None, None))
        self.kernel.started.append(((x, y, z), rest[3:]))


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = {2: 7}
    active = SimpleNamespace(get_current_device=lambda: 2, get_current_stream=streams.__getitem__)
    monkeypatch.setattr(launcher, "driver", SimpleNamespace(active=active))


def test_hooks_of_a_profiler_see_every_start() -> None:
    kernel, x = Kernel(), torch.zeros(8)
    one, two = launcher.Launch(kernel, {"WIDTH": 8, "ROWS": 4}), launcher.Variant(kernel, {"WIDTH": 8, "ROWS": 4}, {})

    def hook(metadata: object) -> None: ...

    launcher.knobs.runtime.launch_enter_hook.add(hook)
    try:
        for _ in range(2):
            one.start(3, (x, None), (32, 0.5), (64,))
            two.start(3, (x, None), (32, 0.5, 64))
    finally:
        launcher.knobs.runtime.launch_enter_hook.remove(hook)
    assert kernel.started == [("watched", (3, 1, 1), (x.data_ptr(), 0, 32, 0.5, 64, 8, 4))] * 2


def test_each_kind_of_arguments_is_bound_once() -> None:
    kernel, x = Kernel(), torch.zeros(1000)
    odd = x[1:]
    assert x.data_ptr() % 16 == 0
    constants = {"ROWS": 4, "WIDTH": 8, "num_warps": 2}
    one = launcher.Launch(kernel, constants)
    one.start(3, (x, None), (32, 0.5), (64,))
    one.start(5, (x[4:], None), (49, 0.25), (64,))
    assert kernel.bound == [((3,), (x, None, 32, 0.5, 64), constants)]
    assert kernel.started == [((5, 1, 1), (x[4:].data_ptr(), 0, 49, 0.25, 64, 8, 4))]
    others: list[tuple[tuple[Any, ...], tuple[float, float], int]] = [
        ((odd, None), (32, 0.5), 64),
        ((odd, x), (32, 0.5), 64),
        ((x, odd), (32, 0.5), 64),
        ((odd, odd), (32, 0.5), 64),
        ((x.double(), None), (32, 0.5), 64),
        ((x, x), (32, 0.5), 64),
        ((x, None), (32, 1), 64),
        ((x, None), (2**32, 0.5), 64),
        ((x, None), (32, 0.5), 65),
    ]
    for count, (tensors, numbers, stride) in enumerate(others, start=2):
        for _ in range(2):
            one.start(1, tensors, numbers, (stride,))
        assert len(kernel.bound) == count, (numbers, stride)
        assert len(kernel.started) == count


def test_numbers_of_a_launch_are_those_that_kernels_do_not_specialise_on() -> None:
    """They are no part of a kind: a kernel compiled for a number of rows that 16 divides would serve all others."""
    tables = (tables_hopper, tables_triton)
    for module in (block_attention, persistent, norms, jagged, short_sums_triton, sums_triton, *tables):
        for kernel in vars(module).values():
            if isinstance(kernel, JITFunction) and kernel.__name__.endswith("_kernel"):
                numbers = [p for p in kernel.params if not p.is_constexpr and p.name.islower()]
                strides = [p.name for p in numbers if re.fullmatch("st.|sh.", p.name)]
                assert [p.name for p in numbers[len(numbers) - len(strides) :]] == strides, kernel
                for p in numbers[: len(numbers) - len(strides)]:
                    assert p.do_not_specialize or p.name in ("scale", "eps", "padding"), (kernel, p.name)


class OnGPU:
    """In place of a tensor on a GPU."""

    dtype = torch.float32

    def __init__(self, device: int) -> None:
        self.get_device = lambda: device

    def data_ptr(self) -> int:
        return 256


@pytest.mark.parametrize("device", [1, 2])
def test_kernels_start_on_the_device_of_the_tensors(device: int, monkeypatch: pytest.MonkeyPatch) -> None:
    current, streams = [2], []

    class Entered:
        """In place of ``torch.cuda.device``."""

        def __init__(self, index: int) -> None:
            self.index = index

        def __enter__(self) -> None:
            current.append(self.index)

        def __exit__(self, *_: object) -> None:
            current.pop()

    def stream(index: int) -> int:
        streams.append(index)
        return 7

    active = SimpleNamespace(get_current_device=lambda: current[-1], get_current_stream=stream)
    monkeypatch.setattr(launcher, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(torch.cuda, "device", Entered)
    for kind in (lambda kernel, constants: launcher.Variant(kernel, constants, {}), launcher.Launch):
        kernel = Kernel()
        bound: list[int] = []
        monkeypatch.setattr(Kernel, "__getitem__", binding(bound, current))
        plan, x = kind(kernel, {"WIDTH": 8, "ROWS": 4}), OnGPU(device)
        for _ in range(3):
            plan.start(3, (x, None), (32, 0.5))  # type: ignore[arg-type]
        assert bound == [device]
        assert len(kernel.started) == 2
    assert streams == [device] * 4
    assert current == [2]


def binding(bound: list[int], current: list[int]) -> Any:
    """What notes on which device a kernel is bound."""

    def start(kernel: Kernel, grid: tuple[int, ...]) -> Any:
        def call(*arguments: Any, **constants: Any) -> Compiled:
            bound.append(current[-1])
            return Compiled(kernel)

        return call

    return start


def test_numbers_have_the_same_types_in_every_call() -> None:
    """Triton compiles an int of 1 in and a bool as one bit, and that kernel would be started with other numbers."""
    rows, offsets = torch.zeros(8, 2, 64, dtype=torch.bfloat16), torch.tensor([0, 3, 8])
    call = launch.Call(rows, rows, rows, offsets, offsets, "silu", 1, 2, False, True, True)
    for numbers in (call.numbers(), call.all_numbers()):
        assert numbers[3:6] == (1, 1.0, 2.0)
        assert [type(number) for number in numbers[3:6]] == [int, float, float]
        assert not any(isinstance(number, bool) for number in numbers)


@pytest.mark.parametrize(("batch", "fit"), [(2**18, True), (2**20, False)])
def test_descriptors_are_left_out_where_they_would_not_fit(batch: int, fit: bool) -> None:
    """Each program makes its own, in memory that Triton addresses with 32 bits."""
    rows = torch.empty(batch, 8, 64, dtype=torch.bfloat16, device="meta")
    offsets = torch.empty(batch + 1, dtype=torch.int64, device="meta")
    call = launch.Call(rows, rows, rows, offsets, offsets, "silu", 1.0, 1.0, False, -1, -1)
    assert launch._descriptors_fit(call.signature()) == fit
