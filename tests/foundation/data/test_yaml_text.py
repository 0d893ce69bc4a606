"""A key that is there twice is refused wherever YAML is read; all else is the standard loader's."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from foundation.data.options import parse_config
from foundation.data.schema import Schema, SchemaError
from foundation.data.settings import PRESETS
from foundation.data.world import WorldConfig
from foundation.data.yaml_text import RepeatedKeyError, load_yaml
from foundation.parallel.topology import Topology

TWICE = "a: 1\nmodel:\n  width: 8\n  layers: 1\n  'width': 16\n"


def test_a_key_that_is_there_twice() -> None:
    with pytest.raises(RepeatedKeyError, match=r"^width: is there twice, in lines 3 and 5; remove one$"):
        load_yaml(TWICE)


@pytest.mark.parametrize("read", [Schema.load, Topology.load, lambda path: config(path)])
def test_whoever_reads_it_names_the_file(tmp_path: Path, read: object) -> None:
    path = tmp_path / "twice.yaml"
    path.write_text("rows: 100\nrows: 200\n")
    with pytest.raises(
        (ValueError, SchemaError), match=rf"^{path}: rows: is there twice, in lines 1 and 2; remove one$"
    ):
        assert callable(read)
        read(path)


def config(path: Path) -> object:
    return parse_config(WorldConfig, ["--config", str(path), "--out", "x"], name="world")


def test_all_else_is_as_ever() -> None:
    for text in ("", "- 1", "a: &x {b: 1}\nc: {<<: *x, b: 2}\nd: *x\n1: a\n'1': b"):
        assert load_yaml(text) == yaml.safe_load(text)
    for path in PRESETS.rglob("*.yaml"):
        assert load_yaml(path.read_text()) == yaml.safe_load(path.read_text())
    with pytest.raises(yaml.YAMLError):
        load_yaml("a: !!python/object/apply:os.getcwd []")
