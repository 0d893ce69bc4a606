"""What operators ask of their inputs before a kernel sees them."""

from __future__ import annotations

from torch import Tensor


def require_floats(operator: str, **inputs: Tensor) -> None:
    """Refuses tensors that are not of real floats, or not all on one device.

    An integer would take the weights that are cast to its type for zeros and ones without a word.

    Raises:
        ValueError: names the operator and the input.
    """
    first, *others = inputs
    for name, value in inputs.items():
        if not value.is_floating_point() or value.element_size() < 2:
            raise ValueError(f"{operator}: {name} is {value.dtype}; float64, float32, bfloat16 and float16 are taken")
    for name in others:
        if inputs[name].device != inputs[first].device:
            raise ValueError(f"{operator}: {name} is on {inputs[name].device}, but {first} on {inputs[first].device}")
