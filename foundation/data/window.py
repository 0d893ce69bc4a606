"""One window of a split in memory, from which batches are taken in shuffled order.

Ids wait as int32 where the tables allow it, which halves the memory of a window; batches have int64. Keys whose ids
lie alike, such as the attributes of a sequence, are kept side by side: taking a row then touches one place in memory
instead of one per key, and that is what taking costs. A window's memory is used again for the next one, because
fresh memory is slow: the system clears every page of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np

from foundation.data.balance import longest_history
from foundation.data.encoding import EncodedBatch, EncodedRows
from foundation.data.jagged import jagged_index
from foundation.data.schema import Feature, Schema, Sequence

New = Callable[[tuple[int, ...], np.dtype], np.ndarray]
"""Makes an uninitialised array of a shape and dtype, as ``numpy.empty`` does."""

# From so many rows on, what has come tells how much memory all will need.
_MANY = 1000

REQUEST_FIELDS = ("request_time", "user_id", "surface")
ITEM_FIELDS = ("labels", "label_valid", "weight", "sampling_rate", "impression_id")
"""The fields of a batch that are plain arrays with one row per request and one per impression."""


class WindowStore:
    """The encoded rows of a window in file order; portions are added as they are read.

    Args:
        table_rows: rows of each table of the schema.
    """

    def __init__(self, schema: Schema, table_rows: Mapping[str, int]) -> None:
        small = max(table_rows.values(), default=0) <= np.iinfo(np.int32).max
        dtype = np.dtype(np.int32 if small else np.int64)
        self.request = _RowStore(schema.request_features, schema.sequences, dtype)
        self.item = _RowStore(schema.item_features, (), dtype)
        self._fields: dict[str, _Growing] = {}

    def clear(self, requests: int, items: int) -> None:
        """Forgets all rows and keeps the memory; so many rows are to come."""
        self.request.clear(requests)
        self.item.clear(items)
        for field in self._fields.values():
            field.clear()

    def begin(self, requests: int, items: int) -> None:
        """Makes room for rows that were read together; a request's last items may come with the next ones."""
        self.request.rows += requests
        self.item.rows += items

    def add(self, request: EncodedRows, item: EncodedRows, fields: Mapping[str, np.ndarray]) -> None:
        """Adds the rows begun; their ids have been written to the ``room`` of ``request`` and ``item``."""
        self.request.add(request)
        self.item.add(item)
        for name, values in fields.items():
            side = self.request if name in REQUEST_FIELDS else self.item
            self._fields.setdefault(name, _Growing()).add(values, side.share)

    def events(self) -> np.ndarray:
        """Events of each request's histories, int64 ``[r]``."""
        return sum(self.request.histories(), np.zeros(self.request.rows, dtype=np.int64))

    def field(self, name: str, rows: np.ndarray, new: New) -> np.ndarray:
        """Rows of a plain field."""
        return _taken(self._fields[name].values(), rows, new)


