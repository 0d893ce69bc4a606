"""The speed of jagged softmax attention: ``python -m kernels.benchmarks.jagged_attention``."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kernels.benchmarks import command
from kernels.benchmarks.cases import Case, Inputs
from kernels.benchmarks.report import Machine, launch_cost, table
from kernels.jagged_attention import jagged_attention

CASES = [
    Case(name="B256 d128 self 2048 dense", batch=256, width=128, queries=2048, act="softmax"),
    Case(name="B512 d128 self 2048 s=.5", batch=512, width=128, queries=2048, lengths="uniform", act="softmax"),
    Case(name="B512 d128 self 2048 heavy", batch=512, width=128, queries=2048, lengths="heavy", act="softmax"),
    Case(
        name="B512 d128 self 2048 s=.5, window 128",
        batch=512, width=128, queries=2048, lengths="uniform", act="softmax", window=128,
    ),
]  # fmt: skip


def call(case: Case, x: Inputs, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The op on a case."""
    window = case.window if case.window >= 0 else None
    return jagged_attention(q, k, v, x.q_offsets, x.kv_offsets, window=window)


def gradients(case: Case, x: Inputs) -> Callable[[], object]:
    """The backward operator on a case."""
    options = (x.q_offsets, x.kv_offsets, case.width**-0.5, False, case.window)
    out, lse = torch.ops.opengem.jagged_attention(x.q, x.k, x.v, *options)
    return lambda: torch.ops.opengem.jagged_attention_backward(x.grad, x.q, x.k, x.v, out, lse, *options)


def main() -> None:
    """Prints the tables. Of the window's line the baselines are full attention, which computes more."""
    table(call, gradients, CASES, Machine.measure())
    launch_cost(call, Case(name="small", batch=8, width=64, queries=64, act="softmax"))


if __name__ == "__main__":
    command.run("jagged_attention", __doc__, main)
