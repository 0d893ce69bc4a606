"""Parameters and floating point operations of a preset: ``python -m foundation.model.benchmarks.size --config ...``.

Nothing is trained or even stored: the model is built without memory.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from foundation.data.commands import run_command
from foundation.data.options import parse_config
from foundation.data.schema import Schema
from foundation.model.benchmarks.presets import even_load, meta_model, model_config, table_rows
from foundation.model.flops import TRAINING, forward_flops


@dataclass(frozen=True, kw_only=True, slots=True)
class SizeConfig:
    """What to count.

    Args:
        preset: training preset, such as foundation/base.
        schema: of the data.
        events: events of a request over all sequences, shared out in proportion to their greatest lengths.
        impressions: of a request.
    """

    preset: str
    schema: str = "configs/datasets/streams.yaml"
    events: int = 512
    impressions: int = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """Parameters, and operations of a forward pass per impression, by part."""

    dense: int
    tables: int
    flops: dict[str, float]


def size(config: SizeConfig) -> Size:
    """Counts a preset."""
    schema = Schema.load(config.schema)
    model = meta_model(model_config(config.preset), schema, table_rows(schema))
    dense = sum(p.numel() for p in model.dense_parameters())
    flops = forward_flops(model, even_load(schema, 1, config.impressions, config.events))
    return Size(
        dense=dense,
        tables=sum(p.numel() for p in model.parameters()) - dense,
        flops={part: count / config.impressions for part, count in flops.items()},
    )


def main(arguments: list[str]) -> None:
    """Prints the counts."""
    config: SizeConfig = parse_config(SizeConfig, arguments, name="python -m foundation.model.benchmarks.size")
    counted = size(config)
    total = sum(counted.flops.values())
    print(f"{config.preset} on {config.schema}, {config.events} events and {config.impressions} impressions a request")
    print(f"dense parameters {counted.dense / 1e6:,.2f} M, tables {counted.tables * 4 / 1e9:,.2f} GB in float32")
    print(f"forward {total / 1e9:,.4f} GFLOP per impression, training {TRAINING * total / 1e9:,.4f}")
    for part, count in counted.flops.items():
        print(f"  {part:12} {count / 1e9:10.4f} GFLOP {count / total:6.1%}")


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
