"""Stage `train`: from a dataset to a trained foundation model in a run folder.

    OUT/ config.yaml  schema.yaml  encoder.npz  metrics.jsonl  tensorboard/  manifest.json
         ledger.jsonl  ledger.json  ledger.html
         checkpoints/ step-00000100/  latest  best

`manifest.json` is written last: a run folder without it is of a run that has not ended.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric import Fabric

from foundation.data import settings
from foundation.data.batch import Batch
from foundation.data.dataset import Dataset
from foundation.data.files import atomic_write, empty_folder
from foundation.data.logs import LogReader, ReaderConfig
from foundation.data.options import whole_keys
from foundation.model.flops import Load, forward_flops
from foundation.model.gem import GEM, GEMConfig
from foundation.parallel import draw
from foundation.parallel.parallelize import parallelize, reset_momentum
from foundation.parallel.plan import SparseConfig
from foundation.parallel.tables import load_tables, table_weights
from foundation.parallel.topology import ParallelConfig, Topology
from foundation.training.activations import choose, measure, recompute, regions
from foundation.training.checkpoint_files import find_checkpoint, point, prune, read_manifest
from foundation.training.compile import Compile, compile_regions
from foundation.training.ema import EMAConfig
from foundation.training.evaluate import EvaluationConfig
from foundation.training.full_disk import full_disk_named
from foundation.training.launch import Device, Precision, launched
from foundation.training.layers_alone import layers_alone
from foundation.training.ledger import LEDGER, Ledger
from foundation.training.ledger_report import publish
from foundation.training.loop import CheckpointConfig, Loop, LoopConfig
from foundation.training.metrics import Results, pick
from foundation.training.operations import Operations
from foundation.training.optimizer import DenseConfig
from foundation.training.origin import config_hash, other_code, written_by
from foundation.training.peaks import device_peak
from foundation.training.phases import DATASET, IMPORTS, MODEL, PROCESS_GROUP, RESTORE, command_start
from foundation.training.resume import begins, resumable, resume_from
from foundation.training.rng import seed_all, untouched_rng
from foundation.training.run_log import RunLog, finite, print_summary, with_nan
from foundation.training.schedule import ScheduleConfig
from foundation.training.sole_writer import sole_writer
from foundation.training.state import Progress, TrainState
from foundation.training.warm_start import Freeze, WarmStart

FORMAT = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """A training run.

    Args:
        dataset: folder or URL of a prepared dataset.
        out: the run folder to write.
        model: the foundation model.
        reader: how the training split is read; its seed is added to `seed`.
        sparse: optimizer and placement of the embedding tables.
        parallel: over how many ranks each part is spread; see docs/parallelism.md.
        topology: a topology file or preset such as topology/one-host-8; empty: the launcher's hosts, in one zone.
        dense: optimizer of the rest.
        schedule: learning rates over the run.
        ema: averages of the weights, which are then evaluated, saved and served.
        evaluation: when, and what is best.
        checkpoint: when.
        precision: fp32, or bf16 for matrix products in bfloat16.
        compile: what `torch.compile` makes graphs of: none; parts, those of the arms, which compile fastest; the
            layers; or dense, the summaries and heads too.
        activation_memory_gb: what the arms of layers may keep for the backward pass; those that save least time per GB
            are computed again. 0 keeps everything.
        accumulate: batches whose mean gradient makes one step of the dense optimizer. More than 1 only where tables do
            not learn (`freeze: trunk`, or `sparse.lr: 0`): theirs is updated inside every backward pass.
        device: auto, cpu or cuda.
        epochs: passes over the training split; may be a fraction.
        max_steps: end after so many steps if the epochs are longer; 0 does not.
        reset_tables: draw the tables anew at the start of every epoch but the first, against overfitting of ids
            ("Multi-Epoch Learning for Deep Click-Through Rate Prediction Models").
        seed: of weights, dropout and the order of rows.
        log_every: steps between lines in `metrics.jsonl`.
        max_skipped: this many steps in a row with a loss that is not finite end the run.
        resume: go on from the latest checkpoint in `out`, if there is one.
        overwrite: replace what is in `out`.
        init_from: folder of a run to start from instead of at random; the schema may have more surfaces.
        freeze: none, or trunk: only what belongs to surfaces that `init_from` did not have learns.
    """

    dataset: str
    out: Path
    model: GEMConfig = field(default_factory=GEMConfig)
    reader: ReaderConfig = field(default_factory=ReaderConfig)
    sparse: SparseConfig = field(default_factory=SparseConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    topology: str = ""
    dense: DenseConfig = field(default_factory=DenseConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    ema: EMAConfig = field(default_factory=EMAConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    precision: Precision = "fp32"
    compile: Compile = "none"
    activation_memory_gb: float = 0.0
    accumulate: int = 1
    device: Device = "auto"
    epochs: float = 1.0
    max_steps: int = 0
    reset_tables: bool = False
    seed: int = 0
    log_every: int = 50
    max_skipped: int = 10
    resume: bool = False
    overwrite: bool = False
    init_from: Path | None = None
    freeze: Freeze = "none"

    def __post_init__(self) -> None:
        if self.freeze not in ("none", "trunk"):
            raise ValueError(f"freeze: must be none or trunk, got {self.freeze!r}")
        if self.freeze == "trunk" and (self.init_from is None or self.dense.weight_decay or self.reset_tables):
            raise ValueError("freeze: trunk needs init_from, and neither dense.weight_decay nor reset_tables")
        if self.epochs <= 0:
            raise ValueError(f"epochs: must be above 0, got {self.epochs}")
        for key, least in (("max_steps", 0), ("seed", 0), ("log_every", 1), ("max_skipped", 1), ("accumulate", 1)):
            if getattr(self, key) < least:
                raise ValueError(f"{key}: must be at least {least}, got {getattr(self, key)}")
        learns = self.freeze == "none" and (self.sparse.lr or any(self.sparse.table_lr.values()))
        if self.accumulate > 1 and learns:
            raise ValueError(
                f"accumulate: tables are updated inside every backward pass, so {self.accumulate} batches would be as "
                "many steps for them. Leave it at 1 and make room with activation_memory_gb or more ranks; it goes "
                "with freeze: trunk and with sparse.lr: 0"
            )
        if self.seed >= 2**32:
            raise ValueError(f"seed: must be below 2**32, got {self.seed}")
        if self.activation_memory_gb < 0:
            raise ValueError(f"activation_memory_gb: must not be negative, got {self.activation_memory_gb}")
        if self.compile not in ("none", "parts", "layers", "dense"):
            raise ValueError(f"compile: must be none, parts, layers or dense, got {self.compile!r}")
        if self.compile != "none" and self.parallel.dense.expert > 1:
            raise ValueError(
                f"compile: {self.compile} with parallel.dense.expert {self.parallel.dense.expert}: a graph cannot hold "
                "the exchange of activations inside of a layer; use compile: none, or spread by parallel.dense.shard"
            )
        if self.resume and self.overwrite:
            raise ValueError("resume: a run is either resumed or overwritten, not both")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainResult:
    """What a run came to.

    Args:
        out: the run folder.
        steps: steps done, skipped ones included.
        skipped: steps without an update.
        samples: impressions trained on.
        ended: "finished" or "stopped early".
        best: value of the chosen metric at the best evaluation; None without one.
        best_step: its step.
        metrics: all metrics of the best evaluation, `{task: {surface: {...}}}`; empty without one.
        checkpoint: folder of the best checkpoint, or of the last one where there was no evaluation.
    """

    out: Path
    steps: int
    skipped: int
    samples: int
    ended: str
    best: float | None
    best_step: int | None
    metrics: Results
    checkpoint: Path


def train(config: TrainConfig) -> TrainResult:
    """Trains a foundation model; under `torchrun`, on all ranks that it started.

    Raises:
        ValueError: a config, dataset or checkpoint that cannot be used; a subclass says which.
        FileExistsError: `out` has something in it, and neither `resume` nor `overwrite` is set.
        TrainingError: the loss was not finite for too many steps in a row.
    """
    ledger = Ledger(command_start())
    ledger.clock.move(IMPORTS)
    with ledger.phase(DATASET):
        dataset = Dataset.open(config.dataset)
    kept = [config.dataset, config.init_from]
    is_new = partial(begins, config.out, resume=config.resume, overwrite=config.overwrite, inputs=kept)
    fresh = is_new()
    with ExitStack() as stack:
        stack.enter_context(full_disk_named(config.out))
        with ledger.phase(PROCESS_GROUP):
            processes = launched(
                device=config.device,
                precision=config.precision,
                log_folder=config.out / "tensorboard",
                log_from=0 if fresh else resumable(config.out / "checkpoints")[1]["step"] + 1,
            )
            fabric = stack.enter_context(processes)
        if fabric.is_global_zero:
            stack.enter_context(sole_writer(config.out))
            fresh = is_new()  # another process may have been there meanwhile
            settings.show(config, "train")
        fresh = fabric.broadcast(fresh)  # as rank 0 saw it, before it writes
        start = None if config.init_from is None else WarmStart.of(config.init_from, config.freeze, dataset)
        loop = _build(config, dataset if start is None else start.dataset(dataset), fabric, fresh, start, ledger)
        try:
            ended = loop.run()
        except BaseException as error:
            with suppress(OSError):  # what ended the run is what its user must hear
                ledger.close(f"failed: {type(error).__name__}")
            raise
        return _finish(config, loop, ended)


def _prepare_folder(config: TrainConfig, dataset: Dataset, fresh: bool) -> None:
    """Makes the run folder and what is known before training."""
    ledger = config.out / LEDGER
    # A run that ended before its first checkpoint starts over, but the time that it took stays in its ledger.
    spent = ledger.read_bytes() if config.resume and ledger.is_file() else b""
    if fresh:
        empty_folder(config.out)
    settings.save(config, config.out / "config.yaml")  # first: it says that the folder is a run's
    (config.out / "checkpoints").mkdir(parents=True, exist_ok=True)
    if fresh and spent:
        atomic_write(ledger, spent)
    (config.out / "manifest.json").unlink(missing_ok=True)
    if fresh:
        dataset.schema.save(config.out / "schema.yaml")
        dataset.encoder.save(config.out / "encoder.npz")


def _build(
    config: TrainConfig, dataset: Dataset, fabric: Fabric, fresh: bool, start: WarmStart | None, ledger: Ledger
) -> Loop:
    """Model, optimizers and readers, at step 0 or at the latest checkpoint. Writes only when all of them are right."""
    rank, world = fabric.global_rank, fabric.world_size
    with ledger.phase(DATASET):
        train_reader = replace(config.reader, seed=config.reader.seed + config.seed)
        reader = LogReader(dataset, "train", train_reader, rank=rank, world_size=world)
        validation = _validation(config, dataset, rank, world)

    seed_all(config.seed)
    topology = Topology.load(config.topology) if config.topology else None
    with ledger.phase(MODEL):
        counts = Operations(config.model, dataset)
        there = start is None and fabric.device.type == "cuda" and counts.tables > draw.MOST_ON_HOST
        plain, sparse = _model(config, dataset, there), config.sparse
        if start is not None:
            start.fill(plain)
            sparse = start.sparse(sparse)
        gathered = torch.bfloat16 if config.precision == "bf16" else torch.float32
        model = parallelize(plain, sparse, fabric.device, config.parallel, topology, gathered=gathered)
        if there:
            draw.draw_tables(model, plain.embeddings.std_of, config.seed)
        if config.freeze == "trunk" and model.layout.shard * model.layout.expert > 1:
            raise ValueError("freeze: a frozen trunk is replicated; leave parallel.shard and parallel.expert at 1")
        state = TrainState.of(model, config.dense, config.ema)
    seed_all(config.seed * 1_000_003 + 1 + rank)  # dropout differs between ranks

    checkpoints = config.out / "checkpoints"
    manifest = {
        "schema_hash": dataset.schema.hash,
        "encoder_hash": dataset.encoder.hash,
        "world_size": world,
        "momentum_scale": model.momentum_scale,
        "config": settings.plain(config),
        "config_hash": config_hash(settings.plain(config)),
        "written_by": written_by(),
    }
    first_batch: Callable[[], None] | None = None
    if not fresh:
        path = find_checkpoint(checkpoints, "latest")
        with ledger.phase(RESTORE):
            first_batch = resume_from(path, state, reader, manifest, fabric.device, TrainConfig)
        if state.progress.best_step is not None:
            best = checkpoints / f"step-{state.progress.best_step:08d}"
            if best.is_dir():
                point(checkpoints, "best", best)
        prune(checkpoints, config.checkpoint.keep, config.checkpoint.keep_every)
    steps = steps_of(reader, config.epochs, state.progress)
    steps = min(steps, config.max_steps) if config.max_steps else steps
    if fabric.is_global_zero:
        _prepare_folder(config, dataset, fresh)
    fabric.barrier()
    log = RunLog(config.out / "metrics.jsonl", fabric, state.progress.step)
    if world > 1:
        log.say(model.layout.describe().replace("\n", "; "))
    peak = device_peak(fabric.device, config.precision)
    facts = {
        "world": world,
        "step": state.progress.step,
        "samples": state.progress.samples,
        "device": _device_name(fabric.device),
        "peak": peak,
        "precision": config.precision,
        "metric": config.evaluation.metric,
    }
    ledger.open(config.out / LEDGER if fabric.is_global_zero else None, fabric.device, facts)
    if peak is None and fabric.device.type == "cuda":
        name = torch.cuda.get_device_name(fabric.device)
        log.say(
            f"no peak rate of {name} in {config.precision} is known (foundation/training/peaks.py): MFU is left out"
        )
    if not fresh:
        code = other_code(read_manifest(find_checkpoint(checkpoints)), exactly=True)
        note = f"; {code}: it goes on, but need not give bit for bit what that code would have given" if code else ""
        log.say(f"resumed from step {state.progress.step} of {steps}{note}")
    if validation is None:
        log.say(f"split {config.evaluation.split!r} has no rows: the model is not evaluated, the last step is kept")
    return Loop(
        fabric=fabric,
        config=LoopConfig(
            steps=steps,
            schedule=config.schedule,
            evaluation=config.evaluation,
            checkpoint=config.checkpoint,
            log_every=config.log_every,
            max_skipped=config.max_skipped,
            accumulate=config.accumulate,
        ),
        state=state,
        reader=reader,
        validation=validation,
        log=log,
        checkpoints=checkpoints,
        manifest=manifest,
        reset_tables=_table_reset(config, dataset, there) if config.reset_tables else None,
        first_batch=first_batch,
        prepare=lambda batch: _prepare(config, state, fabric, batch, log, peak),
        flops=counts.step if peak else None,
        peak_flops=peak,
        overlap=config.parallel.overlap,
        ledger=ledger,
        padding=counts.padding if fabric.is_global_zero else None,
    )


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def _prepare(
    config: TrainConfig, state: TrainState, fabric: Fabric, batch: Batch, log: RunLog, peak: float | None
) -> dict[str, Any]:
    """Chooses what is computed again, the same on all ranks, compiles, and measures each type of layer alone."""
    model = state.model.module
    if config.activation_memory_gb:
        model.train()
        with untouched_rng(fabric.device):
            costs = measure(model, batch, fabric.autocast)
        again = fabric.broadcast(sorted(choose(costs, config.activation_memory_gb * 1e9)))
        recompute(model, again)
        kept = sum(cost.bytes for cost in costs if cost.region not in again) / 1e9
        log.say(
            f"activations: {len(again)} of {len(regions(model))} arms are computed again, the others keep {kept:.2f} GB"
        )
    compile_regions(model, config.compile)
    # Layers that are cut or compiled as a whole do not run alone.
    cut = state.model.layout.shard * state.model.layout.expert > 1
    if peak is None or cut or config.compile in ("layers", "dense"):
        return {}
    model.train()
    with untouched_rng(fabric.device):
        flops = forward_flops(model, Load.of(batch))
        found = layers_alone(model, batch, fabric.autocast, flops, peak, repeats=2)
    return {"local_mfu": {kind: row["mfu"] for kind, row in found.items()}}


def steps_of(reader: LogReader, epochs: float, progress: Progress) -> int:
    """Steps of a whole run of so many epochs, at least 1: those done and those left, by this number of ranks.

    Args:
        reader: at the position to go on from, which it keeps.
        epochs: may be a fraction.
        progress: epochs and steps done.
    """
    position = reader.state_dict()
    whole = int(epochs)
    left = 0.0
    for epoch in range(progress.epoch, whole + 1):
        reader.set_epoch(epoch)
        left += len(reader) * (1.0 if epoch < whole else epochs - whole)
        left -= progress.epoch_step if epoch == progress.epoch else 0
    reader.set_epoch(position["epoch"])
    reader.load_state_dict(position)
    return max(1, progress.step + math.floor(left + 0.5))


def _model(config: TrainConfig, dataset: Dataset, drawn_there: bool = False) -> GEM:
    """The model, its tables on the meta device if they are drawn where they will lie."""
    table_device = torch.device("meta") if drawn_there else None
    with whole_keys(GEMConfig, "model"):
        return GEM(config.model, dataset.schema, dataset.encoder.table_rows, table_device)


def _validation(config: TrainConfig, dataset: Dataset, rank: int, world: int) -> LogReader | None:
    evaluation = config.evaluation
    if not dataset.split(evaluation.split).rows:
        return None
    reader = replace(config.reader.in_order(), batch_size=evaluation.batch_size)
    names = dataset.schema
    empty: dict[str, Any] = {"auc": 0.0, "gauc": 0.0, "ne": 0.0}
    surfaces = {surface: empty for surface in ("all", *names.surface_names)}
    pick({task: surfaces for task in names.task_names}, evaluation.metric)  # refuses an unknown one now
    return LogReader(dataset, evaluation.split, reader, rank=rank, world_size=world)


def _table_reset(config: TrainConfig, dataset: Dataset, there: bool) -> Callable[[TrainState, int], None]:
    """Tables as a new model of another seed has them; optimizer sums and averages of tables start over too."""

    def reset(state: TrainState, epoch: int) -> None:
        seed = config.seed + 7_919 * epoch
        if there:
            draw.draw_tables(state.model, state.model.module.embeddings.std_of, seed)
        else:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                weights = _model(config, dataset).state_dict()
            load_tables(state.model, {name: weights[name] for name in table_weights(state.model)})
        reset_momentum(state.model, config.sparse)
        if state.ema:
            state.ema.restart_tables()

    return reset


def _finish(config: TrainConfig, loop: Loop, ended: str) -> TrainResult:
    """The result, from rank 0, which writes the manifest and prints the table."""
    shared: list[TrainResult | None] = [None]
    if loop.fabric.is_global_zero:
        result = _result(config, loop, ended)
        manifest = {
            "format": FORMAT,
            "kind": "foundation",
            **{key: value for key, value in settings.plain(result).items() if key not in ("out", "checkpoint")},
            "checkpoint": result.checkpoint.name,
            "schema_hash": loop.manifest["schema_hash"],
            "encoder_hash": loop.manifest["encoder_hash"],
            "versions": {"torch": torch.__version__},
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        atomic_write(config.out / "manifest.json", json.dumps(finite(manifest), indent=1) + "\n")
        _print(config, result)
        shared[0] = result
    loop.ledger.close(ended)
    if loop.fabric.is_global_zero:
        publish(config.out)
    dist.broadcast_object_list(shared)
    assert shared[0] is not None
    return shared[0]


def _result(config: TrainConfig, loop: Loop, ended: str) -> TrainResult:
    progress = loop.state.progress
    checkpoint = find_checkpoint(loop.checkpoints, "best" if progress.best_step is not None else "latest")
    return TrainResult(
        out=config.out,
        steps=progress.step,
        skipped=progress.skipped,
        samples=progress.samples,
        ended=ended,
        best=progress.best,
        best_step=progress.best_step,
        metrics=_metrics_of(checkpoint),
        checkpoint=checkpoint,
    )


def _print(config: TrainConfig, result: TrainResult) -> None:
    kept = "last" if result.best_step is None else f"best {config.evaluation.metric}"
    lines = [
        f"{result.steps:,} steps, {result.samples:,} impressions, {result.skipped} steps skipped; {result.ended}",
        f"{kept}: {result.checkpoint}",
    ]
    print_summary(f"{config.evaluation.split}, step {result.best_step}", result.metrics, lines)


def _metrics_of(checkpoint: Path) -> Results:
    """Metrics that a checkpoint was saved with; what was not finite comes back as NaN."""
    return with_nan(read_manifest(checkpoint)["metrics"])
