"""Worker processes that read windows and send batches, in an order that does not depend on their number.

Unit ``i`` of a rank is read by worker ``i mod n``, and the batches are taken unit by unit. A worker sends as many
batches as it has free slots; a slot is memory that it shares with the main process, so a batch costs one copy on
each side and no lock, and nothing is left behind when a process is killed.
"""

from __future__ import annotations

import mmap
import multiprocessing as mp
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

import numpy as np
import pyarrow as pa

from foundation.data.encoding import EncodedBatch
from foundation.data.plan import Unit
from foundation.data.storage import DatasetError
from foundation.data.window import Window
from foundation.data.window_loader import Counts, WindowLoader

# Address space of a slot; memory is used only as far as batches reach. Larger batches go through the pipe.
_SLOT_BYTES = 64 << 20
_ALIGN = 64


class WorkerError(RuntimeError):
    """A worker process ended without saying why."""


@dataclass(frozen=True, slots=True)
class _Message:
    """A batch: its pickle without the arrays, their sizes, and the slot that holds them (``None``: they follow)."""

    head: bytes
    sizes: tuple[int, ...]
    slot: int | None
    counts: Counts


@dataclass(frozen=True, slots=True)
class _Failure:
    """Why a worker could not go on; ``known`` errors are the user's to mend."""

    message: str
    known: bool


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
        # Forked workers share the index and the vocabularies; where fork is not safe they get copies.
        fork = sys.platform == "linux"
        context = mp.get_context("fork") if fork else mp.get_context("spawn")
        for number in range(workers):
            mine, theirs = context.Pipe()
            slots = [mmap.mmap(-1, _SLOT_BYTES) for _ in range(prefetch)] if fork else []
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
            WorkerError: a worker died, for example because the system was out of memory.
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
        for slots in self._slots:
            for slot in slots:
                slot.close()
        self._processes, self._pipes, self._slots = [], [], []

    def _receive(self, number: int) -> tuple[EncodedBatch, Counts]:
        pipe, process = self._pipes[number], self._processes[number]
        if pipe not in wait([pipe, process.sentinel]):
            raise self._death(process)
        try:
            message = pipe.recv()
        except (EOFError, ConnectionError):
            raise self._death(process) from None
        if isinstance(message, _Failure):
            raise DatasetError(message.message) if message.known else WorkerError(message.message)
        places, total = _layout(message.sizes)
        if message.slot is None:
            memory = np.frombuffer(bytearray(pipe.recv_bytes()), dtype=np.uint8)
        else:
            memory = np.empty(total, dtype=np.uint8)
            shared = np.frombuffer(self._slots[number][message.slot], dtype=np.uint8, count=total)
            memory[:] = shared
            del shared
            pipe.send(message.slot)
        buffers = [memory[place : place + size] for place, size in zip(places, message.sizes, strict=True)]
        return pickle.loads(message.head, buffers=buffers), message.counts

    def _death(self, process: BaseProcess) -> WorkerError:
        process.join(5)
        code = process.exitcode
        cause = f"killed by signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        hint = "; the system may be out of memory: use fewer workers or a smaller shuffle_window" if code == -9 else ""
        return WorkerError(f"reader process {process.name} ended unexpectedly ({cause}){hint}")


def _layout(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Aligned positions of buffers of these sizes, and the size of them all."""
    places, position = [], 0
    for size in sizes:
        places.append(position)
        position += -(-size // _ALIGN) * _ALIGN
    return places, position


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
    # Arrow's own allocators keep freed memory longer than malloc does, in every worker.
    pa.set_memory_pool(pa.system_memory_pool())
    for other in inherited:
        # Otherwise a pipe would stay open when the main process is killed, and its reader would wait for ever.
        other.close()
    try:
        sender = _Sender(pipe, slots)
        loader.read_ahead()
        for unit, window, counts in _windows(loader, units, ahead):
            for number in range(unit.first, unit.stop):
                sender.send(window.batch(number), counts)
                counts = {}
        sender.drain()
    except (EOFError, BrokenPipeError, ConnectionError):
        pass
    except BaseException as error:
        known = isinstance(error, DatasetError)
        text = str(error) if known else "".join(traceback.format_exception(error))
        pipe.send(_Failure(text, known))
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
    """Sends batches through free slots; waits for one if all are in use."""

    def __init__(self, pipe: Connection, slots: Sequence[mmap.mmap]) -> None:
        self._pipe = pipe
        self._slots = [np.frombuffer(slot, dtype=np.uint8) for slot in slots]
        self._free = list(range(len(slots)))
        self._parent = os.getppid()

    def send(self, batch: EncodedBatch, counts: Counts) -> None:
        buffers: list[pickle.PickleBuffer] = []
        head = pickle.dumps(batch, protocol=5, buffer_callback=buffers.append)
        raw = [np.frombuffer(buffer.raw(), dtype=np.uint8) for buffer in buffers]
        sizes = tuple(len(part) for part in raw)
        places, total = _layout(sizes)
        if self._slots and total <= _SLOT_BYTES:
            slot = self._free.pop() if self._free else self._returned()
            target = self._slots[slot]
            message = _Message(head, sizes, slot, counts)
        else:
            target = np.empty(total, dtype=np.uint8)
            message = _Message(head, sizes, None, counts)
        for part, place in zip(raw, places, strict=True):
            target[place : place + len(part)] = part
        self._pipe.send(message)
        if message.slot is None:
            self._pipe.send_bytes(target.data)

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
