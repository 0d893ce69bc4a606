"""Ids to rows, against plain dictionaries, for ids of any size."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foundation.data.ids import VocabularyIndex, range_rows

LEAST, MOST = -(2**63), 2**63 - 1
ids_ = st.one_of(
    st.integers(LEAST, MOST), st.integers(-20, 20), st.integers(LEAST, LEAST + 20), st.integers(MOST - 20, MOST)
)


@settings(deadline=None)
@given(vocabulary=st.sets(ids_, min_size=1, max_size=40), others=st.lists(ids_, max_size=40))
def test_vocabulary_of_any_integers(vocabulary: set[int], others: list[int]) -> None:
    known = np.array(sorted(vocabulary), dtype=np.int64)
    index = VocabularyIndex(known)
    expected = {value: row + 2 for row, value in enumerate(known.tolist())}
    asked = [*vocabulary, *others]
    assert index.rows(np.array(asked, dtype=np.int64)).tolist() == [expected.get(value, 1) for value in asked]


@pytest.mark.parametrize("step", [1, 3, 1_000_003, 2**40])
def test_large_vocabularies_dense_and_sparse(step: int) -> None:
    known = np.arange(-2000, 5000, dtype=np.int64) * step
    index = VocabularyIndex(known)
    asked = np.concatenate([known[::-1], known + 1, np.array([LEAST, MOST, 0])])
    expected = {value: row + 2 for row, value in enumerate(known.tolist())}
    assert index.rows(asked).tolist() == [expected.get(value, 1) for value in asked.tolist()]


@settings(deadline=None)
@given(values=st.lists(ids_, max_size=30), rows=st.integers(3, 30))
def test_range_tables_send_ids_outside_to_unknown(values: list[int], rows: int) -> None:
    found = range_rows(np.array(values, dtype=np.int64), rows)
    assert found.tolist() == [value + 2 if 0 <= value < rows - 2 else 1 for value in values]
