"""The shapes the benchmarks time, and how they time them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.jagged import offsets_from_lengths


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A batch to time.

    Args:
        batch, heads, width: B, H and d.
        queries: longest sequence of queries.
        keys: keys of every sequence; 0: self-attention, keys as queries.
        lengths: ``dense`` (all the longest), ``uniform`` (1 to the longest) or ``heavy`` (log-normal, sigma 1.2, with a
            mean of a quarter of ``queries`` before they are cut at 8 times ``queries``).
        act: an activation, or ``softmax``. window: -1 for none.
    """

    name: str
    batch: int
    width: int
    queries: int
    keys: int = 0
    heads: int = 4
    lengths: str = "dense"
    act: str = "gelu_tanh"
    window: int = -1
    dtype: torch.dtype = torch.bfloat16


@dataclass(frozen=True, slots=True)
class Inputs:
    """Tensors of a case, and its useful floating-point operations forward (backward: 2.5 times as many)."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor
    q_offsets: Tensor
    kv_offsets: Tensor
    max_queries: int
    max_keys: int
    flops: int

    @property
    def forward_bytes(self) -> int:
        """Each tensor once."""
        return 2 * (2 * self.q.numel() + self.k.numel() + self.v.numel())

    @property
    def backward_bytes(self) -> int:
        """Queries, gradient and query gradient; keys, values and theirs."""
        return 2 * (3 * self.q.numel() + 2 * self.k.numel() + 2 * self.v.numel())


def make(case: Case, seed: int = 0) -> Inputs:
    """Random inputs of a case on the GPU: normal, with standard deviation 0.5."""
    generator = torch.Generator().manual_seed(seed)
    if case.lengths == "dense":
        lengths = torch.full((case.batch,), case.queries)
    elif case.lengths == "uniform":
        lengths = torch.randint(1, case.queries + 1, (case.batch,), generator=generator)
    else:
        normal = torch.randn(case.batch, generator=generator)
        mean = case.queries / 4
        lengths = (mean * torch.exp(1.2 * normal - 0.72)).long().clamp(1, 8 * case.queries)
    keys = lengths if case.keys == 0 else torch.full((case.batch,), case.keys)
    rows, key_rows = int(lengths.sum()), int(keys.sum())

    def values(count: int) -> Tensor:
        return (torch.randn(count, case.heads, case.width, device="cuda") * 0.5).to(case.dtype)

    pairs = int((lengths * keys).sum())
    if case.window >= 0:
        reach = torch.arange(int(lengths.max()))
        seen = [torch.minimum(reach[:n] + 1 + case.window, n) - (reach[:n] - case.window).clamp(min=0) for n in lengths]
        pairs = sum(int(s.sum()) for s in seen)
    return Inputs(
        values(rows), values(key_rows), values(key_rows), values(rows),
        offsets_from_lengths(lengths).cuda(), offsets_from_lengths(keys).cuda(),
        int(lengths.max()), int(keys.max()), 4 * case.heads * case.width * pairs,
    )  # fmt: skip


def milliseconds(call: Callable[[], object], *, graph: bool = False, rep: int = 40) -> float:
    """Median time of a call, launches included, or of its replay as a CUDA graph."""
    from triton.testing import do_bench

    if not graph:
        return do_bench(call, warmup=5, rep=rep, return_mode="median")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        call()
    return do_bench(captured.replay, warmup=5, rep=rep, return_mode="median")


def host_times(call: Callable[[], object], rounds: int = 9, count: int = 200) -> list[float]:
    """Microseconds that a call keeps the host, of each round; between rounds the host waits for the device."""
    for _ in range(30):
        call()
    found = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            call()
        found.append(1e6 * (time.perf_counter() - start) / count)
    torch.cuda.synchronize()
    return found


def relative_error(got: Tensor, want: Tensor, squares: Callable[[Tensor], Tensor]) -> float:
    """The largest error over that of the reference; infinite where anything is not finite.

    Args:
        squares: sums of squares over what is compared together.
    """
    if not bool(got.isfinite().all()):
        return float("inf")
    assert bool(want.isfinite().all())
    off, size = squares(got.double() - want), squares(want)
    shares = (off / size).nan_to_num(nan=0.0, posinf=torch.inf)  # NaN: nothing is wanted, and nothing is there
    return float(shares.max().sqrt())


def runs_kernels_by_hand() -> bool:
    """Whether kernels scheduled by hand, which are written for Hopper, run on this GPU."""
    return torch.cuda.get_device_capability()[0] == 9


def copy_bandwidth(size: int = 2**30) -> float:
    """GB/s, read plus written, of a device copy of ``size`` bytes."""
    a = torch.empty(size, dtype=torch.int8, device="cuda").random_()
    b = torch.empty_like(a)
    return 2 * a.numel() / milliseconds(lambda: b.copy_(a)) / 1e6


def product_rate() -> float:
    """TFLOP/s of a bf16 product of 8,192 squared matrices of random numbers."""
    a, b = torch.randn(2, 8192, 8192, device="cuda").bfloat16()
    return 2 * 8192**3 / milliseconds(lambda: a @ b) / 1e9
