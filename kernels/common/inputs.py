"""What operators ask of their inputs before a kernel sees them."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import NoReturn

import torch
from torch import Tensor

from kernels.common.eager import readable

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""What operators with arithmetic take."""

_INTEGERS = (int, torch.SymInt, Integral)
_NUMBERS = (float, int, torch.SymFloat, torch.SymInt, Real)


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


def require_tensors(operator: str, **inputs: object) -> None:
    """Refuses what is no tensor.

    Raises:
        ValueError: names the operator and the input.
    """
    for name, value in inputs.items():
        if not isinstance(value, Tensor):
            raise ValueError(f"{operator}: {name} must be a tensor, is {type(value).__name__}")


def require_flag(operator: str, name: str, value: object) -> None:
    """Refuses what is neither ``True`` nor ``False``: any text would count as true.

    Raises:
        ValueError: names the operator and the argument.
    """
    if not isinstance(value, bool):
        raise ValueError(f"{operator}: {name} must be True or False, got {value!r}")


def require_number(operator: str, name: str, value: object) -> None:
    """Refuses what is no real number: a tensor would be read as a constant, and get no gradient.

    Raises:
        ValueError: names the operator and the argument.
    """
    if isinstance(value, _NUMBERS):
        return
    if isinstance(value, Tensor):
        learned = "; to learn it, multiply outside" if "scale" in name else ""
        raise ValueError(f"{operator}: {name} must be a number, is a tensor: pass float({name}){learned}")
    raise ValueError(f"{operator}: {name} must be a number, got {value!r}")


def require_finite(operator: str, name: str, value: float) -> None:
    """``require_number``, and refuses NaN and infinity.

    Raises:
        ValueError: names the operator and the argument.
    """
    if type(value) is not float:
        require_number(operator, name, value)
    if not -math.inf < value < math.inf:
        raise ValueError(f"{operator}: {name} must be finite, got {value}")


def require_int(operator: str, name: str, value: int) -> None:
    """Refuses what is no integer, or negative.

    Raises:
        ValueError: names the operator and the argument.
    """
    if type(value) is not int:
        _require_whole(operator, name, value)
    if value < 0:
        raise ValueError(f"{operator}: {name} must not be negative, got {value}")


def require_length(operator: str, name: str, value: int) -> None:
    """``require_int`` of a number of rows, which a compiler may not know yet: there only its type is looked at."""
    if not torch.compiler.is_compiling():
        require_int(operator, name, value)
    else:
        _require_whole(operator, name, value)


def _require_whole(operator: str, name: str, value: object) -> None:
    if isinstance(value, Tensor):
        raise ValueError(f"{operator}: {name} must be an integer, is a tensor: pass int({name})")
    if isinstance(value, bool) or not isinstance(value, _INTEGERS):
        if torch.compiler.is_compiling():  # to which an integer of NumPy is an array, which it cannot print
            raise ValueError(f"{operator}: {name} must be an integer: pass int({name})")
        raise ValueError(f"{operator}: {name} must be an integer, got {value!r}")


def require_offsets(
    operator: str, name: str, offsets: Tensor, like: Tensor, sequences: int | None = None
) -> int | None:
    """Refuses offsets that are not int64 ``[B + 1]`` on the device of ``like``.

    With fewer sequences on one side a kernel would read beyond its end. What the numbers say is up to
    ``require_span``. Sizes are not compared under a compiler, whose graphs would be bound to them.

    Args:
        sequences: B, where something else says it.

    Returns:
        B; ``None`` under a compiler.

    Raises:
        ValueError: names the operator and the input.
    """
    # In one go where all is well: this is host time of every call.
    both = isinstance(offsets, Tensor) and isinstance(like, Tensor) and like.dim() and offsets.device == like.device
    if both and offsets.dtype == torch.int64 and offsets.dim() == 1:
        if torch.compiler.is_compiling():
            return None
        ends = offsets.shape[0]
        if ends and (sequences is None or ends == sequences + 1):
            return ends - 1
    _refuse_offsets(operator, name, offsets, like, sequences)


