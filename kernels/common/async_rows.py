"""Rows that a program's threads copy to shared memory and go on, and results that they write, 16 bytes at a time."""

# mypy: allow-untyped-defs
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy


@gluon.jit
def row_places(base, stride, start, rows, BLOCK: gl.constexpr, D: gl.constexpr):
    """Addresses of ``BLOCK`` rows of a matrix of ``rows`` rows, 16 bytes for each thread, and which are there."""
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [gl.num_warps(), 1], [1, 0])
    r = start + gl.arange(0, BLOCK, layout=gl.SliceLayout(1, WIDE))
    c = gl.arange(0, D, layout=gl.SliceLayout(0, WIDE))
    return base + r[:, None].to(gl.int64) * stride + c[None, :], (r < rows)[:, None]


@gluon.jit
def copy_rows(tile, base, stride, start, rows):
    """Asks for rows from ``start`` on; zeros beyond the last."""
    at, inside = row_places(base, stride, start, rows, tile.shape[0], tile.shape[1])
    async_copy.async_copy_global_to_shared(tile, at, mask=inside)


@gluon.jit
def write_rows(base, value, stride, start, rows, CACHE: gl.constexpr):
    """Writes what ``copy_rows`` reads; ``CACHE``: ``.cs`` for what no program needs in the L2 cache, or nothing."""
    at, inside = row_places(base, stride, start, rows, value.shape[0], value.shape[1])
    value = gl.convert_layout(value.to(base.dtype.element_ty), at.type.layout)
    gl.store(at, value, mask=inside, cache_modifier=CACHE)
