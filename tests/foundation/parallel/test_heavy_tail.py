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
