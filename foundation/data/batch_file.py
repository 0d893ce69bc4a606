"""A batch as a safetensors file, to look at it or to train on it again elsewhere."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from foundation.data.batch import Batch
from foundation.data.files import atomic_write

_FORMAT = "1"
_PLAIN = "impression_events"


def save_batch(path: Path, batch: Batch) -> None:
    """Writes a batch, whole or not at all.

    Tensors are called like the fields of `Batch`; those of a field that is a dict `FIELD/KEY`, those of `sparse`
    `sparse/values` and `sparse/lengths`. What is not a tensor is in the file's metadata.

    Args:
        path: `*.safetensors`.
        batch: on any device.
    """
    here = batch.to("cpu")
    tensors: dict[str, torch.Tensor] = {}
    for field in fields(here):
        value = getattr(here, field.name)
        if isinstance(value, torch.Tensor):
            tensors[field.name] = value
        elif isinstance(value, dict) and field.name != _PLAIN:
            tensors |= {f"{field.name}/{key}": part for key, part in value.items()}
    tensors |= {"sparse/values": here.sparse.values(), "sparse/lengths": here.sparse.lengths()}
    facts = {"keys": here.sparse.keys(), "stride": here.sparse.stride(), _PLAIN: here.impression_events}
    metadata = {"format": _FORMAT, "batch": json.dumps(facts)}
    atomic_write(path, save({name: value.contiguous() for name, value in tensors.items()}, metadata))


def load_batch(path: Path) -> Batch:
    """The batch of a file, in main memory.

    Raises:
        ValueError: the file is missing, damaged, or not of a batch.
    """
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if metadata.get("format") != _FORMAT:
            raise ValueError(f"format {metadata.get('format')!r} instead of {_FORMAT}")
        facts = json.loads(metadata["batch"])
        values: dict[str, Any] = {_PLAIN: facts[_PLAIN]}
        values["sparse"] = KeyedJaggedTensor(
            keys=facts["keys"],
            values=tensors.pop("sparse/values"),
            lengths=tensors.pop("sparse/lengths"),
            stride=facts["stride"],
        ).sync()
        for field in fields(Batch):
            if field.type.startswith("dict") and field.name != _PLAIN:  # type: ignore[union-attr]
                prefix = f"{field.name}/"
                parts = [name for name in tensors if name.startswith(prefix)]
                values[field.name] = {name.removeprefix(prefix): tensors.pop(name) for name in parts}
        return Batch(**values, **tensors)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: cannot be read as a batch: {error}") from None
