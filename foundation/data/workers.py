"""Worker processes that read windows and send batches, in an order that does not depend on their number.

Unit ``i`` of a rank is read by worker ``i mod n``, and the batches are taken unit by unit. A worker makes a batch in a
free slot, which is memory that it shares with the main process. The main process hands out the slot itself, and the
worker gets it back when the arrays of the batch are gone; a consumer that keeps more than a few batches gets copies.
So most batches are never copied, no lock is held, and nothing is left behind when a process is killed.
"""

from __future__ import annotations

import errno
import gc
import mmap
import multiprocessing as mp
import os
import signal
import sys
import traceback
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

import numpy as np

from foundation.data.encoding import EncodedBatch
from foundation.data.files import may_pass
from foundation.data.plan import Unit
from foundation.data.shared_batch import Arena, Names, Place, flatten, rebuild, size_of
from foundation.data.storage import DatasetError
from foundation.data.window import Window
from foundation.data.window_loader import Counts, WindowLoader

# Address space of a slot; memory is used only as far as batches reach. Larger batches go through the pipe.
_SLOT_BYTES = 64 << 20
# Slots of each worker that may be with the consumer. One more batch than that is copied.
_LENT = 3


class WorkerError(RuntimeError):
    """A fault of ours in a worker process; the message is its traceback."""


class WorkerDied(ChildProcessError):
    """A worker process ended without saying why: something killed it."""


@dataclass(frozen=True, slots=True)
class _Message:
    """A batch: its names unless they are those of the last one, and where its arrays lie in the memory that it uses.

    That is the beginning of a slot; with the slot ``None``, it follows.
    """

    names: Names | None
    places: tuple[Place, ...]
    used: int
    slot: int | None
    counts: Counts


@dataclass(frozen=True, slots=True)
class _Failure:
    """Why a worker could not go on; ``known`` errors are the user's to mend, unless they ``may_pass``."""

    message: str
    known: bool
    may_pass: bool


def read_here(loader: WindowLoader, units: Sequence[Unit]) -> Iterator[tuple[EncodedBatch, Counts]]:
    """Batches of the units, in this process."""
    store = loader.new_store()
    for unit in units:
        window = loader.load(unit, store)
        counts = loader.take_counts()
        for number in range(unit.first, unit.stop):
            yield window.batch(number), counts
            counts = {}


