"""Tiles of several rows of a matrix: which of them a program has, and how it reads and writes them.

Shapes: X is a matrix of rows of ``WIDTH`` elements with the stride ``st``.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tile(WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """First row and columns of this program's tile, and which columns there are."""
    PARTS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    c = (tl.program_id(0) % PARTS) * BLOCK + tl.arange(0, BLOCK)
    return (tl.program_id(0) // PARTS) * ROWS, c, c < WIDTH


@triton.jit
def load(X, st, r, live, c, inside):
    """Rows r of a matrix; zero where not ``live``."""
    return tl.load(X + r.to(tl.int64)[:, None] * st + c[None, :], mask=live[:, None] & inside[None, :], other=0)


@triton.jit
def store(X, st, value, r, live, c, inside):
    """The same, written in the type of ``X``."""
    mask = live[:, None] & inside[None, :]
    tl.store(X + r.to(tl.int64)[:, None] * st + c[None, :], value.to(X.dtype.element_ty), mask=mask)
