"""Stage `plan`: memory, traffic and time of a training step, before anything is launched.

    OUT/ plan.json  plan.html

It takes what `train` takes, and says what that would need on the GPUs of a topology: the model is built without memory
and one step of one rank is rehearsed on tensors that have shapes only.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import torch

from foundation.data import settings
from foundation.data.balance import MARGIN
from foundation.data.dataset import Dataset
from foundation.data.files import atomic_write, require_folder_above
from foundation.data.options import whole_keys
from foundation.data.schema import Schema
from foundation.model.benchmarks.presets import table_rows
from foundation.model.flops import TRAINING
from foundation.model.gem import GEM, GEMConfig
from foundation.parallel.placement import TableSize, place_tables
from foundation.parallel.plan import collections_of, table_size, tables_of
from foundation.parallel.preview.devices import DeviceMemory
from foundation.parallel.preview.load import Requests
from foundation.parallel.preview.memory import OUTSIDE, memory_of
from foundation.parallel.preview.rehearsal import Rehearsal, rehearse
from foundation.parallel.preview.report import to_page, to_text
from foundation.parallel.preview.result import PlacedTable, Plan
from foundation.parallel.preview.seconds import Shares, step_time
from foundation.parallel.preview.traffic import traffic_of
from foundation.parallel.topology import Topology, layout
from foundation.training.activations import Cost, choose
from foundation.training.peaks import peak_flops
from foundation.training.train import TrainConfig

_MOST_VALUES = 1e8
"""Impressions and events of a batch, whose lengths and ids are held in memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanConfig(TrainConfig):
    """What to plan: everything that `train` takes, and:

    Args:
        dataset: whose sizes count; empty: those that `schema`, `impressions` and `events` state.
        out: folder for `plan.json` and `plan.html`; without it nothing is written.
        resume: as in `train`; nothing is resumed here.
        overwrite: as in `train`; a plan replaces its own two files and nothing else.
        schema: of the data, where there is no dataset.
        impressions: of a request, where there is no dataset.
        events: of a request on average over all sequences, before they are cut, where there is no dataset.
        sigma: histories are log-normal with this sigma.
        vocabulary: rows of tables whose schema states none, where there is no dataset.
        most_rows: no table has more; 0: as they are.
        gpu: name of the device, such as H200, H100, A100 or B200.
        gpu_memory_gb: its memory; 0: that of the name.
        reserve_gb: what is not for tensors: CUDA, NCCL, and holes between blocks of memory.
        shares: what of the best rates a step reaches.
    """

    dataset: str = ""
    out: Path | None = None  # type: ignore[assignment]
    schema: str = "configs/datasets/streams.yaml"
    impressions: float = 8.0
    events: float = 512.0
    sigma: float = 1.0
    vocabulary: int = 1_000
    most_rows: int = 0
    gpu: str = "H200"
    gpu_memory_gb: float = 0.0
    reserve_gb: float = 4.0
    shares: Shares = field(default_factory=Shares)

    def __post_init__(self) -> None:
        TrainConfig.__post_init__(self)
        for key, least in (("impressions", 1), ("events", 0), ("sigma", 0), ("vocabulary", 2), ("most_rows", 0)):
            if getattr(self, key) < least:
                raise ValueError(f"{key}: must be at least {least}, got {getattr(self, key)}")
        for key in ("gpu_memory_gb", "reserve_gb"):
            if getattr(self, key) < 0:
                raise ValueError(f"{key}: must not be negative, got {getattr(self, key)}")


def plan(config: PlanConfig) -> Plan:
    """Works a plan out, prints it, and writes it where `out` says.

    Raises:
        ValueError: sizes that do not fit the topology, the model or one another, or a model that does not fit a GPU;
            the message has the numbers.
    """
    if config.out is not None:
        require_folder_above(config.out / "plan.json")
    found = work_out(config)
    settings.show(config, "plan")
    print(to_text(found), end="")
    if config.out is not None:
        config.out.mkdir(parents=True, exist_ok=True)
        atomic_write(config.out / "plan.json", json.dumps(found.plain(), indent=1) + "\n")
        to_page(found, config.out / "plan.html")
    over = found.memory.total - found.capacity
    if over > 0:
        largest = max(found.memory.terms, key=lambda name: found.memory.terms[name])
        raise ValueError(
            f"{found.memory.total / 1e9:.1f} GB do not fit a GPU of {found.capacity / 1e9:.1f} GB; the most is "
            f"{largest}, {found.memory.terms[largest] / 1e9:.1f} GB; {_advice(largest)}"
        )
    return found


