"""Score: the teacher's logits and embedding for every impression of a dataset, written as a label store.

One forward pass, streamed; the store appears whole or not at all. Any number of students read it afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import torch

from foundation.data.batch import Batch
from foundation.data.dataset import SPLITS, Dataset
from foundation.data.files import atomic_dir, require_free
from foundation.data.logs import LogReader, ReaderConfig
from foundation.data.progress import track
from foundation.data.settings import save, show
from foundation.training.checkpoint import LoadedModel, load_model
from transfer.label_store import STORE, LabelStoreError, PartWriter, StoreInfo


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreConfig:
    """What to score, with which teacher.

    Attributes:
        run: a training run's folder.
        dataset: the dataset to score.
        out: the label store to write.
        splits: the splits to score.
        which: the checkpoint: ``best``, ``latest`` or a step.
        reader: how the dataset is read; always in the order of the files.
        rows_per_file: rows after which a new Parquet file starts.
        device: where the teacher runs; ``auto`` takes a GPU when there is one.
        overwrite: replace an existing store.
    """

    run: Path
    dataset: str
    out: Path
    splits: tuple[str, ...] = SPLITS
    which: str = "best"
    reader: ReaderConfig = field(default_factory=lambda: ReaderConfig(batch_size=4096))
    rows_per_file: int = 2_000_000
    device: str = "auto"
    overwrite: bool = False

    def __post_init__(self) -> None:
        unknown = [s for s in self.splits if s not in SPLITS]
        if unknown or not self.splits or len(set(self.splits)) < len(self.splits):
            raise ValueError(f"splits must be some of {', '.join(SPLITS)}, each once, got {list(self.splits)}")
        if self.rows_per_file < 1:
            raise ValueError(f"rows_per_file must be at least 1, got {self.rows_per_file}")
        if self.device not in ("auto", "cpu", "cuda"):
            raise ValueError(f"device must be auto, cpu or cuda, got {self.device!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreResult:
    """The label store, its rows, and the teacher's version."""

    out: Path
    rows: int
    teacher: str


def score(config: ScoreConfig) -> ScoreResult:
    """Writes the label store of a dataset; memory does not grow with the number of rows.

    Raises:
        CheckpointError: there is no such run or checkpoint, or it is damaged.
        DatasetError: the dataset cannot be read.
        LabelStoreError: the dataset's schema or encoder is not the teacher's, or a logit is not finite.
        FileExistsError: ``out`` exists and ``overwrite`` is false.
    """
    show(config, "score")
    require_free(config.out, overwrite=config.overwrite, inputs=[config.run, config.dataset])
    device = torch.device(_device(config.device))
    dataset = Dataset.open(config.dataset)
    teacher = load_model(config.run, config.which, device)
    _check_origin(config, teacher, dataset)
    settings = config.reader.in_order()
    with atomic_dir(config.out, overwrite=config.overwrite) as folder:
        writer = PartWriter(folder, dataset.schema.task_names, teacher.model.embedding_width, config.rows_per_file)
        for split in config.splits:
            if dataset.split(split).rows:
                _score_split(LogReader(dataset, split, settings), teacher, device, writer, f"scoring {split}")
        writer.close()
        info = StoreInfo(
            teacher=teacher.version,
            run=str(config.run),
            schema_hash=dataset.schema.hash,
            encoder_hash=dataset.encoder.hash,
            tasks=dataset.schema.task_names,
            embedding_dim=teacher.model.embedding_width,
            rows=sum(writer.files.values()),
            splits=config.splits,
            files=writer.files,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        save(config, folder / "config.yaml")
        (folder / STORE).write_text(info.to_json())
    print(f"{config.out}: {info.rows:,} rows of {', '.join(config.splits)}, teacher {info.teacher[:12]}")
    return ScoreResult(out=config.out, rows=info.rows, teacher=info.teacher)


@torch.inference_mode()
def _score_split(
    reader: LogReader, teacher: LoadedModel, device: torch.device, writer: PartWriter, description: str
) -> None:
    for encoded in track(reader, description, len(reader)):
        output = teacher.model(Batch.from_encoded(encoded, teacher.schema, device))
        if not bool(torch.isfinite(output.logits).all()):
            rows = (~torch.isfinite(output.logits)).any(1).cpu().numpy()
            raise LabelStoreError(
                f"impression {encoded.impression_id[rows][0]}: the teacher's logit is not finite "
                f"({int(rows.sum())} such rows in the batch); nothing was written"
            )
        writer.write(encoded.impression_id, output.logits.float().cpu().numpy(), output.embedding.float().cpu().numpy())


def _device(name: str) -> str:
    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"


def _check_origin(config: ScoreConfig, teacher: LoadedModel, dataset: Dataset) -> None:
    for what, theirs, ours in (
        ("schema", teacher.schema.hash, dataset.schema.hash),
        ("encoder", teacher.encoder.hash, dataset.encoder.hash),
    ):
        if theirs != ours:
            raise LabelStoreError(
                f"{config.dataset}: its {what} is {ours}, but {config.run} was trained with {what} {theirs}; "
                "score a dataset that was prepared with the teacher's schema and encoder"
            )
