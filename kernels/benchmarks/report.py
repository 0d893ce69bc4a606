"""Times an op on a case, eagerly and as a CUDA graph, beside PyTorch's attention, and prints a line per pass."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn

from kernels.benchmarks.cases import Case, Inputs, copy_bandwidth, host_times, make, milliseconds, product_rate
from kernels.benchmarks.command import versions

Op = Callable[[Case, Inputs, Tensor, Tensor, Tensor], Tensor]
"""The op under test on q, k and v of a case."""

Gradients = Callable[[Case, Inputs], Callable[[], object]]
"""Makes the backward operator of a case, for a CUDA graph without autograd."""

BACKWARD_OPERATIONS = 2.5
"""Five products against two."""

_HEADER = (
    "| case | pass | eager ms | graph ms | useful TFLOP/s | GB/s | share of roofline | varlen_attn ms (ratio)"
    " | padded SDPA ms (ratio) |\n|---|---|---|---|---|---|---|---|---|"
)


@dataclass(frozen=True, slots=True)
class Machine:
    """Measured ceilings: GB/s of a copy, TFLOP/s of a large bf16 product."""

    bandwidth: float
    rate: float

    @staticmethod
    def measure() -> Machine:
        """Measures both and prints them with versions."""
        machine = Machine(copy_bandwidth(), product_rate())
        print(
            f"{torch.cuda.get_device_name()}, {versions()}: copy "
            f"{machine.bandwidth:.0f} GB/s, bf16 product {machine.rate:.0f} TFLOP/s\n"
        )
        return machine

    def floor(self, flops: float, size: int) -> float:
        """The least ms for that many operations and bytes."""
        return max(flops / self.rate / 1e9, size / self.bandwidth / 1e6)


def table(op: Op, gradients: Gradients, cases: list[Case], machine: Machine) -> None:
    """Prints the table of ``cases``."""
    print(_HEADER)
    for case in cases:
        _case(op, gradients, case, machine)
        torch.cuda.empty_cache()
    print()


def _case(op: Op, gradients: Gradients, case: Case, machine: Machine) -> None:
    x = make(case)
    mine = _time(lambda q, k, v: op(case, x, q, k, v), x.q, x.k, x.v, x.grad, gradients(case, x))
    queries, keys = x.q_offsets.int(), x.kv_offsets.int()
    varlen = _time(
        lambda q, k, v: cast(Tensor, varlen_attn(q, k, v, queries, keys, x.max_queries, x.max_keys)),
        x.q, x.k, x.v, x.grad,
    )  # fmt: skip
    padded = _padded(case, x) if case.lengths != "heavy" else None
    for index, name in enumerate(("forward", "backward")):
        flops = x.flops * (1.0 if index == 0 else BACKWARD_OPERATIONS)
        size = x.forward_bytes if index == 0 else x.backward_bytes
        eager, graph = mine[index]
        best = graph or eager
        against = [
            f"{times[index][0]:.3f} ({times[index][0] / best:.2f})" if times else "-" for times in (varlen, padded)
        ]
        row = (case.name, name, f"{eager:.3f}", f"{graph:.3f}" if graph else "-", f"{flops / best / 1e9:.0f}")
        rates = (f"{size / best / 1e6:.0f}", f"{machine.floor(flops, size) / best:.2f}", *against)
        print("| " + " | ".join((*row, *rates)) + " |", flush=True)


def _time(
    call: Callable[[Tensor, Tensor, Tensor], Tensor], q: Tensor, k: Tensor, v: Tensor, grad: Tensor,
    gradients: Callable[[], object] | None = None,
) -> list[tuple[float, float]]:  # fmt: skip
    """Eager and graph ms, forward and backward; graph 0 without ``gradients``, the backward operator."""
    q, k, v = (t.detach().requires_grad_() for t in (q, k, v))

    def forward() -> Tensor:
        with torch.no_grad():
            return call(q, k, v)

    times = [(milliseconds(forward), milliseconds(forward, graph=True) if gradients else 0.0)]
    out = call(q, k, v)

    def backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)

    times.append((milliseconds(backward), milliseconds(gradients, graph=True) if gradients else 0.0))
    return times


def _padded(case: Case, x: Inputs) -> list[tuple[float, float]]:
    """SDPA on tensors that are padded already, with no mask: less work than a user of padding has."""
    q = torch.randn(case.batch, case.heads, x.max_queries, case.width, device="cuda").bfloat16()
    k = torch.randn(case.batch, case.heads, x.max_keys, case.width, device="cuda").bfloat16()
    return _time(F.scaled_dot_product_attention, q, k, k.clone(), torch.randn_like(q))


def launch_cost(op: Op, case: Case) -> None:
    """Prints the host's microseconds per eager call, on a batch too small to keep it waiting: median of rounds."""
    x = make(case)
    plain = (x.q, x.k, x.v)
    q, k, v = (t.detach().requires_grad_() for t in plain)

    def forward() -> Tensor:
        return op(case, x, *plain)

    def both() -> object:
        return torch.autograd.grad(op(case, x, q, k, v), (q, k, v), x.grad)

    for name, call in (("forward, no gradients", forward), ("forward and backward", both)):
        spent = statistics.median(host_times(call))
        print(f"host time per eager call, {name}: {spent:.0f} microseconds")
