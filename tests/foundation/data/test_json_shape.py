"""Shapes of JSON: the first key that is wrong is named."""

from __future__ import annotations

from typing import Any

import pytest

from foundation.data.json_shape import Each, require_shape

SHAPE = {"name": str, "rows": int, "tasks": [str], "files": Each({"bytes": int})}
GOOD: dict[str, Any] = {"name": "a", "rows": 3, "tasks": ["click"], "files": {"x": {"bytes": 1}}, "more": None}


def test_what_fits_passes() -> None:
    require_shape(GOOD, SHAPE)
    require_shape(GOOD | {"tasks": [], "files": {}}, SHAPE)


def test_unions() -> None:
    for value in (1, 1.5, None):
        require_shape({"peak": value}, {"peak": int | float | None})
    with pytest.raises(ValueError, match=r"^content\.peak: expected int \| float \| None, got str$"):
        require_shape({"peak": "high"}, {"peak": int | float | None})


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], r"content: expected dict, got list"),
        ({}, r"content\.name: is missing"),
        (GOOD | {"rows": "3"}, r"content\.rows: expected int, got str"),
        (GOOD | {"rows": True}, r"content\.rows: expected int, got bool"),
        (GOOD | {"tasks": "click"}, r"content\.tasks: expected list, got str"),
        (GOOD | {"tasks": ["click", None]}, r"content\.tasks\[1\]: expected str, got NoneType"),
        (GOOD | {"files": {"x": {}}}, r"content\.files\.x\.bytes: is missing"),
    ],
)
def test_what_does_not_fit_is_named(value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        require_shape(value, SHAPE)
