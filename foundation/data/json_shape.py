"""The shape of JSON that a stage reads back: a damaged or foreign file is told by its key, not by a traceback later."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import UnionType
from typing import Any


@dataclass(frozen=True, slots=True)
class Each:
    """A mapping of any names to values of one shape."""

    shape: Any


def require_shape(value: Any, shape: Any, key: str = "content") -> None:
    """Compares plain values with a shape.

    Args:
        value: what `json.loads` gave.
        shape: a type or a union of types; a mapping of keys that must be there to their shapes (others may be there
            too); a list of the one shape that all elements have; or `Each`.
        key: the name of the value in messages; keys below it are joined with dots.

    Raises:
        ValueError: naming the first key that is missing or of another type.
    """
    kind = shape if isinstance(shape, type | UnionType) else list if isinstance(shape, list) else dict
    if not issubclass(type(value), kind) or (type(value) is bool and kind is not bool):
        name = kind.__name__ if isinstance(kind, type) else str(kind)
        raise ValueError(f"{key}: expected {name}, got {type(value).__name__}")
    if isinstance(shape, Each):
        for name, part in value.items():
            require_shape(part, shape.shape, f"{key}.{name}")
    elif isinstance(shape, Mapping):
        for name, part in shape.items():
            if name not in value:
                raise ValueError(f"{key}.{name}: is missing")
            require_shape(value[name], part, f"{key}.{name}")
    elif isinstance(shape, list):
        for index, part in enumerate(value):
            require_shape(part, shape[0], f"{key}[{index}]")
