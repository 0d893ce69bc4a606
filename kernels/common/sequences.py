"""Where a program of a kernel finds its rows, with no host-side knowledge of the lengths.

Sequence b gets the tile numbers from ``offsets[b] // BLOCK + b`` on: room for all its tiles of BLOCK rows, in rising
order, without a sum over the sequences before it. ``rows // BLOCK + B`` tiles hold every batch of B sequences; a tile
past the end of its sequence has nothing to do.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def find_sequence(Offsets, B, tile, BLOCK: tl.constexpr, OWN: tl.constexpr, ROUNDS: tl.constexpr):
    """The last sequence b with ``offsets[b] // BLOCK + OWN b <= tile``: 32 offsets a round, two for 1,024 sequences."""
    return search(Offsets, B, tile, tl.arange(0, 32), BLOCK, OWN, ROUNDS)


@triton.jit
def search(Offsets, B, tile, lane, BLOCK: tl.constexpr, OWN: tl.constexpr, ROUNDS: tl.constexpr):
    """``find_sequence`` by these lanes, 0 .. 31, which kernels scheduled by hand give a layout."""
    low = tile * 0
    span = B
    for _ in tl.static_range(ROUNDS):
        step = (span + 31) // 32
        index = low + lane * step
        inside = index < low + span
        first = tl.load(Offsets + index, mask=inside, other=0) // BLOCK + index * OWN
        count = tl.sum((inside & (first <= tile)).to(tl.int32), 0)
        end = low + span
        low = low + (count - 1) * step
        span = tl.minimum(step, end - low)
    return low


@triton.jit
def sequence_chunk(Offsets, B, length, tile, BLOCK: tl.constexpr, DENSE: tl.constexpr, ROUNDS: tl.constexpr):
    """As ``sequence_tile``, numbered otherwise: tile b < B is the start of sequence b and needs no search.

    For tiles so large that most sequences have one. The rest of sequence b has the tiles from
    ``B + offsets[b] // BLOCK`` on.
    """
    if DENSE:
        return sequence_tile(Offsets, B, length, tile, BLOCK, True, ROUNDS)
    else:
        b, start = tile, tile * 0
        if tile >= B:
            b = find_sequence(Offsets, B, tile - B, BLOCK, 0, ROUNDS)
            start = (tile - B + 1 - (tl.load(Offsets + b) // BLOCK).to(tl.int32)) * BLOCK
        first = tl.load(Offsets + b).to(tl.int64)
        return b, first, (tl.load(Offsets + b + 1).to(tl.int64) - first).to(tl.int32), start


@triton.jit
def sequence_tile(Offsets, B, length, tile, BLOCK: tl.constexpr, DENSE: tl.constexpr, ROUNDS: tl.constexpr):
    """Sequence, its first row, its length and the tile's start in it. ``DENSE``: all have ``length`` rows."""
    if DENSE:
        per = (length + BLOCK - 1) // BLOCK
        b = tile // per
        return b, b.to(tl.int64) * length, length, (tile - b * per) * BLOCK
    else:
        b = find_sequence(Offsets, B, tile, BLOCK, 1, ROUNDS)
        first = tl.load(Offsets + b).to(tl.int64)
        rows = (tl.load(Offsets + b + 1).to(tl.int64) - first).to(tl.int32)
        return b, first, rows, (tile - b - (first // BLOCK).to(tl.int32)) * BLOCK


@triton.jit
def sequence_rows(Offsets, b, length, DENSE: tl.constexpr):
    """First row and length of sequence b."""
    if DENSE:
        return b.to(tl.int64) * length, length
    else:
        first = tl.load(Offsets + b).to(tl.int64)
        return first, (tl.load(Offsets + b + 1).to(tl.int64) - first).to(tl.int32)


@triton.jit
def load_rows(Base, stride, start, rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr, BLOCK_WIDTH: tl.constexpr):
    """Rows ``start .. start + BLOCK`` of a matrix of ``rows`` rows; zero beyond it."""
    r = start + tl.arange(0, BLOCK)
    c = tl.arange(0, BLOCK_WIDTH)
    mask = (r < rows)[:, None] & (c < WIDTH)[None, :]
    return tl.load(Base + r[:, None].to(tl.int64) * stride + c[None, :], mask=mask, other=0.0)


@triton.jit
def store_rows(Base, value, stride, start, rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr, BLOCK_WIDTH: tl.constexpr):
    """Writes what ``load_rows`` reads."""
    r = start + tl.arange(0, BLOCK)
    c = tl.arange(0, BLOCK_WIDTH)
    mask = (r < rows)[:, None] & (c < WIDTH)[None, :]
    tl.store(Base + r[:, None].to(tl.int64) * stride + c[None, :], value.to(Base.dtype.element_ty), mask=mask)
