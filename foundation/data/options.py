"""Command-line options and YAML files to config dataclasses.

The options of a config are its fields, nested dataclasses with dots. They come from a YAML file (`--config`), from
the command line, or both; what comes later wins.
"""

from __future__ import annotations

import dataclasses
import math
import os
import typing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from foundation.data.option_errors import reworded
from foundation.data.settings import preset
from foundation.data.yaml_text import RepeatedKeyError, load_yaml


def parse_config(config_class: type, arguments: Sequence[str], *, name: str) -> Any:
    """Builds a config dataclass from command-line arguments and YAML files.

    Args:
        config_class: the dataclass; nested dataclasses become dotted options.
        arguments: such as ["--config", "configs/foundation/tiny.yaml", "--model.width", "64"].
        name: the command, for the usage line: one of `opengem`'s, or "python -m MODULE".

    Raises:
        ValueError: an unknown option, a value of the wrong type, or what the dataclass refuses.
    """
    from jsonargparse import ArgumentError

    command = name if name.startswith("python ") else f"opengem {name}"
    parser = _parser(config_class, command)
    try:
        resolved = _resolve_presets(arguments)
        parsed = parser.instantiate(parser.parse_args(resolved))
    except ArgumentError as error:
        said = reworded(str(error), list(parser.get_defaults().keys()), _config_files(resolved))
        raise ValueError(f"{said} (`{command} --help` lists the options)") from error
    return _build(config_class, parsed)


def from_plain(config_class: type, values: Mapping[str, Any]) -> Any:
    """A config from the plain values that a stage saved of it (`foundation.data.settings.plain`).

    Raises:
        ValueError: an unknown key, a value of the wrong type, or what the dataclass refuses; the message names the key.
    """
    from jsonargparse import ArgumentError

    parser = _parser(config_class, "")
    try:
        parsed = parser.instantiate(parser.parse_object(dict(values)))
    except ArgumentError as error:
        raise ValueError(reworded(str(error))) from error
    return _build(config_class, parsed)


@contextmanager
def whole_keys(config_class: type, prefix: str) -> Iterator[None]:
    """What the block refuses is named by its whole key: "cross.recent: ..." becomes "model.layer.cross.recent: ...".

    The parts of a model are built from their own dataclasses, which do not know where they hang.

    Args:
        config_class: of the config that the block builds from.
        prefix: its key, such as "model".
    """
    try:
        yield
    except ValueError as error:
        key, colon, rest = str(error).partition(": ")
        place = _place(config_class, key.split(".")) if colon else None
        if place is None:
            raise
        raise ValueError(f"{'.'.join([prefix, *place, key])}: {rest}") from error


def _place(config_class: type, parts: Sequence[str]) -> tuple[str, ...] | None:
    """Below which fields of a dataclass the key is found that begins with ``parts``; the nearest, None if nowhere."""
    level: list[tuple[tuple[str, ...], type]] = [((), config_class)]
    while level:
        deeper = []
        for path, kind in level:
            nested = {
                name: hint
                for name, hint in typing.get_type_hints(kind).items()
                if isinstance(hint, type) and dataclasses.is_dataclass(hint)
            }
            names = [field.name for field in dataclasses.fields(kind)]
            below = [f.name for f in dataclasses.fields(nested[parts[0]])] if parts[0] in nested else parts[1:2]
            if parts[0] in names and all(part in below for part in parts[1:2]):
                return path
            deeper += [((*path, name), hint) for name, hint in nested.items()]
        level = deeper
    return None


def _parser(config_class: type, command: str) -> Any:
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(prog=command, exit_on_error=False, allow_abbrev=False)
    parser.add_argument("--config", action="config", help="YAML file with any of the options below")
    _add_fields(parser, config_class, prefix="")
    return parser


def _resolve_presets(arguments: Sequence[str]) -> list[str]:
    """Replaces the value of `--config` by the path of the file or preset that it names."""
    resolved = list(arguments)
    for index, argument in enumerate(resolved):
        if argument == "--config" and index + 1 < len(resolved):
            resolved[index + 1] = _text_file(resolved[index + 1])
        elif argument.startswith("--config="):
            resolved[index] = f"--config={_text_file(argument.removeprefix('--config='))}"
    return resolved


