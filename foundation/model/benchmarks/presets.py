"""Models of presets, without data: for benchmarks and for counting."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from foundation.data.options import parse_config
from foundation.data.schema import Schema
from foundation.model.flops import Load
from foundation.model.gem import GEM, GEMConfig
from foundation.training.train import TrainConfig


def model_config(preset: str) -> GEMConfig:
    """The model of a training preset, a path or a name such as ``foundation/tiny``."""
    config: TrainConfig = parse_config(TrainConfig, ["--config", preset, "--dataset", "-", "--out", "-"], name="train")
    return config.model


def table_rows(schema: Schema, most: int | None = None) -> dict[str, int]:
    """Rows of each table as the schema says; a vocabulary that states none counts as 1,000 rows.

    Args:
        most: no table has more.
    """
    rows = {table.name: table.rows or 1_000 for table in schema.tables}
    return {name: min(count, most or count) for name, count in rows.items()}


def meta_model(config: GEMConfig, schema: Schema, rows: Mapping[str, int]) -> GEM:
    """A model without memory, for its shapes."""
    with torch.device("meta"):
        return GEM(config, schema, rows)


def even_load(schema: Schema, requests: int, impressions: int, events: int) -> Load:
    """Requests of equal size: ``events`` over all sequences, shared out in proportion to their greatest lengths."""
    whole = sum(sequence.max_length for sequence in schema.sequences)
    lengths = {s.name: min(s.max_length, round(events * s.max_length / whole)) for s in schema.sequences}
    return Load(
        impressions=np.full(requests, impressions),
        events={name: np.full(requests, length) for name, length in lengths.items()},
    )
