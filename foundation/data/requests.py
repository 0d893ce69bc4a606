"""From rows of a dataset to the raw `/rank` requests that would ask a server about them."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from foundation.data.schema import Feature, Schema


def rank_body(schema: Schema, rows: pa.Table, model: str) -> dict[str, Any]:
    """The JSON body of `/rank` for one request of a dataset.

    Args:
        schema: the dataset's schema.
        rows: the impressions of one request, with the columns of the schema; each becomes a candidate whose `id` is
            its impression id.
        model: name of the exported model to ask.

    Returns:
        `model`, `time_ms`, `user`, `context`, `history` and `candidates`, in plain values that `json` writes. Nulls
        are left out: to the server they are missing values.

    Raises:
        ValueError: there are no rows, or they are not of one request.
    """
    if rows.num_rows == 0:
        raise ValueError("rank_body: there are no rows")
    if schema.request_id is not None and len(rows[schema.request_id].unique()) != 1:
        raise ValueError(f"rank_body: rows of several requests (column {schema.request_id!r} differs)")
    first = {name: rows[name][0].as_py() for name in rows.column_names}
    milliseconds = 1000 if schema.timestamp.unit == "s" else 1
    history: dict[str, dict[str, list]] = {}
    for sequence in schema.sequences:
        events = {a.name: first[a.column] for a in sequence.attributes}
        if sequence.timestamp is not None:
            times = first[sequence.timestamp]
            events["time_ms"] = [None if time is None else time * milliseconds for time in times]
        history[sequence.name] = events
    sides = {side: [f for f in schema.features if f.side == side] for side in ("user", "context", "item")}
    candidates = [
        {"id": row[schema.impression_id], **_values(sides["item"], row)}
        for row in rows.select([schema.impression_id, *_columns(sides["item"])]).to_pylist()
    ]
    return {
        "model": model,
        "time_ms": first[schema.timestamp.column] * milliseconds,
        "user": _values(sides["user"], first),
        "context": _values(sides["context"], first),
        "history": history,
        "candidates": candidates,
    }


def _columns(features: list[Feature]) -> list[str]:
    names = [name for f in features for name in (f.column, f.weights) if name]
    return list(dict.fromkeys(names))


def _values(features: list[Feature], row: dict[str, Any]) -> dict[str, Any]:
    return {name: row[name] for name in _columns(features) if row[name] is not None}
