"""Where requests begin: the map of a split that the reader plans its epochs on.

One pass over two narrow columns (request, and surface if only one is wanted) finds how many rows each request
has. What is kept is one small integer per request, or nothing where every request has one row, so the map of a
hundred million rows takes at most a few hundred megabytes.

Adjacent rows of one file with the same request id are one request; a null id is a request of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from foundation.data.arrow_columns import Role, bools, check_schema, column_roles, surface_codes
from foundation.data.schema import Schema
from foundation.data.storage import DatasetError, open_parquet

_SCAN_ROWS = 1 << 16


@dataclass(frozen=True, slots=True)
class RowGroup:
    """The requests whose first row lies in one row group; the last may go on in the next row group.

    ``first_row`` (of the row group) and ``first_start`` (of its first request) count rows of the file.
    ``rows`` is the size of the row group, ``requests`` the number of requests, ``selected_rows`` their rows
    that are wanted. ``sizes`` holds the rows of each request (``None``: one each), ``selected`` whether each is
    wanted, packed to bits (``None``: all). ``events`` is the mean number of events of a row over all its histories,
    from the file's footer.
    """

    file: int
    group: int
    first_row: int
    rows: int
    first_start: int
    requests: int
    selected_rows: int
    sizes: np.ndarray | None = None
    selected: np.ndarray | None = None
    events: float = 0.0

    def request_sizes(self, first: int, stop: int) -> np.ndarray:
        """Rows of requests ``first .. stop - 1``, int64."""
        if self.sizes is None:
            return np.ones(stop - first, dtype=np.int64)
        return self.sizes[first:stop].astype(np.int64)

    def request_selected(self, first: int, stop: int) -> np.ndarray:
        """Whether requests ``first .. stop - 1`` are wanted, bool."""
        if self.selected is None:
            return np.ones(stop - first, dtype=bool)
        byte = first // 8
        bits = np.unpackbits(self.selected[byte : -(-stop // 8)])
        return bits[first - 8 * byte : stop - 8 * byte].astype(bool)

    def wanted_sizes(self, first: int, stop: int) -> np.ndarray:
        """Rows of requests ``first .. stop - 1``, 0 for those not wanted, int64."""
        return np.where(self.request_selected(first, stop), self.request_sizes(first, stop), 0)

    def row_of(self, request: int) -> int:
        """The row of the file at which a request begins."""
        if self.sizes is None:
            return self.first_start + request
        return self.first_start + int(self.sizes[:request].sum(dtype=np.int64))


@dataclass(frozen=True, slots=True)
class SplitIndex:
    """All row groups of a split's files in order, and what is known of its histories.

    ``event_bytes`` is the mean size of the encoded histories of one row, from the files' footers.
    """

    files: tuple[str, ...]
    file_rows: tuple[int, ...]
    groups: tuple[RowGroup, ...]
    event_bytes: float

    @property
    def rows(self) -> int:
        """Wanted rows."""
        return sum(g.selected_rows for g in self.groups)

    @property
    def requests(self) -> int:
        """Requests, wanted or not."""
        return sum(g.requests for g in self.groups)

    @property
    def layout(self) -> str:
        """8 hex digits that change with the row groups and their requests."""
        digest = hashlib.sha256()
        for g in self.groups:
            digest.update(f"{g.file},{g.group},{g.first_start},{g.rows},{g.requests},{g.selected_rows};".encode())
        return digest.hexdigest()[:8]

    @property
    def largest_group(self) -> int:
        """Rows of the largest row group."""
        return max((g.rows for g in self.groups), default=0)


def index_files(
    files: Sequence[str],
    schema: Schema,
    *,
    surface: int | None = None,
    roles: dict[str, Role] | None = None,
) -> SplitIndex:
    """Checks every file's columns and finds its requests.

    Args:
        files: paths or URLs of Parquet files, in order.
        surface: only requests whose first row has this surface index are wanted.
        roles: the columns each file must have; those of the schema by default.

    Raises:
        DatasetError: a file is missing or broken, or lacks a column, or has it in a type that cannot be used.
    """
    roles = column_roles(schema) if roles is None else roles
    groups: list[RowGroup] = []
    file_rows: list[int] = []
    events = 0.0
    for number, file in enumerate(files):
        parquet = open_parquet(file)
        try:
            check_schema(parquet.schema_arrow, roles, file)
            events += _event_bytes(parquet.metadata, schema)
            groups += _FileScan(parquet, number, file, schema, surface).run()
            file_rows.append(parquet.metadata.num_rows)
        except (pa.ArrowException, OSError) as error:
            raise DatasetError(f"{file}: cannot be read; the file may be damaged ({error})") from None
        finally:
            parquet.close()
    total = sum(file_rows)
    return SplitIndex(tuple(files), tuple(file_rows), tuple(groups), events / total if total else 0.0)


def _event_bytes(metadata: pq.FileMetaData, schema: Schema) -> float:
    """Bytes of a file's encoded histories: the footer says how many values each list column has."""
    width: dict[str, tuple[int, int]] = {}
    for sequence in schema.sequences:
        for attribute in sequence.attributes:
            width[attribute.column] = (4, sequence.max_length)
        if sequence.timestamp is not None:
            width[sequence.timestamp] = (8, sequence.max_length)
    if not metadata.num_row_groups:
        return 0.0
    total = 0.0
    first = metadata.row_group(0)
    leaves = [
        (i, *width[name])
        for i in range(first.num_columns)
        if (name := first.column(i).path_in_schema.split(".", 1)[0]) in width
    ]
    for g in range(metadata.num_row_groups):
        group = metadata.row_group(g)
        for i, size, limit in leaves:
            total += size * min(group.column(i).num_values, limit * group.num_rows)
    return total


