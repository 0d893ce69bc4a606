"""From raw ids to embedding rows, vectorised over numpy arrays and free of torch.

Row 0 is "missing", row 1 is "unknown", known ids start at row 2. The same code runs in training and serving.
"""

from __future__ import annotations

import re
from typing import Literal

import numpy as np
import xxhash

from foundation.data.schema import FIRST_ROW, UNKNOWN_ROW

_PRIME1 = np.uint64(0x9E3779B185EBCA87)
_PRIME2 = np.uint64(0xC2B2AE3D27D4EB4F)
_PRIME3 = np.uint64(0x165667B19E3779F9)
_PRIME4 = np.uint64(0x85EBCA77C2B2AE63)
_PRIME5 = np.uint64(0x27D4EB2F165667C5)

# A vocabulary of integers whose span is at most this many times its size is looked up in a plain array.
_DIRECT_SPAN = 16
_DIRECT_LEAST = 1 << 22


IdType = Literal["integer", "string"]
_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,18}")


def canonical_ids(values: np.ndarray, name: str) -> np.ndarray:
    """Ids in one of the two forms the project knows: int64, or an object/unicode array of strings.

    Booleans and whole floats become int64. Raises ValueError naming ``name`` for anything else.
    """
    kind = values.dtype.kind
    if kind in "US":
        return values.astype(str)
    if kind == "O":
        wrong = next((v for v in values if not isinstance(v, str)), None)
        if wrong is not None:
            raise ValueError(f"{name}: expected string ids, got {wrong!r} ({type(wrong).__name__})")
        return values
    if kind in "bi":
        return values.astype(np.int64, copy=False)
    if kind == "u":
        if values.size and int(values.max()) > np.iinfo(np.int64).max:
            raise ValueError(f"{name}: id {values.max()} does not fit into int64; store ids as int64 or string")
        return values.astype(np.int64)
    if kind == "f":
        with np.errstate(invalid="ignore"):
            whole = values.astype(np.int64)
        bad = whole != values
        if bad.any():
            raise ValueError(f"{name}: ids must be whole numbers or strings, got {values[bad][0]:g}")
        return whole
    raise ValueError(f"{name}: ids must be integers or strings, got {values.dtype}")


def id_type(ids: np.ndarray) -> IdType:
    """The type of canonical ids."""
    return "integer" if ids.dtype.kind == "i" else "string"


def spelt_integer(text: str) -> int | None:
    """The int64 that ``text`` spells as Python prints it; None for any other text, such as ``007`` or ``7.0``."""
    number = int(text) if _INTEGER.fullmatch(text) else None
    return number if number is not None and -(2**63) <= number < 2**63 else None


def as_id_type(ids: np.ndarray, wanted: IdType | None, name: str, table: str) -> np.ndarray:
    """Canonical ids ``[n]`` as the type that a table was fitted with; ``None``: as they are.

    A string that spells an integer is that integer. An integer is no string: ``7`` may stand for ``"7"`` or ``"007"``.

    Raises:
        ValueError: an id that has no such form; the message names ``name``, the table and the id.
    """
    if wanted in (None, id_type(ids)) or not len(ids):
        return ids
    if wanted == "string":
        raise ValueError(
            f"{name}: table {table} holds string ids, got the integer {ids[0]}; "
            "give ids as strings, spelt as in the training rows"
        )
    numbers = [spelt_integer(text) for text in ids.tolist()]
    if None in numbers:
        text = str(ids[numbers.index(None)])
        raise ValueError(f"{name}: table {table} holds integer ids, got the string {text!r:.60}")
    return np.array(numbers, dtype=np.int64)


def xxhash64_int64(values: np.ndarray, seed: int) -> np.ndarray:
    """xxHash64 of each value's 8 little-endian bytes, as uint64 ``[n]``.

    Equal to ``xxhash.xxh64_intdigest(int(v).to_bytes(8, "little", signed=True), seed)`` for each value.
    """
    with np.errstate(over="ignore"):
        lane = values.astype(np.int64, copy=False).view(np.uint64) * _PRIME2
        lane = _rotate_left(lane, 31) * _PRIME1
        digest = (np.uint64(seed) + _PRIME5 + np.uint64(8)) ^ lane
        digest = _rotate_left(digest, 27) * _PRIME1 + _PRIME4
        digest = (digest ^ (digest >> np.uint64(33))) * _PRIME2
        digest = (digest ^ (digest >> np.uint64(29))) * _PRIME3
        return np.asarray(digest ^ (digest >> np.uint64(32)), dtype=np.uint64)


def xxhash64(values: np.ndarray, seed: int) -> np.ndarray:
    """xxHash64 of canonical ids: integers by their 8 bytes, strings by their UTF-8 bytes; uint64 ``[n]``."""
    if values.dtype.kind == "i":
        return xxhash64_int64(values, seed)
    digests = (xxhash.xxh64_intdigest(v.encode(), seed) for v in values.tolist())
    return np.fromiter(digests, dtype=np.uint64, count=len(values))


