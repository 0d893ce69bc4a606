"""A batch described and made again from one piece of memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from foundation.data.logs import LogReader, ReaderConfig
from foundation.data.shared_batch import Arena, flatten, rebuild, size_of
from tests.foundation.data.builders import small_table, train_parts, write_dataset
from tests.foundation.data.test_logs import same


def test_a_batch_is_the_same_in_other_memory(tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path, train_parts(small_table([1, 2, 3])))
    (batch,) = LogReader(dataset, "train", ReaderConfig(workers=0))
    names, arrays = flatten(batch)
    memory = np.zeros(size_of(arrays), dtype=np.uint8)
    arena = Arena(memory)
    copies = [arena.copy(array) for array in arrays]
    assert not arena.full and 0 < arena.used <= len(memory)
    again = rebuild(names, [arena.place(copy) for copy in copies], memory)
    same(batch, again)
    assert all(np.shares_memory(array, memory) for array in flatten(again)[1] if array.size)


def test_what_does_not_fit_lies_elsewhere() -> None:
    memory = np.zeros(100, dtype=np.uint8)
    arena = Arena(memory)
    first, second = (arena.new((8,), np.dtype(np.int64)) for _ in range(2))
    assert arena.full and arena.used == 64
    assert np.shares_memory(first, memory) and not np.shares_memory(second, memory)
