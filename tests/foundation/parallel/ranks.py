"""Runs a function on several Gloo ranks, each a process of its own, or on one rank in this process."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


@contextmanager
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def on_ranks(function: Callable[..., Any], world: int, folder: Path, *args: Any) -> list[Any]:
    """Calls `function(*args)` on each rank and returns the answers in rank order; a failed rank fails the test."""
    folder.mkdir(parents=True, exist_ok=True)
    mp.spawn(_rank, args=(function, world, str(folder), args), nprocs=world)
    return [torch.load(folder / f"answer-{rank}.pt", weights_only=False) for rank in range(world)]


def _rank(rank: int, function: Callable[..., Any], world: int, folder: str, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    torch.save(function(*args), f"{folder}/answer-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
