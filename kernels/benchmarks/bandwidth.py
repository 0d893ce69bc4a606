"""Times ops that memory bounds, beside a copy of the same bytes and beside what PyTorch offers."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from kernels.benchmarks.cases import copy_bandwidth, host_times, milliseconds
from kernels.benchmarks.command import versions

Call = Callable[[], object]

SMALL = 2**27
"""Bytes of a small copy, which reads and writes as much as the smallest cases do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """One pass of an op.

    Args:
        size: bytes of every tensor it has to read or write, each once.
        eager: the call as a user makes it; for a backward pass through autograd.
        kernels: the same below autograd, which can be captured; default ``eager``.
        baselines: what PyTorch offers, by name.
    """

    case: str
    name: str
    size: int
    eager: Call
    kernels: Call | None = None
    baselines: dict[str, Call] = field(default_factory=dict)


def size_of(*tensors: torch.Tensor | None) -> int:
    """Bytes of tensors."""
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def measure_copy() -> float:
    """GB/s of a device copy, printed with the versions and with that of a small one.

    Before each call the L2 cache is filled with what then has to be written to memory, some 7 us for any call.
    """
    bandwidth, small = copy_bandwidth(), copy_bandwidth(SMALL)
    print(
        f"{torch.cuda.get_device_name()}, {versions()}: "
        f"copy {bandwidth:.0f} GB/s, of {SMALL >> 20} MB {small:.0f} GB/s\n"
    )
    return bandwidth


def print_table(cases: Iterable[Sequence[Pass]], bandwidth: float) -> None:
    """Measures the passes of each case and prints them as a table.

    Args:
        cases: made one after another, so that the tensors of one are gone before the next is there.
        bandwidth: GB/s of a device copy.
    """
    _print_header()
    for case in cases:
        for one in case:
            _print_pass(one, bandwidth)
        del case, one
        torch.cuda.empty_cache()
    print()


def _print_header() -> None:
    """The head of the table that ``_print_pass`` prints rows of."""
    print("| case | pass | MB | eager ms | graph ms | GB/s | share of copy | baselines: ms (ratio) |")
    print("|---|---|---|---|---|---|---|---|")


def _print_pass(one: Pass, bandwidth: float) -> None:
    """Times a pass and prints its row. Rates are those of the graph; ratios, too, are over its time."""
    eager = milliseconds(one.eager, rep=25)
    graph = milliseconds(one.kernels or one.eager, graph=True, rep=25)
    rate = one.size / graph / 1e6
    others = []
    for name, call in one.baselines.items():
        ms = milliseconds(call, rep=25)
        others.append(f"{name} {ms:.3f} ({ms / graph:.2f})")
    cells = (
        one.case, one.name, f"{one.size / 1e6:.0f}", f"{eager:.3f}", f"{graph:.3f}", f"{rate:.0f}",
        f"{rate / bandwidth:.2f}", ", ".join(others) or "-",
    )  # fmt: skip
    print("| " + " | ".join(cells) + " |", flush=True)


def host_cost(calls: Sequence[tuple[str, Call]]) -> None:
    """Prints the host's microseconds per call, on inputs too small to keep it waiting: median of rounds."""
    for name, call in calls:
        spent = statistics.median(host_times(call))
        print(f"host time per eager call, {name}: {spent:.0f} microseconds")


def packed_lengths(batch: int, longest: int, kind: str) -> torch.Tensor:
    """Lengths ``[batch]`` on the CPU.

    ``s=.7`` and ``s=.5``: uniform with a mean of .7 or .5 of the longest; ``dense``; ``heavy``: log-normal, sigma 1.2,
    a mean of a quarter of the longest before the cut at 8 times the longest.
    """
    generator = torch.Generator().manual_seed(0)
    if kind == "dense":
        return torch.full((batch,), longest)
    if kind == "heavy":
        normal = torch.randn(batch, generator=generator)
        return (longest / 4 * torch.exp(1.2 * normal - 0.72)).long().clamp(1, 8 * longest)
    least = 1 if kind == "s=.5" else int(0.4 * longest)
    return torch.randint(least, longest + 1, (batch,), generator=generator)
