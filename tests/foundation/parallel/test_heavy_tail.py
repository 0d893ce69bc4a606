"""Batches of the benchmarks of several ranks."""

from __future__ import annotations

import numpy as np
import pytest

from foundation.data.schema import Schema
from foundation.model.benchmarks.presets import table_rows
from foundation.parallel.benchmarks.heavy_tail import Shape, events_of_batches, heavy_batches

SHAPE = Shape(requests=64, impressions=16, mean=512, longest=4096, sigma=1.0)


def heaviest(balance: bool, ranks: int = 4) -> float:
    """Events of the heaviest rank over the mean, over steps."""
    events = np.array([[e.sum() for e in events_of_batches(SHAPE, 4, rank, balance=balance)] for rank in range(ranks)])
    return float((events.max(0) / events.mean(0)).mean())


def test_balanced_batches_of_ranks_are_nearly_equal_and_others_are_not() -> None:
    assert heaviest(True) < 1.03 < 1.1 < heaviest(False)


def test_capped_batches_are_as_balanced_and_none_is_heavier_than_the_mean() -> None:
    most = SHAPE.requests * SHAPE.mean
    capped = events_of_batches(SHAPE, 60, 0, balance=True, most_events=most)
    whole = events_of_batches(SHAPE, 60, 0, balance=True)
    events = np.array([own.sum() for own in capped])
    assert max(np.rint(own).sum() for own in capped) <= most < max(own.sum() for own in whole)
    assert events.max() < 1.05 * events.mean() and events.mean() > 0.9 * most
    assert max(len(own) for own in capped) <= SHAPE.requests


@pytest.mark.parametrize("balance", [True, False])
def test_batches_have_the_requests_and_on_average_the_events_that_are_asked_for(balance: bool) -> None:
    found = events_of_batches(SHAPE, 64, 0, balance=balance)
    assert [len(events) for events in found] == [64] * 64
    assert np.concatenate(found).mean() == pytest.approx(512, rel=0.01)  # 64 batches are a window
    assert np.concatenate(found).max() <= 4096
    again = events_of_batches(SHAPE, 64, 0, balance=balance)
    assert all(np.array_equal(a, b) for a, b in zip(found, again, strict=True))


def test_batches_hold_what_was_drawn() -> None:
    schema = Schema.load("configs/datasets/streams.yaml")
    shape = Shape(requests=8, impressions=2, mean=64, longest=256, sigma=1.0)
    rows = table_rows(schema, 100)
    for batch, events in zip(
        heavy_batches(shape, schema, rows, 2, 1, balance=True),
        events_of_batches(shape, 2, 1, balance=True),
        strict=True,
    ):
        assert (batch.num_requests, batch.num_impressions) == (8, 16)
        held = sum(int(offsets[-1]) for offsets in batch.sequence_offsets.values())
        assert held == pytest.approx(events.sum(), abs=0.5 * 8 * len(schema.sequences))
