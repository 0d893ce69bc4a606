"""Block attention against a loop over blocks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.block_attention import BLOCK, block_attention, op
from kernels.jagged import offsets_from_lengths

LENGTHS = [3, 0, 64, 130, 1, 65]


def make(
    lengths: list[int], heads: int, key_heads: int, width: int, columns: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    generator = torch.Generator().manual_seed(0)
    offsets = offsets_from_lengths(torch.tensor(lengths, dtype=torch.int64))
    rows = int(offsets[-1])
    q, k, v = (
        torch.randn(rows, h, width, generator=generator, dtype=torch.float64) for h in (heads, key_heads, key_heads)
    )
    if not columns:
        return q, k, v, offsets, None, None
    positions = torch.rand(rows, columns, generator=generator) * 100
    return q, k, v, offsets, positions, torch.rand(width // 2, generator=generator)


def turned(x: Tensor, angle: Tensor) -> Tensor:
    """Pairs of one head as complex numbers."""
    half = x.shape[1] // 2
    pairs = torch.complex(x[:, :half], x[:, half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([pairs.real, pairs.imag], dim=1)


def attend(
    q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, positions: Tensor | None, frequencies: Tensor | None, scale: float
) -> Tensor:
    """The definition, block by block and head by head."""
    parts = []
    for begin, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        for low in range(begin, end, BLOCK):
            rows = slice(low, min(low + BLOCK, end))
            heads = []
            for h in range(q.shape[1]):
                g = h * k.shape[1] // q.shape[1]
                a, b = q[rows, h], k[rows, g]
                if positions is not None and frequencies is not None:
                    each = q.shape[2] // 2 // positions.shape[1]
                    place = positions[rows].double().repeat_interleave(each, dim=1)
                    a, b = turned(a, place * frequencies.double()), turned(b, place * frequencies.double())
                heads.append(torch.softmax(a @ b.T * scale, dim=1) @ v[rows, g])
            parts.append(torch.stack(heads, dim=1))
    return torch.cat(parts)


@pytest.mark.parametrize("columns", [0, 1, 2])
@pytest.mark.parametrize("key_heads", [2, 1])
def test_equals_the_definition(columns: int, key_heads: int) -> None:
    q, k, v, offsets, positions, frequencies = make(LENGTHS, 2, key_heads, 4, columns)
    out = block_attention(q, k, v, offsets, scale=0.7, positions=positions, frequencies=frequencies)
    torch.testing.assert_close(out, attend(q, k, v, offsets, positions, frequencies, 0.7))
    fallback = block_attention(q, k, v, offsets)
    torch.testing.assert_close(fallback, attend(q, k, v, offsets, None, None, 0.5))


@pytest.mark.parametrize("columns", [0, 1, 2])
def test_gradients(columns: int) -> None:
    q, k, v, offsets, positions, frequencies = make([2, 0, 3], 2, 1, 4, columns)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return block_attention(q, k, v, offsets, positions=positions, frequencies=frequencies)

    assert torch.autograd.gradcheck(call, tuple(x.requires_grad_() for x in (q, k, v)))


def test_gradients_of_long_sequences() -> None:
    q, k, v, offsets, positions, frequencies = make(LENGTHS, 2, 1, 4, 2)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = block_attention(*leaves, offsets, positions=positions, frequencies=frequencies)
    want = attend(*leaves, offsets, positions, frequencies, 0.5)
    grad = torch.randn_like(out)
    for a, b in zip(torch.autograd.grad(out, leaves, grad), torch.autograd.grad(want, leaves, grad), strict=True):
        torch.testing.assert_close(a, b)


def test_only_differences_of_positions_matter() -> None:
    q, k, v, offsets, positions, frequencies = make(LENGTHS, 2, 2, 4, 1)
    assert positions is not None
    out = [block_attention(q, k, v, offsets, positions=p, frequencies=frequencies) for p in (positions, positions + 8)]
    torch.testing.assert_close(*out, rtol=1e-4, atol=1e-5)  # the sum of position and 8 is rounded in float32


FROM = {torch.float32: 2.0**23, torch.float64: 1.7e9, torch.int64: 2**62, torch.uint8: 0}


@pytest.mark.parametrize("columns", [1, 2])
@pytest.mark.parametrize("dtype", FROM)
def test_positions_may_count_from_anywhere(dtype: torch.dtype, columns: int) -> None:
    q, k, v, offsets, _, frequencies = make(LENGTHS, 2, 2, 4, columns)
    q, k, v = (x.float() for x in (q, k, v))
    near = torch.arange(q.shape[0] * columns).flip(0).view(-1, columns) % 251  # uint8 would go round between two
    leaves = [x.requires_grad_() for x in (q, k, v)]
    choice = {"offsets": offsets, "frequencies": frequencies}
    out = [block_attention(*leaves, positions=x, **choice) for x in (near.float(), near.to(dtype) + FROM[dtype])]
    assert torch.equal(*out)
    assert all(map(torch.equal, *(torch.autograd.grad(x.square().sum(), leaves) for x in out)))


def test_positions_that_float32_does_not_hold_are_shifted_for_the_kernels() -> None:
    *_, offsets, _, _ = make([3, 66], 1, 1, 4)
    places = torch.arange(69)
    want = torch.cat([torch.arange(3), torch.arange(64), torch.arange(2)]).float()
    for positions in (places.double() + 1.7e9, places + 2**62):
        assert torch.equal(op._from_block_start(positions, offsets), want)
    for positions in (places.float(), places.bfloat16(), None):
        assert op._from_block_start(positions, offsets) is positions  # the kernels do it


@pytest.mark.parametrize("lengths", [[], [0, 0]])
def test_positions_of_empty_batches(lengths: list[int]) -> None:
    q, k, v, offsets, _, _ = make(lengths, 2, 2, 4)
    choice = {"positions": torch.zeros(0).double(), "frequencies": torch.ones(2)}
    assert block_attention(q, k, v, offsets, **choice).shape == q.shape


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [0, 2])
def test_operator_passes_opcheck(dtype: torch.dtype, columns: int) -> None:
    q, k, v, offsets, positions, frequencies = make([3, 0, 66], 2, 1, 4, columns)
    q, k, v = (x.to(dtype).requires_grad_() for x in (q, k, v))
    torch.library.opcheck(torch.ops.opengem.block_attention.default, (q, k, v, offsets, positions, frequencies, 0.5))


def test_low_precision_is_computed_in_float32_also_under_autocast() -> None:
    q, k, v, offsets, positions, frequencies = make(LENGTHS, 2, 2, 8, 1)
    q, k, v = (x.bfloat16() for x in (q, k, v))
    choice = {"positions": positions, "frequencies": frequencies}
    want = block_attention(q.float(), k.float(), v.float(), offsets, **choice).bfloat16()
    with torch.autocast("cpu", dtype=torch.float16):
        assert torch.equal(block_attention(q, k, v, offsets, **choice), want)


def test_empty_batches() -> None:
    for lengths in ([], [0, 0]):
        q, k, v, offsets, *_ = make(lengths, 2, 2, 4)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = block_attention(*leaves, offsets)
        assert out.shape == (0, 2, 4)
        assert all(g.shape == (0, 2, 4) for g in torch.autograd.grad(out.sum(), leaves))


def test_one_block_never_touches_another() -> None:
    q, k, v, offsets, *_ = make(LENGTHS, 2, 2, 4)
    clean = block_attention(q, k, v, offsets)
    begin = int(offsets[3]) + BLOCK
    q[begin : begin + BLOCK], k[begin : begin + BLOCK] = torch.nan, torch.inf
    dirty = block_attention(q, k, v, offsets)
    assert torch.equal(clean[:begin], dirty[:begin])
    assert torch.equal(clean[begin + BLOCK :], dirty[begin + BLOCK :])


def test_wrong_arguments_are_refused() -> None:
    q, k, v, offsets, positions, frequencies = make([3], 2, 2, 4, 1)
    assert positions is not None
    with pytest.raises(ValueError, match="do not go together"):
        block_attention(q[:, :1], k, v, offsets)
    with pytest.raises(ValueError, match="go together"):
        block_attention(q, k, v, offsets, positions=positions)
    with pytest.raises(ValueError, match="positions"):
        block_attention(q, k, v, offsets, positions=positions[:2], frequencies=frequencies)
    with pytest.raises(ValueError, match=r"d must be a multiple of 4 with 2 column\(s\) of positions"):
        block_attention(
            *(x[..., :2] for x in (q, k, v)), offsets, positions=positions.expand(-1, 2), frequencies=frequencies
        )
    for name in ("positions", "frequencies"):
        learned = {"positions": positions, "frequencies": frequencies}
        learned[name] = torch.nn.Parameter(learned[name])
        with pytest.raises(ValueError, match=f"block_attention: {name} would get no gradient"):
            block_attention(q, k, v, offsets, **learned)
        with torch.no_grad():
            block_attention(q, k, v, offsets, **learned)
    with pytest.raises(ValueError, match="one per pair"):
        block_attention(q, k, v, offsets, positions=positions, frequencies=torch.ones(3))
