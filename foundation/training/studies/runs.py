"""Trains variants of a preset with several seeds, a few at a time, each in a process of its own.

    OUT/VARIANT/seed-S/run/          what `opengem train` writes
    OUT/VARIANT/seed-S/result.json   metrics of the last weights on the study's split, and what the run took

What is there already is not run again, so a study that was cut off goes on where it stopped. A result from elsewhere
counts too: copy its folder (`result.json` is enough) to its place. `train: false` runs nothing and takes what is there.
"""

from __future__ import annotations

import json
import re
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import as_completed
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml

from foundation.data.batch import Batch
from foundation.data.dataset import Dataset
from foundation.data.files import atomic_write
from foundation.data.logs import LogReader, ReaderConfig
from foundation.data.options import parse_config
from foundation.data.processes import ProcessPool
from foundation.data.progress import progress
from foundation.data.settings import plain
from foundation.model.flops import TRAINING
from foundation.training.checkpoint import load_model
from foundation.training.evaluate import evaluate
from foundation.training.launch import Device, pick_device
from foundation.training.metrics import Results
from foundation.training.operations import Operations
from foundation.training.run_log import finite, with_nan
from foundation.training.train import TrainConfig, train

COUNTED_BATCHES = 20
OWN = ("dataset", "out", "seed", "device", "overwrite", "resume")
"""Options of `train` that a study sets."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ,.()+-]*")


class RunsError(ValueError):
    """Runs that failed, each named with its log, which holds the whole story."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyConfig:
    """What all studies are told.

    Args:
        dataset: folder or URL of a prepared dataset.
        out: folder to write; runs that are there are kept.
        preset: preset of `train` that the variants change.
        options: what is changed in every variant, nested as in a preset; a variant's own changes win, as those of a
            second `--config` do: a mapping such as `model.match.outcomes` is replaced as a whole.
        split: what is measured.
        seeds: every variant is trained with each; at least two for standard errors.
        processes: runs at a time.
        threads: of PyTorch in each; 0 leaves it alone.
        device: auto, cpu or cuda.
        train: run what is missing; if not, the table is made of the results that are there.
    """

    dataset: str
    out: Path
    preset: str
    options: dict[str, Any] = field(default_factory=dict)
    split: str = "test"
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2])
    processes: int = 1
    threads: int = 1
    device: Device = "auto"
    train: bool = True

    def __post_init__(self) -> None:
        if self.processes < 1:
            raise ValueError(f"processes: must be at least 1, got {self.processes}")
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds: {self.seeds} has one twice, which would count as a run of its own")

    def run(self, variants: Mapping[str, dict[str, Any]]) -> dict[tuple[str, int], Outcome]:
        """Trains what is missing of the variants; outcomes by variant and seed. Raises what `plan` and `run_all` do.

        Without `train` the runs that are not there are missing in the outcomes, and their names are printed.
        """
        jobs = plan(
            variants,
            self.seeds,
            common=self.options,
            preset=self.preset,
            dataset=self.dataset,
            split=self.split,
            out=self.out,
            device=self.device,
            threads=self.threads,
        )
        if self.train:
            run_all([job for job in jobs if not job.result.is_file()], self.processes)
        there = [job for job in jobs if job.result.is_file()]
        missing = [f"{job.variant} (seed {job.seed})" for job in jobs if job not in there]
        if missing:
            print(f"not there: {', '.join(missing)}", file=sys.stderr)
        return {(job.variant, job.seed): read(job.result) for job in there}


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One run.

    Args:
        variant: its name.
        seed: of the run.
        preset: preset of `train`.
        common: what the study changes in it for all variants, nested as in a preset.
        options: what the variant changes after that.
        dataset: folder or URL.
        split: what the result is measured on.
        folder: where it goes.
        device: auto, cpu or cuda.
        threads: of PyTorch; 0 leaves it alone.
    """

    variant: str
    seed: int
    preset: str
    common: dict[str, Any]
    options: dict[str, Any]
    dataset: str
    split: str
    folder: Path
    device: Device
    threads: int

    @property
    def result(self) -> Path:
        """The file that says that the run is complete."""
        return self.folder / "result.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What came of a run.

    Args:
        metrics: `{task: {"all" or surface: slice}}` on the study's split.
        samples: impressions trained on.
        flops: useful operations of a forward pass per impression, on average over some training batches.
        dense: parameters besides the tables.
        seconds: wall time.
    """

    metrics: Results
    samples: int
    flops: float
    dense: int
    seconds: float


