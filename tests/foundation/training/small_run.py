"""A small dataset and a small model that has everything which makes resuming hard: dropout, averages, histories."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from foundation.data.dataset import Dataset
from foundation.data.logs import ReaderConfig
from foundation.model.embeddings import EmbeddingsConfig
from foundation.model.gem import GEMConfig
from foundation.model.heads import HeadsConfig
from foundation.parallel.parallelize import SparseConfig
from foundation.training.checkpoint_files import find_checkpoint, read_tensors, saved_keys
from foundation.training.ema import EMAConfig
from foundation.training.evaluate import EvaluationConfig
from foundation.training.optimizer import DenseConfig
from foundation.training.schedule import ScheduleConfig
from foundation.training.train import TrainConfig
from tests.foundation.data.builders import small_table, write_dataset

SPEEDS = (
    "samples_per_second",
    "tokens_per_second",
    "data_wait",
    "loader_samples_per_second",
    "tflops",
    "mfu",
    "local_mfu",
)
MODEL = GEMConfig(
    width=8,
    layers=1,
    embeddings=EmbeddingsConfig(id_dropout={"user_id": 0.2}),
    heads=HeadsConfig(trunk=(16, 8), tower=4, adapter_rank=2, dropout=0.2),
)


def dataset(folder: Path, seed: int = 0, train_requests: int = 120) -> Dataset:
    """Train, validation and test splits of small requests."""
    sizes = {"train": train_requests, "validation": 40, "test": 30}
    tables, first = {}, 0
    for number, (split, requests) in enumerate(sizes.items()):
        table = small_table([1 + i % 4 for i in range(requests)], seed=seed + number, first_id=first)
        tables[f"{split}/part-00000.parquet"] = table
        first += len(table)
    return write_dataset(folder, tables, row_group_size=50)


def config(data: Path, out: Path, **changes: Any) -> TrainConfig:
    """About 10 steps per epoch."""
    settings: dict[str, Any] = {
        "dataset": str(data),
        "out": out,
        "model": MODEL,
        "reader": ReaderConfig(batch_size=32, shuffle_window=100, workers=0),
        "sparse": SparseConfig(lr=0.05),
        "dense": DenseConfig(lr=0.01),
        "schedule": ScheduleConfig(warmup_steps=3),
        "ema": EMAConfig(decay=0.9),
        "evaluation": EvaluationConfig(batch_size=64),
        "device": "cpu",
        "log_every": 1,
    }
    return TrainConfig(**{**settings, **changes})


def lines(run: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """What `metrics.jsonl` says, without the speeds, which differ between runs."""
    entries = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for entry in entries:
        for key in SPEEDS:
            entry.pop(key, None)
    return [entry for entry in entries if kind in (None, entry["kind"])]


def tensors(run: Path, which: str | int = "latest") -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, whole."""
    path = find_checkpoint(run / "checkpoints", which)
    filled = {key: torch.zeros(shape) for key, shape in saved_keys(path).items()}
    read_tensors(path, filled)
    return filled


def assert_same_tensors(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    """Bit for bit."""
    assert one.keys() == other.keys()
    different = [key for key, value in one.items() if not torch.equal(value, other[key])]
    assert not different
