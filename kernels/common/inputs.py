"""What operators ask of their inputs before a kernel sees them."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from kernels.common.eager import readable

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""What operators with arithmetic take."""


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x.to(dtype)``, which takes the host a while even where it has nothing to do."""
    return x if x.dtype == dtype else x.to(dtype)


def require_floats(operator: str, **inputs: Tensor) -> None:
    """Refuses tensors that are not of real floats, or not all on one device.

    An integer would take the weights that are cast to its type for zeros and ones without a word.

    Raises:
        ValueError: names the operator and the input.
    """
    device = None
    for value in inputs.values():
        # In one go where all is well: this is host time of every call.
        if value.dtype not in FLOATS or (device is not None and value.device != device):
            _refuse_floats(operator, inputs)
        device = value.device


def _refuse_floats(operator: str, inputs: dict[str, Tensor]) -> None:
    for name, value in inputs.items():
        if value.dtype not in FLOATS:
            raise ValueError(f"{operator}: {name} is {value.dtype}; float64, float32, bfloat16 and float16 are taken")
    require_one_device(operator, **inputs)


def require_one_device(operator: str, **inputs: Tensor | None) -> None:
    """Refuses tensors that are not on the device of the first; those that are ``None`` are on any.

    Raises:
        ValueError: names the operator and the input.
    """
    first, device = "", None
    for name, value in inputs.items():
        if value is None:
            continue
        if device is None:
            first, device = name, value.device
        elif value.device != device:
            raise ValueError(f"{operator}: {name} is on {value.device}, but {first} on {device}")


def require_numbers(operator: str, **numbers: object) -> None:
    """Refuses a tensor where a number is wanted: it would be read as a constant, and get no gradient.

    Raises:
        ValueError: names the operator and the input.
    """
    for name, value in numbers.items():
        if isinstance(value, Tensor):
            raise ValueError(f"{operator}: {name} must be a number, is a tensor; to learn it, multiply outside")


def require_offsets(
    operator: str, name: str, offsets: Tensor, like: Tensor, sequences: int | None = None
) -> int | None:
    """Refuses offsets that are not int64 ``[B + 1]`` on the device of ``like``.

    With fewer sequences on one side a kernel would read beyond its end. What the numbers say is up to
    ``require_span``. Nothing is checked under a compiler, whose graphs sizes would be bound to.

    Args:
        sequences: B, where something else says it.

    Returns:
        B; ``None`` under a compiler.

    Raises:
        ValueError: names the operator and the input.
    """
    if torch.compiler.is_compiling():
        return None
    # In one go where all is well: this is host time of every call.
    both = isinstance(offsets, Tensor) and isinstance(like, Tensor) and like.dim() and offsets.device == like.device
    if both and offsets.dtype == torch.int64 and offsets.dim() == 1:
        ends = offsets.shape[0]
        if ends and (sequences is None or ends == sequences + 1):
            return ends - 1
    _refuse_offsets(operator, name, offsets, like, sequences)


def require_packed(
    operator: str, name: str, offsets: Tensor, like: Tensor, rows: int | None = None, sequences: int | None = None
) -> int | None:
    """``require_offsets``, and ``require_span`` of the packed ``rows``: those of ``like``, if nothing else says it."""
    sequences = require_offsets(operator, name, offsets, like, sequences)
    if sequences is not None and offsets.is_cpu:
        require_span(operator, name, offsets, like.shape[0] if rows is None else rows)
    return sequences


def _refuse_offsets(operator: str, name: str, offsets: object, like: object, sequences: int | None) -> NoReturn:
    if not isinstance(like, Tensor) or not like.dim():
        raise ValueError(f"{operator}: the values must be a tensor of at least one dim, are {like!r}")
    if not isinstance(offsets, Tensor) or offsets.dtype != torch.int64 or offsets.dim() != 1 or not offsets.shape[0]:
        found = f"{offsets.dtype} {list(offsets.shape)}" if isinstance(offsets, Tensor) else type(offsets).__name__
        raise ValueError(f"{operator}: {name} must be an int64 tensor [B + 1], is {found}")
    if offsets.device != like.device:
        raise ValueError(f"{operator}: {name} is on {offsets.device}, but the values are on {like.device}")
    raise ValueError(
        f"{operator}: {name} has {offsets.shape[0] - 1} sequences, where {sequences} are expected; these do not fit"
    )


def require_span(operator: str, name: str, offsets: Tensor, rows: int) -> None:
    """Refuses offsets that do not begin at 0, or fall, or do not end at ``rows``.

    Only where looking costs no wait: in eager code on the CPU.

    Raises:
        ValueError: names the operator and the input.
    """
    if not readable(offsets):
        return
    first, last = int(offsets[0]), int(offsets[-1])
    falls = bool((offsets[1:] < offsets[:-1]).any())
    if first == 0 and last == rows and not falls:
        return
    found = "fall somewhere" if falls else f"go from {first} to {last}"
    raise ValueError(
        f"{operator}: {name} {found}, but must begin at 0, never fall and end at the number of rows, {rows}; "
        "kernels.jagged.offsets_from_lengths makes them"
    )


def require_range(operator: str, index: Tensor, rows: int, *, name: str = "index", rising: bool = False) -> None:
    """Refuses an index of rows that are not there, or that falls though it was said to rise.

    Only where looking costs no wait: in eager code on the CPU.

    Raises:
        ValueError: names the operator and the input.
    """
    if not readable(index) or not index.numel():
        return
    low, high = (int(x) for x in index.aminmax())
    if low < 0 or high >= rows:
        raise ValueError(f"{operator}: {name} has numbers from {low} to {high}, but the {rows} rows count from 0")
    if rising and index.dim() == 1 and bool((index[1:] < index[:-1]).any()):
        raise ValueError(f"{operator}: {name} falls somewhere, but must rise: sort it, or do not promise it")


def require_index(operator: str, like: Tensor, index: Tensor, *, name: str, rows: int | None = None) -> None:
    """Refuses an index that is not of integers on the device of ``like``, or has not ``rows`` rows.

    Raises:
        ValueError: names the operator and the input.
    """
    if torch.compiler.is_compiling():
        return
    if not isinstance(index, Tensor) or not isinstance(like, Tensor):
        raise ValueError(f"{operator}: {name} and the values must be tensors, are {type(index)} and {type(like)}")
    if index.dtype not in (torch.int64, torch.int32) or index.dim() not in (1, 2):
        raise ValueError(f"{operator}: {name} must be int64 or int32 [N], is {index.dtype} {list(index.shape)}")
    if index.device != like.device:
        raise ValueError(f"{operator}: {name} is on {index.device}, but the values are on {like.device}")
    if rows is not None and index.shape != (rows,):
        raise ValueError(f"{operator}: {name} is {list(index.shape)}, where [{rows}] is expected, one per sequence")
