"""RMS norm and layer norm as a PyTorch operator, ``opengem::norm``, with gate and residual.

Legend: N rows, D width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.common.backend import Backend
from kernels.common.inputs import FLOATS, require_finite, require_floats, require_tensors
from kernels.common.operators import operator
from kernels.norms import reference

BACKEND = Backend(reference)


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    gate: Tensor | None = None,
    act: str = "sigmoid",
    eps: float = 1e-5,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """``((x - mean) / sqrt(var + eps) * weight + bias) * act(gate)`` over the last dim, in one pass over memory.

    Args:
        x: ``[..., D]``. weight, bias: ``[D]`` or none. gate: like x, or none.
        act: of the gate, ``sigmoid`` or ``silu``.
        dtype: of the result; default that of x. Sums are made in float32 (float64 for float64) whatever it is.

    Raises:
        ValueError: arguments that do not go together.
    """
    return _apply("layer_norm", x, None, gate, weight, bias, eps, True, act, dtype)[0]


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    gate: Tensor | None = None,
    act: str = "sigmoid",
    eps: float = 1e-6,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight * act(gate)`` over the last dim; arguments as in ``layer_norm``."""
    return _apply("rms_norm", x, None, gate, weight, None, eps, False, act, dtype)[0]


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    gate: Tensor | None = None,
    act: str = "sigmoid",
    eps: float = 1e-5,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Layer norm of ``z = x + residual``, and z in the dtype of x, in one pass; arguments as in ``layer_norm``."""
    require_tensors("add_layer_norm", residual=residual)
    return _apply("add_layer_norm", x, residual, gate, weight, bias, eps, True, act, dtype)


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    *,
    gate: Tensor | None = None,
    act: str = "sigmoid",
    eps: float = 1e-6,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """RMS norm of ``z = x + residual``, and z in the dtype of x, in one pass; arguments as in ``layer_norm``."""
    require_tensors("add_rms_norm", residual=residual)
    return _apply("add_rms_norm", x, residual, gate, weight, None, eps, False, act, dtype)


def _apply(
    operator: str,
    x: Tensor,
    residual: Tensor | None,
    gate: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    center: bool,
    act: str,
    dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    require_tensors(operator, x=x)
    shape, device = x.shape, x.device
    if act not in ("sigmoid", "silu"):
        raise ValueError(f"{operator}: act must be sigmoid or silu, got {act!r}")
    require_finite(operator, "eps", eps)
    if not shape or not shape[-1]:
        raise ValueError(f"{operator}: x must be [..., D] with D of at least 1, is {list(shape)}")
    if x.dtype not in FLOATS:
        require_floats(operator, x=x)
    if dtype is not None and (not isinstance(dtype, torch.dtype) or not dtype.is_floating_point):
        raise ValueError(f"{operator}: dtype must be of floats, is {dtype}")
    for name, other in (("residual", residual), ("gate", gate)):
        if other is not None and not _goes_with(other, shape, device):
            _refuse(operator, name, other, x, f"must have the shape of x {list(shape)}")
    for name, other in (("weight", weight), ("bias", bias)):
        if other is not None and not _goes_with(other, shape[-1:], device):
            _refuse(operator, name, other, x, f"must have the width of x {list(shape)}")
    options = (weight, bias, eps, center, act, x.dtype if dtype is None else dtype)
    if len(shape) == 2:
        return _norm(x, residual, gate, *options)
    rows = [None if t is None else t.reshape(-1, shape[-1]) for t in (x, residual, gate)]
    y, z = _norm(*rows, *options)
    return y.view(shape), z.view(shape) if residual is not None else z


def _goes_with(other: Tensor, shape: torch.Size, device: torch.device) -> bool:
    return isinstance(other, Tensor) and other.shape == shape and other.device == device and other.dtype in FLOATS


def _refuse(operator: str, name: str, other: Tensor, x: Tensor, wanted: str) -> None:
    require_tensors(operator, **{name: other})
    require_floats(operator, **{"x": x, name: other})
    raise ValueError(f"{operator}: {name} {list(other.shape)} {wanted}")


def _forward(
    x: Tensor,
    residual: Tensor | None,
    gate: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    center: bool,
    act: str,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    return BACKEND.of(x).forward(x, residual, gate, weight, bias, eps, center, act, dtype)


def _fake_forward(x: Tensor, residual: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=rest[-1]), x.new_empty((0,) if residual is None else x.shape)


def _backward(
    grad: Tensor,
    grad_z: Tensor | None,
    z: Tensor,
    gate: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    center: bool,
    act: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return BACKEND.of(z).backward(grad, grad_z, z, gate, weight, bias, eps, center, act)


def _fake_backward(grad: Tensor, grad_z: Tensor | None, z: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    empty = [z.new_empty((0,)) if t is None else t.new_empty(t.shape) for t in rest[:3]]
    return z.new_empty(z.shape), empty[0], empty[1], empty[2]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, residual, gate, weight, bias, *options, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x if residual is None else output[1], gate, weight, bias)
    ctx.options, ctx.residual = options, None if residual is None else residual.dtype


def _autograd(ctx: Any, grad: Tensor | None, grad_z: Tensor | None) -> tuple[Tensor | None, ...]:
    z, gate, weight, bias = ctx.saved_tensors
    if ctx.residual is None:
        grad_z = None
    if grad is None:
        if grad_z is None:
            return (None,) * 9
        grad = torch.zeros_like(z)
    dz, d_gate, d_weight, d_bias = _norm_backward(grad, grad_z, z, gate, weight, bias, *ctx.options)
    return (
        dz,
        None if ctx.residual is None else dz.to(ctx.residual),
        None if gate is None else d_gate,
        None if weight is None else d_weight,
        None if bias is None else d_bias,
        *(None,) * 4,
    )


_norm_backward = operator("norm_backward", _backward, _fake_backward)
_norm = operator("norm", _forward, _fake_forward, backward=_autograd, setup_context=_setup_context)
