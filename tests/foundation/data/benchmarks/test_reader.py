"""The reader's benchmark runs: its datasets have the columns of KuaiRand, and its measurement counts every row."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from foundation.data.benchmarks.kuairand_like import write_kuairand_like
from foundation.data.benchmarks.reader import measure
from foundation.data.dataset import Dataset
from foundation.data.logs import LogReader, ReaderConfig


@pytest.mark.parametrize(("row_group_rows", "groups"), [(700, 3), (2000, 1)])
def test_datasets_have_the_shape_asked_for(tmp_path: Path, row_group_rows: int, groups: int) -> None:
    write_kuairand_like(tmp_path, 2000, row_group_rows)
    dataset = Dataset.open(tmp_path)
    assert dataset.split("train").rows == 2000
    assert pq.ParquetFile(dataset.files("train")[0]).num_row_groups == groups
    (batch,) = LogReader(dataset, "train", ReaderConfig(batch_size=2000, workers=0))
    lengths = batch.request.lengths["shown.video"]
    assert 35 < lengths.mean() < 43 and lengths.max() == 50
    assert (np.sort(batch.impression_id) == np.arange(2000)).all()


def test_a_measurement_counts_every_row(tmp_path: Path) -> None:
    write_kuairand_like(tmp_path, 1000, 400)
    found = measure(str(tmp_path), "train", ReaderConfig(batch_size=100, workers=1), epochs=2)
    assert found.rows == 2000
    assert found.resident_mb >= found.proportional_mb > 0
    assert 0 < found.first_s <= found.wall_s and found.cpu_s > 0 and found.decode_rows_per_s > 0
