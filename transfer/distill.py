"""Distil: one value model for one surface, from the surface's labels and, if given, from a teacher.

The same command without label store and teacher trains the student alone, for comparison.
"""

from __future__ import annotations

import logging
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, RichProgressBar
from lightning.pytorch.loggers import TensorBoardLogger

from foundation.data.dataset import Dataset
from foundation.data.files import atomic_dir, require_free
from foundation.data.index import index_files
from foundation.data.logs import LogReader, ReaderConfig
from foundation.data.settings import save, show
from foundation.training.checkpoint import load_model
from foundation.training.full_disk import quiet_tensorboard
from foundation.training.metrics import ALL
from transfer.batches import StudentBatches, sample_inputs
from transfer.evaluate import predict, report
from transfer.label_store import LabelStore
from transfer.losses import DistillLossConfig
from transfer.sharing import SharingConfig, SharingError, share_tables, teacher_tables
from transfer.student_module import MONITOR, StudentModule, StudentOptimizerConfig
from value_models.calibration import CalibrationConfig
from value_models.model import ValueModel, ValueModelConfig
from value_models.student import Student, save_student


@dataclass(frozen=True, kw_only=True, slots=True)
class DistillConfig:
    """How to train one student.

    Attributes:
        dataset: the dataset.
        surface: the surface whose rows the student ranks; ``all`` for every surface.
        out: the student folder to write.
        store: a label store of this dataset; None trains from labels alone.
        teacher: a training run whose tables are shared; needs ``sharing``.
        which: the teacher's checkpoint: ``best``, ``latest`` or a step.
        sharing: the contract of shared tables; needs ``teacher``.
        model: sizes of the student.
        loss: weights of the distillation losses.
        optimizer: rates, schedule and weight averaging.
        calibration: how probabilities are calibrated on the validation rows.
        reader: how the dataset is read.
        other_surfaces_weight: weight of training rows of other surfaces; 0 does not read them.
        epochs: the most passes over the training rows.
        min_steps: more passes where they have fewer batches than this, so that one config serves surfaces of any size.
        evaluations_per_epoch: validations in a pass.
        patience: validations in a row without a better NE after which training stops.
        seed: for weights, dropout and the order of rows.
        device: ``auto``, ``cpu`` or ``cuda``.
        overwrite: replace an existing student.
    """

    dataset: str
    surface: str
    out: Path
    store: Path | None = None
    teacher: Path | None = None
    which: str = "best"
    sharing: SharingConfig | None = None
    model: ValueModelConfig = field(default_factory=ValueModelConfig)
    loss: DistillLossConfig = field(default_factory=DistillLossConfig)
    optimizer: StudentOptimizerConfig = field(default_factory=StudentOptimizerConfig)
    calibration: CalibrationConfig = field(default_factory=CalibrationConfig)
    reader: ReaderConfig = field(default_factory=ReaderConfig)
    other_surfaces_weight: float = 0.0
    epochs: int = 1
    min_steps: int = 0
    evaluations_per_epoch: int = 4
    patience: int = 4
    seed: int = 0
    device: str = "auto"
    overwrite: bool = False

    def __post_init__(self) -> None:
        for key in ("epochs", "evaluations_per_epoch", "patience"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key} must be at least 1, got {getattr(self, key)}")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must be from 0 to 2**32 - 1, got {self.seed}")
        if self.min_steps < 0:
            raise ValueError(f"min_steps must not be negative, got {self.min_steps}")
        if self.other_surfaces_weight < 0:
            raise ValueError(f"other_surfaces_weight must not be negative, got {self.other_surfaces_weight}")
        if self.device not in ("auto", "cpu", "cuda"):
            raise ValueError(f"device must be auto, cpu or cuda, got {self.device!r}")
        if (self.teacher is None) != (self.sharing is None):
            raise ValueError("teacher and sharing go together: sharing.tables says what is taken from the teacher")


@dataclass(frozen=True, kw_only=True, slots=True)
class DistillResult:
    """The student's folder, its metrics by split, and how many training rows the teacher had scored."""

    out: Path
    surface: str
    metrics: dict[str, Any]
    train_rows: int
    teacher_rows: int
    steps: int
    best_step: int