def require_packed(
    operator: str,
    name: str,
    offsets: Tensor,
    like: Tensor,
    rows: int | None = None,
    sequences: int | None = None,
    *,
    end: str = "the number of rows",
) -> int | None:
    """``require_offsets``, and ``require_span`` of the packed ``rows``: those of ``like``, if nothing else says it."""
    sequences = require_offsets(operator, name, offsets, like, sequences)
    if sequences is not None and offsets.is_cpu:
        require_span(operator, name, offsets, like.shape[0] if rows is None else rows, end=end)
    return sequences


def _refuse_offsets(operator: str, name: str, offsets: Tensor, like: Tensor, sequences: int | None) -> NoReturn:
    if not isinstance(offsets, Tensor) or offsets.dtype != torch.int64 or offsets.dim() != 1 or not offsets.shape[0]:
        found = f"{offsets.dtype} {list(offsets.shape)}" if isinstance(offsets, Tensor) else type(offsets).__name__
        raise ValueError(f"{operator}: {name} must be an int64 tensor [B + 1], is {found}")
    require_tensors(operator, values=like)
    if not like.dim():
        raise ValueError(f"{operator}: values must have at least one dim, are a single number")
    if offsets.device != like.device:
        raise ValueError(f"{operator}: {name} is on {offsets.device}, but the values are on {like.device}")
    raise ValueError(
        f"{operator}: {name} has {offsets.shape[0] - 1} sequences, where {sequences} are expected; these do not fit"
    )


def require_span(
    operator: str, name: str, offsets: Tensor, rows: int | None, *, end: str = "the number of rows"
) -> None:
    """Refuses offsets that do not begin at 0, or fall, or do not end at ``rows``, of which ``end`` is the name.

    Only where looking costs no wait: in eager code on the CPU.

    Raises:
        ValueError: names the operator and the input.
    """
    if not readable(offsets):
        return
    first, last = int(offsets[0]), int(offsets[-1])
    fallen = falls(offsets)
    if first == 0 and rows in (None, last) and not fallen:
        return
    found = "fall somewhere" if fallen else f"go from {first} to {last}"
    wanted = "begin at 0 and never fall" if rows is None else f"begin at 0, never fall and end at {end}, {rows}"
    raise ValueError(f"{operator}: {name} {found}, but must {wanted}; kernels.jagged.offsets_from_lengths makes them")


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
    if rising and falls(index):
        raise ValueError(f"{operator}: {name} falls somewhere, though rising=True promises that it never does")


def falls(index: Tensor) -> bool:
    """Whether a number of a readable index or of offsets ``[N]`` is smaller than the one before."""
    return index.dim() == 1 and bool((index[1:] < index[:-1]).any())


def require_index(
    operator: str, like: Tensor, index: Tensor, *, name: str, rows: int | None = None, choices: bool = False
) -> None:
    """Refuses an index that is not of integers on the device of ``like``, or has not ``rows`` rows.

    Args:
        choices: whether an index ``[N, C]`` is taken as well as ``[N]``.

    Raises:
        ValueError: names the operator and the input.
    """
    if not isinstance(index, Tensor) or not isinstance(like, Tensor):
        require_tensors(operator, values=like, **{name: index})
    if index.dtype not in (torch.int64, torch.int32) or not 1 <= index.dim() <= 1 + choices:
        shape = "[N] or [N, C]" if choices else "[N]"
        raise ValueError(f"{operator}: {name} must be int64 or int32 {shape}, is {index.dtype} {list(index.shape)}")
    if index.device != like.device:
        raise ValueError(f"{operator}: {name} is on {index.device}, but the values are on {like.device}")
    if rows is not None and not torch.compiler.is_compiling() and index.shape != (rows,):
        raise ValueError(f"{operator}: {name} is {list(index.shape)}, where [{rows}] is expected, one per sequence")
