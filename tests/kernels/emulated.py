"""Runs kernels scheduled by hand, as they are written, on the CPU: their warps as threads, their barriers by phases.

What a Gluon kernel calls stands in for here, on NumPy arrays in float64, so that the functions of
``kernels/common/forward_long.py``, ``backward_long.py`` and ``backward_few.py``, of
``kernels/block_attention/persistent.py`` and of ``kernels/jagged/tables_hopper.py`` run unchanged. Warps take turns at
random wherever they meet a barrier, a load from global memory arrives at random, or when its group is waited for, with
NaN in its place until then, and a product reads shared memory when it is waited for. So a slot that is let go too soon
or read too early gives a wrong result, and warps that wait for each other are found. Layouts, registers and what one
thread sees of another's stores are not looked at.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl

from kernels.block_attention import persistent
from kernels.common import async_rows, backward_few, backward_long, forward_long, long_tiles, sequence_search
from kernels.jagged import tables_hopper


def _checked(name: str) -> Any:
    """An operation of integers whose results are ``Int``."""
    plain = getattr(int, name)

    def op(self, *other):
        assert ("div" not in name and "mod" not in name) or min(self, *other) >= 0
        result = plain(self, *other)
        return Int(result) if type(result) is int else result

    return op


class Int(int):
    """A scalar of a kernel. The GPU rounds quotients to zero, so that none may be negative."""

    __add__, __radd__, __neg__ = _checked("__add__"), _checked("__radd__"), _checked("__neg__")
    __sub__, __rsub__ = _checked("__sub__"), _checked("__rsub__")
    __mul__, __rmul__ = _checked("__mul__"), _checked("__rmul__")
    __floordiv__, __mod__ = _checked("__floordiv__"), _checked("__mod__")

    def to(self, dtype):
        return self


class Array(np.ndarray):
    """A tensor of a kernel."""

    def to(self, dtype, bitcast=False):
        if self.dtype.kind != "i" or dtype not in ("int16", "int32"):
            return self
        half = 1 << int(dtype[3:]) - 1
        return (self + half) % (2 * half) - half


def array(x) -> Any:
    """Whatever NumPy returned, as a kernel has it."""
    x = np.asarray(x)
    if x.ndim:
        return x.view(Array)
    return Int(x) if x.dtype.kind == "i" else x[()]


class Pointer:
    """An address, or many, within a tensor."""

    dtype = SimpleNamespace(element_ty="bf16")
    type = SimpleNamespace(layout=None)

    def __init__(self, memory: np.ndarray, at: Any = 0) -> None:
        self.memory, self.at = memory, at

    def __add__(self, other):
        return Pointer(self.memory, self.at + other)


class Shared:
    """Shared memory, or a part of it."""

    def __init__(self, x: np.ndarray, groups: Groups | None = None) -> None:
        self.x, self.dtype, self.shape, self.groups = x, "bf16", x.shape, groups

    def index(self, i):
        return Shared(self.x[i], self.groups)

    def slice(self, start, length):
        return Shared(self.x[start : start + length], self.groups)

    def permute(self, order):
        return Shared(self.x.transpose(order), self.groups)

    def store(self, value):
        self.x[...] = value

    def load(self, layout):
        if self.groups is not None:
            self.groups.read.append(self.x)
        return array(self.x.copy())


class Barrier:
    """Counts arrivals and bytes; its phase ends when both are there."""

    def __init__(self) -> None:
        self.phase = self.count = self.missing = self.bytes = 0

    def check(self) -> None:
        assert self.missing >= 0
        if self.missing == 0 and self.bytes == 0:
            self.phase, self.missing = self.phase ^ 1, self.count


class Barriers:
    def __init__(self, number: int) -> None:
        self.bars = [Barrier() for _ in range(number)]

    def index(self, i):
        return self.bars[i]


class Product:
    """A product that has been started."""

    def __init__(self, a, b, acc, use_acc, groups) -> None:
        self.a, self.b, self.acc, self.groups = a, b, acc if use_acc else 0.0, groups

    def end(self):
        a, b = (x.x if isinstance(x, Shared) else x for x in (self.a, self.b))
        if self.groups is not None:
            self.groups.read += [x.x for x in (self.a, self.b) if isinstance(x, Shared)]
        before = self.acc.end() if isinstance(self.acc, Product) else self.acc
        return array(before + np.matmul(a, b))


class Stuck(Exception):
    """Every warp waits."""


class Machine:
    """One multiprocessor: it runs a program's warps in an order that ``seed`` gives."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.eager = self.random.choice((0.1, 0.5, 0.9))  # of copies: how soon they are there
        self.program = self.programs = 0
        self.copies: list[Any] = []
        self.groups: Groups | None = None
        """Of copies that threads make themselves, in kernels that have such."""
        self.loads: Counter[tuple[int, int, int]] = Counter()
        """How often a program loaded a block, by program, tensor and row."""
        self.main = threading.Semaphore(0)
        self.waiting: dict[int, Any] = {}
        self.turns: dict[int, threading.Semaphore] = {}
        self.failure: BaseException | None = None

    def launch(self, kernel, programs: int, *arguments, behind=lambda: None, **constants) -> None:
        """Runs programs one after another, ``behind`` after each."""
        self.programs = programs
        arguments = tuple(Int(x) if type(x) is int else x for x in arguments)
        for self.program in range(programs):
            kernel(*arguments, **constants)
            assert not self.copies, "a load that nobody waited for"
            assert not self.groups or not any(self.groups.groups), "a copy that nobody waited for"
            behind()

    def specialize(self, parts, warps, registers) -> None:
        threads = []
        for i, (function, arguments) in enumerate(parts):
            self.turns[i], self.waiting[i] = threading.Semaphore(0), None
            threads.append(threading.Thread(target=self.warp, args=(i, function, arguments), daemon=True))
            threads[-1].start()
        while self.turns and self.failure is None:
            if self.copies and self.random.random() < self.eager:
                self.land()
            ready = [i for i, wait in self.waiting.items() if wait is None or wait[0].phase != wait[1]]
            if ready:
                self.turns[self.random.choice(ready)].release()
                self.main.acquire()
            elif self.copies:
                self.land()
            else:
                self.failure = Stuck(f"program {self.program}: {sorted(self.waiting)} wait")
        for turn in self.turns.values():
            turn.release()
        for thread in threads:
            thread.join()
        if self.failure is not None:
            raise self.failure

    def warp(self, i, function, arguments) -> None:
        self.me().i = i
        self.turns[i].acquire()
        try:
            if self.failure is None:
                function(*arguments)
        except BaseException as problem:
            self.failure = self.failure or problem
        del self.turns[i], self.waiting[i]
        self.main.release()

    def me(self):
        return threading.current_thread()

    def pause(self, wait=None) -> None:
        """Others' turn, until a phase has ended."""
        i = self.me().i
        self.waiting[i] = wait
        self.main.release()
        self.turns[i].acquire()
        if self.failure is not None:
            raise self.failure

    def land(self) -> None:
        """One of the copies arrives."""
        source, row, bar, target = self.copies.pop(self.random.randrange(len(self.copies)))
        target.x[...] = source.read(row)
        bar.bytes -= source.block_type.nbytes
        bar.check()

    # Barriers

    def wait(self, bar, phase, pred=True, deps=()):
        assert phase in (0, 1)
        if pred and (bar.phase == phase or self.random.random() < 0.2):
            self.pause((bar, phase))

    def arrive(self, bar, pred=True):
        if pred:
            bar.missing -= 1
            bar.check()
        if self.random.random() < 0.2:
            self.pause()

    def expect(self, bar, number):
        bar.bytes += number
        self.arrive(bar)

    def init(self, bar, count):
        bar.count = bar.missing = count

    # Copies

    def load(self, source, where, bar, target):
        target.x[...] = np.nan
        row = int(where[0])
        self.loads[self.program, id(source.memory), row] += 1
        self.copies.append((source, row, bar, target))