def train_config(job: Job) -> TrainConfig:
    """The run's config.

    Raises:
        ValueError: the preset or an option cannot be used; names the variant.
    """
    for where, changed in (("options", job.common), (f"variants.{job.variant}", job.options)):
        own = [key for key in OWN if key in changed]
        if own:
            raise ValueError(f"{where}.{own[0]}: is set by the study for each run; leave it out")
    job.folder.mkdir(parents=True, exist_ok=True)
    options = ["--config", job.preset]
    for name, changed in (("common.yaml", job.common), ("changes.yaml", job.options)):
        atomic_write(job.folder / name, yaml.safe_dump(changed, sort_keys=False))
        options += ["--config", str(job.folder / name)]
    options += ["--dataset", job.dataset, "--seed", str(job.seed)]
    options += ["--out", str(job.folder / "run"), "--device", job.device, "--overwrite", "true"]
    try:
        return parse_config(TrainConfig, options, name="train")  # type: ignore[no-any-return]
    except ValueError as error:
        raise ValueError(f"variants.{job.variant}: {error}") from error


def plan(
    variants: Mapping[str, dict[str, Any]],
    seeds: Sequence[int],
    *,
    common: Mapping[str, Any],
    preset: str,
    dataset: str,
    split: str,
    out: Path,
    device: Device,
    threads: int,
) -> list[Job]:
    """All runs of a study, seed by seed, so that a study that is cut off has all variants of the first seeds.

    Raises:
        ValueError: a name that cannot be a folder, or a variant that is no config; before anything is trained.
    """
    if not variants or not seeds:
        raise ValueError("a study needs at least one variant and one seed")
    for name in variants:
        if not _NAME.fullmatch(name):
            raise ValueError(f"variants: {name!r} must be letters, digits, spaces and , . ( ) + - only")
    opened = Dataset.open(dataset)
    opened.split(split)
    jobs = [
        Job(
            variant=name,
            seed=seed,
            preset=preset,
            common=dict(common),
            options=dict(options),
            dataset=dataset,
            split=split,
            folder=out / name / f"seed-{seed}",
            device=device,
            threads=threads,
        )
        for seed in seeds
        for name, options in variants.items()
    ]
    for job in jobs:
        _refuse_other(job, train_config(job), opened)
    return jobs


def run_all(jobs: Sequence[Job], processes: int) -> None:
    """Runs the jobs, `processes` at a time.

    Raises:
        RunsError: a run failed; the others are kept, and the message names the failed run's log.
    """
    failed: list[str] = []
    with (
        ProcessPool(processes, tasks_per_process=1) as pool,
        progress("runs", len(jobs)) as advance,
    ):
        futures = {pool.submit(run_one, job): job for job in jobs}
        for future in as_completed(futures):
            advance(1)
            if (error := future.exception()) is not None:
                kind = "" if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: "
                failed.append(f"{futures[future].folder / 'log'}: {kind}{error}")
    if failed:
        raise RunsError("; ".join(sorted(failed)))


