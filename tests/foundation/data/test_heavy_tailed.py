"""The random dataset with long histories, through the reader."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from foundation.data.benchmarks.heavy_tailed import write_heavy_tailed
from foundation.data.dataset import Dataset
from foundation.data.logs import LogReader, ReaderConfig
from foundation.data.schema import Schema


def test_requests_and_histories_are_as_asked(tmp_path: Path) -> None:
    schema = Schema.load("configs/datasets/streams.yaml")
    write_heavy_tailed(tmp_path / "data", schema, requests=80, impressions=3, mean=32.0, longest=128)
    reader = LogReader(Dataset.open(tmp_path / "data"), "train", ReaderConfig(batch_size=60, workers=0))
    batches = list(reader)
    assert sum(len(batch.impression_id) for batch in batches) == 240
    assert all((np.bincount(batch.request_index) == 3).all() for batch in batches)
    events = sum(
        np.concatenate([batch.request.lengths[s.key(s.attributes[0].name)] for batch in batches])
        for s in schema.sequences
    )
    assert 16 < events.mean() < 48
    assert events.max() <= 130  # rounded stream by stream


def test_histories_in_the_first_row_of_a_request_are_enough(tmp_path: Path) -> None:
    schema = Schema.load("configs/datasets/streams.yaml")
    read = []
    for once in (False, True):
        folder = tmp_path / str(once)
        write_heavy_tailed(folder, schema, requests=20, impressions=3, mean=32.0, longest=128, once=once)
        read.append(list(LogReader(Dataset.open(folder), "train", ReaderConfig(batch_size=30, workers=0))))
    for every, first in zip(*read, strict=True):
        assert first.request.ids.keys() == every.request.ids.keys()
        for key, ids in every.request.ids.items():
            assert np.array_equal(first.request.ids[key], ids) and len(ids)
        assert np.array_equal(first.impression_id, every.impression_id)
