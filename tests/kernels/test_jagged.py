"""Jagged data movement against loops over sequences."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from kernels import jagged

LENGTHS = st.lists(st.integers(0, 5), max_size=6)


def packed(lengths: list[int], *dims: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    offsets = jagged.offsets_from_lengths(torch.tensor(lengths, dtype=torch.int64))
    return torch.randn(int(offsets[-1]), *dims, generator=generator, dtype=torch.float64), offsets


def sequences(values: Tensor, offsets: Tensor) -> list[Tensor]:
    return [values[offsets[b] : offsets[b + 1]] for b in range(offsets.numel() - 1)]


@settings(deadline=None)
@given(LENGTHS)
def test_lengths_and_offsets_are_inverse(lengths: list[int]) -> None:
    offsets = jagged.offsets_from_lengths(torch.tensor(lengths, dtype=torch.int32))
    assert offsets.dtype == torch.int64
    assert offsets[0] == 0
    assert jagged.lengths_from_offsets(offsets).tolist() == lengths
    owner = jagged.sequence_ids(offsets, sum(lengths))
    assert owner.tolist() == [b for b, n in enumerate(lengths) for _ in range(n)]


@settings(deadline=None)
@given(LENGTHS, st.integers(0, 7), st.sampled_from([(), (2,), (2, 3)]))
def test_to_padded(lengths: list[int], width: int, dims: tuple[int, ...]) -> None:
    values, offsets = packed(lengths, *dims)
    padded = jagged.to_padded(values, offsets, width, padding=-7.0)
    assert padded.shape == (len(lengths), width, *dims)
    for row, sequence in zip(padded, sequences(values, offsets), strict=True):
        kept = min(width, sequence.shape[0])
        assert torch.equal(row[:kept], sequence[:kept])
        assert (row[kept:] == -7.0).all()


@settings(deadline=None)
@given(LENGTHS, st.integers(0, 3))
def test_padding_is_undone(lengths: list[int], extra: int) -> None:
    values, offsets = packed(lengths, 2)
    padded = jagged.to_padded(values, offsets, max(lengths, default=0) + extra)
    assert torch.equal(jagged.from_padded(padded, offsets, values.shape[0]), values)


def test_from_padded_gives_zero_beyond_the_padded_length() -> None:
    offsets = torch.tensor([0, 3, 4])
    out = jagged.from_padded(torch.ones(2, 2, 1), offsets, 4)
    assert out.flatten().tolist() == [1, 1, 0, 1]


@settings(deadline=None)
@given(LENGTHS)
def test_segment_sum_and_mean(lengths: list[int]) -> None:
    values, offsets = packed(lengths, 3)
    total, mean = jagged.segment_sum(values, offsets), jagged.segment_mean(values, offsets)
    assert total.shape == mean.shape == (len(lengths), 3)
    for b, sequence in enumerate(sequences(values, offsets)):
        torch.testing.assert_close(total[b], sequence.sum(0))
        torch.testing.assert_close(mean[b], sequence.mean(0) if len(sequence) else torch.zeros(3).double())


@settings(deadline=None)
@given(LENGTHS, st.data())
def test_gather_sequences(lengths: list[int], data: st.DataObject) -> None:
    values, offsets = packed(lengths, 2)
    choice = st.lists(st.integers(0, len(lengths) - 1), max_size=8) if lengths else st.just([])
    index = torch.tensor(data.draw(choice), dtype=torch.int64)
    out, new_offsets = jagged.gather_sequences(values, offsets, index)
    before, after = sequences(values, offsets), sequences(out, new_offsets)
    assert len(after) == len(index)
    for i, sequence in zip(index.tolist(), after, strict=True):
        assert torch.equal(sequence, before[i])


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=6))
def test_concat(lengths: list[tuple[int, int]]) -> None:
    a, a_offsets = packed([n for n, _ in lengths], 2, seed=1)
    b, b_offsets = packed([n for _, n in lengths], 2, seed=2)
    out, offsets = jagged.concat(a, a_offsets, b, b_offsets)
    parts = zip(sequences(a, a_offsets), sequences(b, b_offsets), sequences(out, offsets), strict=True)
    for x, y, joined in parts:
        assert torch.equal(joined, torch.cat([x, y]))


@settings(deadline=None)
@given(LENGTHS, st.integers(0, 4))
def test_last_k(lengths: list[int], k: int) -> None:
    values, offsets = packed(lengths, 2)
    rows, real = jagged.last_k(values, offsets, k)
    assert rows.shape == (len(lengths), k, 2)
    for b, sequence in enumerate(sequences(values, offsets)):
        kept = min(k, len(sequence))
        assert real[b].tolist() == [False] * (k - kept) + [True] * kept
        assert torch.equal(rows[b, k - kept :], sequence[len(sequence) - kept :])
        assert not rows[b, : k - kept].any()


@settings(deadline=None)
@given(LENGTHS)
def test_broadcast_add(lengths: list[int]) -> None:
    values, offsets = packed(lengths, 2)
    dense = torch.randn(len(lengths), 2, dtype=torch.float64)
    out = sequences(jagged.broadcast_add(values, offsets, dense), offsets)
    for b, sequence in enumerate(sequences(values, offsets)):
        assert torch.equal(out[b], sequence + dense[b])


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=6))
def test_split_undoes_concat(lengths: list[tuple[int, int]]) -> None:
    a, a_offsets = packed([n for n, _ in lengths], 2, seed=1)
    b, b_offsets = packed([n for _, n in lengths], 2, seed=2)
    joined, _ = jagged.concat(a, a_offsets, b, b_offsets)
    for got, want in zip(jagged.split(joined, a_offsets, b_offsets, a.shape[0]), (a, b), strict=True):
        assert torch.equal(got, want)


def test_embeddings_of_time_and_position() -> None:
    values, tables = torch.randn(7, 3), torch.randn(10, 3)
    time, position = torch.randint(4, (7,)), torch.randint(6, (7,))
    index = torch.stack([time, 4 + position], dim=1)
    out = jagged.embedding_add(values, tables, index)
    assert torch.equal(out, jagged.embedding_add(values, tables, index, sizes=(4, 6)))
    with pytest.raises(ValueError, match="must sum to the 10 rows"):
        jagged.embedding_add(values, tables, index, sizes=(4, 5))
    with pytest.raises(ValueError, match="must not be negative"):
        jagged.embedding_add(values, tables, index, sizes=(-1, 11))
    for other in ((values, tables[:, :1], index), (values, tables, index[:1]), (values[:1], tables, index)):
        with pytest.raises(ValueError, match="do not go together"):  # a kernel would read beyond their ends
            jagged.embedding_add(*other)
    with pytest.raises(ValueError, match=r"values is torch.int64"):
        jagged.embedding_add(values.long(), tables, index)
    torch.testing.assert_close(out, values + tables[:4][time] + tables[4:][position])


def test_rows_taken_twice_sum_their_gradients() -> None:
    values = torch.ones(3, 2, requires_grad=True)
    jagged.gather_rows(values, torch.tensor([2, 0, 2])).sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [[1, 1], [0, 0], [2, 2]]


OFFSETS = torch.tensor([0, 2, 2, 5, 6])
DIFFERENTIABLE: dict[str, Callable[[Tensor], Tensor]] = {
    "to_padded": lambda x: jagged.to_padded(x, OFFSETS, 3),
    "to_padded, cut": lambda x: jagged.to_padded(x, OFFSETS, 2),
    "from_padded": lambda x: jagged.from_padded(x.view(2, 3, 2), torch.tensor([0, 1, 4]), 4),
    "from_padded, short": lambda x: jagged.from_padded(x.view(3, 2, 2), torch.tensor([0, 1, 4, 4]), 4),
    "gather_rows": lambda x: jagged.gather_rows(x, torch.tensor([5, 0, 5, 3])),
    "scatter_sum": lambda x: jagged.scatter_sum(x, torch.tensor([1, 0, 1, 3, 3, 3]), 5),
    "segment_sum": lambda x: jagged.segment_sum(x, OFFSETS),
    "segment_mean": lambda x: jagged.segment_mean(x, OFFSETS),
    "gather_sequences": lambda x: jagged.gather_sequences(x, OFFSETS, torch.tensor([2, 1, 2, 0]))[0],
    "concat": lambda x: jagged.concat(x, OFFSETS, x * 2, OFFSETS)[0],
    "last_k": lambda x: jagged.last_k(x, OFFSETS, 2)[0],
    "broadcast_add": lambda x: jagged.broadcast_add(x, OFFSETS, x[:4] * 3),
    "gather_rows, rising": lambda x: jagged.gather_rows(x, torch.tensor([0, 0, 3, 5]), rising=True),
    "gather_rows, sums": lambda x: jagged.gather_rows(x, torch.tensor([[5, 0], [5, 5], [1, 2]])),
    "scatter_sum, several": lambda x: jagged.scatter_sum(x[:3], torch.tensor([[1, 0], [1, 1], [3, 2]]), 5),
    "embedding_add": lambda x: jagged.embedding_add(x[:3], x, torch.tensor([[5, 0], [5, 5], [1, 2]])),
    "embedding_add, two tables": lambda x: jagged.embedding_add(
        x[:3], x, torch.tensor([[1, 2], [0, 5], [1, 3]]), sizes=(2, 4)
    ),
    "split": lambda x: torch.cat(jagged.split(x, torch.tensor([0, 1, 3]), torch.tensor([0, 2, 3]), 3)[::-1]),
    "gather_sequences, rising": lambda x: jagged.gather_sequences(
        x, OFFSETS, torch.tensor([0, 2, 2]), total=8, rising=True
    )[0],
}


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradients_twice(name: str) -> None:
    x = torch.randn(6, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(DIFFERENTIABLE[name], (x,))
    assert torch.autograd.gradgradcheck(DIFFERENTIABLE[name], (x,))


def test_an_empty_batch_keeps_the_graph() -> None:
    x = torch.zeros(0, 2, requires_grad=True)
    offsets = torch.tensor([0])
    out = [
        jagged.to_padded(x, offsets, 3),
        jagged.segment_mean(x, offsets),
        jagged.last_k(x, offsets, 2)[0],
        jagged.gather_sequences(x, offsets, torch.zeros(0, dtype=torch.int64))[0],
        jagged.concat(x, offsets, x, offsets)[0],
    ]
    sum(o.sum() for o in out).backward()
    assert x.grad is not None
    assert x.grad.shape == (0, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_operators_pass_opcheck(dtype: torch.dtype) -> None:
    x = torch.randn(6, 2, dtype=dtype, requires_grad=True)
    padded = torch.randn(4, 3, 2, dtype=dtype, requires_grad=True)
    few = torch.randn(4, 2, dtype=dtype, requires_grad=True)
    index = torch.tensor([1, 0, 1, 3, 3, 3])
    torch.library.opcheck(torch.ops.opengem.to_padded.default, (x, OFFSETS, 3, 0.5, False))
    torch.library.opcheck(torch.ops.opengem.last_k.default, (x, OFFSETS, 2))
    torch.library.opcheck(torch.ops.opengem.from_padded.default, (padded, OFFSETS, 6, True))
    torch.library.opcheck(torch.ops.opengem.gather_rows.default, (x, index, False))
    torch.library.opcheck(torch.ops.opengem.scatter_sum.default, (x, index, 4, False))
    torch.library.opcheck(torch.ops.opengem.embedding_add.default, (x, few, index, ()))
    torch.library.opcheck(torch.ops.opengem.table_sum.default, (x, index[:, None], (4,)))
    torch.library.opcheck(torch.ops.opengem.segment_sum.default, (x, OFFSETS, True))
    torch.library.opcheck(torch.ops.opengem.spread.default, (few, OFFSETS, 6, True))
    torch.library.opcheck(torch.ops.opengem.broadcast_add.default, (x, OFFSETS, few))
    torch.library.opcheck(torch.ops.opengem.concat.default, (x, few, OFFSETS, OFFSETS + torch.arange(5)))
    torch.library.opcheck(torch.ops.opengem.split.default, (x, torch.tensor([0, 1, 3]), torch.tensor([0, 3, 6]), 3))
    choice, new_offsets = torch.tensor([0, 0]), torch.tensor([0, 2, 4])
    torch.library.opcheck(torch.ops.opengem.gathered_offsets.default, (OFFSETS, choice))
    torch.library.opcheck(torch.ops.opengem.gather_sequences.default, (x, OFFSETS, choice, new_offsets, 4, True))
    torch.library.opcheck(torch.ops.opengem.sum_sequences.default, (few, OFFSETS, choice, new_offsets, 6, True))


def test_integer_rows_can_be_moved() -> None:
    values = torch.arange(6)
    assert jagged.to_padded(values, OFFSETS, 2, padding=-1)[1].tolist() == [-1, -1]
    assert jagged.gather_rows(values, torch.tensor([3])).tolist() == [3]


def test_means_of_many_half_rows_are_finite() -> None:
    values = torch.ones(70_000, 1, dtype=torch.float16, requires_grad=True)
    mean = jagged.segment_mean(values, torch.tensor([0, 70_000]))
    (mean * 1024).sum().backward()
    assert mean.item() == 1
    assert values.grad is not None and bool((values.grad == torch.tensor(1024 / 70_000).half()).all())


def test_sums_of_choices_keep_their_dtype() -> None:
    for dtype in (torch.int32, torch.bfloat16):
        assert jagged.gather_rows(torch.ones(3, 2, dtype=dtype), torch.tensor([[0, 2]])).dtype == dtype


ONE = torch.tensor([0, 1000])
ZEROS = torch.zeros(1000, dtype=torch.int32)
SUMS: dict[str, Callable[[Tensor], Tensor]] = {
    "segment_sum": lambda x: jagged.segment_sum(x, ONE),
    "scatter_sum": lambda x: jagged.scatter_sum(x, ZEROS, 1),
    "scatter_sum, choices": lambda x: jagged.scatter_sum(x[:500], ZEROS.view(500, 2), 1),
    "gather_rows, choices": lambda x: jagged.gather_rows(x, torch.arange(1000)[None]),
    "embedding_add": lambda x: jagged.embedding_add(x[:1] * 0, x, torch.arange(1000)[None]),
}
SUMMED_BACK: dict[str, Callable[[Tensor], Tensor]] = {
    "gather_rows": lambda x: jagged.gather_rows(x, ZEROS, rising=True),
    "broadcast_add": lambda x: jagged.broadcast_add(torch.zeros(1000, *x.shape[1:], dtype=x.dtype), ONE, x),
    "gather_sequences": lambda x: jagged.gather_sequences(x, ONE[:2] // 1000, ZEROS)[0],
    "embedding_add": lambda x: jagged.embedding_add(torch.zeros(1000, *x.shape[1:], dtype=x.dtype), x, ZEROS),
    "embedding_add, sizes": lambda x: jagged.embedding_add(
        torch.zeros(1000, *x.shape[1:], dtype=x.dtype), x, ZEROS[:, None], sizes=(1,)
    ),
    "scatter_sum": lambda x: jagged.scatter_sum(x.expand(1000, *x.shape[1:]), torch.arange(1000), 1000),
}


@pytest.mark.parametrize("dims", [(), (3,)])
@pytest.mark.parametrize("name", SUMS)
def test_sums_of_16_bits_are_made_in_float32(name: str, dims: tuple[int, ...]) -> None:
    assert (SUMS[name](torch.ones(1000, *dims).bfloat16()) == 1000).all()  # bfloat16 would stop at 256
    assert (SUMS[name](torch.full((1000, *dims), 4.0).half()) == 4000).all()


@pytest.mark.parametrize("dims", [(), (3,)])
@pytest.mark.parametrize("name", SUMMED_BACK)
def test_gradients_of_16_bits_are_summed_in_float32(name: str, dims: tuple[int, ...]) -> None:
    x = torch.ones(1, *dims, dtype=torch.bfloat16, requires_grad=True)
    out = SUMMED_BACK[name](x)
    (grad,) = torch.autograd.grad(out, x, torch.ones_like(out))
    assert (grad == 1000).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.int32])
def test_padding_is_exact(dtype: torch.dtype) -> None:
    padding = 0.1 if dtype.is_floating_point else 16_777_217
    assert jagged.to_padded(torch.ones(6, dtype=dtype), OFFSETS, 1, padding)[1].item() == padding


@pytest.mark.parametrize(("dtype", "padding"), [(torch.float64, 0.1), (torch.int64, 16_777_217)])
def test_the_kernels_get_no_padding_that_float32_rounds(
    dtype: torch.dtype, padding: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = torch.ones(6, dtype=dtype)
    monkeypatch.setattr(jagged.padded_op, "BACKEND", SimpleNamespace(of=lambda _: SimpleNamespace()))
    assert jagged.to_padded(values, OFFSETS, 1, padding)[1].item() == padding
    with pytest.raises(AttributeError):
        jagged.to_padded(values, OFFSETS, 1, 2)


@pytest.mark.parametrize(
    ("dtype", "padding"),
    [
        (torch.int64, 0.5),
        (torch.int8, 128),
        (torch.uint8, -1),
        (torch.bool, 2),
        (torch.int32, torch.inf),
        (torch.half, 1e5),
    ],
)
def test_a_padding_that_values_cannot_hold_is_refused(dtype: torch.dtype, padding: float) -> None:
    with pytest.raises(ValueError, match=r"to_padded: padding is .*, which does not fit into values of"):
        jagged.to_padded(torch.ones(6, dtype=dtype), OFFSETS, 3, padding)


def test_what_is_added_to_all_rows_keeps_its_meaning() -> None:
    for dense, values in ((torch.int64, torch.int8), (torch.complex64, torch.float32), (torch.float32, torch.int64)):
        with pytest.raises(ValueError, match=r"broadcast_add: dense is .*, which does not fit into"):
            jagged.broadcast_add(torch.ones(6, dtype=values), OFFSETS, torch.ones(4, dtype=dense))
    for dense, values in ((torch.int32, torch.int64), (torch.float64, torch.bfloat16), (torch.int64, torch.float32)):
        out = jagged.broadcast_add(torch.ones(6, dtype=values), OFFSETS, torch.ones(4, dtype=dense))
        assert out.dtype == values
        assert (out == 2).all()
