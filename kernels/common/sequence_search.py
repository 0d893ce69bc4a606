"""The search of ``sequences.py`` for kernels scheduled by hand, which name their layouts."""

# mypy: allow-untyped-defs
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def find_sequence(Offsets, B, tile, BLOCK: gl.constexpr, WARPS: gl.constexpr, ROUNDS: gl.constexpr):
    """The last sequence b with ``offsets[b] // BLOCK + b <= tile``, by so many warps, each of which knows it then."""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    lane = gl.arange(0, 32, layout=LANES)
    low = tile * 0
    span = B
    for _ in gl.static_range(ROUNDS):
        step = (span + 31) // 32
        index = low + lane * step
        inside = index < low + span
        first = gl.load(Offsets + index, mask=inside, other=0) // BLOCK + index
        count = gl.sum((inside & (first <= tile)).to(gl.int32), 0)
        end = low + span
        low = low + (count - 1) * step
        span = gl.minimum(step, end - low)
    return low
