"""Batches of a student: the value model's named inputs, labels, and what the teacher said about the same rows.

Shapes: R requests, N impressions, K tasks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from foundation.data.encoding import EncodedBatch, model_inputs
from foundation.data.logs import LogReader
from foundation.data.schema import Schema
from transfer.label_store import LabelStore
from value_models.student import to_tensors

SAMPLE_REQUESTS = 8
SAMPLE_IMPRESSIONS = 64


class StudentBatch(NamedTuple):
    """Tensors of R requests and N impressions.

    ``inputs`` by name; ``labels`` float32 ``[N, K]``, ``label_valid`` bool ``[N, K]``, ``weight`` and
    ``sampling_rate`` float32 ``[N]``, ``surface`` and ``user_id`` int64 ``[N]``, ``teacher_logits`` float32
    ``[N, K]`` (0 where not found), ``teacher_found`` bool ``[N]``.
    """

    inputs: dict[str, Tensor]
    labels: Tensor
    label_valid: Tensor
    weight: Tensor
    sampling_rate: Tensor
    surface: Tensor
    user_id: Tensor
    teacher_logits: Tensor
    teacher_found: Tensor


def student_batch(schema: Schema, encoded: EncodedBatch, store: LabelStore | None) -> StudentBatch:
    """A reader's batch as the student's tensors; without a store no row is found."""
    count = len(encoded.impression_id)
    if store is None:
        logits, found = np.zeros((count, len(schema.task_names)), np.float32), np.zeros(count, bool)
    else:
        logits, _, found = store.lookup(encoded.impression_id)
    index = encoded.request_index
    named = model_inputs(schema, encoded.request, encoded.item, index, encoded.request_time)
    rows = {
        "labels": encoded.labels,
        "label_valid": encoded.label_valid,
        "weight": encoded.weight,
        "sampling_rate": encoded.sampling_rate,
        "surface": encoded.surface[index],
        "user_id": encoded.user_id[index],
        "teacher_logits": logits,
        "teacher_found": found,
    }
    return StudentBatch(inputs=to_tensors(named), **to_tensors(rows))


class StudentBatches:
    """Batches of a reader, one epoch per iteration; counts the rows that the teacher scored.

    Args:
        reader: gives encoded batches.
        store: the teacher's answers, or None.
        surface: index of the student's surface; rows of others get their weight times ``other_weight``. None
            treats all alike.
        other_weight: see ``surface``.
    """

    def __init__(
        self, reader: LogReader, store: LabelStore | None, surface: int | None = None, other_weight: float = 1.0
    ) -> None:
        self.reader = reader
        self.store = store
        self.surface = surface
        self.other_weight = other_weight
        self.rows = 0
        self.found = 0

    def __len__(self) -> int:
        """Batches of the current epoch."""
        return len(self.reader)

    def __iter__(self) -> Iterator[StudentBatch]:
        """Yields the batches of one epoch; ``rows`` and ``found`` then describe it."""
        self.rows = self.found = 0
        for encoded in self.reader:
            batch = student_batch(self.reader.dataset.schema, encoded, self.store)
            if self.surface is not None:
                scale = torch.where(batch.surface == self.surface, 1.0, self.other_weight)
                batch = batch._replace(weight=batch.weight * scale)
            self.rows += len(batch.weight)
            self.found += int(batch.teacher_found.sum())
            yield batch


def sample_inputs(schema: Schema, encoded: EncodedBatch) -> dict[str, np.ndarray]:
    """Named inputs of the first few requests of a batch that have impressions, for parity and golden rows."""
    counts = np.bincount(encoded.request_index, minlength=encoded.request.rows)
    requests = np.flatnonzero(counts)[:SAMPLE_REQUESTS]
    rows = np.flatnonzero(np.isin(encoded.request_index, requests))[:SAMPLE_IMPRESSIONS]
    requests = np.unique(encoded.request_index[rows])
    index = np.searchsorted(requests, encoded.request_index[rows]).astype(np.int64)
    return model_inputs(
        schema, encoded.request.take(requests), encoded.item.take(rows), index, encoded.request_time[requests]
    )
