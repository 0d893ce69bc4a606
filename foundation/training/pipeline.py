"""Batches on the device, one ahead of the computation, each with the reader's position after it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from foundation.data.batch import Batch
from foundation.data.logs import LogReader

Positioned = tuple[Batch, dict[str, Any]]


def device_batches(reader: LogReader, device: torch.device) -> Iterator[Positioned]:
    """Yields the rest of the reader's epoch.

    On CUDA a batch is copied from page-locked memory on a stream of its own while the one before it is computed.

    Args:
        reader: what to read.
        device: where the batches go.

    Yields:
        A batch, and the position to resume from once that batch is done.
    """
    schema = reader.dataset.schema
    if device.type != "cuda":
        for encoded in reader:
            yield Batch.from_encoded(encoded, schema), reader.state_dict()
        return
    copies = torch.cuda.Stream(device)
    ahead: Positioned | None = None
    for encoded in reader:
        position = reader.state_dict()
        with torch.cuda.stream(copies):
            batch = Batch.from_encoded(encoded, schema).pin_memory().to(device, non_blocking=True)
        if ahead is not None:
            yield _ready(ahead, copies)
        ahead = batch, position
    if ahead is not None:
        yield _ready(ahead, copies)


def _ready(ahead: Positioned, copies: torch.cuda.Stream) -> Positioned:
    """Makes the computing stream wait for the copy and keeps the memory until that stream is done with it."""
    current = torch.cuda.current_stream()
    current.wait_stream(copies)
    ahead[0].record_stream(current)
    return ahead
