"""Raw columns as numpy arrays, also lists, and what the encoder does with them before it looks at values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from foundation.data.jagged import jagged_index


class EncodingError(ValueError):
    """Values that cannot become model inputs; the message names the column."""


@dataclass(frozen=True, slots=True)
class Column:
    """A raw column. A list column has ``offsets`` int64 ``[rows + 1]`` into ``values``; a null list is empty.

    ``valid`` is a bool mask over ``values`` (``None``: all valid). With a ``dictionary`` (distinct strings, as
    Arrow stores them), ``values`` are positions in it, so that each distinct string is looked up only once.
    """

    values: np.ndarray
    valid: np.ndarray | None = None
    offsets: np.ndarray | None = None
    dictionary: np.ndarray | None = None


def clip(
    column: Column, name: str, limit: int, keep: Literal["latest", "earliest"]
) -> tuple[Column, np.ndarray | None]:
    """At most ``limit`` values per row, and the positions kept (``None``: all)."""
    offsets = offsets_of(column, name)
    lengths = np.diff(offsets)
    if not len(lengths) or (lengths.max() <= limit and offsets[0] == 0):
        return column, None
    kept = np.minimum(lengths, limit)
    starts = offsets[1:] - kept if keep == "latest" else offsets[:-1]
    index = jagged_index(starts, kept)
    clipped = np.concatenate([[0], np.cumsum(kept)])
    selected = select(column, index)
    return Column(selected.values, selected.valid, clipped, column.dictionary), index


def select(column: Column, index: np.ndarray | None) -> Column:
    """The values at these positions of a column, without offsets (``None``: all of them)."""
    if index is None:
        return column
    valid = None if column.valid is None else column.valid[index]
    return Column(column.values[index], valid, dictionary=column.dictionary)


def check_aligned(offsets: np.ndarray, whole: np.ndarray, name: str, first: str) -> None:
    """Raises EncodingError unless column ``name`` has as many values in each row as column ``first``."""
    if not np.array_equal(offsets, whole):
        lengths, want = np.diff(offsets), np.diff(whole)
        row = int(np.flatnonzero(lengths != want)[0]) if len(lengths) == len(want) else 0
        raise EncodingError(
            f"{name}: row {row} has {lengths[row] if len(lengths) else 0} events, "
            f"but {first} has {want[row] if len(want) else 0}; the lists of a sequence must be aligned"
        )


def column_of(columns: Mapping[str, Column], name: str) -> Column:
    """A column by its name. Raises EncodingError if it is absent."""
    if name not in columns:
        raise EncodingError(f"{name}: column is missing")
    return columns[name]


def offsets_of(column: Column, name: str) -> np.ndarray:
    """The offsets of a list column. Raises EncodingError for another."""
    if column.offsets is None:
        raise EncodingError(f"{name}: expected a list column")
    return column.offsets


def as_floats(values: np.ndarray, name: str) -> np.ndarray:
    """Numbers as float64. Raises EncodingError naming the column for anything else."""
    if values.dtype.kind not in "biuf":
        raise EncodingError(f"{name}: expected numbers, got {values.dtype}")
    return values.astype(np.float64, copy=False)
