"""The order of candidates."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from serving.ranking import order


@given(st.lists(st.sampled_from([0.0, 0.1, 0.1, 0.9])))
def test_order_is_falling_and_stable(values: list[float]) -> None:
    positions = order(np.array(values)).tolist()
    assert positions == sorted(range(len(values)), key=lambda i: (-values[i], i))
