"""Runs the Triton kernels of all but sequence attention on the CPU; see ``interpreted.py``."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernels.block_attention import reference as block_reference
from kernels.block_attention import triton as block_triton
from kernels.common.memory_tuning import forced
from kernels.common.rows import matrix
from kernels.jagged import reference as jagged_reference
from kernels.jagged import short_sums_triton, tables_triton
from kernels.jagged import triton as jagged_triton
from kernels.norms import reference as norm_reference
from kernels.norms import triton as norm_triton
from tests.kernels import test_interaction, test_token_mixing
from tests.kernels.unwritten import apart, unwritten_is_nan

TOLERANCE = 2e-6
"""Relative, of float32 sums of at most some hundred terms against float64: some roundings of 6e-8."""


def offsets_of(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def close(got: Tensor, want: Tensor, tolerance: float = TOLERANCE) -> None:
    assert got.shape == want.shape
    assert got.isfinite().all()
    error = (got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-30)
    assert error < tolerance, float(error)


def same(kernel: Callable[..., Any], reference: Callable[..., Any], *arguments: Any) -> Any:
    """Runs a kernel, and the reference in float64 on the same arguments; returns what the kernel gave.

    The first time also on tensors whose elements do not lie side by side, for the same bits.
    """
    exact = [x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in arguments]
    got, want = kernel(*arguments), reference(*exact)
    for a, b in zip(*((x if isinstance(x, tuple) else (x,)) for x in (got, want)), strict=True):
        close(a, b)
    if reference not in _APART:
        _APART.add(reference)
        same_apart(kernel, got, *arguments)
    return got


_APART: set[Callable[..., Any]] = set()
"""References of the kernels that ``same`` has run on such tensors."""


def same_apart(kernel: Callable[..., Any], want: Any, *arguments: Any) -> None:
    got = kernel(*(apart(x) if isinstance(x, Tensor) else x for x in arguments))
    for a, b in zip(*((x if isinstance(x, tuple) else (x,)) for x in (got, want)), strict=True):
        assert torch.equal(a, b)


def block_attention() -> None:
    """All forms of rotary, grouped heads, ragged and empty sequences, views of a fused tensor."""
    offsets = offsets_of([3, 0, 70, 64, 0])
    rows = int(offsets[-1])
    for columns, width, group in ((1, 12, 2), (0, 20, 1), (2, 8, 1), (0, 8, 2)):
        torch.manual_seed(columns)
        q = torch.randn(rows, 2, width)
        k, v = torch.randn(rows, 2, 2 // group, width).unbind(1)
        grad = torch.randn(2, rows, width).transpose(0, 1)
        positions = torch.rand(rows, columns) * 9 if columns else None
        frequencies = torch.rand(width // 2) if columns else None
        rotary = (offsets, positions, frequencies, 0.4)
        same(block_triton.forward, block_reference.forward, q, k, v, *rotary)
        same(block_triton.backward, block_reference.backward, grad, q, k, v, *rotary)


def block_attention_leaks() -> None:
    """What a block holds never reaches another one, and a program writes only its own rows."""
    offsets = offsets_of([3, 66, 5])
    torch.manual_seed(0)
    q, k, v, grad = torch.randn(4, 74, 1, 8)
    dirty = [x.clone() for x in (q, k, v, grad)]
    for x in dirty:
        x[3:67] = torch.nan
    results = []
    for a, b, c, g in ((q, k, v, grad), dirty):
        rotary = (offsets, None, None, 1.0)
        results.append((block_triton.forward(a, b, c, *rotary), *block_triton.backward(g, a, b, c, *rotary)))
    for clean, other in zip(*results, strict=True):
        assert torch.equal(clean[:3], other[:3])
        assert torch.equal(clean[67:], other[67:])
    empty = torch.zeros(0, 1, 8)
    for lengths in ([], [0, 0]):
        out = block_triton.forward(empty, empty, empty, offsets_of(lengths), None, None, 1.0)
        assert out.shape == (0, 1, 8)


def movement() -> None:
    """Every kernel of jagged movement: many sequences in a tile, none, one longer than a chunk; any row width."""
    lengths = [3, 0, 0, 5, 1, 40, *[1, 0] * 40, 2, 0]
    offsets, other = offsets_of(lengths), offsets_of(lengths[::-1])
    rows, batch = int(offsets[-1]), len(lengths)
    for width in (1, 5, 130):
        torch.manual_seed(width)
        x = torch.randn(rows, 2, width)[:, 0]
        y, dense, padded = torch.randn(rows, width), torch.randn(batch, width), torch.randn(batch, 7, width)
        for right in (False, True):
            same(jagged_triton.to_padded, jagged_reference.to_padded, x, offsets, 7, -2.0, right)
            same(jagged_triton.from_padded, jagged_reference.from_padded, padded, offsets, rows, right)
        same(jagged_triton.last_k, jagged_reference.last_k, x, offsets, 4)
        joined = same(jagged_triton.concat, jagged_reference.concat, x, y, offsets, offsets + other)
        same(jagged_triton.split, jagged_reference.split, joined, offsets, offsets + other, rows)
        for mean in (False, True):
            same(jagged_triton.segment_sum, jagged_reference.segment_sum, x, offsets, mean)
            same(jagged_triton.spread, jagged_reference.spread, dense, offsets, rows, mean)
        same(jagged_triton.broadcast_add, jagged_reference.broadcast_add, x, offsets, dense)


def gathers() -> None:
    """Rows and sequences taken by an index, and the sums of their copies, sorted or not; a sum in several chunks."""
    lengths = [3, 0, 7, 40, 1]
    offsets = offsets_of(lengths)
    rows = int(offsets[-1])
    torch.manual_seed(0)
    x, many = torch.randn(rows, 2, 4), torch.randn(700, 2, 4)
    for index, rising in ((torch.tensor([4, 0, 2, 2, 1, 4, 3]), False), (torch.tensor([0, 0, 2, 2, 4]), True)):
        same(jagged_triton.gather_rows, jagged_reference.gather_rows, x, index)
        new_offsets = same(jagged_triton.gathered_offsets, jagged_reference.gathered_offsets, offsets, index)
        assert new_offsets.tolist() == offsets_of([lengths[i] for i in index]).tolist()
        total = int(new_offsets[-1])
        copies = same(
            jagged_triton.gather_sequences, jagged_reference.gather_sequences, x, offsets, index, new_offsets, total
        )
        for values in (x, x[:, 1, 1:]):  # rows of 32 bytes, and of 12, which no limit of registers holds for
            arguments = (values, offsets, index, new_offsets, total)
            with forced("sequences_kernel", {"ROWS": 16, "num_warps": 4, "maxnreg": 96}):
                same(jagged_triton.gather_sequences, jagged_reference.gather_sequences, *arguments)
        arguments = (copies, offsets, index, new_offsets, rows, rising)
        same(jagged_triton.sum_sequences, jagged_reference.sum_sequences, *arguments)
    for count in (0, 1025, 5000):  # as far as one program goes, and beyond
        index = torch.randint(5, (count,), dtype=torch.int32)
        new_offsets = jagged_triton.gathered_offsets(offsets, index)
        assert torch.equal(new_offsets, jagged_reference.gathered_offsets(offsets, index))
    index = torch.randint(3, (700,)) * 2
    same(jagged_triton.scatter_sum, jagged_reference.scatter_sum, many, index, 6, False)
    same(jagged_triton.scatter_sum, jagged_reference.scatter_sum, many, index.sort().values, 6, True)
    same(
        jagged_triton.scatter_sum, jagged_reference.scatter_sum, many, index.view(350, 2)[:, :2].repeat(2, 1), 6, False
    )
    table = torch.randn(6, 2, 4)
    same(jagged_triton.embedding_add, jagged_reference.embedding_add, many, table, torch.randint(6, (700, 2)))
    same(jagged_triton.gather_rows, jagged_reference.gather_rows, table, torch.randint(6, (9, 3)))
    ids = torch.arange(rows)
    assert torch.equal(jagged_triton.to_padded(ids, offsets, 3, -1.0, False)[0], torch.tensor([0, 1, 2]))


def chunks() -> None:
    """Sums of sequences longer than a chunk, one of them right behind another; NaN stays in its own sequence."""
    offsets = offsets_of([513, 1, 1024, 0, 1100, 3])
    x = torch.randn(int(offsets[-1]), 3)
    for mean in (False, True):
        same(jagged_triton.segment_sum, jagged_reference.segment_sum, x, offsets, mean)
    x[513] = torch.nan
    bad = jagged_triton.segment_sum(x, offsets, False).isnan().any(1)
    assert bad.tolist() == [False, True, False, False, False, False]


def short_sums() -> None:
    """Several sequences in a program, some of them longer than what is summed side by side; starts of an index."""
    lengths = [3, 0, 65, 1, *[2, 0, 9] * 30, 64, 300, 0, 4]
    offsets = offsets_of(lengths)
    for width in (1, 3, 130):
        x = torch.randn(int(offsets[-1]), 2, width)[:, 1]
        for mean in (False, True):
            same(jagged_triton.segment_sum, jagged_reference.segment_sum, x, offsets, mean)
    with forced("short_sum", {"GROUP": 8, "ROWS": 1, "num_warps": 4}):
        same(jagged_triton.segment_sum, jagged_reference.segment_sum, x, offsets, True)
    x[3] = x[-1] = torch.nan
    bad = jagged_triton.segment_sum(x, offsets, False).isnan().any(1)
    assert bad.nonzero().flatten().tolist() == [2, len(lengths) - 1]
    for index in ([0] * 1024, [5] * 1030, [0, 0, 3, 7], [*range(2, 900), *[900] * 1500, 1999], [1, 1800]):
        for dtype in (torch.int64, torch.int32):
            ordered = torch.tensor(index, dtype=dtype)
            want = torch.searchsorted(ordered, torch.arange(2001, dtype=dtype))
            assert torch.equal(short_sums_triton.starts(ordered, 2000), want)


def tables() -> None:
    """Gradients of two tables, the large one first or second, its last group of 64 rows not full, columns masked."""

    def table_sum(x: Tensor, index: Tensor, sizes: tuple[int, int]) -> Tensor:
        return tables_triton.table_sum(matrix(x)[0], index, sizes)

    torch.manual_seed(0)
    x = torch.randn(600, 70)  # two chunks of rows, the second not full
    config = {"PROGRAMS": 2, "TILE": 64, "BLOCK": 64, "STAGES": 2, "num_warps": 4}
    for sizes in ((330, 7), (7, 130)):
        index = torch.stack([torch.randint(n, (600,)) for n in sizes], dim=1)
        index[:, 0] = index[:, 0] // 140 * 140 + index[:, 0] // 300  # groups that are empty
        index[:, 1] += sizes[0]
        with forced("tables", config | ({"TILE": 128, "STAGES": 3} if sizes[0] == 7 else {})):
            same(table_sum, jagged_reference.table_sum, x, index, sizes)
        with forced("tables", {**config, "PROGRAMS": 1}):
            row = torch.tensor([[0, sizes[0]]]) + torch.tensor([s - 1 for s in sizes])  # in the last group
            same(table_sum, jagged_reference.table_sum, x[:1], row, sizes)


def empty_movement() -> None:
    """No rows, no sequences, no columns."""
    for lengths in ([], [0, 0, 0]):
        offsets, x = offsets_of(lengths), torch.zeros(0, 3)
        dense, padded = torch.ones(len(lengths), 3), torch.ones(len(lengths), 4, 3)
        none = torch.zeros(0, dtype=torch.int64)
        same(jagged_triton.to_padded, jagged_reference.to_padded, x, offsets, 4, 2.0, True)
        same(jagged_triton.from_padded, jagged_reference.from_padded, padded, offsets, 0, False)
        same(jagged_triton.segment_sum, jagged_reference.segment_sum, x, offsets, True)
        same(jagged_triton.spread, jagged_reference.spread, dense, offsets, 0, True)
        same(jagged_triton.concat, jagged_reference.concat, x, x, offsets, offsets)
        same(jagged_triton.split, jagged_reference.split, x, offsets, offsets, 0)
        same(jagged_triton.gather_rows, jagged_reference.gather_rows, dense, none)
        same(jagged_triton.scatter_sum, jagged_reference.scatter_sum, x, none, 3, False)
        same(jagged_triton.sum_sequences, jagged_reference.sum_sequences, x, offsets, none, offsets[:1], 0, True)
    wide = torch.zeros(4, 0)
    same(jagged_triton.segment_sum, jagged_reference.segment_sum, wide, torch.tensor([0, 3, 4]), False)
    same(
        jagged_triton.from_padded, jagged_reference.from_padded, torch.ones(2, 0, 3), torch.tensor([0, 3, 4]), 4, False
    )


def norms() -> None:
    """Combinations of parts; rows of one tile and of several; views with strides."""
    for rows, width in ((5, 3), (30, 130)):
        torch.manual_seed(width)
        fused = torch.randn(5, rows, 2, width)[:, :, 1]
        x, residual, gate, grad, grad_z = fused.unbind(0)
        weight, bias = torch.randn(2, width)
        for center, has in itertools.product((False, True), ((), ("w",), ("w", "b", "g"), ("r", "g"), ("r", "w", "b"))):
            parts = [t if name in has else None for name, t in (("g", gate), ("w", weight), ("b", bias))]
            rest = residual if "r" in has else None
            for act in ("sigmoid", "silu") if "g" in has else ("silu",):
                choice = (0.1, center, act)
                y, z = norm_triton.forward(x, rest, *parts, *choice, torch.float32)
                if rows == 5 and center:
                    same_apart(norm_triton.forward, (y, z), x, rest, *parts, *choice, torch.float32)
                exact = [None if t is None else t.double() for t in (x, rest, *parts)]
                want_y, want_z = norm_reference.forward(*exact, 0.1, center, act, torch.float64)
                close(y, want_y)
                close(z, want_z)
                to_z, rest_z = (grad_z, grad_z.double()) if "r" in has else (None, None)
                source, exact_source = (x, exact[0]) if rest is None else (z, want_z)
                config = {"ROWS": 8, "num_warps": 4, "PROGRAMS": 3, "STAGES": 2}
                with forced("norm_backward", config):
                    got = norm_triton.backward(grad, to_z, source, *parts, *choice)
                    if rows == 5 and center:
                        same_apart(norm_triton.backward, got, grad, to_z, source, *parts, *choice)
                want = norm_reference.backward(grad.double(), rest_z, exact_source, *exact[2:], *choice)
                for a, b in zip(got, want, strict=True):
                    close(a, b, 4 * TOLERANCE)  # differences of sums


def products() -> None:
    """Interactions of tokens and maps over them, each at the sizes of its own file."""
    test_interaction.interpreted()
    test_token_mixing.interpreted()


if __name__ == "__main__":
    torch.set_num_threads(1)
    with unwritten_is_nan():
        for name in sys.argv[1:]:
            globals()[name]()
    print("checked")
