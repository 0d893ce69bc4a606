"""Random batches for any schema: inputs of benchmarks and tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from foundation.data.encoding import NO_TIME, EncodedBatch, EncodedRows
from foundation.data.schema import Feature, Schema


def random_batch(
    schema: Schema,
    sizes: Sequence[int],
    table_rows: Mapping[str, int],
    *,
    seed: int = 0,
    histories: Sequence[int] | Mapping[str, Sequence[int]] | None = None,
) -> EncodedBatch:
    """Random requests with these numbers of impressions.

    Args:
        table_rows: rows of each table.
        histories: number of events of each request, in every sequence or by sequence, cut to the sequence's greatest
            length; random by default.
    """
    rng = np.random.default_rng(seed)
    requests, impressions = len(sizes), sum(sizes)
    now = 1_700_000_000_000 + rng.integers(0, 10**9, requests)
    request = _rows(rng, schema.request_features, requests, table_rows)
    for sequence in schema.sequences:
        given = histories[sequence.name] if isinstance(histories, Mapping) else histories
        lengths = np.asarray(
            rng.integers(0, sequence.max_length + 1, requests) if given is None else given, dtype=np.int64
        ).clip(0, sequence.max_length)
        for attribute in sequence.attributes:
            key = sequence.key(attribute.name)
            request.ids[key] = rng.integers(0, table_rows[attribute.table], lengths.sum())
            request.lengths[key] = lengths
        if sequence.timestamp is not None:
            age = (10 ** rng.uniform(3, 10, lengths.sum())).astype(np.int64)
            time = np.repeat(now, lengths) - age
            request.times[sequence.name] = np.where(rng.random(len(time)) < 0.1, NO_TIME, time)
    tasks = len(schema.tasks)
    labels = (rng.random((impressions, tasks)) < 0.4).astype(np.float32)
    valid = np.ones((impressions, tasks), dtype=bool)
    for k, task in enumerate(schema.tasks):
        if task.given is not None:
            valid[:, k] = labels[:, schema.task_names.index(task.given)] == 1
    return EncodedBatch(
        request=request,
        item=_rows(rng, schema.item_features, impressions, table_rows),
        request_index=np.repeat(np.arange(requests), sizes),
        request_time=now,
        user_id=rng.integers(0, 100, requests),
        surface=rng.integers(0, len(schema.surface_names), requests),
        labels=labels,
        label_valid=valid,
        weight=rng.uniform(0.5, 2.0, impressions).astype(np.float32),
        sampling_rate=np.ones(impressions, dtype=np.float32),
        impression_id=np.arange(impressions),
    )


def one_impression_each(batch: EncodedBatch) -> EncodedBatch:
    """The same impressions, each in a request of its own: what a model computes without sharing."""
    index = batch.request_index
    return EncodedBatch(
        request=batch.request.take(index),
        item=batch.item,
        request_index=np.arange(len(index)),
        request_time=batch.request_time[index],
        user_id=batch.user_id[index],
        surface=batch.surface[index],
        labels=batch.labels,
        label_valid=batch.label_valid,
        weight=batch.weight,
        sampling_rate=batch.sampling_rate,
        impression_id=batch.impression_id,
    )


def _rows(
    rng: np.random.Generator, features: Sequence[Feature], rows: int, table_rows: Mapping[str, int]
) -> EncodedRows:
    ids: dict[str, np.ndarray] = {}
    lengths: dict[str, np.ndarray] = {}
    weights: dict[str, np.ndarray] = {}
    width = 0
    for feature in features:
        if feature.table is None:
            width += feature.dim
            continue
        multi = feature.kind == "multi"
        length = rng.integers(0, feature.max_length + 1, rows) if multi else np.ones(rows, dtype=np.int64)
        lengths[feature.name] = length
        ids[feature.name] = rng.integers(0, table_rows[feature.table], length.sum())
        if feature.weights is not None:
            weights[feature.name] = rng.uniform(0.1, 1.0, length.sum()).astype(np.float32)
    dense = rng.normal(size=(rows, width)).astype(np.float32)
    return EncodedRows(rows=rows, ids=ids, lengths=lengths, weights=weights, dense=dense, times={})
