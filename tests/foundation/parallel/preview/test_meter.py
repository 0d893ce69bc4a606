"""Memory counted on fake tensors is the memory that autograd holds."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile

from foundation.parallel.preview.meter import COPIES, Meter

ROWS, WIDTH = 256, 128
BLOCK = ROWS * WIDTH * 4


def test_what_a_small_network_holds_is_counted_exactly() -> None:
    with FakeTensorMode():
        first, second = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        x = torch.empty(ROWS, WIDTH)
        with Meter([first.parameters(), second.parameters()], [x]) as meter:
            meter.region = "first"
            hidden = torch.sigmoid(first(x))  # sigmoid keeps its result, the product's is freed
            meter.region = "second"
            loss = second(hidden).sum()
            assert meter.held() == {"first": BLOCK, "second": 512}
            meter.region = "backward"
            loss.backward()
            weight = WIDTH * WIDTH * 4
            # At first the whole of the output's gradient; hidden is needed until the second weight has its gradient.
            assert set(meter.frontier) == {(0, 0), (0, weight), (weight, weight)}
            assert meter.frontier[0, 0] >= 2 * BLOCK
            assert meter.operators["first"] == 2  # mm and sigmoid; transposing a weight queues nothing
            assert meter.moved["first"] == 2 * BLOCK + weight + 2 * BLOCK
        del hidden, loss
        assert meter.held() == {}


def network() -> nn.Module:
    return nn.Sequential(
        nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 512), nn.LayerNorm(512), nn.Linear(512, 128), nn.Softmax(-1)
    )


def test_the_most_that_is_held_is_what_the_allocator_hands_out() -> None:
    model, x = network(), torch.randn(1024, 256)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        loss = model(x).square().sum()
        loss.backward()
    held = most = 0
    results = profiler.profiler.kineto_results  # type: ignore[union-attr]
    for event in sorted((e for e in results.events() if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    with FakeTensorMode():
        model, x = network(), torch.empty(1024, 256)
        with Meter([model.parameters()], [x]) as meter:
            loss = model(x).square().sum()
            loss.backward()
    planned = max(other + sum(gradients) for gradients, other in meter.frontier.items())
    assert most > 1e7 and planned == pytest.approx(most, rel=1e-3)


def test_copies_of_weights_for_products_are_named() -> None:
    with FakeTensorMode():
        layer = nn.Linear(WIDTH, WIDTH, bias=False)
        x = torch.empty(ROWS, WIDTH, requires_grad=True)  # else the weight is not needed again
        with Meter([layer.parameters()], [x]) as meter:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = layer(x)
            held = meter.held()
            assert held[COPIES] == WIDTH * WIDTH * 2
            assert sum(held.values()) == held[COPIES] + 2 * (BLOCK // 2), "the input in bfloat16, and the output"
            del y
