"""Draws the rows of tables where they lie, the same at any number of ranks.

A table is drawn in blocks of rows, each from a generator of its own, so a rank draws only the blocks that it holds a
part of, and never holds more of a table than its share and one block.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torchrec.distributed.model_parallel import DistributedModelParallel

from foundation.parallel.tables import table_weights

BLOCK = 65_536
"""Rows of a block; another number gives other rows."""

MOST_ON_HOST = 1 << 28
"""Tables of a CUDA run with more numbers than these are drawn on the devices. Drawn in main memory they would be those
of a run on CPU, but take minutes and as much memory."""


@torch.no_grad()
def draw_tables(model: DistributedModelParallel, std_of: Callable[[str], float], seed: int) -> None:
    """Draws every table from a normal distribution, on the devices that hold it.

    The numbers depend on the seed, the tables' names and the kind of device, not on who holds which rows.

    Args:
        model: the sharded model.
        std_of: standard deviation of a table by its name in the unsharded model.
        seed: not negative.
    """
    for number, (name, table) in enumerate(sorted(table_weights(model).items())):
        for piece in table.pieces:
            rows, columns = piece.place
            draw_rows(piece.tensor, rows.start, table.shape, columns, std_of(name), (seed, number))


def draw_rows(
    rows: torch.Tensor, first: int, shape: tuple[int, ...], columns: slice, std: float, key: tuple[int, ...]
) -> None:
    """Fills ``rows [n, c]``, the rows from `first` on and some columns of a table of that shape.

    Args:
        key: what tells tables and seeds apart.
    """
    if std == 0.0:
        rows.zero_()
        return
    total, dim = shape
    generator = torch.Generator(device=rows.device)
    last = first + rows.shape[0]
    for block in range(first // BLOCK, -(-last // BLOCK)):
        start, end = block * BLOCK, min((block + 1) * BLOCK, total)
        generator.manual_seed(int(np.random.SeedSequence([*key, block]).generate_state(1, np.uint64)[0]) >> 1)
        drawn = torch.empty(end - start, dim, dtype=rows.dtype, device=rows.device).normal_(
            0.0, std, generator=generator
        )
        own = slice(max(first, start), min(last, end))
        rows[own.start - first : own.stop - first] = drawn[own.start - start : own.stop - start, columns]
