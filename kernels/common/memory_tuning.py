"""Tuned configurations of the kernels that memory bounds: block attention, jagged movement, norms.

``memory_tuned.json`` ships with the package: what ``python -m kernels.benchmarks.tune_memory`` found fastest among
configurations whose results it had checked first. A shape that is not there takes the nearest, or the kernel's default;
a GPU that is not there, rows of one with the same multiprocessors (``tuning.row_names``).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch

from kernels.common.tuning import row_names

TUNED = Path(__file__).with_name("memory_tuned.json")

_FORCED: dict[str, dict[str, Any]] = {}

_PLANS: list[Any] = []

P = ParamSpec("P")
R = TypeVar("R")


def plan(build: Callable[P, R]) -> Callable[P, R]:
    """Caches what a function makes of configurations that it has found here."""
    kept = cache(build)
    _PLANS.append(kept)
    return kept  # type: ignore[return-value]


@contextmanager
def forced(kernel: str, configuration: dict[str, Any]) -> Iterator[None]:
    """Lets a kernel run with this configuration, for the tuner and for tests."""
    _forget()
    _FORCED[kernel] = configuration
    try:
        yield
    finally:
        del _FORCED[kernel]
        _forget()


def _forget() -> None:
    for kept in _PLANS:
        kept.cache_clear()


def find(kernel: str, device: torch.device, dtype: torch.dtype, width: int, length: int) -> dict[str, Any] | None:
    """The tuned configuration of a launch, or the nearest in width, then in length; ``None`` if there is none.

    Args:
        kernel: name of the kernel, the first part of a row's key.
        width: elements of a row. length: mean rows of a sequence, or 1 where there are no sequences.
    """
    if kernel in _FORCED:
        return _FORCED[kernel]
    found = (_find(kernel, name, dtype, bucket(width), bucket(length)) for name in row_names(device))
    return next(filter(None, found), None)


def bucket(number: int) -> int:
    """The power of two, up to 65,536, that holds ``number``."""
    return min(1 << max(number - 1, 0).bit_length(), 65536)


def key(kernel: str, device: str, dtype: torch.dtype, width: int, length: int) -> str:
    """The name of a row of ``memory_tuned.json``; ``width`` and ``length`` are buckets."""
    return f"{kernel}/{device}/{str(dtype).removeprefix('torch.')}/w{width}/n{length}"


@cache
def tuned() -> dict[str, dict[str, Any]]:
    """The shipped table."""
    return json.loads(TUNED.read_text())["configurations"] if TUNED.exists() else {}


@cache
def _find(kernel: str, device: str, dtype: torch.dtype, width: int, length: int) -> dict[str, Any] | None:
    def distance(row: tuple[int, int]) -> tuple[int, int]:
        return abs(row[0].bit_length() - width.bit_length()), abs(row[1].bit_length() - length.bit_length())

    powers = [1 << i for i in range(17)]
    rows = [(w, n) for w in powers for n in powers if key(kernel, device, dtype, w, n) in tuned()]
    if not rows:
        return None
    nearest = min(rows, key=distance)
    config = dict(tuned()[key(kernel, device, dtype, *nearest)])
    if "ROWS" in config:  # as many elements a tile
        config["ROWS"] = min(256, max(1, config["ROWS"] * nearest[0] // width))
    return config
