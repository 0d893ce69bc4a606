"""K and V that impressions of a request share, on a GPU: against float64, and against a copy for each impression."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from kernels.benchmarks.cases import runs_kernels_by_hand
from kernels.common import launch
from kernels.common.launch import Call
from kernels.common.requests import request_offsets
from kernels.gdpa import gdpa
from kernels.jagged import offsets_from_lengths
from kernels.jagged_attention import jagged_attention
from tests.kernels.graphs import check_graph, without_waiting
from tests.kernels.test_triton_gpu import same
from tests.kernels.unwritten import unwritten_is_nan

pytestmark = pytest.mark.gpu

IMPRESSIONS = [3, 1, 0, 5, 2, 0, 7, 1, 4, 9, 0]
"""Of each request; the last one, which has none, begins where the queries end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Keys of requests under queries of impressions.

    Args:
        queries: most of an impression; 0: as many as its request has keys.
        keys: most of a request. dense: all have so many. bounded: the op is told that none has more.
        by_hand: passes that kernels scheduled by hand do on Hopper, by head width.
    """

    act: str
    queries: int
    keys: int
    dense: bool = False
    bounded: bool = False
    heads: int = 4
    kv_heads: int = 4
    by_hand: tuple[tuple[int, str], ...] = ()


CASES = {
    "gdpa, CLS tokens on few keys": Case(
        act="silu", queries=8, keys=64, bounded=True, by_hand=((64, "backward"), (128, "backward"))
    ),
    "gdpa, few keys": Case(act="gelu", queries=300, keys=128, bounded=True, by_hand=((128, "both"),)),
    "gdpa, dense keys": Case(act="gelu_tanh", queries=300, keys=200, dense=True, by_hand=((128, "forward"),)),
    "gdpa, grouped heads": Case(act="relu2", queries=300, keys=96, bounded=True, kv_heads=2, by_hand=((128, "both"),)),
    "gdpa, cross": Case(act="silu", queries=300, keys=700, by_hand=((64, "both"), (128, "both"))),
    "gdpa, self": Case(act="gelu", queries=0, keys=700, by_hand=((64, "both"), (128, "both"))),
    "softmax, CLS tokens on few keys": Case(act="softmax", queries=8, keys=50),
    "softmax, one key head": Case(act="softmax", queries=8, keys=700, kv_heads=1),
    "softmax, cross": Case(act="softmax", queries=300, keys=700, by_hand=((64, "both"), (128, "both"))),
    "softmax, self": Case(act="softmax", queries=0, keys=700, by_hand=((64, "both"), (128, "both"))),
}


@dataclass(frozen=True, slots=True)
class Batch:
    """Tensors of a case: B impressions of R requests.

    ``rows``: the rows of k and v, or their sequences where they are dense, that a copy for each impression has.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    q_offsets: Tensor
    kv_offsets: Tensor
    index: Tensor
    rows: Tensor


