"""Activations and their slopes inside Triton kernels.

``FAST`` forms (for 16-bit inputs) use one special-function instruction per element, ``tanh.approx.f32``, whose relative
error is 2^-11: the sigmoid, and with it silu and both gelus, is then off by at most 2.5e-4 absolute. The fast gelu
writes the normal distribution function as ``(1 + tanh(x (c0 + c1 x^2 + c2 x^4))) / 2`` with fitted coefficients: 3e-5
off in the value and 1e-4 in the slope, less than the instruction's own error. Without ``FAST`` all are exact to
float32 rounding.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl

INTERPRET = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""The interpreter knows no inline assembly."""

TANH_C0 = tl.constexpr(0.7978845608028654)  # sqrt(2 / pi)
TANH_C1 = tl.constexpr(0.035677408136300125)  # sqrt(2 / pi) * 0.044715
ERF_C0 = tl.constexpr(0.797480661)
ERF_C1 = tl.constexpr(0.0369836561)
ERF_C2 = tl.constexpr(-0.000346257795)
SQRT_HALF = tl.constexpr(0.7071067811865476)
INV_SQRT_2PI = tl.constexpr(0.3989422804014327)


@triton.jit
def tanh(u):
    """The hyperbolic tangent in one instruction; the interpreter, which knows none, computes it."""
    if INTERPRET:
        return 2.0 / (1.0 + tl.exp(-2.0 * u)) - 1.0
    else:
        return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [u], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def rise(u, FAST: tl.constexpr):
    """``(1 + tanh(u)) / 2``, the sigmoid of ``2 u``."""
    if FAST:
        return 0.5 * tanh(u) + 0.5
    else:
        return 1.0 / (1.0 + tl.exp(-2.0 * u))


@triton.jit
def _gelu_angle(x, ACT: tl.constexpr):
    """``u`` with ``gelu(x) = x (1 + tanh(u)) / 2``, and ``du / dx``."""
    if ACT == "gelu_tanh":
        x2 = x * x
        return x * (TANH_C1 * x2 + TANH_C0), (3.0 * TANH_C1) * x2 + TANH_C0
    else:
        x2 = tl.minimum(x * x, 36.0)  # beyond 6 the function is 0 or 1, and the polynomial would turn round
        return x * ((ERF_C2 * x2 + ERF_C1) * x2 + ERF_C0), ((5.0 * ERF_C2) * x2 + 3.0 * ERF_C1) * x2 + ERF_C0


@triton.jit
def _half_risen(x, u, FAST: tl.constexpr):
    """``x rise(u)``; in the fast form one multiply-add behind the tangent, since ``x / 2`` need not wait for it."""
    if FAST:
        half = 0.5 * x
        return half * tanh(u) + half
    else:
        return x * rise(u, FAST)


@triton.jit
def _positive(x):
    """``max(x, 0)``; NaN stays, as in PyTorch: what is wrong with a row must show."""
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def activate(x, ACT: tl.constexpr, FAST: tl.constexpr):
    """``act(x)`` for a name in ``kernels.gdpa.ACTIVATIONS``; float32."""
    if ACT == "identity":
        return x
    elif ACT == "relu":
        return _positive(x)
    elif ACT == "relu2":
        r = _positive(x)
        return r * r
    elif ACT == "silu":
        return _half_risen(x, 0.5 * x, FAST)
    elif ACT == "gelu" and not FAST:
        return x * (0.5 * tl.erf(x * SQRT_HALF) + 0.5)
    elif ACT == "gelu" or ACT == "gelu_tanh":
        u, _ = _gelu_angle(x, ACT)
        return _half_risen(x, u, FAST)
    else:
        tl.static_assert(ACT == "hardswish")
        return x * tl.minimum(tl.maximum(x * (1.0 / 6.0) + 0.5, 0.0), 1.0)


@triton.jit
def _slope_of_half_risen(half, t, du):
    """``y = x (1 + t) / 2`` with ``t = tanh(u)``, and ``dy / dx``, from ``x / 2``, ``t`` and ``du / dx``."""
    return half * t + half, (half * (1.0 - t * t)) * du + (0.5 * t + 0.5)


@triton.jit
def activate_with_slope(x, ACT: tl.constexpr, FAST: tl.constexpr):
    """``act(x)`` and ``act'(x)``; float32. Slopes at a kink are those of PyTorch; that of relu at NaN is 0."""
    if ACT == "identity":
        return x, x * 0.0 + 1.0
    elif ACT == "relu":
        return _positive(x), tl.where(x > 0, 1.0, 0.0)
    elif ACT == "relu2":
        r = _positive(x)
        return r * r, 2.0 * r
    elif ACT == "silu":
        if FAST:
            half = 0.5 * x
            return _slope_of_half_risen(half, tanh(half), 0.5)
        else:
            s = rise(0.5 * x, FAST)
            y = x * s
            return y, s + (y - y * s)
    elif ACT == "gelu" and not FAST:
        s = 0.5 * tl.erf(x * SQRT_HALF) + 0.5
        return x * s, s + x * (INV_SQRT_2PI * tl.exp(-0.5 * x * x))
    elif ACT == "gelu" or ACT == "gelu_tanh":
        u, slope = _gelu_angle(x, ACT)
        if FAST:
            return _slope_of_half_risen(0.5 * x, tanh(u), slope)
        else:
            s = rise(u, FAST)
            y = x * s
            return y, s + (y - y * s) * (2.0 * slope)
    else:
        tl.static_assert(ACT == "hardswish")
        r = tl.minimum(tl.maximum(x * (1.0 / 6.0) + 0.5, 0.0), 1.0)
        return x * r, tl.where(tl.abs(x) >= 3.0, r, x * (1.0 / 3.0) + 0.5)


@triton.jit
def activate_with_slope_in_less(x, ACT: tl.constexpr):
    """As ``activate_with_slope`` in the fast form, with fewer operations and less to keep, one behind another.

    From ``r = (1 + tanh(u)) / 2``: ``y = x r`` and ``dy / dx = r + y (1 - r) 2 du / dx``.
    """
    if ACT == "silu":
        r = 0.5 * tanh(0.5 * x) + 0.5
        y = x * r
        return y, (y - y * r) + r
    elif ACT == "gelu_tanh":
        x2 = x * x
        r = 0.5 * tanh(x * (TANH_C1 * x2 + TANH_C0)) + 0.5
        y = x * r
        return y, (y - y * r) * ((6.0 * TANH_C1) * x2 + 2.0 * TANH_C0) + r
    else:
        return activate_with_slope(x, ACT, True)
