"""A rank's random batches with heavy-tailed histories, as they come, or balanced and bounded as by the reader.

A rank draws a window of requests, as many as the reader shuffles at once, and takes its first batches. Every window has
the same mean number of events, so that ranks and numbers of ranks differ only in how events are dealt to batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from foundation.data.balance import MARGIN, balanced, base_size, base_stops, fewest_batches, longest_history
from foundation.data.batch import Batch
from foundation.data.schema import Schema
from foundation.model.benchmarks.batches import random_batch

WINDOW = 65_536
"""Rows, as the reader's default."""
BASE = 128
"""Rows of a base batch, as the reader's default."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """What batches look like.

    Args:
        requests: of a batch.
        impressions: of a request.
        mean, longest, sigma: events of a request over all sequences: log-normal with this mean and sigma, cut there;
            shared out in proportion to the sequences' greatest lengths.
    """

    requests: int
    impressions: int
    mean: int
    longest: int
    sigma: float


def events_of_batches(shape: Shape, count: int, seed: int, *, balance: bool, most_events: int = 0) -> list[np.ndarray]:
    """Events of each request of a rank's first batches, float64 `[requests]` each; fewer requests where events bound.

    Args:
        count: batches.
        seed: of the rank.
        balance: deal base batches so that batches come close to the window's mean; else take requests as they come.
        most_events: of a batch: windows are cut into more batches, and the longest histories; needs `balance`.
    """
    whole = max(count * shape.requests, WINDOW // shape.impressions)
    drawn = np.random.default_rng(seed).lognormal(0.0, shape.sigma, whole)
    events = np.minimum(drawn * (shape.mean / np.exp(shape.sigma**2 / 2)), shape.longest)
    for _ in range(20):  # cutting lowers the mean
        events = np.minimum(events * (shape.mean / events.mean()), shape.longest)
    if not balance:
        return [events[number * shape.requests : (number + 1) * shape.requests] for number in range(count)]
    sizes = np.full(whole, shape.impressions, dtype=np.int64)
    rows = shape.requests * shape.impressions
    base = base_size(sizes, BASE, rows)
    batches = fewest_batches(len(base_stops(sizes, base)), base, rows)
    if most_events:
        batches = max(batches, -(-int(MARGIN * events.sum()) // most_events))
    order, stops = balanced(sizes, np.rint(events).astype(np.int64), base, rows, batches, (seed, 0))
    places = stops // shape.impressions
    found = [events[order[places[number] : places[number + 1]]] for number in range(count)]
    return [_cut(own, most_events) for own in found] if most_events else found


def heavy_batches(
    shape: Shape,
    schema: Schema,
    rows: Mapping[str, int],
    count: int,
    seed: int,
    *,
    balance: bool,
    most_events: int = 0,
) -> list[Batch]:
    """The batches, in main memory; arguments as in `events_of_batches`, with rows by table."""
    whole = sum(sequence.max_length for sequence in schema.sequences)
    found = []
    for number, events in enumerate(events_of_batches(shape, count, seed, balance=balance, most_events=most_events)):
        histories = {s.name: np.rint(events * s.max_length / whole).astype(np.int64) for s in schema.sequences}
        sizes = [shape.impressions] * len(events)
        encoded = random_batch(schema, sizes, rows, seed=1000 * seed + number, histories=cast(Any, histories))
        found.append(Batch.from_encoded(encoded, schema))
    return found


def _cut(events: np.ndarray, most: int) -> np.ndarray:
    """Histories cut to one length where together they are too long."""
    length = longest_history(np.rint(events).astype(np.int64), np.ones(len(events), dtype=np.int64), most)
    return events if length is None else np.minimum(events, length)
