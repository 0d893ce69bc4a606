"""Requests for a model, made from its own folder: tensors from its golden rows, raw values from its schema."""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson
from tritonclient.grpc import service_pb2

from foundation.data.schema import Feature
from serving.codec import datatype_of, encode_raw
from serving.model import ServedModel


def infer_body(model: ServedModel, candidates: int, budget_ms: float) -> tuple[bytes, int]:
    """A REST inference request with binary tensors, and the length of its JSON header."""
    inputs = model.repeat_golden(candidates)
    blobs = {name: encode_raw(array) for name, array in inputs.items()}
    header = orjson.dumps(
        {
            "parameters": {"timeout": int(budget_ms * 1e3), "binary_data_output": True},
            "inputs": [
                {
                    "name": name,
                    "datatype": datatype_of(array.dtype),
                    "shape": list(array.shape),
                    "parameters": {"binary_data_size": len(blobs[name])},
                }
                for name, array in inputs.items()
            ],
        }
    )
    return b"".join([header, *blobs.values()]), len(header)


def grpc_request(model: ServedModel, candidates: int) -> Any:
    """A ModelInferRequest with raw contents."""
    request = service_pb2.ModelInferRequest(model_name=model.name)
    for name, array in model.repeat_golden(candidates).items():
        request.inputs.add(name=name, datatype=datatype_of(array.dtype), shape=array.shape)
        request.raw_input_contents.append(encode_raw(array))
    return request


def rank_body(model: ServedModel, candidates: int, budget_ms: float, seed: int = 0) -> bytes:
    """A `/rank` body with random known ids, random numbers and full histories."""
    return orjson.dumps({**rank_request(model, candidates, seed), "deadline_ms": budget_ms})


def rank_request(model: ServedModel, candidates: int, seed: int = 0) -> dict[str, Any]:
    """The same as plain values, without a deadline."""
    schema, random = model.schema, np.random.default_rng(seed)
    now = 1_700_000_000_000

    def one_id(table: str) -> Any:
        if table in model.encoder.vocabularies:
            vocabulary = model.encoder.vocabularies[table]
            return vocabulary[random.integers(len(vocabulary))].item() if len(vocabulary) else 0
        number = int(random.integers(int(schema.table(table).rows or 3) - 2))
        return str(number) if model.encoder.id_type(table) == "string" else number

    def value(feature: Feature) -> dict[str, Any]:
        if feature.kind == "categorical":
            return {feature.column: one_id(str(feature.table))}
        if feature.kind == "dense":
            return {feature.column: float(random.random())}
        if feature.kind == "embedding":
            return {feature.column: random.random(feature.dim).tolist()}
        values: dict[str, Any] = {feature.column: [one_id(str(feature.table)) for _ in range(feature.max_length)]}
        if feature.weights is not None:
            values[feature.weights] = [1.0] * feature.max_length
        return values

    def row(side: str) -> dict[str, Any]:
        return {k: v for f in schema.features if f.side == side for k, v in value(f).items()}

    numbers = dict.fromkeys(model.value.fields, 1.0)
    return {
        "model": model.name,
        "time_ms": now,
        "user": row("user"),
        "context": row("context"),
        "history": {
            s.name: {
                "time_ms": [now - 60_000 * (s.max_length - i) for i in range(s.max_length)],
                **{a.name: [one_id(a.table) for _ in range(s.max_length)] for a in s.attributes},
            }
            for s in schema.sequences
        },
        "candidates": [{"id": i, **numbers, **row("item")} for i in range(candidates)],
    }