class Window:
    """The rows of a unit, handed out batch by batch in the order of use.

    Args:
        store: all rows; it must not change while the window is in use.
        sizes: rows of each request in file order, int64 ``[r]``.
        order: the requests in the order of use, int64; some may be left out.
        cuts: row positions between batches in the order of use, int64 ``[batches + 1]``.
    """

    def __init__(self, store: WindowStore, sizes: np.ndarray, order: np.ndarray, cuts: np.ndarray) -> None:
        self._store = store
        self._order = order
        self._cuts = cuts
        used = sizes[order]
        one_each = int(sizes.sum()) == len(sizes)
        # The rows, and the number of each row's request, in the order of use.
        self._rows = order if one_each else jagged_index((np.cumsum(sizes) - sizes)[order], used)
        self._request_of = np.arange(len(order)) if one_each else np.repeat(np.arange(len(order)), used)
        self._limits: dict[int, int] = {}
        assert store.request.rows == len(sizes) and store.item.rows >= len(self._rows)

    def limit(self, most: int, copies: bool, batches: Iterable[int]) -> int:
        """Cuts the longest histories of batches that have more than ``most`` events.

        Args:
            copies: a history counts once for each impression of its request, else once.
            batches: numbers of the batches that will be taken.

        Returns:
            how many histories are cut.
        """
        histories = self._store.request.histories()
        cut = 0
        for number in batches:
            requests, rows, _ = self._batch(number)
            impressions = np.bincount(rows, minlength=len(requests)) if copies else np.ones(len(requests), np.int64)
            lengths = np.concatenate([own[requests] for own in histories]) if histories else np.zeros(0, np.int64)
            found = longest_history(lengths, np.tile(impressions, len(histories)), most) if len(lengths) else None
            if found is not None:
                self._limits[number] = found
                cut += int(np.count_nonzero(lengths > found))
        return cut

    def batch(self, number: int, new: New = np.empty) -> EncodedBatch:
        """Batch ``number``, R requests with N impressions, in arrays that ``new`` makes."""
        requests, request_of, rows = self._batch(number)
        return EncodedBatch(
            request=self._store.request.take(requests, new, self._limits.get(number)),
            item=self._store.item.take(rows, new),
            request_index=np.positive(request_of, out=new(request_of.shape, request_of.dtype)),
            **{name: self._store.field(name, requests, new) for name in REQUEST_FIELDS},
            **{name: self._store.field(name, rows, new) for name in ITEM_FIELDS},
        )

    def _batch(self, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Requests of a batch, which of them each of its rows belongs to, and the rows."""
        start, stop = int(self._cuts[number]), int(self._cuts[number + 1])
        request_of = self._request_of[start:stop]
        first, last = (int(request_of[0]), int(request_of[-1]) + 1) if stop > start else (0, 0)
        return self._order[first:last], request_of - first, self._rows[start:stop]


class _Growing:
    """An array that grows at its end and keeps its memory when cleared."""

    __slots__ = ("_array", "_length")

    def __init__(self) -> None:
        self._array: np.ndarray | None = None
        self._length = 0

    def clear(self) -> None:
        self._length = 0

    def add(self, values: np.ndarray, share: float = 1.0) -> None:
        self.extend(len(values), values.shape[1:], values.dtype, share)[...] = values

    def extend(self, count: int, shape: tuple[int, ...], dtype: np.dtype, share: float = 1.0) -> np.ndarray:
        """Room for ``count`` more rows of this shape, to be filled; with them, this ``share`` of all is there."""
        end = self._length + count
        if self._array is None or end > len(self._array):
            # What is not written to takes no memory.
            larger = np.empty((max(int(1.1 * end / share), self._length * 3 // 2), *shape), dtype=dtype)
            if self._array is not None:
                larger[: self._length] = self._array[: self._length]
            self._array = larger
        room = self._array[self._length : end]
        self._length = end
        return room

    def anew(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """An array of this shape over what was there."""
        self.clear()
        return self.extend(shape[0], shape[1:], dtype)

    def values(self) -> np.ndarray:
        assert self._array is not None
        return self._array[: self._length]


class _RowStore:
    """Encoded rows of one side, from which any can be taken at the cost of their size.

    Keys that lie alike are one group and have their ids side by side: a sequence is a group, a multi-valued feature
    is one, and so are all categorical features together (named ``""``).
    """

    def __init__(self, features: Iterable[Feature], sequences: Iterable[Sequence], dtype: np.dtype) -> None:
        features = list(features)
        groups = {"": [f.name for f in features if f.kind == "categorical"]}
        groups |= {f.name: [f.name] for f in features if f.kind == "multi"}
        groups |= {s.name: [s.key(a.name) for a in s.attributes] for s in sequences}
        self.rows = 0
        self._latest = {s.name: s.keep == "latest" for s in sequences}
        self._expected = 0
        self._groups = {name: keys for name, keys in groups.items() if keys}
        self._place = {key: (name, number) for name, keys in groups.items() for number, key in enumerate(keys)}
        self._dtype = dtype
        self._parts: dict[tuple[str, str], _Growing] = {}
        self._starts: dict[str, np.ndarray] = {}
        self._added: dict[str, np.ndarray] = {}

    @property
    def share(self) -> float:
        """The part of the expected rows that is there, with those being added; 1 while they are few."""
        return self.rows / max(self._expected, self.rows) if self.rows >= _MANY else 1.0

    def clear(self, expected: int) -> None:
        self.rows = 0
        self._expected = expected
        self._starts.clear()
        for part in self._parts.values():
            part.clear()

    def room(self, key: str, count: int) -> np.ndarray:
        """Where the ids of ``count`` more values of a key go; the keys of a group in turn."""
        group, number = self._place[key]
        if number == 0:
            width = _width(len(self._groups[group]))
            self._added[group] = self._part("ids", group).extend(count, (width,), self._dtype, self.share)
        found = self._added[group][:, number]
        assert len(found) == count
        return found

    def add(self, rows: EncodedRows) -> None:
        share = self.share
        self._part("dense").add(rows.dense, share)
        for group, keys in self._groups.items():
            if group:
                self._part("lengths", group).add(rows.lengths[keys[0]], share)
        for name, values in rows.weights.items():
            self._part("weights", name).add(values, share)
        for name, values in rows.times.items():
            self._part("times", name).add(values, share)

    def histories(self) -> list[np.ndarray]:
        """Events of each row, one array per sequence."""
        return [self._part("lengths", name).values() for name in self._latest]

    def take(self, rows: np.ndarray, new: New, limit: int | None = None) -> EncodedRows:
        """The rows with these numbers (int64 ``[n]``) in this order, with int64 ids.

        Args:
            limit: events that a history keeps, of the end that its sequence names; all by default.
        """
        found = EncodedRows(len(rows), {}, {}, {}, _taken(self._part("dense").values(), rows, new), {})
        for group, keys in self._groups.items():
            if group:
                lengths = self._part("lengths", group).values()
                if group not in self._starts:
                    self._starts[group] = np.cumsum(lengths) - lengths
                count = _taken(lengths, rows, new)
                starts = self._starts[group].take(rows)
                if limit is not None and group in self._latest:
                    if self._latest[group]:
                        starts += np.maximum(count - limit, 0)
                    np.minimum(count, limit, out=count)
                index = jagged_index(starts, count)
            else:
                index, count = rows, new(rows.shape, np.dtype(np.int64))
                count.fill(1)
            ids = self._part("ids", group).values()
            # Taken together, then apart: the memory between them is small and used again.
            values = _taken(ids, index, self._part("taken", group).anew)
            for number, key in enumerate(keys):
                found.ids[key] = new(index.shape, np.dtype(np.int64))
                found.ids[key][:] = values[:, number]
                found.lengths[key] = count
            if ("weights", group) in self._parts:
                found.weights[group] = _taken(self._part("weights", group).values(), index, new)
            if ("times", group) in self._parts:
                found.times[group] = _taken(self._part("times", group).values(), index, new)
        return found

    def _part(self, what: str, group: str = "") -> _Growing:
        return self._parts.setdefault((what, group), _Growing())


def _taken(values: np.ndarray, rows: np.ndarray, new: New) -> np.ndarray:
    """Rows of an array. They are known to be there; numpy checks that least in the mode "clip"."""
    return values.take(rows, axis=0, out=new((len(rows), *values.shape[1:]), values.dtype), mode="clip")


def _width(keys: int) -> int:
    """Ids of a group's values side by side: numpy copies 4, 8, 16 or 32 bytes faster than a number between them."""
    power = 1 << (keys - 1).bit_length()
    return power if power <= 8 and 3 * power <= 4 * keys else keys
