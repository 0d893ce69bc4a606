"""The Triton kernels in Triton's interpreter, against the references in float64."""

from __future__ import annotations

import pytest

from tests.kernels.interpreter import check_in_interpreter

pytest.importorskip("triton")


@pytest.mark.parametrize("parts", ["activations short general dense", "softmax empty leaks"])
def test_kernels_equal_the_references(parts: str) -> None:
    check_in_interpreter("-m", "tests.kernels.interpreted", *parts.split())
