"""Which calls the backward kernel for few keys gets on an H200, and with what it is started."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from kernels.common import launch, launcher, tuning
from kernels.common.backward_few import backward_few
from kernels.common.launch import Call
from kernels.jagged import offsets_from_lengths

LENGTHS, KEYS = [3, 0, 170, 1, 230], [5, 64, 0, 1, 33]

Started = list[tuple[launcher.Variant, int, tuple[Tensor | None, ...], tuple[float, ...]]]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    found: Started = []

    def start(variant: launcher.Variant, programs: int, tensors: Any, numbers: Any) -> None:
        found.append((variant, programs, tensors, numbers))

    monkeypatch.setattr(tuning, "row_names", lambda device: ("NVIDIA H200",))
    monkeypatch.setattr(launch, "_backward_plans", launch._backward_plans.__wrapped__)
    monkeypatch.setattr(launcher.Variant, "start", start)
    return found


def rows(count: int, heads: int = 2, width: int = 128, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(count, heads, width, dtype=dtype)


def packed(width: int = 128, heads: int = 2, bound: int = 64, **options: Any) -> Call:
    """Queries and keys of five sequences, one after another, two key heads."""
    dtype, act, window = options.get("dtype", torch.bfloat16), options.get("act", "gelu"), options.get("window", -1)
    q, k, v = rows(sum(LENGTHS), heads, width, dtype), *(rows(sum(KEYS), 2, width, dtype) for _ in "kv")
    where = [offsets_from_lengths(torch.tensor(x)) for x in (LENGTHS, KEYS)]
    return Call(q, k, v, *where, act, 0.3, 0.5, False, window, bound)


@pytest.mark.parametrize(("width", "bound", "heads"), [(128, 64, 2), (128, 100, 6), (64, 7, 2), (128, 200, 4)])
def test_packed_keys(started: Started, width: int, bound: int, heads: int) -> None:
    call = packed(width, heads, bound)
    grad = torch.zeros_like(call.q)
    dq, dk, dv = launch.backward(call, grad, None, None)
    ((variant, programs, tensors, numbers),) = started
    keys = 64 if bound <= 64 else 128
    assert variant._kernel is backward_few
    assert set(variant.constants) == {p.name for p in backward_few.params if p.is_constexpr}
    assert (variant.constants["KEYS"], variant.constants["GROUP"]) == (keys, heads // 2)
    assert variant.constants["SEVERAL"] == (bound > 128)
    assert variant._options == {"num_warps": keys // 16, **({"maxnreg": 168} if width == 64 else {})}
    assert programs == 5 * 2
    part = tensors[5]
    assert (part is not None) == (bound > 128)
    if part is not None:
        tiles = sum(LENGTHS) // 64 + 5
        assert (part.numel(), part.dtype) == (tiles * heads * 64 * width, torch.bfloat16)
    wanted = (call.q, call.k, call.v, grad, dq, part, dk, dv, call.q_offsets, call.kv_offsets)
    assert all(a is b for a, b in zip(tensors, wanted, strict=True))
    assert numbers == (5, sum(LENGTHS), bound, -1, 0.3, 0.5)
    assert len(tensors) + len(numbers) + len(variant.constants) == len(backward_few.params)


def test_dense_keys_and_learned_queries(started: Started) -> None:
    keys = torch.zeros(5, 33, 2, 128, dtype=torch.bfloat16)
    offsets = offsets_from_lengths(torch.tensor(LENGTHS))
    launch.backward(
        Call(rows(sum(LENGTHS)), keys, keys, offsets, None, "silu", 1.0, 1.0, False, -1, -1),
        rows(sum(LENGTHS)), None, None,
    )  # fmt: skip
    learned = Call(rows(20), keys, keys, None, None, "silu", 1.0, 1.0, False, -1, -1)
    dq, _, _ = launch.backward(learned, rows(100), None, None)
    assert dq.shape == (20, 2, 128)
    assert dq.dtype == torch.bfloat16
    (dense, programs, _, _), (broadcast, _, tensors, numbers) = started
    assert dense._kernel is broadcast._kernel is backward_few
    assert programs == 5 * 2
    assert (dense.constants["DENSE"], dense.constants["BROADCAST"]) == (True, False)
    assert (broadcast.constants["DENSE"], broadcast.constants["BROADCAST"]) == (True, True)
    assert numbers[:3] == (5, 20, 33)
    each = tensors[4]
    assert each is not None and each.shape == (100, 2, 128) and each.dtype == torch.float32, "summed over sequences"


def test_the_part_of_a_gradient_is_of_its_type_but_for_fp16(started: Started) -> None:
    keys = torch.zeros(5, 129, 2, 128, dtype=torch.bfloat16)
    learned = Call(rows(70), keys, keys, None, None, "silu", 1.0, 1.0, False, -1, -1)
    launch.backward(learned, rows(350), None, None)
    half = packed(bound=256, dtype=torch.float16)
    launch.backward(half, torch.zeros_like(half.q), None, None, {"BLOCK_Q": 64, "KEYS": 128, "num_warps": 8})
    for (_, _, tensors, _), tiles in zip(started, (350 // 64 + 5, sum(LENGTHS) // 64 + 5), strict=True):
        part = tensors[5]
        assert part is not None and (part.numel(), part.dtype) == (tiles * 2 * 64 * 128, torch.float32)


@pytest.mark.parametrize(("learned", "few"), [(65, True), (64, False), (3, False)])
def test_keys_in_two_blocks_want_enough_queries(started: Started, learned: int, few: bool) -> None:
    """What is kept between the blocks takes whole tiles: 64 times the room of the gradient for a query a sequence."""
    keys = torch.zeros(5, 129, 2, 128, dtype=torch.bfloat16)
    call = Call(rows(learned), keys, keys, None, None, "silu", 1.0, 1.0, False, -1, -1)
    launch.backward(call, rows(5 * learned), None, None)
    assert [variant._kernel is backward_few for variant, *_ in started] == [few]


def test_a_gradient_at_an_odd_address_is_copied(started: Started) -> None:
    call = packed()
    odd = torch.zeros(call.q.numel() + 1, dtype=torch.bfloat16)[1:].view(call.q.shape)
    launch.backward(call, odd, None, None)
    ((_, _, tensors, _),) = started
    assert tensors[3] is not None and tensors[3].data_ptr() % 16 == 0


@pytest.mark.parametrize(
    "options",
    [
        {"window": 20}, {"dtype": torch.float32}, {"width": 96}, {"width": 33}, {"bound": 300}, {"bound": -1},
        {"act": "softmax"},
    ],
)  # fmt: skip
def test_other_calls_run_in_plain_kernels(started: Started, options: dict[str, Any]) -> None:
    call = packed(**options)
    softmax = call.act == "softmax"
    lse = torch.zeros(call.q.shape[:2]) if softmax else None
    launch.backward(call, torch.zeros_like(call.q), call.q if softmax else None, lse)
    assert all(variant._kernel is not backward_few for variant, *_ in started)


@pytest.mark.parametrize("kind", ["address", "stride"])
def test_rows_that_are_not_copied_16_bytes_at_a_time(started: Started, kind: str) -> None:
    count = sum(LENGTHS)
    if kind == "address":
        q = torch.zeros(count * 2 * 128 + 1, dtype=torch.bfloat16)[1:].view(count, 2, 128)
    else:
        q = torch.zeros(count, 2 * 128 + 4, dtype=torch.bfloat16)[:, :256].view(count, 2, 128)
    call = packed()
    call = Call(q, call.k, call.v, call.q_offsets, call.kv_offsets, "gelu", 0.3, 0.5, False, -1, 64)
    launch.backward(call, rows(count), None, None)
    ((variant, *_),) = started
    assert variant.constants["PASSES"] == 1
    assert not variant.constants["TMA"]