class Rows:
    """A tensor's rows of one head, as the copy engine sees them."""

    def __init__(self, pointer: Pointer, shape, strides, block, layout) -> None:
        self.memory, self.at, self.rows, self.stride, self.block = (
            pointer.memory,
            pointer.at,
            shape[0],
            strides[0],
            block,
        )
        self.block_type = SimpleNamespace(nbytes=block[0] * block[1] * 2)

    def _places(self, row):
        rows = np.arange(row, row + self.block[0])
        live = (rows >= 0) & (rows < self.rows)
        return live, (self.at + rows[live, None] * self.stride + np.arange(self.block[1])[None, :]).astype(int)

    def read(self, row) -> np.ndarray:
        live, places = self._places(row)
        result = np.zeros(self.block)
        result[live] = self.memory[places]
        return result

    def write(self, row, x) -> None:
        live, places = self._places(row)
        self.memory[places] = x[live]


def _load(pointer, mask=None, other=0, **hints):
    where = np.asarray(pointer.at)
    if mask is not None:
        where = np.where(mask, where, 0)
    assert where.min(initial=0) >= 0, "a load before the tensor, which NumPy would take from its end"
    found = pointer.memory[where]
    return array(found if mask is None else np.where(mask, found, other))


def _store(pointer, value, mask=True, **hints):
    where, value, mask = np.broadcast_arrays(pointer.at, value, mask)
    assert where[mask].min(initial=0) >= 0, "a store before the tensor"
    pointer.memory[where[mask]] = value[mask]