def run_one(job: Job) -> None:
    """Trains, measures and writes the result."""
    if job.threads:
        torch.set_num_threads(job.threads)
    begin = time.perf_counter()
    with open(job.folder / "log", "w") as log, redirect_stdout(log), redirect_stderr(log):
        try:
            config, dataset, outcome = _outcome(job, begin)
        except Exception:
            traceback.print_exc()  # what the study says of it is one line
            raise
    content = {**_identity(job, config, dataset), **plain(outcome)}
    atomic_write(job.result, json.dumps(finite(content), indent=1) + "\n")


def _outcome(job: Job, begin: float) -> tuple[TrainConfig, Dataset, Outcome]:
    config = train_config(job)
    trained = train(config)
    device = pick_device(job.device)
    dataset = Dataset.open(job.dataset)
    loaded = load_model(trained.out, "latest", device)
    reader = LogReader(dataset, job.split, ReaderConfig(batch_size=4096, shuffle_window=0, workers=0))
    counts = Operations(config.model, dataset)
    outcome = Outcome(
        metrics=evaluate(loaded.model, reader, device),
        samples=trained.samples,
        flops=flops_per_impression(counts, config, dataset),
        dense=counts.dense,
        seconds=time.perf_counter() - begin,
    )
    return config, dataset, outcome


def flops_per_impression(counts: Operations, config: TrainConfig, dataset: Dataset) -> float:
    """Useful operations of a forward pass, by the histories of the first training batches."""
    reader = LogReader(dataset, "train", ReaderConfig(batch_size=config.reader.batch_size, workers=0))
    operations = impressions = 0.0
    for _, encoded in zip(range(COUNTED_BATCHES), reader, strict=False):
        batch = Batch.from_encoded(encoded, dataset.schema)
        operations += counts.step(batch) / TRAINING
        impressions += len(batch.labels)
    return operations / impressions


def read(path: Path) -> Outcome:
    """A result that `run_one` wrote; what was not finite comes back as NaN.

    Raises:
        ValueError: the file is damaged, or something else; names it.
    """
    content = _content(path)
    try:
        return Outcome(
            metrics=with_nan(content["metrics"]),
            samples=int(content["samples"]),
            flops=float(content["flops"]),
            dense=int(content["dense"]),
            seconds=float(content["seconds"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise _no_result(path, error) from error


def _content(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise _no_result(path, error) from error
    if not isinstance(content, dict):
        raise _no_result(path, TypeError(f"a {type(content).__name__} in place of an object"))
    return content


def _no_result(path: Path, error: Exception) -> ValueError:
    return ValueError(
        f"{path}: is no whole result of a run ({type(error).__name__}: {error}); copy it again, or remove it to have "
        "the run done anew"
    )


def _essence(config: TrainConfig) -> dict[str, Any]:
    """What makes a run what it is, wherever it runs: its config without places and devices."""
    content: dict[str, Any] = json.loads(json.dumps(plain(config)))
    return {key: value for key, value in content.items() if key not in ("dataset", "out", "device", "overwrite")}


def _identity(job: Job, config: TrainConfig, dataset: Dataset) -> dict[str, Any]:
    """What a result must have in common with a run to stand for it."""
    rows = {name: split.rows for name, split in dataset.manifest.splits.items()}
    return {
        "config": _essence(config),
        "schema": dataset.schema.hash,
        "data": {"encoder": dataset.encoder.hash, "rows": rows},
        "split": job.split,
    }


def _refuse_other(job: Job, config: TrainConfig, dataset: Dataset) -> None:
    """A result of another config, of other data or on another split must not pass for this one's."""
    if not job.result.is_file():
        return
    content = _content(job.result)
    wanted = _identity(job, config, dataset)
    unsaid = [what for what in ("data", "split") if what not in content]  # written before results said so
    for what in (what for what in wanted if what not in unsaid):
        if content.get(what) != wanted[what]:
            raise ValueError(
                f"{job.result}: is of another {what} of {job.variant!r}; choose another `out`, or remove it"
            )
    if unsaid:
        print(f"{job.result}: does not say of which {' and '.join(unsaid)} it is", file=sys.stderr)
    read(job.result)