class WorkerPool:
    """Reads units in worker processes. Use as a context manager: leaving it ends the processes.

    Args:
        loader: reads a window; each worker has its own copy.
        units: what to read, in order.
        workers: number of processes.
        prefetch: batches that each worker may have ready.
    """

    def __init__(self, loader: WindowLoader, units: Sequence[Unit], workers: int, prefetch: int) -> None:
        self._units = units
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._slots: list[list[mmap.mmap]] = []
        # Per worker: how many slots the consumer has, and which of them it has done with.
        self._lent: list[int] = [0] * workers
        self._ended: list[deque[int]] = [deque() for _ in range(workers)]
        self._names: list[Names] = [()] * workers
        # Forked workers share the index and the vocabularies; where fork is not safe they get copies.
        fork = sys.platform == "linux"
        context = mp.get_context("fork") if fork else mp.get_context("spawn")
        for number in range(workers):
            mine, theirs = context.Pipe()
            slots = [mmap.mmap(-1, _SLOT_BYTES) for _ in range(prefetch + _LENT)] if fork else []
            inherited = [*self._pipes, mine] if fork else []
            process = context.Process(
                target=_work,
                args=(theirs, inherited, slots, loader, list(units[number::workers]), workers == 1),
                daemon=True,
                name=f"opengem-reader-{number}",
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(mine)
            self._slots.append(slots)

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[tuple[EncodedBatch, Counts]]:
        """Batches with what was counted while reading them.

        Raises:
            DatasetError: the data cannot be read.
            WorkerDied: something killed a worker, for example the system when it was out of memory.
        """
        for i, unit in enumerate(self._units):
            for _ in range(unit.length):
                yield self._receive(i % len(self._processes))

    def close(self) -> None:
        """Ends all workers."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
        # The memory of a slot goes when the last array in it does.
        self._processes, self._pipes, self._slots = [], [], []

    def _receive(self, number: int) -> tuple[EncodedBatch, Counts]:
        pipe, process = self._pipes[number], self._processes[number]
        if pipe not in wait([pipe, process.sentinel]):
            raise self._death(process)
        try:
            message = pipe.recv()
            if isinstance(message, _Failure):
                if not message.known:
                    raise WorkerError(message.message)
                raise DatasetError(message.message) from (OSError(errno.EIO, "") if message.may_pass else None)
            while self._ended[number]:
                pipe.send(self._ended[number].popleft())
                self._lent[number] -= 1
            memory = self._memory(number, message)
        except (EOFError, ConnectionError):
            raise self._death(process) from None
        if message.names is not None:
            self._names[number] = message.names
        return rebuild(self._names[number], message.places, memory), message.counts

    def _memory(self, number: int, message: _Message) -> np.ndarray:
        """The memory that holds a batch."""
        if message.slot is None:
            return np.frombuffer(bytearray(self._pipes[number].recv_bytes()), dtype=np.uint8)
        shared = np.frombuffer(self._slots[number][message.slot], dtype=np.uint8)
        if self._lent[number] < _LENT:
            self._lent[number] += 1
            # The arrays of the batch are views of this one.
            weakref.finalize(shared, self._ended[number].append, message.slot).atexit = False
            return shared
        memory = shared[: message.used].copy()
        self._pipes[number].send(message.slot)
        return memory

    def _death(self, process: BaseProcess) -> WorkerDied:
        process.join(5)
        code = process.exitcode
        cause = f"killed by signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        hint = "; the system may be out of memory: use fewer workers or a smaller shuffle_window" if code == -9 else ""
        return WorkerDied(f"reader process {process.name} ended unexpectedly ({cause}){hint}")


def _work(
    pipe: Connection,
    inherited: Sequence[Connection],
    slots: Sequence[mmap.mmap],
    loader: WindowLoader,
    units: Sequence[Unit],
    ahead: bool,
) -> None:
    """The life of a worker: it ends when its units are sent or the main process closes the pipe."""
    # Ctrl-C is for the main process, which then ends its workers; its other handlers are not for them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # What was there before is there to stay; the collector need not look at it again and again.
    gc.freeze()
    for other in inherited:
        # Otherwise a pipe would stay open when the main process is killed, and its reader would wait for ever.
        other.close()
    try:
        sender = _Sender(pipe, slots)
        loader.read_ahead()
        for unit, window, counts in _windows(loader, units, ahead):
            for number in range(unit.first, unit.stop):
                sender.send(window, number, counts)
                counts = {}
        sender.drain()
    except (EOFError, BrokenPipeError, ConnectionError):
        pass
    except BaseException as error:
        known = isinstance(error, DatasetError)
        text = str(error) if known else "".join(traceback.format_exception(error))
        pipe.send(_Failure(text, known, may_pass(error)))
    finally:
        pipe.close()
    # No clean-up of what was inherited from the main process, such as its exit handlers.
    os._exit(0)


def _windows(loader: WindowLoader, units: Sequence[Unit], ahead: bool) -> Iterator[tuple[Unit, Window, Counts]]:
    """Windows in order. ``ahead``: the next one is read while this one is being sent."""
    stores = [loader.new_store() for _ in range(2 if ahead else 1)]

    def load(number: int) -> tuple[Unit, Window, Counts]:
        window = loader.load(units[number], stores[number % len(stores)])
        return units[number], window, loader.take_counts()

    if not ahead:
        yield from map(load, range(len(units)))
        return
    with ThreadPoolExecutor(1) as executor:
        pending = executor.submit(load, 0)
        for number in range(1, len(units) + 1):
            found = pending.result()
            if number < len(units):
                pending = executor.submit(load, number)
            yield found


class _Sender:
    """Makes batches in free slots and sends them; waits for a slot if all are in use."""

    def __init__(self, pipe: Connection, slots: Sequence[mmap.mmap]) -> None:
        self._pipe = pipe
        self._slots = [np.frombuffer(slot, dtype=np.uint8) for slot in slots]
        self._free = list(range(len(slots)))
        self._names: Names = ()
        self._parent = os.getppid()

    def send(self, window: Window, number: int, counts: Counts) -> None:
        """Sends one batch of a window."""
        slot: int | None = None
        memory = np.zeros(0, dtype=np.uint8)
        if self._slots:
            # The slot that came back last is the likeliest to be in the processor's cache.
            while not self._free or self._pipe.poll():
                self._free.append(self._returned())
            slot = self._free.pop()
            memory = self._slots[slot]
        arena = Arena(memory)
        names, arrays = flatten(window.batch(number, arena.new))
        if slot is None or arena.full:
            if slot is not None:
                self._free.append(slot)
                slot = None
            memory = np.empty(size_of(arrays), dtype=np.uint8)
            arena = Arena(memory)
            arrays = [arena.copy(array) for array in arrays]
        told = None if names == self._names else names
        self._names = names
        self._pipe.send(_Message(told, tuple(arena.place(array) for array in arrays), arena.used, slot, counts))
        if slot is None:
            self._pipe.send_bytes(memory[: arena.used].data)

    def drain(self) -> None:
        """Waits until everything sent has been taken."""
        while len(self._free) < len(self._slots):
            self._free.append(self._returned())

    def _returned(self) -> int:
        """The next slot that the main process has emptied. Raises EOFError if that is gone."""
        while not self._pipe.poll(5):
            if os.getppid() != self._parent:
                raise EOFError
        return int(self._pipe.recv())
