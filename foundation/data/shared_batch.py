"""A batch in one piece of memory: where its arrays lie there, and the batch made of that again.

Describing a batch costs a tenth of pickling it, because its names are the same from batch to batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields

import numpy as np

from foundation.data.encoding import EncodedBatch, EncodedRows

_ALIGN = 64

Place = tuple[int, str, tuple[int, ...]]
"""Where an array begins in the memory, in bytes, the character of its dtype, and its shape."""

Names = tuple[tuple[str, str, str, int], ...]
"""For each array of a batch: side (or ``""``), field, key (or ``""``), and its number; some share one array."""

_SIDES = ("request", "item")
_KEYED = ("ids", "lengths", "weights", "times")
_PLAIN = tuple(f.name for f in fields(EncodedBatch) if f.name not in _SIDES)


class Arena:
    """Makes arrays one behind the other in the first ``used`` bytes of a piece of memory.

    ``full`` says that one did not fit and lies elsewhere.

    Args:
        memory: uint8 ``[bytes]``.
    """

    def __init__(self, memory: np.ndarray) -> None:
        self._memory = memory
        self.used = 0
        self._made: dict[int, tuple[int, np.ndarray]] = {}
        self.full = False

    def new(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """An uninitialised array, in the memory if it fits."""
        start = self.used
        end = start + math.prod(shape) * dtype.itemsize
        if end > len(self._memory):
            self.full = True
            return np.empty(shape, dtype)
        self.used = -(-end // _ALIGN) * _ALIGN
        array: np.ndarray = np.ndarray(shape, dtype, self._memory, start)
        self._made[id(array)] = start, array
        return array

    def copy(self, array: np.ndarray) -> np.ndarray:
        """A copy of an array."""
        made = self.new(array.shape, array.dtype)
        made[...] = array
        return made

    def place(self, array: np.ndarray) -> Place:
        """The place of an array that was made here."""
        return self._made[id(array)][0], array.dtype.char, array.shape


def size_of(arrays: Sequence[np.ndarray]) -> int:
    """Bytes that suffice for copies of the arrays in an arena."""
    return sum(array.nbytes + _ALIGN for array in arrays)


def flatten(batch: EncodedBatch) -> tuple[Names, list[np.ndarray]]:
    """The names of a batch and its arrays, each once."""
    arrays: list[np.ndarray] = []
    numbers: dict[int, int] = {}
    names: list[tuple[str, str, str, int]] = []

    def add(side: str, field: str, key: str, array: np.ndarray) -> None:
        number = numbers.setdefault(id(array), len(arrays))
        if number == len(arrays):
            arrays.append(array)
        names.append((side, field, key, number))

    for side in _SIDES:
        rows: EncodedRows = getattr(batch, side)
        add(side, "dense", "", rows.dense)
        for field in _KEYED:
            for key, array in getattr(rows, field).items():
                add(side, field, key, array)
    for field in _PLAIN:
        add("", field, "", getattr(batch, field))
    return tuple(names), arrays


def rebuild(names: Names, places: Sequence[Place], memory: np.ndarray) -> EncodedBatch:
    """The batch whose arrays lie in ``memory``, uint8 ``[bytes]``; they are views of it."""
    arrays = [np.ndarray(shape, dtype, memory, start) for start, dtype, shape in places]
    sides: dict[str, dict[str, dict[str, np.ndarray]]] = {s: {field: {} for field in _KEYED} for s in _SIDES}
    dense: dict[str, np.ndarray] = {}
    plain: dict[str, np.ndarray] = {}
    for side, field, key, number in names:
        if not side:
            plain[field] = arrays[number]
        elif field == "dense":
            dense[side] = arrays[number]
        else:
            sides[side][field][key] = arrays[number]
    request, item = (EncodedRows(rows=len(dense[s]), dense=dense[s], **sides[s]) for s in _SIDES)
    return EncodedBatch(request=request, item=item, **plain)
