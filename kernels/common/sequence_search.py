"""The search of ``sequences.py`` for kernels scheduled by hand, which name their layouts."""

# mypy: allow-untyped-defs
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.common.sequences import search


@gluon.jit
def find_sequence(Offsets, B, tile, BLOCK: gl.constexpr, WARPS: gl.constexpr, ROUNDS: gl.constexpr):
    """The last sequence b with ``offsets[b] // BLOCK + b <= tile``, by so many warps, each of which knows it then."""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    return search(Offsets, B, tile, gl.arange(0, 32, layout=LANES), BLOCK, 1, ROUNDS)
