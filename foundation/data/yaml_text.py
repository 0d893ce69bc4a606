"""YAML as people write it: a key that is there twice is refused, where the standard loader takes the last one."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import yaml


class RepeatedKeyError(yaml.YAMLError):
    """A mapping has a key twice; the message says which one and in which lines."""


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            line, name = key.start_mark.line + 1, (key.tag, key.value)
            if name in lines:
                raise RepeatedKeyError(f"{key.value}: is there twice, in lines {lines[name]} and {line}; remove one")
            lines[name] = line
        return super().construct_mapping(node, deep)


def yaml_fault(error: yaml.YAMLError | UnicodeDecodeError) -> str:
    """What is wrong with a text that `load_yaml` or the decoding refused; the caller names the file."""
    return str(error) if isinstance(error, RepeatedKeyError) else f"not a YAML file: {error}"


def load_yaml(text: str | bytes) -> Any:
    """The plain values of a YAML text.

    Raises:
        yaml.YAMLError: it is not YAML, or RepeatedKeyError.
    """
    return yaml.load(text, Loader=_Loader)
