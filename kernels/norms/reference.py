"""Norms over rows in plain PyTorch: the CPU path and the oracle of the GPU kernels.

``z = x + residual``, ``u = (z - mean(z)) / sqrt(var(z) + eps)`` (layer norm, arXiv 1607.06450) or
``u = z / sqrt(mean(z^2) + eps)`` (RMS norm, arXiv 1910.07467), ``y = (weight * u + bias) * act(gate)``. Backward,
with g the gradient of u and m the mean of a row: ``dz = (g - m(g) - u m(g u)) / sqrt(...)``; RMS norm has no ``m(g)``.

Computes in float32, or float64 for float64 inputs. Legend: N rows, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.jagged.padding import compute_dtype


def forward(
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
    """y ``[N, D]`` of ``dtype``, and z ``[N, D]`` of the dtype of x (empty without residual).

    Args:
        x, residual, gate: ``[N, D]``. weight, bias: ``[D]``.
        center: layer norm, otherwise RMS norm. act: of the gate: ``sigmoid`` or ``silu``.
    """
    precise = compute_dtype(x.dtype)
    z = x if residual is None else (x.to(precise) + residual.to(precise)).to(x.dtype)
    if center and _alike(z, weight, bias):
        y = F.layer_norm(z, z.shape[1:], weight, bias, eps)
    else:
        y = _affine(_normalise(z.to(precise), eps, center)[0], weight, bias)
    if gate is not None:
        y = y * _activate(gate.to(precise), act)[0]
    return y.to(dtype).contiguous(), z.contiguous() if residual is not None else x.new_empty((0,))


def backward(
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
    """Gradients of z, gate, weight and bias; those of what is not there are empty.

    Args:
        grad: of y. grad_z: of z where it was returned.
    """
    precise = compute_dtype(z.dtype)
    if center and gate is None and grad_z is None and _alike(z, weight, bias, grad):
        _, mean, scale = torch.native_layer_norm(z, z.shape[1:], weight, bias, eps)
        mask = [True, weight is not None, bias is not None]
        found = torch.ops.aten.native_layer_norm_backward(grad, z, z.shape[1:], mean, scale, weight, bias, mask)
        d_x, d_weight, d_bias = (_empty(z) if t is None else t.contiguous() for t in found)
        return d_x, _empty(z), d_weight, d_bias
    u, scale = _normalise(z.to(precise), eps, center)
    g = grad.to(precise)
    d_gate, d_weight, d_bias = _empty(z), _empty(z), _empty(z)
    if gate is not None:
        value, slope = _activate(gate.to(precise), act)
        d_gate = (g * _affine(u, weight, bias) * slope).to(gate.dtype).contiguous()
        g = g * value
    if weight is not None:
        d_weight = (g * u).sum(0).to(weight.dtype)
    if bias is not None:
        d_bias = g.sum(0).to(bias.dtype)
    if weight is not None:
        g = g * weight.to(precise)
    dz = g - u * (g * u).mean(1, keepdim=True)
    if center:
        dz = dz - g.mean(1, keepdim=True)
    dz = dz * scale
    if grad_z is not None:
        dz = dz + grad_z.to(precise)
    return dz.to(z.dtype).contiguous(), d_gate, d_weight, d_bias


def _empty(z: Tensor) -> Tensor:
    """The gradient of what is not there; one for each, since an operator returns no tensor twice."""
    return z.new_empty((0,))


def _alike(z: Tensor, *others: Tensor | None) -> bool:
    """Whether all are of the dtype that is computed in: PyTorch's own layer norm takes them, in fewer passes."""
    return z.dtype == compute_dtype(z.dtype) and all(t is None or t.dtype == z.dtype for t in others)


def _affine(u: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    u = u if weight is None else u * weight.to(u.dtype)
    return u if bias is None else u + bias.to(u.dtype)


def _normalise(z: Tensor, eps: float, center: bool) -> tuple[Tensor, Tensor]:
    """u, and what z was multiplied by."""
    if center:
        u, _, scale = torch.native_layer_norm(z, [z.shape[1]], None, None, eps)
        return u, scale
    scale = torch.rsqrt(z.square().mean(1, keepdim=True) + eps)
    return z * scale, scale


def _activate(gate: Tensor, act: str) -> tuple[Tensor, Tensor]:
    """Value and slope."""
    s = torch.sigmoid(gate)
    return (s, s * (1 - s)) if act == "sigmoid" else (F.silu(gate), s + gate * s * (1 - s))