def _text_file(name: str) -> str:
    """The path of a config file. The parser would not say which file has bytes that are no text, or a key twice."""
    path = preset(name)
    try:
        load_yaml(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not a text file in UTF-8: {error}") from None
    except RepeatedKeyError as error:
        raise ValueError(f"{path}: {error}") from None
    except yaml.YAMLError:
        pass  # which the parser explains
    return str(path)


def _config_files(arguments: Sequence[str]) -> list[str]:
    """The values of `--config`."""
    after = [following for argument, following in pairwise(arguments) if argument == "--config"]
    return after + [a.removeprefix("--config=") for a in arguments if a.startswith("--config=")]


def _add_fields(parser: Any, config_class: type, prefix: str, default: Any = None) -> None:
    """Adds one option per field; a field that is a dataclass adds its own fields under its name.

    `default` is the instance that holds the defaults, when the field that leads here declares one.
    """
    from docstring_parser import parse

    described = {
        item.arg_name: item.description
        for base in reversed(config_class.__mro__)
        for item in parse(base.__doc__ or "").params
    }
    hints = typing.get_type_hints(config_class)
    for field in dataclasses.fields(config_class):
        hint, key = hints[field.name], f"{prefix}{field.name}"
        settings = {"default": getattr(default, field.name)} if default is not None else _default(field)
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            _add_fields(parser, hint, prefix=f"{key}.", default=settings.get("default"))
            continue
        parser.add_argument(f"--{key}", type=hint, help=described.get(field.name), **settings)


def _default(field: dataclasses.Field) -> dict[str, Any]:
    if field.default is not dataclasses.MISSING:
        return {"default": field.default}
    if field.default_factory is not dataclasses.MISSING:
        return {"default": field.default_factory()}
    return {"required": True}


def _build(config_class: type, parsed: Any, prefix: str = "") -> Any:
    """Turns the parser's nested namespaces into the nested dataclasses."""
    from jsonargparse import Namespace

    hints = typing.get_type_hints(config_class)
    values = {}
    for field in dataclasses.fields(config_class):
        value = parsed[field.name]  # not getattr: a field may be named like a method of the namespace
        hint, key = hints[field.name], f"{prefix}{field.name}"
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            if not isinstance(value, Namespace):
                raise ValueError(f"{key}: expected a mapping of options, got {value!r}")
            value = _build(hint, value, f"{key}.")
        elif value is None and type(None) not in typing.get_args(hint):
            # The parser lets a null stand for any type.
            raise ValueError(f"{key}: expected a value, got null")
        _require_ordinary(key, value)
        values[field.name] = _from_home(value)
    try:
        return config_class(**values)
    except ValueError as error:
        message = _with_whole_key(str(error), prefix)
        if message == str(error):
            raise
        raise ValueError(message) from error


def _from_home(value: Any) -> Any:
    """A path below `~` below the home folder: shells do so, but not in `--out=~/run` or in a file."""
    if isinstance(value, Path):
        return Path(_from_home(str(value)))
    if isinstance(value, str):
        return os.path.expanduser(value) if value.startswith("~/") else value
    if isinstance(value, list | tuple):
        return type(value)(_from_home(inner) for inner in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        changed = {name: _from_home(inner) for name, inner in fields.items() if _from_home(inner) != inner}
        return dataclasses.replace(value, **changed) if changed else value
    return value


def _require_ordinary(key: str, value: Any) -> None:
    """No option means anything with infinity, NaN (which passes every comparison) or a number beyond 64 bits."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            _require_ordinary(f"{key}.{name}", inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            _require_ordinary(key, inner)
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{key}: expected a finite number, got {value}")
    elif isinstance(value, int) and abs(value) >= 2**63:
        raise ValueError(f"{key}: expected a number of at most 64 bits, got {value}")


def _with_whole_key(message: str, prefix: str) -> str:
    """The message of a nested dataclass with the key as it is given on the command line.

    A dataclass does not know where it hangs: below `model.layer.`, "interaction.experts: ..." becomes
    "model.layer.interaction.experts: ...".
    """
    key, colon, rest = message.partition(": ")
    above, parts = prefix.split(".")[:-1], key.split(".")
    for place in range(len(above)):
        shared = above[place:]
        if parts[: len(shared)] == shared:
            return f"{'.'.join([*above[:place], *parts])}{colon}{rest}"
    return message
