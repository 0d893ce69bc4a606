"""On which rank of a table group the rows of each table lie: by rows over all of them, or whole on one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class TableSize:
    """A table's name, rows, width of a row, and whether rows are summed where they lie (bags)."""

    name: str
    rows: int
    dim: int
    pooled: bool = False


def place_tables(tables: Iterable[TableSize], row_wise_from: int, ranks: int) -> dict[str, int | None]:
    """The rank of each table, None for one that is cut by rows over all.

    A rank that holds a whole table sends its rows to all ranks of the group while these wait: up to as many as the
    table has, to each. Tables of which that would be too many are cut; the others are placed whole, the largest first,
    each on the rank that holds least so far. Bags are sent summed: a cut would make all ranks send as much.

    Args:
        tables: with names of their own.
        row_wise_from: rows times ranks from which a table is cut; for bags rows.
        ranks: of a group.
    """
    held = np.zeros(ranks, dtype=np.int64)
    owner: dict[str, int | None] = {}
    for table in sorted(tables, key=lambda t: (-t.rows * t.dim, t.name)):
        sent = table.rows if table.pooled else table.rows * ranks
        if ranks > 1 and sent >= row_wise_from:  # to deal ids by row, TorchRec waits for the device
            owner[table.name] = None
            continue
        rank = int(held.argmin())
        held[rank] += table.rows * table.dim
        owner[table.name] = rank
    return owner


def rows_of_ranks(table: TableSize, owner: int | None, ranks: int) -> np.ndarray:
    """Rows of a table that each rank holds, int64 `[ranks]`; cut as TorchRec does it: the last may have fewer."""
    held = np.zeros(ranks, dtype=np.int64)
    if owner is None:
        block = -(-table.rows // ranks)
        return np.clip(table.rows - np.arange(ranks, dtype=np.int64) * block, 0, block)
    held[owner] = table.rows
    return held