def _add(pointer, value):
    old = Int(pointer.memory[pointer.at])
    pointer.memory[pointer.at] += value
    return old


def _extreme(plain, of_arrays):
    return lambda a, b: Int(plain(a, b)) if isinstance(a, int) and isinstance(b, int) else array(of_arrays(a, b))


def _shared(dtype, shape, layout):
    if dtype == "int64":
        return Barriers(shape[0])
    return Shared(np.zeros(shape, int) if dtype == "int32" else np.full(shape, np.nan))


def _nothing(x):
    """What stands where nothing was written: as a row, none that there is."""
    return 2**31 - 2 if x.dtype.kind == "i" else np.nan


class Groups:
    """Copies that a program's threads make themselves (``cp.async``) and wait for in groups.

    What one warp copied or stored, others see behind a barrier; behind one only may a copy take the place of what was
    read.
    """

    def __init__(self) -> None:
        self.groups: list[list[Any]] = [[]]
        self.there: list[Any] = []
        """Values that are there for the warps that brought them."""
        self.read: list[np.ndarray] = []
        """Shared memory that warps have read since the last barrier."""

    def copy(self, tile, pointer, mask):
        on_their_way = [other.x for group in self.groups for other, _ in group]
        assert not any(np.may_share_memory(tile.x, x) for x in self.read), "another warp may still read what was there"
        assert not any(np.may_share_memory(tile.x, x) for x in on_their_way), "either copy may come last"
        tile.x[...] = _nothing(tile.x)
        self.groups[-1].append((tile, _load(pointer, mask, 0)))

    def commit(self):
        self.groups.append([])

    def wait(self, outstanding):
        while len(self.groups) - 1 > outstanding:
            self.there += self.groups.pop(0)

    def barrier(self):
        for tile, value in self.there:
            tile.x[...] = value
        self.there, self.read = [], []

    def shared(self, dtype, shape, layout, value=None):
        x = np.zeros(shape, int if dtype == "int64" else float)
        x[...] = _nothing(x)
        tile = Shared(x, self)
        if value is not None:
            self.there.append((tile, value.copy()))
        return tile


def _wait(num_outstanding, deps):
    done = [x.end() if isinstance(x, Product) else x for x in deps]
    return done[0] if len(done) == 1 else done


def _silu(x, act, fast):
    assert act == "silu"
    return array(x / (1 + np.exp(-x)))


def _silu_with_slope(x, act, fast):
    gate = 1 / (1 + np.exp(-x))
    return _silu(x, act, fast), array(gate * (1 + x * (1 - gate)))


def _assembly(text, constraints, arguments, dtype, is_pure, pack):
    """What a text of assembly does, by its first letters."""
    return array(
        {
            "cos": np.cos,
            "sin": np.sin,
            "set": lambda a, b: (a % 65536 == b).astype(float),
            "pop": lambda x: np.bitwise_count(x).astype(int),
            "{ .": lambda bit: np.broadcast_to(_votes(bit), bit.shape),
        }[text[:3]](*arguments)
    )


def _votes(bit):
    return ((bit != 0).astype(int) << np.arange(32)).sum(-1, keepdims=True)


