"""The speed of jagged movement: ``python -m kernels.benchmarks.jagged``.

Baseline: the reference on the GPU, which is PyTorch's own operators one after another.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kernels.benchmarks import command
from kernels.benchmarks.bandwidth import Pass, host_cost, measure_copy, packed_lengths, print_table, size_of
from kernels.jagged import (
    concat,
    gather_rows,
    gather_sequences,
    offsets_from_lengths,
    padded_op,
    reference,
    rows_op,
    segment_sum,
    sequences_op,
    sums_op,
    to_padded,
)

CASES = [
    ("B1024 T1024 w256 s=.5", 1024, 1024, 256, "s=.5"),
    ("B16384 T64 w256 s=.5", 16384, 64, 256, "s=.5"),
    ("B8192 T1024 w64 heavy", 8192, 1024, 64, "heavy"),
]
"""Name, sequences, longest, row width, lengths; bf16."""

COPIES = 8
"""Impressions of a request."""


def passes(name: str, batch: int, longest: int, width: int, kind: str, device: str = "cuda") -> list[Pass]:
    """Forward and backward of every op; most backward passes are the forward pass of another."""
    lengths = packed_lengths(batch, longest, kind)
    offsets = offsets_from_lengths(lengths).to(device)
    rows, length = int(offsets[-1]), min(int(lengths.max()), longest)
    x, y = torch.randn(2, rows, width, device=device).bfloat16()
    dense = torch.randn(batch, width, device=device).bfloat16()
    covered = 2 * width * int(lengths.clamp(max=length).sum())
    padded = to_padded(x, offsets, length)
    joined, ends = concat(x, offsets, y, offsets)
    requests = max(batch // COPIES, 1)
    few = offsets[: requests + 1]
    source = x[: int(few[-1])]
    index = torch.arange(requests, device=device).repeat_interleave(COPIES)
    copies, new_offsets = gather_sequences(source, few, index, rising=True)
    picks = torch.arange(rows, device=device) * 7919 % rows
    owner = torch.arange(rows // COPIES, device=device).repeat_interleave(COPIES)
    table = torch.randn(2048 + 64, width, device=device).bfloat16()
    choice = torch.stack([torch.randint(2048, (rows,)), 2048 + torch.randint(64, (rows,))], dim=1).to(device)
    found: list[Pass] = []

    def add(label: str, size: int, own: Callable[[], object], torch_own: Callable[[], object]) -> None:
        found.append(Pass(case=name, name=label, size=size, eager=own, baselines={"torch": torch_own}))

    def both(label: str, size: int, function: str, *arguments: object) -> None:
        operator, other = _operator(function), getattr(reference, function)
        add(label, size, lambda: operator(*arguments), lambda: other(*arguments))

    both("to_padded", covered + size_of(padded), "to_padded", x, offsets, length, 0.0, False)
    both("from_padded", covered + size_of(x), "from_padded", padded, offsets, rows, False)
    both("concat", 2 * size_of(joined), "concat", x, y, offsets, ends)
    both("split", 2 * size_of(joined), "split", joined, offsets, ends, rows)
    both("broadcast_add", 2 * size_of(x) + size_of(dense), "broadcast_add", x, offsets, dense)
    both("segment_sum (backward of broadcast_add)", size_of(x, dense), "segment_sum", x, offsets, False)
    both("segment_mean", size_of(x, dense), "segment_sum", x, offsets, True)
    both("backward of segment_mean", size_of(x, dense), "spread", dense, offsets, rows, True)
    add(
        "gather_rows, any order", 2 * size_of(x) + size_of(picks),
        lambda: rows_op._gather_rows(x, picks, False), lambda: reference.gather_rows(x, picks),
    )  # fmt: skip
    few_rows = x[: owner[-1] + 1] if rows >= COPIES else x
    taken = gather_rows(few_rows, owner)
    add(
        "gather_rows, request_index", size_of(few_rows, taken, owner),
        lambda: rows_op._gather_rows(few_rows, owner, True), lambda: reference.gather_rows(few_rows, owner),
    )  # fmt: skip
    both("its backward", size_of(few_rows, taken, owner), "scatter_sum", taken, owner, few_rows.shape[0], True)
    size = size_of(source, copies)
    arguments = (few, index, new_offsets)
    add(
        "gather_sequences, request_index", size,
        lambda: sequences_op._gather_sequences(source, *arguments, copies.shape[0], True),
        lambda: reference.gather_sequences(source, *arguments, copies.shape[0]),
    )  # fmt: skip
    both("its backward ", size, "sum_sequences", copies, *arguments, source.shape[0], True)
    size = 2 * size_of(x) + size_of(choice)
    add(
        "embedding_add, time and position", size,
        lambda: rows_op._embedding_add(x, table, choice, ()), lambda: reference.embedding_add(x, table, choice),
    )  # fmt: skip
    both("its backward, tables not told apart", size_of(x, choice, table), "scatter_sum", x, choice, len(table), False)
    both("its backward, two tables", size_of(x, choice, table), "table_sum", x, choice, (2048, 64))
    return found


def _operator(name: str) -> Callable[..., object]:
    """The operator that a function of the reference goes with."""
    for file in (padded_op, rows_op, sums_op, sequences_op):
        if found := vars(file).get(f"_{name}"):
            return found
    raise AssertionError(f"no operator {name}")


def main() -> None:
    """Prints the table."""
    print_table((passes(*case) for case in CASES), measure_copy())
    x, offsets = torch.randn(8, 64, device="cuda").bfloat16(), torch.tensor([0, 3, 8], device="cuda")
    leaf = x.detach().requires_grad_()

    def forward() -> Tensor:
        with torch.no_grad():
            return segment_sum(x, offsets)

    grad = forward()
    both = ("segment_sum and backward", lambda: torch.autograd.grad(segment_sum(leaf, offsets), leaf, grad))
    host_cost([("segment_sum, no gradients", forward), both])


if __name__ == "__main__":
    command.run("jagged", __doc__, main)
