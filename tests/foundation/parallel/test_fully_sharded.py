"""What the benchmark of fully sharded replicas compares: only another order of sums, or a fault, differs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from foundation.parallel import replica_parts
from foundation.parallel.benchmarks.equality import TOLERANCE
from foundation.parallel.benchmarks.fully_sharded import differences
from foundation.parallel.benchmarks.random_batches import Sizes, backwards, random_batch
from foundation.parallel.benchmarks.scaling import PRESETS
from tests.foundation.parallel.ranks import on_ranks

SIZES = Sizes(users=100, items=100, dim=16, requests=6, history=4, tail=0.0, longest=8)
SMALL = replace(PRESETS["tiny"], sizes=SIZES)


def compared() -> list[dict[str, float]]:
    device = torch.device("cpu")
    found = [differences(SMALL, way, device, steps=2) for way in ("fully sharded", "whole backwards")]
    keep = replica_parts._Rows._keep_part

    def rounded(rows: replica_parts._Rows) -> None:
        keep(rows)
        rows._part = rows._part.bfloat16().float()

    with mock.patch.object(replica_parts._Rows, "_keep_part", rounded):
        return [*found, differences(SMALL, "fully sharded", device, steps=2)]


@pytest.mark.distributed
@pytest.mark.timeout(600)
def test_fully_sharded_replicas_are_compared_with_whole_ones(tmp_path: Path) -> None:
    for same, order, rounded in on_ranks(compared, 2, tmp_path):
        assert set(same) == {"loss", "row", "sum", "dense"}
        assert set(same.values()) == {0.0}
        assert 0.0 < max(order.values()) < TOLERANCE
        assert rounded["row"] > TOLERANCE


def test_backwards_keeps_what_belongs_to_a_request() -> None:
    batch = random_batch(replace(SIZES, tail=1.0), seed=0)
    turned = backwards(batch)
    np.testing.assert_array_equal(turned.request_time, batch.request_time[::-1])
    np.testing.assert_array_equal(turned.request_index, batch.request_index)
    events = np.repeat(np.arange(SIZES.requests), batch.request.lengths["shown.item"])
    expected = [batch.request.ids["shown.item"][events == r] for r in reversed(range(SIZES.requests))]
    np.testing.assert_array_equal(turned.request.ids["shown.item"], np.concatenate(expected))
    for request in range(SIZES.requests):
        own, other = batch.request_index == request, turned.request_index == SIZES.requests - 1 - request
        np.testing.assert_array_equal(turned.labels[other], batch.labels[own])
        np.testing.assert_array_equal(turned.item.ids["item_id"][other], batch.item.ids["item_id"][own])
    again = backwards(turned)
    for name in ("labels", "weight", "surface", "impression_id"):
        np.testing.assert_array_equal(getattr(again, name), getattr(batch, name))