def kernel(name: str, machine: Machine) -> Any:
    """A kernel as a function on ``Pointer`` and numbers."""

    def nothing(*_, **__):
        return None

    module = next(m for m in (forward_long, backward_few, backward_long, persistent, tables_hopper) if hasattr(m, name))
    groups = machine.groups = Groups() if module in (backward_few, persistent, tables_hopper) else None
    layouts = ("NVMMADistributedLayout", "SliceLayout", "BlockedLayout", "DotOperandLayout", "SwizzledSharedLayout")
    gl = SimpleNamespace(
        **dict.fromkeys(layouts, nothing),
        **{name: name for name in ("int16", "int32", "int64", "float32", "float16", "bfloat16")},
        NVMMASharedLayout=SimpleNamespace(get_default_for=nothing),
        zeros=lambda shape, dtype, layout: array(np.zeros(shape, int if dtype.startswith("int") else float)),
        full=lambda shape, value, dtype, layout: array(np.full(shape, value)),
        arange=lambda start, stop, layout: array(np.arange(start, stop)),
        where=lambda x, a, b: array(np.where(x, a, b)),
        sum=lambda x, axis: array(np.sum(np.asarray(x), axis)),
        max=lambda x, axis: array(np.max(np.asarray(x), axis)),
        maximum=_extreme(max, np.maximum),
        minimum=_extreme(min, np.minimum),
        exp2=lambda x: array(np.exp2(x)),
        log=lambda x: array(np.log(x)),
        convert_layout=lambda x, layout: x,
        inline_asm_elementwise=_assembly,
        associative_scan=lambda x, axis, add: array(np.cumsum(np.asarray(x), axis)),
        gather=lambda x, index, axis: array(np.take_along_axis(x, index, axis)),
        broadcast=lambda *x: tuple(map(array, np.broadcast_arrays(*x))),
        static_range=range,
        num_warps=lambda: 4,
        program_id=lambda axis: Int(machine.program),
        num_programs=lambda axis: Int(machine.programs),
        allocate_shared_memory=_shared if groups is None else groups.shared,
        atomic_add=_add,
        load=_load,
        store=_store,
        warp_specialize=machine.specialize,
    )
    stand_ins = {
        "gl": gl,
        "tl": SimpleNamespace(
            debug_barrier=nothing if groups is None else groups.barrier,
            **{name: getattr(gl, name) for name in ("load", "sum", "minimum", "static_range", "int32", "int64")},
        ),
        "mbarrier": SimpleNamespace(
            wait=machine.wait, arrive=machine.arrive, expect=machine.expect, init=machine.init, MBarrierLayout=nothing
        ),
        "tma": SimpleNamespace(
            make_tensor_descriptor=Rows,
            async_copy_global_to_shared=machine.load,
            async_copy_shared_to_global=lambda rows, where, tile: rows.write(int(where[0]), tile.x),
            store_wait=nothing,
        ),
        "fence_async_shared": nothing,
        "warpgroup_mma": lambda a, b, acc, use_acc=True, is_async=False: Product(a, b, acc, use_acc, groups),
        "warpgroup_mma_wait": _wait,
        "activate": _silu,
        "activate_with_slope": _silu_with_slope,
        "activate_with_slope_in_less": lambda x, act: _silu_with_slope(x, act, True),
        "range": lambda *bounds: map(Int, range(*bounds)),
    }
    if groups is not None:
        stand_ins["async_copy"] = SimpleNamespace(
            async_copy_global_to_shared=groups.copy, commit_group=groups.commit, wait_group=groups.wait
        )
    stand_ins["find_sequence"] = _functions(sequence_search, stand_ins)["find_sequence"]
    shared = {**_functions(long_tiles, stand_ins), **_functions(async_rows, stand_ins)}
    own = {name for name, x in vars(module).items() if hasattr(x, "fn") and x.fn.__module__ == module.__name__}
    taken = {name: x for name, x in shared.items() if isinstance(x, FunctionType) and name not in own}
    return _functions(module, {**taken, **stand_ins})[name]


def _functions(module: ModuleType, others: dict[str, Any]) -> dict[str, Any]:
    """A module's kernels as functions, in a world of stand-ins."""
    world: dict[str, Any] = {}
    for name, x in vars(module).items():
        if name in others:
            continue
        if isinstance(x, tl.constexpr):
            world[name] = x.value
        elif hasattr(x, "fn"):
            world[name] = FunctionType(x.fn.__code__, world, name)
        else:
            world[name] = x
    world.update(others)
    return world
