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
