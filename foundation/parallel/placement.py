"""On which rank of a table group the rows of each table lie: by rows over all of them, or whole on one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class TableSize:
    """A table's name, rows, and width of a row."""

    name: str
    rows: int
    dim: int


def place_tables(tables: Iterable[TableSize], row_wise_from: int, ranks: int) -> dict[str, int | None]:
    """The rank of each table, None for one that is cut by rows over all.

    Large tables are cut; the others are placed whole, the largest first, each on the rank that holds least so far.

    Args:
        tables: with names of their own.
        row_wise_from: rows from which a table is cut.
        ranks: of a group.
    """
    held = np.zeros(ranks, dtype=np.int64)
    owner: dict[str, int | None] = {}
    for table in sorted(tables, key=lambda t: (-t.rows * t.dim, t.name)):
        if ranks > 1 and table.rows >= max(row_wise_from, ranks):  # to deal ids by row, TorchRec waits for the device
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
