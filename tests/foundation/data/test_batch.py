"""Batches as tensors: the jagged layout against the numpy batch, and batches of nothing."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from foundation.data.batch import Batch, sparse_keys
from foundation.data.encoding import EncodedBatch
from foundation.data.logs import LogReader, ReaderConfig
from foundation.data.window_loader import empty_batch
from tests.foundation.data.builders import fit, small_schema, small_table, train_parts, write_dataset


@pytest.fixture(scope="module")
def encoded(tmp_path_factory: pytest.TempPathFactory) -> EncodedBatch:
    folder: Path = tmp_path_factory.mktemp("batch")
    dataset = write_dataset(folder, train_parts(small_table([3, 1, 4, 2])))
    return next(iter(LogReader(dataset, "train", ReaderConfig(batch_size=16, shuffle_window=0, workers=0))))


def test_keys_follow_the_schema() -> None:
    assert sparse_keys(small_schema()) == (
        "user_id",
        "likes",
        "hour",
        "watched.item",
        "watched.action",
        "item_id",
        "topics",
    )


def test_sparse_features_of_requests_and_items(encoded: EncodedBatch) -> None:
    batch = Batch.from_encoded(encoded, small_schema())
    assert (batch.num_requests, batch.num_impressions) == (4, 10)
    assert batch.sparse.stride() == 4
    for key in ("user_id", "likes", "watched.item", "watched.action"):
        assert batch.sparse[key].values().tolist() == encoded.request.ids[key].tolist()
        assert batch.sparse[key].lengths().tolist() == encoded.request.lengths[key].tolist()
    assert batch.sparse["item_id"].lengths().tolist() == [3, 1, 4, 2]
    assert batch.sparse["item_id"].values().tolist() == encoded.item.ids["item_id"].tolist()


def test_multi_valued_item_features_split_twice(encoded: EncodedBatch) -> None:
    batch = Batch.from_encoded(encoded, small_schema())
    per_impression = encoded.item.lengths["topics"]
    expected = [per_impression[encoded.request_index == r].sum() for r in range(4)]
    assert batch.sparse["topics"].lengths().tolist() == expected
    assert batch.item_multi_lengths["topics"].tolist() == per_impression.tolist()
    assert batch.sparse_weights["topics"].tolist() == encoded.item.weights["topics"].tolist()
    assert batch.sparse_weights["topics"].shape == batch.sparse["topics"].values().shape


def test_sequences_are_packed(encoded: EncodedBatch) -> None:
    batch = Batch.from_encoded(encoded, small_schema())
    offsets = batch.sequence_offsets["watched"]
    assert offsets.dtype == torch.int64 and offsets.shape == (5,)
    assert offsets.diff().tolist() == encoded.request.lengths["watched.item"].tolist()
    assert batch.sequence_times["watched"].shape == (int(offsets[-1]),)


def test_what_the_model_would_have_to_ask_the_device_for_is_counted_before(encoded: EncodedBatch) -> None:
    batch = Batch.from_encoded(encoded, small_schema())
    lengths = batch.sequence_offsets["watched"].diff()
    assert batch.impression_events == {"watched": int(lengths[batch.request_index].sum())}
    moved = batch.to("meta")
    assert moved.impression_events == batch.impression_events
    assert moved.sparse.length_per_key() == [batch.sparse[key].values().numel() for key in batch.sparse.keys()]  # noqa: SIM118


def test_plain_tensors_keep_values_and_dtypes(encoded: EncodedBatch) -> None:
    batch = Batch.from_encoded(encoded, small_schema())
    for name in ("request_index", "request_time", "user_id", "surface", "labels", "label_valid", "impression_id"):
        np.testing.assert_array_equal(getattr(batch, name).numpy(), getattr(encoded, name))
    assert batch.labels.dtype == batch.weight.dtype == batch.item_dense.dtype == torch.float32
    assert batch.label_valid.dtype == torch.bool
    assert batch.request_dense.shape == (4, 1) and batch.item_dense.shape == (10, 4)


def test_a_batch_of_nothing() -> None:
    schema = small_schema()
    batch = Batch.from_encoded(empty_batch(schema, fit(schema, small_table([2, 2]))), schema)
    assert batch.num_requests == batch.num_impressions == batch.sparse.stride() == 0
    assert batch.labels.shape == (0, 3) and batch.item_dense.shape == (0, 4)
    assert batch.sequence_offsets["watched"].tolist() == [0]
    moved = batch.to("cpu")
    assert moved.sparse.keys() == list(sparse_keys(schema))


def test_to_another_device_moves_every_tensor(encoded: EncodedBatch) -> None:
    batch = Batch.from_encoded(encoded, small_schema(), device="meta")
    assert batch.device.type == "meta"
    for tensor in _tensors(batch):
        assert tensor.device.type == "meta"


@pytest.mark.gpu
def test_pinned_memory_and_streams(encoded: EncodedBatch) -> None:
    batch = Batch.from_encoded(encoded, small_schema()).pin_memory()
    assert all(tensor.is_pinned() for tensor in _tensors(batch) if tensor.numel())
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        moved = batch.to("cuda", non_blocking=True)
    moved.record_stream(torch.cuda.current_stream())
    stream.synchronize()
    assert moved.sparse.values().tolist() == batch.sparse.values().tolist()


def _tensors(batch: Batch) -> list[torch.Tensor]:
    found: list[torch.Tensor] = [batch.sparse.values(), batch.sparse.lengths()]
    for field in fields(batch):
        value: Any = getattr(batch, field.name)
        found += value.values() if isinstance(value, dict) else [value]
    return [value for value in found if isinstance(value, torch.Tensor)]
