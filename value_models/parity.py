"""The parity gate: an exported graph must give the PyTorch model's scores, at every shape a server may send.

Shapes: R requests, N impressions, K tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from foundation.data.encoding import TensorSpec, model_signature
from foundation.data.schema import MISSING_ROW, UNKNOWN_ROW, Schema

Inputs = dict[str, np.ndarray]
Scorer = Callable[[Inputs], np.ndarray]


class ParityError(ValueError):
    """The exported graph differs from the model; the message names the case."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Named inputs at one shape."""

    name: str
    inputs: Inputs


@dataclass(frozen=True, kw_only=True, slots=True)
class ParityReport:
    """Largest absolute difference over all cases, and per case its shape and difference."""

    tolerance: float
    max_abs_diff: float
    cases: tuple[dict[str, Any], ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for the manifest."""
        return {"tolerance": self.tolerance, "max_abs_diff": self.max_abs_diff, "cases": list(self.cases)}


def check_parity(reference: Scorer, exported: Scorer, cases: list[Case], tolerance: float = 1e-5) -> ParityReport:
    """Runs both on every case.

    Args:
        reference: inputs to probabilities ``[N, K]``, the PyTorch model.
        exported: the same, the exported graph.
        cases: from :func:`parity_cases`.
        tolerance: largest absolute difference allowed.

    Raises:
        ParityError: a case fails to run, has another shape, is not finite or differs by more than ``tolerance``.
    """
    rows: list[dict[str, Any]] = []
    for case in cases:
        want = reference(case.inputs)
        try:
            got = exported(case.inputs)
        except Exception as error:
            raise ParityError(f"case {case.name!r}: the exported graph fails: {error}") from error
        if got.shape != want.shape:
            raise ParityError(f"case {case.name!r}: shape {got.shape}, the model gives {want.shape}")
        if not (np.isfinite(got).all() and np.isfinite(want).all()):
            raise ParityError(f"case {case.name!r}: scores are not finite")
        difference = float(np.abs(got.astype(np.float64) - want).max(initial=0.0))
        if difference > tolerance:
            raise ParityError(
                f"case {case.name!r}: scores differ by {difference:.3g}, more than {tolerance:.3g}; not exported"
            )
        index = case.inputs["request_index"]
        rows.append({"name": case.name, "impressions": len(index), "max_abs_diff": difference})
    return ParityReport(tolerance=tolerance, max_abs_diff=max(r["max_abs_diff"] for r in rows), cases=tuple(rows))


def parity_cases(schema: Schema, table_rows: Mapping[str, int], sample: Inputs, seed: int = 0) -> list[Case]:
    """Real rows, every corner shape, empty and full histories, missing, unseen and out-of-table ids.

    Args:
        schema: gives names and shapes. table_rows: rows of every table. sample: inputs of real requests.
    """
    rng = np.random.default_rng(seed)

    def draw(requests: int, impressions: int) -> Inputs:
        return random_inputs(schema, table_rows, rng, requests, impressions)

    several = draw(5, 37)
    lonely = dict(several, request_index=np.full(37, 3, np.int64))
    lengths = [spec for spec in model_signature(schema) if spec.name.endswith(".length")]
    widths = {spec.name: _width(schema, spec) for spec in lengths}
    empty = dict(several, **{name: np.zeros_like(several[name]) for name in widths})
    full = dict(several, **{name: np.full_like(several[name], width) for name, width in widths.items()})
    tables = id_tables(schema)
    return [
        Case(name="real rows", inputs=sample),
        Case(name="one request, no candidate", inputs=draw(1, 0)),
        Case(name="one request, one candidate", inputs=draw(1, 1)),
        Case(name="one request, many candidates", inputs=draw(1, 300)),
        Case(name="several requests", inputs=several),
        Case(name="several requests, no candidate", inputs=draw(4, 0)),
        Case(name="requests without candidates", inputs=lonely),
        Case(name="empty lists and histories", inputs=empty),
        Case(name="full lists and histories", inputs=full),
        Case(name="missing ids", inputs=_constant_ids(several, tables, lambda rows: MISSING_ROW, table_rows)),
        Case(name="unseen ids", inputs=_constant_ids(several, tables, lambda rows: UNKNOWN_ROW, table_rows)),
        Case(name="ids past the table", inputs=_constant_ids(several, tables, lambda rows: rows + 7, table_rows)),
        Case(name="negative ids", inputs=_constant_ids(several, tables, lambda rows: -3, table_rows)),
    ]


def random_inputs(
    schema: Schema, table_rows: Mapping[str, int], rng: np.random.Generator, requests: int, impressions: int
) -> Inputs:
    """Random named inputs for R requests and N impressions, with the shapes and dtypes of the signature."""
    tables = id_tables(schema)
    out: Inputs = {}
    for spec in model_signature(schema):
        sizes = {"R": requests, "N": impressions}
        dims = tuple(d if isinstance(d, int) else sizes[d] for d in spec.dims)
        if spec.name == "request_index":
            out[spec.name] = np.sort(rng.integers(0, requests, impressions)) if requests else np.zeros(0, np.int64)
        elif spec.name in tables:
            out[spec.name] = rng.integers(0, table_rows[tables[spec.name]], dims)
        elif spec.name.endswith(".length"):
            out[spec.name] = rng.integers(0, _width(schema, spec) + 1, dims)
        elif spec.name.endswith(".age"):
            out[spec.name] = (rng.random(dims) * 15).astype(np.float32)
        else:
            out[spec.name] = rng.standard_normal(dims).astype(np.float32)
    return {name: np.asarray(value, np.int64 if value.dtype.kind == "i" else np.float32) for name, value in out.items()}


def id_tables(schema: Schema) -> dict[str, str]:
    """The table of every input that holds ids."""
    tables = {f.name: f.table for f in schema.features if f.table is not None}
    return tables | {s.key(a.name): a.table for s in schema.sequences for a in s.attributes}


def _width(schema: Schema, spec: TensorSpec) -> int:
    """The padded width of the list that a ``.length`` input belongs to."""
    owner = spec.name.removesuffix(".length")
    widths = {f.name: f.max_length for f in schema.features} | {s.name: s.max_length for s in schema.sequences}
    return widths[owner]


def _constant_ids(
    inputs: Inputs, tables: Mapping[str, str], choose: Callable[[int], int], table_rows: Mapping[str, int]
) -> Inputs:
    changed = {name: np.full_like(inputs[name], choose(table_rows[table])) for name, table in tables.items()}
    return inputs | changed
