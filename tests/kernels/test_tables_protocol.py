"""The kernels of two tables that are scheduled by hand, run on the CPU as they are written: ``emulated.py``."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")

from kernels.jagged.tables_hopper import MARK
from tests.kernels import emulated
from tests.kernels.emulated import Machine, Pointer

TILE, GROUPS, WARPS = 16, 32, 4


@pytest.mark.parametrize("seed", range(24))
def test_rows_that_arrive_late(seed: int) -> None:
    """All rows, of groups that are empty, small or large, at all places, in programs with and without tiles."""
    draw, rng = random.Random(seed), np.random.default_rng(seed)
    rows, width, block = draw.choice((1, 16, 300, 1500)), draw.choice((3, 8)), draw.choice((4, 8))
    parts, programs = draw.choice((1, 2)), draw.choice((1, 3, 40))
    x = rng.normal(size=(rows, width + 1))
    big = rng.choice(rng.integers(2048, size=draw.choice((1, 5, 900))), size=rows)
    small = rng.integers(draw.choice((1, 64)), size=rows)
    big[-1] = draw.choice((0, 2047))
    taken, ends = ordered(big, small, parts, draw)
    if seed % 2:  # equally many tiles for all programs
        programs = draw.choice([n for n in range(1, 41) if ends[-1] % n == 0])
    check_order(taken, ends, big, small)
    columns = -(-width // block)
    partial = np.full((programs + GROUPS - 1, 64, width), np.nan)
    least = np.full((programs, 64, width), np.nan)
    tensors = (x, taken, ends, partial, least)
    constants = {"WIDTH": width, "BLOCK": block, "TILE": TILE, "STAGES": draw.choice((2, 3, 4))}
    run("sum_kernel", seed, programs * columns, tensors, programs, width + 1, **constants)
    share = -(-int(ends[-1]) // programs)
    want = np.zeros((2048 + 64, width))
    np.add.at(want, big, x[:, :width])
    np.add.at(want, 2048 + small, x[:, :width])
    got = np.zeros((GROUPS, 64, width))
    for group, (begin, end) in enumerate(zip((0, *ends[:-1]), ends, strict=True)):
        if end > begin:
            got[group] = partial[begin // share + group : (end - 1) // share + group + 1].sum(0)
    np.testing.assert_allclose(got.reshape(2048, width), want[:2048], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(least[: -(-int(ends[-1]) // share)].sum(0), want[2048:], rtol=1e-9, atol=1e-12)


def run(name: str, seed: int, programs: int, tensors: tuple[Any, ...], *numbers: int, **constants: int) -> None:
    machine = Machine(seed)
    pointers = [Pointer(emulated.array(x.reshape(-1))) for x in tensors]
    machine.launch(emulated.kernel(name, machine), programs, *pointers, *numbers, **constants)


def ordered(big: Any, small: Any, parts: int, draw: random.Random) -> tuple[Any, Any]:
    """What the two kernels that group rows make of them."""
    rows, step = len(big), WARPS * 32 * parts
    chunk = step * draw.choice((1, 2, 5))
    programs = -(-rows // chunk)
    first = draw.choice((0, 64))  # of the large table
    index = np.stack([big + first, small + (0 if first else 2048)], axis=1)
    keys, totals = np.full(rows, -1), np.full((programs, GROUPS), -1)
    counts, ends = np.full((programs, WARPS, GROUPS), -1), np.full(GROUPS, -1)
    taken = np.full((-(-rows // TILE) + GROUPS) * TILE, -1)
    columns = [Pointer(emulated.array(index.reshape(-1)), i) for i in range(2)]
    machine = Machine(0)
    given = [Pointer(emulated.array(x.reshape(-1))) for x in (keys, totals, counts)]
    numbers = (rows, chunk, first, 0 if first else 2048, 2)
    machine.launch(emulated.kernel("count_kernel", machine), programs, *columns, *given, *numbers, PARTS=parts)
    counted = 1 << (programs - 1).bit_length()
    rest = {"TILE": TILE, "COUNTED": counted, "PARTS": parts}
    run("order_kernel", 0, programs, (keys, totals, counts, ends, taken), rows, chunk, **rest)
    return taken, ends


def check_order(taken: Any, ends: Any, big: Any, small: Any) -> None:
    """Every row once, in tiles of its group, with what it took, in the order of the rows."""
    tiles = taken[: ends[-1] * TILE]
    row = tiles & 0xFFFFFFFF
    real = row != 0xFFFFFFFF
    row = row[real]
    np.testing.assert_array_equal(np.sort(row), np.arange(len(big)))
    np.testing.assert_array_equal(tiles[real] >> 32 & 0xFFFF, MARK.value + big[row] % 64)
    np.testing.assert_array_equal(tiles[real] >> 48, MARK.value + small[row])
    group = np.repeat(np.arange(GROUPS), np.diff(ends, prepend=0) * TILE)[real]
    np.testing.assert_array_equal(group, big[row] // 64)
    np.testing.assert_array_equal(row, np.argsort(big // 64, kind="stable"))
    assert (tiles[~real] == 0xFFFFFFFF).all(), "no row takes nothing"
