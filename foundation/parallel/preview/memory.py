"""GB of one GPU, term by term, from the sizes of the model, its placement and a rehearsed step.

Legend: P dense parameters of a rank's model before FSDP cuts them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from foundation.parallel.placement import TableSize, rows_of_ranks
from foundation.parallel.preview.meter import COPIES
from foundation.parallel.preview.rehearsal import Rehearsal
from foundation.parallel.topology import Layout
from foundation.training.ema import EMAConfig
from foundation.training.launch import Precision

FLOAT = 4
"""Weights, gradients, optimizer states, averages and tables are float32."""

BATCHES = 4
"""Batches on a device: the next one, the current one, and the two before it, of which the host has not heard yet."""

WORKSPACES = 2 * 32 << 20
"""cuBLAS keeps 32 MiB for each thread that queues products: one forward, one backward."""

OUTSIDE = "outside of the allocator"


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Bytes of the fullest GPU at the fullest moment.

    Args:
        terms: by name; they add up to `total`.
        allocated: what `torch.cuda.max_memory_allocated` would say.
        total: with the reserve.
        tables_heaviest, tables_mean: bytes of tables on the fullest rank and on average.
    """

    terms: dict[str, float]
    allocated: float
    total: float
    tables_heaviest: float
    tables_mean: float


def memory_of(
    rehearsal: Rehearsal,
    layout: Layout,
    tables: Sequence[TableSize],
    owner: dict[str, int | None],
    ema: EMAConfig,
    precision: Precision,
    reserve: float,
    fully_sharded: bool = False,
) -> Memory:
    """Adds up a GPU's memory.

    Tables, AdaGrad's sums (one number per row), dense weights, AdamW's two moments and averages are there all the time.
    Gradients and activations come and go: the fullest moment counts. DDP keeps gradients in buckets from step to step;
    FSDP holds its unsharded root and two layers, one running, one on its way, and gradients of one layer and the root
    as they were computed and as they are reduced, in float32.

    Fully sharded replicas hold a part of their rows while activations are there; when these are gone, whole kernels of
    tables, with a part beside: one for the update, all of them for evaluations, checkpoints and averages.

    Args:
        precision: bf16 makes FSDP gather in bfloat16, which products then need no copies of.
        reserve: bytes outside of the allocator.
        fully_sharded: the replicas of tables are.
    """
    ranks = layout.table_shard
    width, shard = layout.shard * layout.expert, layout.shard
    held = np.zeros(ranks)
    sums = np.zeros(ranks)
    kernels: dict[tuple[str, bool], np.ndarray] = {}
    for table in tables:
        rows = rows_of_ranks(table, owner[table.name], ranks)
        numbers = rows * table.dim * FLOAT
        held += numbers
        kernel = (table.name.rsplit(".", 1)[0], owner[table.name] is None)
        kernels[kernel] = kernels.get(kernel, 0.0) + numbers
        sums += rows * FLOAT
    fullest = int((held + sums).argmax())
    weights = FLOAT * (rehearsal.rest / width + rehearsal.blocks / shard)
    terms = {
        "tables": float(held[fullest]),
        "AdaGrad sums of rows": float(sums[fullest]),
        "dense weights": weights,
        "AdamW moments": 2 * weights,
    }
    if ema.decay:
        terms["averages"] = weights + (float(held[fullest]) if ema.tables else 0.0)
    moment = _moment(rehearsal, layout, gathered_bytes(precision))
    if fully_sharded:
        own = [float(numbers[fullest]) for numbers in kernels.values() if numbers[fullest]]
        copies = layout.table_replicas
        part = terms["tables"] / copies
        whole = max(part + max(own, default=0.0), terms["tables"] + min(own, default=0.0) / copies)
        # What the fullest moment lets go until then makes room.
        terms["tables"] = max(part, whole - sum(moment.values()) + moment.get("gradients", 0.0))
    terms |= moment
    terms["batches"] = float(BATCHES * rehearsal.batch)
    terms["cuBLAS workspaces"] = float(WORKSPACES)
    allocated = sum(terms.values())
    terms[OUTSIDE] = reserve
    return Memory(
        terms=terms,
        allocated=allocated,
        total=allocated + reserve,
        tables_heaviest=float(held.max()),
        tables_mean=float(held.mean()),
    )


def gathered_bytes(precision: Precision) -> int:
    """Bytes of a parameter as FSDP gathers it."""
    return 2 if precision == "bf16" else FLOAT


def _moment(rehearsal: Rehearsal, layout: Layout, gathered: int) -> dict[str, float]:
    """Gradients, activations and what FSDP gathers, at the moment when they are most together."""
    width = layout.shard * layout.expert
    cut = width > 1
    best: dict[str, float] = {}
    layer = max((rest + (blocks if layout.shard > 1 else 0) for rest, blocks in rehearsal.layers), default=0)
    root = rehearsal.rest - sum(rest for rest, _ in rehearsal.layers)
    for (rest, blocks), other in rehearsal.frontier.items():
        gradients = rest / width + blocks / layout.shard
        if not cut and layout.world > 1:
            gradients = float(FLOAT * (rehearsal.rest + rehearsal.blocks))
        copies = min(other, rehearsal.kept.get(COPIES, 0))
        now = {"gradients": gradients, "activations": float(other - copies)}
        if cut:
            now["gathered by FSDP"] = float(gathered * (root + 2 * layer))
            now["gradients on their way"] = float((gathered + FLOAT) * (root + layer)) if rest or blocks else 0.0
        if not (cut and gathered < FLOAT):
            now[COPIES] = float(copies)
        if sum(now.values()) > sum(best.values()):
            best = now
    return best
