"""The Triton kernels of all but sequence attention in Triton's interpreter, against float64."""

from __future__ import annotations

import pytest

from tests.kernels.interpreter import check_in_interpreter

pytest.importorskip("triton")


@pytest.mark.parametrize(
    "parts",
    [
        "block_attention block_attention_leaks movement short_sums",
        "gathers chunks tables empty_movement norms products",
    ],
)
def test_kernels_equal_the_references(parts: str) -> None:
    check_in_interpreter("-m", "tests.kernels.interpreted_ops", *parts.split())
