"""Datasets with the columns of KuaiRand and random content, in any number of rows and any size of row group."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from foundation.data.arrow_columns import column_roles, to_column
from foundation.data.dataset import write_manifest
from foundation.data.encoder_fit import EncoderFit
from foundation.data.schema import Feature, Schema, Sequence
from foundation.data.settings import preset

_DISTINCT_ROWS = 131_072
# Users, videos and authors of KuaiRand-Pure, and the mean lengths of the histories in its training days.
_CARDINALITY = {"user_id": 27_285, "video_id": 7_583, "author_id": 6_474, "music_id": 6_000, "tab": 15, "tag": 60}
_WORDS = ("user_active_degree", "_range", "video_type", "upload_type")
_MEAN_EVENTS = {"shown": 39.0, "clicked": 2.8}


def write_kuairand_like(folder: Path, rows: int, row_group_rows: int, seed: int = 0) -> None:
    """Writes one training file. Beyond the first 131,072 rows, all but ids and times repeat.

    Args:
        folder: an empty local folder.
        row_group_rows: rows of a row group; with ``rows``, the file is a single one.
    """
    schema = Schema.load(preset("datasets/kuairand"))
    (folder / "train").mkdir(parents=True)
    fitting = EncoderFit(schema)
    first = _chunk(schema, min(rows, _DISTINCT_ROWS), np.random.default_rng(seed))
    fitting.update({name: to_column(first.column(name), role) for name, role in column_roles(schema).items()})
    parts = []
    for start in range(0, rows, _DISTINCT_ROWS):
        numbers = np.arange(start, min(start + _DISTINCT_ROWS, rows))
        columns = dict(zip(first.schema.names, first.slice(0, len(numbers)).columns, strict=True))
        columns[schema.impression_id] = pa.array(numbers)
        columns[schema.timestamp.column] = pa.array(1_650_000_000_000 + 1000 * numbers)
        parts.append(pa.record_batch(columns))
    table = pa.Table.from_batches(parts)
    pq.write_table(table, folder / "train" / "part-00000.parquet", row_group_size=row_group_rows, compression="zstd")
    write_manifest(folder, schema, fitting.finish())


def _chunk(schema: Schema, count: int, rng: np.random.Generator) -> pa.RecordBatch:
    blank = pa.array(np.zeros(count, dtype=np.int64))
    columns: dict[str, pa.Array] = {schema.impression_id: blank, schema.timestamp.column: blank}
    for task in schema.tasks:
        columns[task.label] = pa.array(rng.integers(0, 2, count))
    for feature in schema.features:
        columns.setdefault(feature.column, _feature(feature, count, rng))
    for sequence in schema.sequences:
        columns |= _sequence(sequence, count, rng)
    return pa.record_batch({name: columns[name] for name in schema.columns()})


def _feature(feature: Feature, count: int, rng: np.random.Generator) -> pa.Array:
    if feature.kind == "dense":
        return pa.array(rng.lognormal(6, 2, count))
    ids = _ids(feature.table or "", count, rng)
    if any(part in feature.name for part in _WORDS):
        return pa.DictionaryArray.from_arrays(ids % 8, [f"level {i}" for i in range(8)]).dictionary_decode()
    return pa.array(ids)


def _sequence(sequence: Sequence, count: int, rng: np.random.Generator) -> dict[str, pa.Array]:
    most = sequence.max_length
    mean = _MEAN_EVENTS.get(sequence.name, 0.8 * most)
    if mean > most / 2:
        # Some are full, the others anything up to that.
        full = rng.random(count) < 2 * mean / most - 1
        lengths = np.where(full, most, rng.integers(0, most + 1, count))
    else:
        lengths = np.minimum(rng.geometric(1 / (1 + mean), count) - 1, most)
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    total = int(lengths.sum())
    made = {a.column: pa.ListArray.from_arrays(offsets, _ids(a.table, total, rng)) for a in sequence.attributes}
    if sequence.timestamp is not None:
        times = 1_640_000_000_000 + rng.integers(0, 10**10, total)
        made[sequence.timestamp] = pa.ListArray.from_arrays(offsets, times)
    return made


def _ids(table: str, count: int, rng: np.random.Generator) -> np.ndarray:
    """Skewed ids; those of authors and music are spread over a wide range, as in the data."""
    size = _CARDINALITY.get(table, 3 if table.startswith("action") else 7)
    ids = (size * rng.random(count) ** 2).astype(np.int64)
    return ids * 1_000_003 if table in ("author_id", "music_id") else ids