def work_out(config: PlanConfig) -> Plan:
    """The plan alone; raises as `plan` does, but for a model that does not fit."""
    topology = Topology.load(config.topology) if config.topology else Topology()
    try:
        groups = layout(config.parallel, topology)
    except ValueError as error:
        raise ValueError(
            f"{error}{'' if config.topology else '; topology: none is given, so there is one GPU'}"
        ) from None
    memory = DeviceMemory.of(config.gpu)
    peak = peak_flops(config.gpu, config.precision)
    if peak is None:
        raise ValueError(f"gpu: no peak rate of {config.gpu} in {config.precision} is known; choose another precision")
    if config.gpu_memory_gb:
        memory = DeviceMemory(bytes=config.gpu_memory_gb * 1e9, speed=memory.speed)
    schema, rows, requests = _data(config)
    impressions = _impressions(config, requests)
    values = impressions * (1 + sum(requests.events.values()) / requests.impressions)
    if values > _MOST_VALUES:
        raise ValueError(
            f"reader.batch_size: {impressions:,} impressions and their events are more than a plan can count with "
            f"({values:.2g} of {_MOST_VALUES:.2g}); plan a smaller batch"
        )
    batch = requests.batch(schema, rows, impressions)

    def step(again: set[str]) -> Rehearsal:
        return rehearse(
            config.model,
            schema,
            rows,
            batch,
            precision=config.precision,
            experts=groups.expert,
            again=again,
            copies_of_rows=1 if groups.table_shard == 1 else 3,
        )

    rehearsal, again = step(set()), set[str]()
    if config.activation_memory_gb:
        costs = [
            Cost(name, rehearsal.kept.get(name, 0), _forward_seconds(rehearsal, name, memory, config.shares))
            for name in rehearsal.by_region
            if name.startswith("layers.")
        ]
        again = choose(costs, config.activation_memory_gb * 1e9)
        rehearsal = step(again) if again else rehearsal

    tables = _table_sizes(config, schema, rows)
    owner = place_tables(tables, config.sparse.row_wise_from, groups.table_shard)
    reserve, parts = config.reserve_gb * 1e9, config.parallel.sparse.fully_sharded
    held = memory_of(rehearsal, groups, tables, owner, config.ema, config.precision, reserve, parts)
    tokens = requests.tokens(schema, groups.world, impressions).sum(1)
    imbalance = float(tokens.max() / tokens.mean()) if tokens.any() else 1.0
    if config.reader.balance != "none":
        # Batches come to their window's mean, which spreads less than a batch by the root of their number.
        imbalance = 1 + (imbalance - 1) / max(1, config.reader.shuffle_window // impressions) ** 0.5
    collectives = traffic_of(rehearsal, groups, tables, owner, config.parallel, config.precision, config.shares.links)
    time = step_time(rehearsal, groups, collectives, peak, memory, config.shares, imbalance)
    return Plan(
        layout=groups,
        parameters=rehearsal.rest + rehearsal.blocks * groups.expert,
        memory=held,
        capacity=memory.bytes,
        kept=dict(rehearsal.kept),
        trail=rehearsal.trail,
        again=tuple(sorted(again)),
        tables=tuple(
            PlacedTable(name=t.name, rows=t.rows, dim=t.dim, rank=owner[t.name], bytes=4 * t.rows * (t.dim + 1))
            for t in sorted(tables, key=lambda t: (-t.rows * t.dim, t.name))
        ),
        table_imbalance=held.tables_heaviest / held.tables_mean if held.tables_mean else 1.0,
        token_imbalance=imbalance,
        collectives=tuple(collectives),
        time=time,
        flops=TRAINING * rehearsal.flops,
        samples_per_second=groups.world * impressions / time.step,
        mfu=TRAINING * rehearsal.flops / time.step / peak,
    )


def _data(config: PlanConfig) -> tuple[Schema, dict[str, int], Requests]:
    """Schema, rows of tables, and what requests look like."""
    if config.dataset:
        dataset = Dataset.open(config.dataset)
        rows = dict(dataset.encoder.table_rows)
        schema, requests = dataset.schema, Requests.of_dataset(dataset, config.sigma)
    else:
        schema = Schema.load(settings.preset(config.schema, "schema", "datasets"))
        rows = table_rows(schema)
        rows |= {table.name: config.vocabulary for table in schema.tables if not table.rows}
        requests = Requests.stated(schema, config.impressions, config.events, config.sigma)
    if config.most_rows:
        rows = {name: min(count, config.most_rows) for name, count in rows.items()}
    return schema, rows, requests


def _impressions(config: PlanConfig, requests: Requests) -> int:
    """Impressions of a batch, fewer where its events are limited."""
    reader = config.reader
    if not reader.max_tokens:
        return reader.batch_size
    of_request = sum(requests.events.values())
    each = of_request if reader.balance == "impression" else of_request / requests.impressions
    return max(1, min(reader.batch_size, int(reader.max_tokens / max(1e-9, MARGIN * each))))


def _table_sizes(config: PlanConfig, schema: Schema, rows: dict[str, int]) -> list[TableSize]:
    with torch.device("meta"), whole_keys(GEMConfig, "model"):
        model = GEM(config.model, schema, rows)
    return [
        table_size(path, module, table) for path, module in collections_of(model).items() for table in tables_of(module)
    ]


def _forward_seconds(rehearsal: Rehearsal, name: str, memory: DeviceMemory, shares: Shares) -> float:
    """What computing a region again costs: the longer of moving its bytes and queueing its operators."""
    operators, moved = rehearsal.by_region[name]
    return max(moved / (memory.speed * shares.memory), operators * shares.launch_us * 1e-6)


def _advice(largest: str) -> str:
    if largest in ("tables", "AdaGrad sums of rows", "averages"):
        return "more ranks to a table group (parallel.sparse.shard), or smaller tables"
    if largest in ("dense weights", "AdamW moments", "gradients", "gathered by FSDP", "gradients on their way"):
        return "cut the dense part over more ranks (parallel.dense.shard, parallel.dense.expert)"
    if largest == OUTSIDE:
        return "a GPU with more memory, or a smaller reserve_gb"
    return "a smaller reader.batch_size, or activation_memory_gb"