def id_hash(values: np.ndarray, name: str) -> np.ndarray:
    """A stable int64 for each id: integers as they are, strings by xxHash64. Used to group rows by user."""
    ids = canonical_ids(values, name)
    return ids if ids.dtype.kind == "i" else xxhash64(ids, 0).view(np.int64)


def hash_rows(values: np.ndarray, rows: int, seed: int) -> np.ndarray:
    """Rows of a hash table with ``rows`` rows in all: int64 in ``[2, rows)``."""
    spread = xxhash64(values, seed) % np.uint64(rows - FIRST_ROW)
    return spread.astype(np.int64) + FIRST_ROW


def range_rows(values: np.ndarray, rows: int) -> np.ndarray:
    """Rows of a range table: id ``i`` in ``[0, rows - 2)`` is row ``i + 2``, any other id is unknown."""
    # As unsigned numbers, negative ids are beyond every table.
    outside = values.view(np.uint64) >= np.uint64(rows - FIRST_ROW)
    found = values + FIRST_ROW
    if outside.any():
        # Several times faster than an assignment by mask.
        found *= ~outside
        found += UNKNOWN_ROW * outside
    return found


class VocabularyIndex:
    """Looks ids up in a sorted vocabulary; id number ``i`` of it is row ``i + 2``, others are unknown.

    Args:
        vocabulary: sorted distinct ids ``[n]``, int64 or unicode.
    """

    def __init__(self, vocabulary: np.ndarray) -> None:
        self.vocabulary = vocabulary
        self._direct: np.ndarray | None = None
        self._hashed: _HashTable | None = None
        self._rows: dict[str, int] = {}
        if vocabulary.dtype.kind != "i":
            self._rows = {v: i + FIRST_ROW for i, v in enumerate(vocabulary.tolist())}
        elif len(vocabulary):
            # The first and the last slot of the array are for ids below and above all.
            self._base = max(int(vocabulary[0]) - 1, np.iinfo(np.int64).min)
            span = int(vocabulary[-1]) - self._base
            if span <= max(_DIRECT_LEAST, _DIRECT_SPAN * len(vocabulary)) and self._base < vocabulary[0]:
                self._direct = np.full(span + 2, UNKNOWN_ROW, dtype=np.int32)
                self._direct[vocabulary - self._base] = np.arange(len(vocabulary)) + FIRST_ROW
            else:
                self._hashed = _HashTable(vocabulary)

    @property
    def holds_strings(self) -> bool:
        """Whether the ids are strings."""
        return self.vocabulary.dtype.kind != "i"

    def rows(self, values: np.ndarray) -> np.ndarray:
        """Rows of canonical ids ``[n]``: int32 or int64 ``[n]``."""
        if self.holds_strings:
            found = (self._rows.get(v, UNKNOWN_ROW) for v in values.tolist())
            return np.fromiter(found, dtype=np.int64, count=len(values))
        if not len(self.vocabulary):
            return np.full(len(values), UNKNOWN_ROW, dtype=np.int64)
        if self._direct is not None:
            # Where the difference overflows, it lands beyond the other end.
            return self._direct.take(values - self._base, mode="clip")
        assert self._hashed is not None
        return self._hashed.rows(values)


class _HashTable:
    """Rows of sparse integer ids by open addressing: several times faster than a binary search.

    At most half of the slots are full. An id lies in the slot of its hash or in one of the next, with no empty slot
    between; an empty slot has the row "unknown".
    """

    def __init__(self, vocabulary: np.ndarray) -> None:
        bits = max(len(vocabulary) - 1, 1).bit_length() + 1
        self._shift = np.uint64(64 - bits)
        home = self._home(vocabulary)
        order = np.argsort(home, kind="stable")
        steps = np.arange(len(vocabulary))
        place = np.maximum.accumulate(home[order] - steps) + steps
        slots = max(1 << bits, int(place[-1]) + 1) + 1
        self._ids = np.zeros(slots, dtype=np.int64)
        self._rows = np.full(slots, UNKNOWN_ROW, dtype=np.int32)
        self._ids[place] = vocabulary[order]
        self._rows[place] = order + FIRST_ROW

    def rows(self, values: np.ndarray) -> np.ndarray:
        """Rows of int64 ids ``[n]``: int64 ``[n]``."""
        slot = self._home(values)
        rows = self._rows.take(slot).astype(np.int64)
        pending = np.flatnonzero(self._ids.take(slot) != values)
        pending = pending[rows.take(pending) != UNKNOWN_ROW]
        slot = slot[pending]
        while len(pending):
            slot += 1
            rows[pending] = self._rows.take(slot)
            going = (self._ids.take(slot) != values[pending]) & (rows[pending] != UNKNOWN_ROW)
            pending, slot = pending[going], slot[going]
        return rows

    def _home(self, values: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore"):
            spread = values.view(np.uint64) * _PRIME1
        return (spread >> self._shift).view(np.int64)


def _rotate_left(values: np.ndarray, bits: int) -> np.ndarray:
    return (values << np.uint64(bits)) | (values >> np.uint64(64 - bits))
