"""Memory counted on fake tensors is the memory that autograd holds."""

from __future__ import annotations

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

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
