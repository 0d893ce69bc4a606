"""The kernels of block attention that go from block to block, run on the CPU as they are written: ``emulated.py``."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from kernels.block_attention import reference
from kernels.common.rows import rounds
from tests.kernels import emulated
from tests.kernels.emulated import Machine, Pointer

D, SCALE = 8, 0.4


@pytest.mark.parametrize("seed", range(24))
def test_copies_that_arrive_late(seed: int) -> None:
    draw = random.Random(seed)
    heads, group, columns = draw.choice((1, 2, 3)), draw.choice((1, 2)), draw.randrange(3)
    lengths = [draw.choice((0, 1, 64, 65, 128, draw.randrange(300))) for _ in range(draw.choice((3, 40)))] + [20]
    rng = np.random.default_rng(seed)
    where = np.cumsum([0, *lengths])
    q, grad = rng.normal(size=(2, where[-1], heads * group, D))
    k, v = rng.normal(size=(2, where[-1], heads, D))
    positions, frequencies = rng.normal(size=(where[-1], max(columns, 1))), rng.normal(size=D // 2)
    bad = draw.randrange(3)  # whose NaN no other sequence may see
    for x in (q, k, v, grad):
        x[where[bad] : where[bad + 1]] = np.nan
    constants = {"HEADS": heads * group, "GROUP": group, "D": D, "COLUMNS": columns, "ROUNDS": rounds(len(lengths))}
    strides = (heads * group * D, D, heads * D, D, heads * D, D)
    blocks = int(where[-1]) // reference.BLOCK + len(lengths)
    rest = (Pointer(emulated.array(where)), Pointer(positions.reshape(-1)), Pointer(frequencies), len(lengths), blocks)
    programs = draw.choice((1, 3, 14, 60))

    def run(name: str, given: tuple[Any, ...], results: tuple[Any, ...], strides: Any, **more: int) -> None:
        machine = Machine(seed)
        tensors = [Pointer(x.reshape(-1)) for x in (*given, *results)]
        machine.launch(
            emulated.kernel(name, machine), programs, *tensors, *rest, SCALE, *strides, **{**constants, **more}
        )

    exact: Any = [torch.from_numpy(x).nan_to_num() for x in (q, k, v, grad)]
    turn = tuple(map(torch.from_numpy, (positions, frequencies))) if columns else (None, None)
    options: Any = (torch.from_numpy(where), *turn, SCALE)
    others = np.repeat(np.arange(len(lengths)) != bad, lengths)
    out = np.full_like(q, np.nan)
    run("forward_kernel", (q, k, v), (out,), strides)
    np.testing.assert_allclose(out[others], reference.forward(*exact[:3], *options)[others], rtol=1e-9, atol=1e-12)
    if group > 1:
        return
    gradients = tuple(np.full_like(q, np.nan) for _ in "qkv")
    del constants["GROUP"]
    run("backward_kernel", (q, k, v, grad), gradients, (*strides, heads * D, D), PLACES=draw.choice((1, 2)))
    for got, want in zip(gradients, reference.backward(exact[3], *exact[:3], *options), strict=True):
        np.testing.assert_allclose(got[others], want[others], rtol=1e-9, atol=1e-12)
