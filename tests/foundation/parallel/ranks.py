"""Runs a function on several Gloo ranks, each a process of its own, or on one rank in this process.

The ranks are forks of one server, which this process starts with the first of them: what takes seconds to import is
imported there once, and not by every rank of every test.
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

IMPORTED = [
    "pytest",
    "foundation.training.train",
    "foundation.parallel.benchmarks.equality",
    "tests.foundation.parallel.ranks",
    "tests.foundation.training.small_run",
]
"""By the server. None of it starts a thread that a fork would miss: the one of Arrow's allocator expects forks."""


@contextmanager
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def in_processes(function: Callable[..., None], count: int, folder: Path, *args: Any) -> None:
    """Calls `function(number, *args)` in each process and waits; what they write is in `folder`/output-NUMBER.txt.

    A process that fails ends the others and fails the test.
    """
    folder.mkdir(parents=True, exist_ok=True)
    mp.get_context("forkserver").set_forkserver_preload(IMPORTED)
    arguments = (function, str(folder), dict(os.environ), args)
    started = mp.start_processes(_process, args=arguments, nprocs=count, join=False, start_method="forkserver")
    try:
        while not started.join():
            pass
    except BaseException:
        for process in started.processes:
            process.kill()
        for path in sorted(folder.glob("output-*.txt")):
            print(f"{path.name}:", path.read_text(errors="replace")[-20_000:], sep="\n", file=sys.stderr)
        raise


def on_ranks(function: Callable[..., Any], world: int, folder: Path, *args: Any) -> list[Any]:
    """Calls `function(*args)` on each rank and returns the answers in rank order; a failed rank fails the test."""
    in_processes(_rank, world, folder, function, world, str(folder), args)
    return [torch.load(folder / f"answer-{rank}.pt", weights_only=False) for rank in range(world)]


def _process(
    number: int, function: Callable[..., None], folder: str, environment: dict[str, str], args: tuple[Any, ...]
) -> None:
    gc.freeze()  # what was imported is no garbage, and no collection has to look at it
    os.environ.clear()
    os.environ.update(environment)
    file = os.open(f"{folder}/output-{number}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.close(file)
    function(number, *args)


def _rank(rank: int, function: Callable[..., Any], world: int, folder: str, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    torch.save(function(*args), f"{folder}/answer-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