def make(case: Case, width: int, dtype: torch.dtype) -> Batch:
    """Random: a request without keys, one with a single key, impressions without queries and with a single one."""
    generator = torch.Generator().manual_seed(0)
    index = torch.arange(len(IMPRESSIONS)).repeat_interleave(torch.tensor(IMPRESSIONS))
    keys = torch.randint(case.keys // 2, case.keys + 1, (len(IMPRESSIONS),), generator=generator)
    keys[:2] = torch.tensor([case.keys, 1])
    keys[7] = 0
    if case.dense:
        keys[:] = case.keys
    queries = torch.randint(case.queries + 1, (len(index),), generator=generator) if case.queries else keys[index]
    queries[1:3] = torch.tensor([1, 0])

    def values(rows: Tensor, heads: int) -> Tensor:
        return torch.randn(int(rows.sum()), heads, width, generator=generator).mul_(0.5).to(dtype).cuda()

    k, v = values(keys, 2 * case.kv_heads).chunk(2, dim=1)  # views of one tensor, as a projection makes them
    kv_offsets = offsets_from_lengths(keys)
    rows = torch.cat([torch.arange(int(kv_offsets[r]), int(kv_offsets[r + 1])) for r in index.tolist()])
    if case.dense:
        k, v, rows = k.unflatten(0, (-1, case.keys)), v.unflatten(0, (-1, case.keys)), index
    offsets = offsets_from_lengths(queries)
    return Batch(values(queries, case.heads), k, v, offsets.cuda(), kv_offsets.cuda(), index.cuda(), rows.cuda())


def shared(case: Case, batch: Batch) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The op of a case on one copy of k and v for each request."""
    where, index = (batch.q_offsets, None if case.dense else batch.kv_offsets), batch.index
    if case.act == "softmax":
        return lambda q, k, v: jagged_attention(q, k, v, batch.q_offsets, batch.kv_offsets, request_index=index)
    options = {"activation": case.act, "logit_scale": 0.3, "scale": 0.5}
    bound = case.keys if case.bounded else None
    return lambda q, k, v: gdpa(q, k, v, *where, request_index=index, max_keys=bound, **options)


def copied(case: Case, batch: Batch) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The same on a copy for each impression, made by PyTorch, which sums the gradients of the copies in float32."""
    kv_offsets = offsets_from_lengths(batch.kv_offsets.diff()[batch.index])
    where = (batch.q_offsets, None if case.dense else kv_offsets)

    def copies(x: Tensor) -> Tensor:
        return x.to(torch.promote_types(x.dtype, torch.float32))[batch.rows].to(x.dtype)

    if case.act == "softmax":
        return lambda q, k, v: jagged_attention(q, copies(k), copies(v), batch.q_offsets, kv_offsets)
    options = {"activation": case.act, "logit_scale": 0.3, "scale": 0.5}
    return lambda q, k, v: gdpa(q, copies(k), copies(v), *where, **options)


def results(op: Callable[[Tensor, Tensor, Tensor], Tensor], batch: Batch, dtype: torch.dtype) -> list[Tensor]:
    """Output and gradients of q, k and v."""
    leaves = [x.detach().to(dtype).requires_grad_() for x in (batch.q, batch.k, batch.v)]
    out = op(*leaves)
    generator = torch.Generator().manual_seed(1)
    grad = torch.randn(out.shape, generator=generator).to(batch.q.dtype).cuda().to(dtype)
    return [out, *torch.autograd.grad(out, leaves, grad)]


def compare(case: Case, batch: Batch) -> None:
    dtype = batch.q.dtype
    exact = results(copied(case, batch), batch, torch.float64)
    apart = results(copied(case, batch), batch, dtype)
    with unwritten_is_nan():
        together = results(shared(case, batch), batch, dtype)
    for got, copy, want in zip(together, apart, exact, strict=True):
        assert got.dtype == dtype
        same(got, want, dtype)
        same(got, copy.double(), dtype)
    none = torch.tensor(IMPRESSIONS, device="cuda") == 0
    owner = torch.arange(len(none), device="cuda")
    if not case.dense:
        owner = owner.repeat_interleave(batch.kv_offsets.diff())
        asks = (batch.index == 7).repeat_interleave(batch.q_offsets.diff())
        assert not together[0][asks].any()  # of the request without keys
        assert not together[1][asks].any()
    for gradient in together[2:]:  # of requests that nobody asks
        assert not gradient[none[owner]].any()


def by_hand(case: Case, batch: Batch) -> tuple[bool, bool]:
    """Whether kernels scheduled by hand run forward, and backward."""
    offsets = request_offsets(batch.q_offsets, batch.index, len(IMPRESSIONS))
    where = (offsets, None if case.dense else batch.kv_offsets)
    bound = case.keys if case.bounded else -1
    signature = Call(batch.q, batch.k, batch.v, *where, case.act, 0.3, 0.5, False, -1, bound).signature()
    forward = launch._forward_plan(signature).constants
    backward = [plan.constants for plan in launch._backward_plans(signature) if plan is not None]
    return bool({"BUFFERS", "OVERLAP"} & set(forward)), any({"KEPT", "KEYS"} & set(constants) for constants in backward)


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("name", CASES)
def test_shared_keys(name: str, width: int) -> None:
    case = CASES[name]
    batch = make(case, width, torch.bfloat16)
    compare(case, batch)
    if runs_kernels_by_hand():
        passes = dict(case.by_hand).get(width, "")
        forward, backward = by_hand(case, batch)
        assert forward or passes not in ("forward", "both")
        assert backward or passes not in ("backward", "both")


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("name", ["gdpa, few keys", "gdpa, cross", "softmax, cross"])
def test_shared_keys_of_other_types(name: str, dtype: torch.dtype) -> None:
    batch = make(CASES[name], 128, dtype)
    compare(CASES[name], replace(batch, index=batch.index.int()))


@pytest.mark.parametrize("name", ["gdpa, few keys", "softmax, cross"])
def test_requests_without_any_impression(name: str) -> None:
    case = CASES[name]
    batch = make(case, 64, torch.bfloat16)
    nobody = replace(batch, q=batch.q[:0], q_offsets=batch.q_offsets[:1], index=batch.index[:0])
    out, dq, dk, dv = results(shared(case, nobody), nobody, torch.bfloat16)
    assert out.shape == dq.shape == (0, 4, 64)
    assert not dk.any()
    assert not dv.any()


@pytest.mark.parametrize("name", ["gdpa, few keys", "gdpa, cross", "softmax, one key head", "softmax, cross"])
def test_shared_keys_never_wait_and_give_the_same_bits_in_a_graph(name: str) -> None:
    case = CASES[name]
    batch = make(case, 128, torch.bfloat16)
    op, grad = shared(case, batch), torch.ones_like(batch.q)

    def step() -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in (batch.q, batch.k, batch.v)]
        out = op(*leaves)
        return [out, *torch.autograd.grad(out, leaves, grad)]

    step()
    check_graph(step, without_waiting(step))
