"""A dataset of any schema with random content: requests of several impressions, histories with a long tail."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from foundation.data.arrow_columns import column_roles, to_column
from foundation.data.dataset import write_manifest
from foundation.data.encoder_fit import EncoderFit
from foundation.data.schema import Feature, Schema

GROUP_REQUESTS = 64
_START = 1_700_000_000_000


def write_heavy_tailed(
    folder: Path,
    schema: Schema,
    requests: int,
    impressions: int = 16,
    mean: float = 512.0,
    sigma: float = 1.0,
    longest: int = 4096,
    seed: int = 0,
    once: bool = False,
) -> None:
    """Writes one training file, a row per impression.

    Args:
        folder: an empty local folder.
        schema: its ids are drawn up to the rows of their tables.
        requests: in all. impressions: of each.
        mean, sigma, longest: events of a request over all sequences: log-normal, cut there, shared out in proportion
            to the sequences' greatest lengths.
        once: histories stand in the first row of their request only, others have null; else in all of its rows.
    """
    rng = np.random.default_rng(seed)
    rows = {table.name: table.rows or 1_000 for table in schema.tables}
    (folder / "train").mkdir(parents=True)
    writer: pq.ParquetWriter | None = None
    fitting = EncoderFit(schema)
    for first in range(0, requests, GROUP_REQUESTS):
        count = min(GROUP_REQUESTS, requests - first)
        drawn = np.minimum(rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, count), longest)
        table = _group(schema, rows, first, drawn, impressions, rng, once)
        if writer is None:
            columns = {name: table.column(name).combine_chunks() for name in column_roles(schema)}
            fitting.update({name: to_column(columns[name], role) for name, role in column_roles(schema).items()})
            writer = pq.ParquetWriter(folder / "train" / "part-00000.parquet", table.schema, compression="zstd")
        writer.write_table(table)
    assert writer is not None
    writer.close()
    write_manifest(folder, schema, fitting.finish())


def _group(
    schema: Schema,
    rows: dict[str, int],
    first: int,
    events: np.ndarray,
    impressions: int,
    rng: np.random.Generator,
    once: bool,
) -> pa.Table:
    requests = len(events)
    owner = np.repeat(np.arange(requests), impressions)
    count = len(owner)
    columns: dict[str, pa.Array] = {schema.timestamp.column: pa.array(_START + 1000 * (first + owner))}
    for name in filter(None, (schema.user, schema.request_id)):
        columns[name] = pa.array(first + owner)
    if schema.impression_id:
        columns[schema.impression_id] = pa.array(first * impressions + np.arange(count))
    surfaces = np.array(schema.surface_names)
    columns[schema.surface.column] = pa.array(surfaces[rng.integers(0, len(surfaces), requests)][owner])
    for task in schema.tasks:
        columns[task.label] = pa.array(rng.integers(0, 2, count))
    for feature in schema.features:
        side = count if feature.side == "item" else requests
        column = _feature(feature, side, rows, rng)
        columns[feature.column] = column if feature.side == "item" else column.take(pa.array(owner))
    whole = sum(sequence.max_length for sequence in schema.sequences)
    listed = pa.array(owner, mask=np.arange(count) % impressions > 0 if once else None)
    for sequence in schema.sequences:
        lengths = np.rint(events * sequence.max_length / whole).astype(np.int64)
        total = int(lengths.sum())
        offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
        lists = {a.column: rng.integers(0, rows[a.table], total) for a in sequence.attributes}
        if sequence.timestamp is not None:
            lists[sequence.timestamp] = _START - rng.integers(0, 10**9, total)
        for name, values in lists.items():
            columns[name] = pa.ListArray.from_arrays(offsets, pa.array(values)).take(listed)
    return pa.table({name: columns[name] for name in schema.columns()})


def _feature(feature: Feature, count: int, rows: dict[str, int], rng: np.random.Generator) -> pa.Array:
    if feature.table is None:
        values = rng.lognormal(1.0, 1.0, count * feature.dim).astype(np.float32)
        return pa.array(values) if feature.kind == "dense" else _lists(pa.array(values), np.full(count, feature.dim))
    if feature.kind != "multi":
        return pa.array(rng.integers(0, rows[feature.table], count))
    lengths = rng.integers(0, feature.max_length + 1, count)
    return _lists(pa.array(rng.integers(0, rows[feature.table], int(lengths.sum()))), lengths)


def _lists(values: pa.Array, lengths: np.ndarray) -> pa.Array:
    return pa.ListArray.from_arrays(pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)), values)
