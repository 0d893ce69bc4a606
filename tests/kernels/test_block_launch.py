"""Which calls of block attention get the kernels whose programs stay, and with what they are started."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from kernels.block_attention import persistent
from kernels.block_attention import triton as block_triton
from kernels.common import launcher, memory_tuning
from kernels.jagged import offsets_from_lengths

Started = list[tuple[launcher.Launch, int, tuple[Tensor | None, ...], tuple[float, ...], tuple[int, ...]]]

LENGTHS = [3, 0, 70, 130]
TUNED = {"STAY": 2, "num_warps": 4, "plain": {"num_warps": 2}}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    found: Started = []
    monkeypatch.setattr(launcher.Launch, "start", lambda *arguments: found.append(arguments))
    monkeypatch.setattr(memory_tuning, "row_names", lambda device: ("NVIDIA H200",))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=3))
    return found


def run(
    config: dict[str, Any], width: int = 256, columns: int = 0, key_heads: int = 2, dtype: torch.dtype = torch.bfloat16,
    skip: int = 0,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Both passes on heads that begin at element ``skip`` of theirs; returns q, k, v, gradient and all results."""
    rows, turn = sum(LENGTHS), "_rotary" if columns else ""
    q, grad = torch.zeros(2, rows, 2, width + skip, dtype=dtype)[..., skip:]
    k, v = torch.zeros(2, rows, key_heads, width + skip, dtype=dtype)[..., skip:]
    rest: tuple[Any, ...] = (offsets_from_lengths(torch.tensor(LENGTHS)), None, None, 0.1)
    if columns:
        rest = (rest[0], torch.zeros(rows, columns), torch.zeros(width // 2), 0.1)
    with memory_tuning.forced(f"block_forward{turn}", config):
        out = block_triton.forward(q, k, v, *rest)
    with memory_tuning.forced(f"block_backward{turn}", {**config, "PLACES": 2}):
        return q, k, v, grad, out, *block_triton.backward(grad, q, k, v, *rest)


@pytest.mark.parametrize("columns", [0, 2])
@pytest.mark.parametrize("width", [128, 256])
def test_wide_heads(started: Started, width: int, columns: int) -> None:
    q, k, v, grad, out, dq, dk, dv = run(TUNED, width, columns)
    forward, backward = started
    blocks = sum(LENGTHS) // 64 + len(LENGTHS)
    for (launch, programs, tensors, numbers, strides), kernel, wanted in (
        (forward, persistent.forward_kernel, (q, k, v, out)),
        (backward, persistent.backward_kernel, (q, k, v, grad, dq, dk, dv)),
    ):
        assert launch._kernel is kernel
        assert programs == 2 * 3
        assert all(a is b for a, b in zip(tensors[: len(wanted)], wanted, strict=True))
        assert numbers == (len(LENGTHS), blocks, 0.1)
        constants = {p.name for p in kernel.params if p.is_constexpr}
        assert set(launch.constants) == {*constants, "num_warps"}
        assert (launch.constants["D"], launch.constants["COLUMNS"]) == (width, columns)
        assert len(tensors) + len(numbers) + len(strides) + len(constants) == len(kernel.params)


def test_no_more_programs_than_blocks(started: Started) -> None:
    run({**TUNED, "STAY": 50})
    assert [programs for _, programs, *_ in started] == [(sum(LENGTHS) // 64 + len(LENGTHS)) * 2] * 2


@pytest.mark.parametrize(
    "options",
    [{"width": 192}, {"width": 64}, {"dtype": torch.float32, "width": 128}, {"skip": 4}, {"width": 256, "skip": 8}],
)
def test_others_get_a_program_for_each_block(started: Started, options: dict[str, Any]) -> None:
    """Widths between, float32, and rows that 16 bytes or, in strides, 16 elements do not divide."""
    run(TUNED, **options)
    assert [launch._kernel for launch, *_ in started] == [block_triton.forward_kernel, block_triton.backward_kernel]
    assert all(launch.constants["num_warps"] == 2 for launch, *_ in started)


@pytest.mark.parametrize("odd", range(4))
def test_an_odd_address_of_any_tensor(started: Started, odd: int) -> None:
    rows = sum(LENGTHS)
    given = [torch.zeros(rows * 512 + 4, dtype=torch.bfloat16)[4 * (i == odd) :][: rows * 512] for i in range(4)]
    q, k, v, grad = (x.view(rows, 2, 256) for x in given)
    rest: tuple[Any, ...] = (offsets_from_lengths(torch.tensor(LENGTHS)), None, None, 0.1)
    with memory_tuning.forced("block_forward", TUNED):
        block_triton.forward(q, k, v, *rest)
    with memory_tuning.forced("block_backward", {**TUNED, "PLACES": 2}):
        block_triton.backward(grad, q, k, v, *rest)
    forward, backward = (launch._kernel for launch, *_ in started)
    assert forward is (persistent.forward_kernel if odd == 3 else block_triton.forward_kernel)
    assert backward is block_triton.backward_kernel


def test_heads_that_are_not_within_rows_are_copied(started: Started) -> None:
    """Their stride times a head would leave 32 bits long before the tensor's own elements do."""
    q, k, v = torch.zeros(3, 2, sum(LENGTHS), 256, dtype=torch.bfloat16).transpose(1, 2)
    with memory_tuning.forced("block_forward", TUNED):
        block_triton.forward(q, k, v, offsets_from_lengths(torch.tensor(LENGTHS)), None, None, 0.1)
    ((_, _, tensors, _, strides),) = started
    assert strides == (512, 256) * 3
    assert tensors[0] is not None and tensors[0].is_contiguous()


def test_shared_keys(started: Started) -> None:
    """Forward only: backward, a program adds up what query heads give to a key head."""
    run(TUNED, key_heads=1)
    assert [launch._kernel for launch, *_ in started] == [persistent.forward_kernel, block_triton.backward_kernel]
