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
    """

    batch: Batch
    position: dict[str, Any]
    work: Work
    waited: float


def device_batches(
    reader: LogReader, device: torch.device, flops: Callable[[Batch], float] | None = None
) -> Iterator[Delivered]:
    """Yields the rest of the reader's epoch.

    On CUDA a batch is copied from page-locked memory on a stream of its own while the one before it is computed.

    Args:
        reader: what to read.
        device: where the batches go.
        flops: useful operations of a step on a batch, which is in main memory; None leaves them uncounted.
    """
    copies = torch.cuda.Stream(device) if device.type == "cuda" else None
    ahead: Delivered | None = None
    source = iter(reader)
    while True:
        start = time.perf_counter()
        encoded = next(source, None)
        if encoded is None:
            break
        position = reader.state_dict()
        batch = Batch.from_encoded(encoded, reader.dataset.schema)
        work = work_of(batch, flops)
        if copies is None:
            yield Delivered(batch, position, work, time.perf_counter() - start)
            continue
        with torch.cuda.stream(copies):
            batch = batch.pin_memory().to(device, non_blocking=True)
        delivered = Delivered(batch, position, work, time.perf_counter() - start)
        if ahead is not None:
            yield _ready(ahead, copies)
        ahead = delivered
    if ahead is not None:
        assert copies is not None
        yield _ready(ahead, copies)


def work_of(batch: Batch, flops: Callable[[Batch], float] | None = None) -> Work:
    """Counts a batch that is in main memory."""
    tokens = sum(int(offsets[-1]) for offsets in batch.sequence_offsets.values())
    return Work(batch.num_impressions, tokens, flops(batch) if flops else 0.0)


def _ready(ahead: Delivered, copies: torch.cuda.Stream) -> Delivered:
    """Makes the computing stream wait for the copy and keeps the memory until that stream is done with it."""
    current = torch.cuda.current_stream()
    current.wait_stream(copies)
    ahead.batch.record_stream(current)
    return ahead
