"""Batches on the device, one ahead of the computation, each with the reader's position after it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from foundation.data.batch import Batch
from foundation.data.logs import LogReader


class Work(NamedTuple):
    """What a batch holds, counted on the host before the batch goes to the device.

    Args:
        impressions: N.
        tokens: events of all histories of the batch's requests.
        flops: useful floating-point operations of a step, 0 where they are not counted.
    """

    impressions: int
    tokens: int
    flops: float


class Delivered(NamedTuple):
    """A batch on the device.

    Args:
        batch: the batch.
        position: the reader's position to resume from once the batch is done.
        work: what it holds.
        waited: seconds that the host spent on reading and encoding it, waiting for the reader's processes included.
        following: the batch after it where it was asked for, None at the end. On CUDA its copy is queued on the stream
            for copies, and no other stream waits for it yet.
    """

    batch: Batch
    position: dict[str, Any]
    work: Work
    waited: float
    following: Batch | None = None


def device_batches(
    reader: LogReader,
    device: torch.device,
    flops: Callable[[Batch], float] | None = None,
    *,
    ahead: bool = False,
    copies: torch.cuda.Stream | None = None,
) -> Iterator[Delivered]:
    """Yields the rest of the reader's epoch.

    On CUDA a batch is copied from page-locked memory on a stream of its own while the one before it is computed.

    Args:
        reader: what to read.
        device: where the batches go.
        flops: useful operations of a step on a batch, which is in main memory; None leaves them uncounted.
        ahead: read a batch before the one before it is yielded, and say which follows.
        copies: the stream to copy on; by default one of its own.
    """
    if device.type == "cuda" and copies is None:
        copies = torch.cuda.Stream(device)
    waiting: Delivered | None = None
    copied: torch.cuda.Event | None = None
    source = iter(reader)
    while True:
        start = time.perf_counter()
        encoded = next(source, None)
        if encoded is None:
            break
        position = reader.state_dict()
        batch = Batch.from_encoded(encoded, reader.dataset.schema)
        work = work_of(batch, flops)
        arrived = None
        if copies is not None:
            with torch.cuda.stream(copies):
                batch = batch.pin_memory().to(device, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record(copies)
        delivered = Delivered(batch, position, work, time.perf_counter() - start)
        if copies is None and not ahead:
            yield delivered
            continue
        if waiting is not None:
            yield _ready(waiting, copied, batch if ahead else None)
        waiting, copied = delivered, arrived
    if waiting is not None:
        yield _ready(waiting, copied, None)


def work_of(batch: Batch, flops: Callable[[Batch], float] | None = None) -> Work:
    """Counts a batch that is in main memory."""
    tokens = sum(int(offsets[-1]) for offsets in batch.sequence_offsets.values())
    return Work(batch.num_impressions, tokens, flops(batch) if flops else 0.0)


def _ready(delivered: Delivered, copied: torch.cuda.Event | None, following: Batch | None) -> Delivered:
    """Makes the computing stream wait for the copy and keeps the memory until that stream is done with it."""
    if copied is not None:
        current = torch.cuda.current_stream()
        current.wait_event(copied)
        delivered.batch.record_stream(current)
    return delivered._replace(following=following)