def _group_events(metadata: pq.FileMetaData, schema: Schema, number: int) -> float:
    """Mean events of a row of a row group over all histories, none longer than is read on average."""
    limits = {s.attributes[0].column: s.max_length for s in schema.sequences}
    group = metadata.row_group(number)
    total = 0
    for place in range(group.num_columns):
        column = group.column(place)
        limit = limits.get(column.path_in_schema.split(".", 1)[0])
        if limit is not None:
            total += min(column.num_values, limit * group.num_rows)
    return total / max(1, group.num_rows)


@dataclass(slots=True)
class _Open:
    """A row group whose last request may not have ended yet."""

    group: int
    first_row: int
    rows: int
    starts: np.ndarray
    selected: np.ndarray | None


@dataclass(slots=True)
class _FileScan:
    parquet: pq.ParquetFile
    file: int
    name: str
    schema: Schema
    surface: int | None
    previous: pa.Scalar | None = field(default=None, init=False)

    def run(self) -> Iterator[RowGroup]:
        metadata = self.parquet.metadata
        rows = [metadata.row_group(g).num_rows for g in range(metadata.num_row_groups)]
        waiting: _Open | None = None
        first_row = 0
        for group, count in enumerate(rows):
            if self.schema.request_id is None and self.surface is None:
                if count:
                    events = _group_events(metadata, self.schema, group)
                    yield RowGroup(self.file, group, first_row, count, first_row, count, count, events=events)
            else:
                found = self._scan(group, first_row, count)
                if len(found.starts):
                    if waiting is not None:
                        yield self._close(waiting, int(found.starts[0]))
                    waiting = found
            first_row += count
        if waiting is not None:
            yield self._close(waiting, first_row)

    def _scan(self, group: int, first_row: int, rows: int) -> _Open:
        """The requests that start in a row group."""
        request, surface = self.schema.request_id, self.schema.surface.column
        columns = [c for c, wanted in ((request, request), (surface, self.surface is not None)) if wanted]
        starts: list[np.ndarray] = []
        selected: list[np.ndarray] = []
        row = first_row
        for batch in self.parquet.iter_batches(_SCAN_ROWS, row_groups=[group], columns=columns, use_threads=False):
            begins = np.ones(len(batch), dtype=bool)
            if request is not None and len(batch):
                begins = self._begins(batch.column(batch.schema.get_field_index(request)))
            found = np.flatnonzero(begins)
            starts.append(found + row)
            if self.surface is not None:
                codes = surface_codes(batch.column(batch.schema.get_field_index(surface)), self.schema)
                selected.append(codes[found] == self.surface)
            row += len(batch)
        joined = np.concatenate(starts) if starts else np.zeros(0, np.int64)
        return _Open(group, first_row, rows, joined, np.concatenate(selected) if selected else None)

    def _begins(self, ids: pa.Array) -> np.ndarray:
        """Which rows differ from the row before them."""
        if pa.types.is_dictionary(ids.type):
            ids = ids.dictionary_decode()
        differs = np.ones(len(ids), dtype=bool)
        if pa.types.is_null(ids.type):
            return differs
        if len(ids) > 1:
            differs[1:] = bools(pc.not_equal(ids.slice(1), ids.slice(0, len(ids) - 1)))
        if self.previous is not None and self.previous.is_valid and ids[0].is_valid:
            differs[0] = self.previous.as_py() != ids[0].as_py()
        self.previous = ids[len(ids) - 1]
        return differs

    def _close(self, found: _Open, end: int) -> RowGroup:
        sizes = np.diff(found.starts, append=end)
        selected = found.selected
        wanted = int(sizes.sum()) if selected is None else int(sizes[selected].sum())
        largest = int(sizes.max())
        return RowGroup(
            file=self.file,
            group=found.group,
            first_row=found.first_row,
            rows=found.rows,
            first_start=int(found.starts[0]),
            requests=len(sizes),
            selected_rows=wanted,
            sizes=None if largest == 1 else sizes.astype(np.min_scalar_type(largest)),
            selected=None if selected is None or selected.all() else np.packbits(selected),
            events=_group_events(self.parquet.metadata, self.schema, found.group),
        )
