"""JSON values to the raw columns of `foundation.data.encoding`, with errors that name row and field."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from foundation.data.encoding import Column
from foundation.data.ids import spelt_integer
from serving.codec import shorten
from serving.errors import invalid

_WHOLE = frozenset({int, bool})
_NUMBER = frozenset({int, float, bool})
_LARGEST = 2**63 - 1
_NAMES: dict[type, str] = {int: "an integer", str: "a string"}


class Place:
    """The name of a value in error messages: `place(3)` -> "candidates[3].price"."""

    def __init__(self, name: str, row_name: Callable[[int], str]) -> None:
        self._name = name
        self._row_name = row_name

    def __call__(self, row: int) -> str:
        return f"{self._row_name(row)}.{self._name}"


def id_column(values: list[Any], place: Callable[[int], str], takes: type | None) -> Column:
    """Ids, integers or strings; None is missing.

    Args:
        values: one per row. place: names a row in errors.
        takes: int or str where only that type fits, but for strings that spell an integer, as clients write ids that
            JavaScript cannot hold; None where the first id of the column decides.
    """
    if takes is int and any(type(value) is str for value in values):
        spelt = [spelt_integer(value) if type(value) is str else value for value in values]
        values = [new if new is not None else old for new, old in zip(spelt, values, strict=True)]
    return _ids(values, place, takes)


def time_column(values: list[Any], place: Callable[[int], str]) -> Column:
    """Times as integers; None is missing."""
    return _ids(values, place, int)


def _ids(values: list[Any], place: Callable[[int], str], takes: type | None) -> Column:
    valid = _valid(values)
    given = values if valid is None else [value for value in values if value is not None]
    types = set(map(type, given))
    if types == {str} and takes is not int:
        return Column(_spread(np.array(given, object), valid, ""), valid)
    if types <= _WHOLE and takes is not str:
        return Column(_spread(_int64(given, values, place), valid, 0), valid)
    if types <= _NUMBER and takes is not str and all(float(value).is_integer() for value in given):
        whole = [int(value) for value in given]  # some clients write 5 as 5.0
        return Column(_spread(_int64(whole, values, place), valid, 0), valid)
    if not given:
        return Column(np.zeros(len(values), np.int64), valid)
    raise _wrong_id(values, place, takes)


def _wrong_id(values: list[Any], place: Callable[[int], str], takes: type | None) -> Exception:
    for index, value in enumerate(values):
        if value is None:
            continue
        text = type(value) is str
        number = type(value) in _NUMBER and float(value).is_integer()
        if not text and not number:
            wanted = "an integer or a string" if takes is None else _NAMES[takes]
        elif takes is None:
            takes = str if text else int
            continue
        elif text == (takes is str):
            continue
        else:
            wanted = _NAMES[takes]
        return invalid(f"{place(index)}: expected {wanted}, got {shorten(value)}")
    raise AssertionError("every id was of the right type")


def _int64(given: list[int], values: list[Any], place: Callable[[int], str]) -> np.ndarray:
    try:
        return np.array(given, np.int64)
    except OverflowError:
        index = next(i for i, v in enumerate(values) if v is not None and not -_LARGEST <= v <= _LARGEST)
        raise invalid(f"{place(index)}: {shorten(values[index])} does not fit into int64") from None


def number_column(values: list[Any], place: Callable[[int], str]) -> Column:
    """Numbers, true and false included; None is missing."""
    valid = _valid(values)
    given = values if valid is None else [value for value in values if value is not None]
    if not _NUMBER.issuperset(map(type, given)):
        index = next(i for i, v in enumerate(values) if v is not None and type(v) not in _NUMBER)
        raise invalid(f"{place(index)}: expected a number, got {shorten(values[index])}")
    return Column(_spread(np.array(given, np.float64), valid, 0.0), valid)


def list_column(values: list[Any], place: Callable[[int], str], takes: type | None) -> Column:
    """Lists of ids (`takes` int, str or None) or of numbers (`takes` float); None is an empty list."""
    lists = [[] if value is None else value for value in values]
    for index, value in enumerate(lists):
        if type(value) is not list:
            raise invalid(f"{place(index)}: expected a list, got {shorten(value)}")
    offsets = np.concatenate([[0], np.cumsum([len(value) for value in lists], dtype=np.int64)])
    flat = [element for value in lists for element in value]

    def element(position: int) -> str:
        row = int(np.searchsorted(offsets, position, side="right")) - 1
        return f"{place(row)}[{position - offsets[row]}]"

    inner = number_column(flat, element) if takes is float else id_column(flat, element, takes)
    return Column(inner.values, inner.valid, offsets.astype(np.int64))


def take_events(column: Column, keep: np.ndarray) -> Column:
    """A list column of one row from a flat column: the events at the positions `keep`, in that order."""
    valid = None if column.valid is None else column.valid[keep]
    return Column(column.values[keep], valid, np.array([0, len(keep)], np.int64))


def _valid(values: list[Any]) -> np.ndarray | None:
    """Which values are not None, bool ``[rows]``; None where all are."""
    if None not in values:
        return None
    return np.array([value is not None for value in values], bool)


def _spread(given: np.ndarray, valid: np.ndarray | None, fill: Any) -> np.ndarray:
    """The given values at their rows, `fill` at the others."""
    if valid is None:
        return given
    spread = np.full(len(valid), fill, given.dtype)
    spread[valid] = given
    return spread