def distill(config: DistillConfig) -> DistillResult:
    """Trains, calibrates and measures one student, and writes its folder.

    Training rows that the label store lacks are counted and learned from labels only.

    Raises:
        DatasetError: the dataset cannot be read, or has no rows of the surface to train or validate on.
        LabelStoreError: the store is broken, or belongs to another schema or encoder.
        SharingError: the teacher's tables do not meet the contract.
        FileExistsError: ``out`` exists and ``overwrite`` is false.
        ValueError: the surface is not known, or no task has both classes in validation.
    """
    show(config, "distill")
    inputs = [config.dataset, config.store, config.teacher]
    require_free(config.out, overwrite=config.overwrite, inputs=inputs)
    dataset = Dataset.open(config.dataset)
    schema = dataset.schema
    surface = None if config.surface == ALL else schema.surface_index(config.surface)
    store = _open_store(config, dataset)
    pl.seed_everything(config.seed, verbose=False)
    model = ValueModel(config.model, schema, dataset.encoder.table_rows)
    shared = _share(config, dataset, model)
    only = None if surface is None or config.other_surfaces_weight else config.surface
    train = StudentBatches(_reader(config, dataset, "train", only), store, surface, config.other_surfaces_weight)
    own = None if surface is None else config.surface
    held_out = {"validation": StudentBatches(_reader(config, dataset, "validation", own), store)}
    if _has_rows(dataset, "test", surface):
        held_out["test"] = StudentBatches(_reader(config, dataset, "test", own), store)
    epochs = max(config.epochs, -(-config.min_steps // len(train)))
    with atomic_dir(config.out, overwrite=config.overwrite) as folder:
        module = StudentModule(model, schema, config.loss, config.optimizer, len(train) * epochs, config.surface)
        _fit(config, epochs, module, train, held_out["validation"], folder)
        if store is not None and train.found < train.rows:
            print(
                f"distill: {train.rows - train.found} of {train.rows} training rows are not in {config.store}; "
                "they were learned from labels only",
                file=sys.stderr,
            )
        best = module.best_model().cpu()
        predictions = {name: predict(best, batches, f"scoring {name}") for name, batches in held_out.items()}
        calibration, metrics = report(predictions, schema, config.calibration)
        encoded = next(iter(held_out["validation"].reader))
        manifest = {
            "seed": config.seed,
            "steps": module.steps,
            "best_step": module.best_step,
            "train_rows": train.rows,
            "teacher_rows": train.found,
            "teacher": _teacher_entry(store, shared),
            "curve": module.curve,
        }
        student = Student(
            surface=config.surface,
            model=best,
            calibration=calibration,
            schema=schema,
            encoder=dataset.encoder,
            sample=sample_inputs(schema, encoded),
            metrics=metrics,
            manifest=manifest,
        )
        save(config, folder / "config.yaml")
        save_student(folder, student)
    print(summary(config, metrics))
    return DistillResult(
        out=config.out,
        surface=config.surface,
        metrics=metrics,
        train_rows=train.rows,
        teacher_rows=train.found,
        steps=module.steps,
        best_step=module.best_step,
    )


def summary(config: DistillConfig, metrics: dict[str, Any]) -> str:
    """One line per task on the last split measured, beside the teacher where it scored the rows."""
    split = "test" if "test" in metrics else "validation"
    lines = [f"{config.out}: student of surface {config.surface}, on {split}:"]
    for task, slices in metrics[split].items():
        own = slices.get(config.surface)
        if own is None:
            continue
        line = (
            f"  {task}: NE {_number(own['ne'])}, AUC {_number(own['auc'])}, calibration {_number(own['calibration'])}"
        )
        teacher = metrics.get("teacher", {}).get(split, {}).get(task, {}).get(config.surface)
        if teacher is not None:
            line += f" (teacher NE {_number(teacher['ne'])}, AUC {_number(teacher['auc'])})"
        lines.append(line + f", {own['rows']:,} rows")
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return "not defined" if value is None else f"{value:.4f}"


def _open_store(config: DistillConfig, dataset: Dataset) -> LabelStore | None:
    if config.store is None:
        return None
    store = LabelStore.open(config.store)
    store.require(dataset.schema.hash, dataset.encoder.hash, dataset.schema.task_names)
    return store


def _share(config: DistillConfig, dataset: Dataset, model: ValueModel) -> dict[str, dict[str, Any]]:
    """Fills the student's shared tables. Raises SharingError, also for a teacher with other ids."""
    if config.teacher is None or config.sharing is None:
        return {}
    teacher = load_model(config.teacher, config.which, torch.device("cpu"))
    if teacher.encoder.hash != dataset.encoder.hash:
        raise SharingError(
            f"teacher {config.teacher}: its encoder is {teacher.encoder.hash}, the dataset's is "
            f"{dataset.encoder.hash}; rows of their tables mean different ids"
        )
    return share_tables(config.sharing, teacher_tables(teacher.model), model.tables)


def _teacher_entry(store: LabelStore | None, shared: dict[str, dict[str, Any]]) -> dict[str, Any] | None:
    """What the student has from a teacher, for its manifest."""
    if store is None and not shared:
        return None
    return {"version": store.info.teacher if store else None, "shared": shared}


def _reader(config: DistillConfig, dataset: Dataset, split: str, surface: str | None) -> LogReader:
    settings = replace(config.reader, seed=config.reader.seed + config.seed)
    if split != "train":
        settings = settings.in_order()
    return LogReader(dataset, split, settings, surface=surface)


def _has_rows(dataset: Dataset, split: str, surface: int | None) -> bool:
    """Whether a split exists and has rows of the surface."""
    if split not in dataset.manifest.splits or not dataset.manifest.splits[split].rows:
        return False
    return bool(index_files(dataset.files(split), dataset.schema, surface=surface).rows)


def _fit(
    config: DistillConfig,
    epochs: int,
    module: StudentModule,
    train: StudentBatches,
    validation: StudentBatches,
    folder: Path,
) -> None:
    """Runs Lightning's Trainer; logs for TensorBoard go to ``folder``."""
    callbacks: list[Callback] = [EarlyStopping(monitor=MONITOR, mode="min", patience=config.patience)]
    watched = sys.stderr.isatty()
    if watched:
        callbacks.append(RichProgressBar(console_kwargs={"stderr": True}))
    checks = min(config.evaluations_per_epoch, len(train))
    with _quiet():
        trainer = pl.Trainer(
            accelerator={"cuda": "gpu"}.get(config.device, config.device),
            devices=1,
            max_epochs=epochs,
            val_check_interval=1.0 / checks,
            num_sanity_val_steps=0,
            logger=TensorBoardLogger(folder, name="", version="tensorboard"),
            callbacks=callbacks,
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=watched,
            log_every_n_steps=10,
        )
        interrupt = signal.getsignal(signal.SIGINT)
        try:
            with quiet_tensorboard():
                trainer.fit(module, train, validation)
        except SystemExit:
            # Lightning turns Ctrl-C into an exit of its own and leaves the signal ignored.
            signal.signal(signal.SIGINT, interrupt)
            if trainer.interrupted:
                raise KeyboardInterrupt from None
            raise


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences Lightning's notes about devices, data loaders and tips, which say nothing about the student."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="lightning")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
