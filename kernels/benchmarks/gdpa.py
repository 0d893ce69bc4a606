"""The speed of GDPA: ``python -m kernels.benchmarks.gdpa``.

``varlen_attn`` and SDPA compute softmax attention, another function of the same products; they are what PyTorch has.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kernels.benchmarks import command
from kernels.benchmarks.cases import Case, Inputs
from kernels.benchmarks.report import Machine, launch_cost, table
from kernels.gdpa import gdpa

CASES = [
    Case(name="B1024 d128 q512 kv64 dense", batch=1024, width=128, queries=512, keys=64),
    Case(name="B1024 d128 q512 kv64 s=.5", batch=1024, width=128, queries=512, keys=64, lengths="uniform"),
    Case(name="B1024 d128 q512 kv64 heavy", batch=1024, width=128, queries=512, keys=64, lengths="heavy"),
    Case(name="B1024 d128 q512 kv128 dense", batch=1024, width=128, queries=512, keys=128),
    Case(name="B1024 d64 q512 kv64 s=.5", batch=1024, width=64, queries=512, keys=64, lengths="uniform"),
    Case(name="B1152 d128 q512 kv256 dense", batch=1152, width=128, queries=512, keys=256),
    Case(name="B256 d128 self 2048 dense", batch=256, width=128, queries=2048),
    Case(name="B512 d128 self 2048 s=.5", batch=512, width=128, queries=2048, lengths="uniform"),
    Case(name="B512 d128 self 2048 heavy", batch=512, width=128, queries=2048, lengths="heavy"),
]


def call(case: Case, x: Inputs, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The op on a case."""
    bound = case.keys if case.keys else None
    return gdpa(q, k, v, x.q_offsets, x.kv_offsets, activation=case.act, max_keys=bound)


def gradients(case: Case, x: Inputs) -> Callable[[], object]:
    """The backward operator on a case."""
    bound = case.keys if case.keys else -1
    options = (x.q_offsets, x.kv_offsets, case.act, 1.0, 1.0, -1, bound)
    return lambda: torch.ops.opengem.gdpa_backward(x.grad, x.q, x.k, x.v, *options)


def main() -> None:
    """Prints the tables."""
    table(call, gradients, CASES, Machine.measure())
    launch_cost(call, Case(name="small", batch=8, width=64, queries=64, keys=64))


if __name__ == "__main__":
    command.run("gdpa", __doc__, main)
