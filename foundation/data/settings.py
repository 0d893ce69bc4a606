"""Configs as plain data: printed in full when a stage starts, saved with what it writes."""

from __future__ import annotations

import dataclasses
import enum
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import yaml

from foundation.data.files import atomic_write

PRESETS = Path(__file__).resolve().parents[2] / "configs"


def plain(value: Any) -> Any:
    """A config dataclass, however nested, as dicts, lists, strings, numbers, booleans and None."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if isinstance(value, enum.Enum):
        return plain(value.value)
    if isinstance(value, Path):
        return str(value)
    return value


def to_yaml(config: Any) -> str:
    """A config dataclass as YAML text, fields in the order in which they are declared."""
    return yaml.safe_dump(plain(config), sort_keys=False, allow_unicode=True)


_quiet = ContextVar("quiet", default=False)


@contextmanager
def quiet() -> Iterator[None]:
    """Within the block `show` prints nothing, for commands that run many stages; configs are saved as ever."""
    token = _quiet.set(True)
    try:
        yield
    finally:
        _quiet.reset(token)


def show(config: Any, stage: str) -> None:
    """Prints the whole config to stderr under the stage's name."""
    if _quiet.get():
        return
    text = "".join(f"  {line}\n" for line in to_yaml(config).splitlines())
    print(f"{stage}:\n{text}", file=sys.stderr, end="", flush=True)


def save(config: Any, path: str | Path) -> None:
    """Writes the config as YAML, in the form that `--config` reads back."""
    atomic_write(path, to_yaml(config))


def preset(name: str | Path, key: str = "config", kind: str = "") -> Path:
    """Finds a YAML file: as given, or among the presets that come with the package.

    Args:
        name: a path, or a preset such as `configs/foundation/tiny.yaml` or `foundation/tiny`.
        key: the option that names it.
        kind: the folder of presets that the option is for; empty for all.

    Raises:
        FileNotFoundError: neither exists; the message lists the presets of that kind.
        IsADirectoryError: it is a folder.
        ValueError: it is a pipe or a device.
    """
    given = Path(os.path.expanduser(name) if str(name).startswith("~/") else name)
    if given.is_dir():
        at = next((given / file for file in ("config.yaml", "schema.yaml") if (given / file).is_file()), None)
        raise IsADirectoryError(f"{key}: {name} is a folder, not a YAML file{f'; there is {at}' if at else ''}")
    if given.is_file():
        return given
    if given.exists():  # such as the pipe of `--config <(...)`, which can be read only once
        raise ValueError(f"{key}: {name} is not a regular file; write it to one")
    relative = Path(*given.parts[1:]) if given.parts[:1] == ("configs",) else given
    found = PRESETS / relative.with_suffix(".yaml")
    if not given.is_absolute() and found.is_file():
        return found
    known = sorted(str(path.relative_to(PRESETS)) for path in (PRESETS / kind).rglob("*.yaml"))
    raise FileNotFoundError(f"{key}: {name} does not exist; presets are: {', '.join(known) or 'none'}")
