"""Block attention, jagged movement, norms and interaction products on a GPU against the references in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from kernels import jagged
from kernels.block_attention import block_attention
from kernels.interaction import fm_block
from kernels.jagged import offsets_from_lengths
from kernels.jagged.sequences_op import sequence_rows
from kernels.norms import add_layer_norm, layer_norm, rms_norm
from kernels.token_mixing import mix_tokens, sum_kron
from tests.kernels.graphs import check_graph, without_waiting
from tests.kernels.unwritten import apart, unwritten_is_nan

pytestmark = pytest.mark.gpu

TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 6e-3}
"""Norm of the error over that of the result: float32 sums of some thousand terms, products as three of TF32, 2^-20 off;
two roundings to 2^-12 and 2^-9."""

LENGTHS = [3, 0, 700, 1, 129, 64, 0, 65, 2]


def random(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").mul_(0.5).to(dtype)


def offsets_of(lengths: Sequence[int]) -> Tensor:
    return offsets_from_lengths(torch.tensor(lengths)).cuda()


def compare(op: Callable[..., Tensor], inputs: Sequence[Tensor], dtype: torch.dtype) -> None:
    """Output and gradients of ``op`` on the GPU against float64, which the references compute on the GPU too."""
    results = []
    for precise in (False, True):
        leaves = [(x.double() if precise else x).detach().requires_grad_() for x in inputs]
        with unwritten_is_nan():
            out = op(*leaves)
            grad = random(*out.shape, dtype=dtype, seed=1).to(out.dtype)
            results.append((out, *torch.autograd.grad(out, leaves, grad)))
    for got, want in zip(*results, strict=True):
        assert got.isfinite().all()
        assert (got.double() - want).norm() / want.norm() < TOLERANCE[dtype]


def twice(op: Callable[..., Tensor], inputs: Sequence[Tensor]) -> None:
    """The same bits in two runs, without waiting for the device; and from a CUDA graph, and compiled in one piece."""

    def step() -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in inputs]
        out = op(*leaves)
        return [out, *torch.autograd.grad(out, leaves, torch.ones_like(out))]

    runs = [without_waiting(step) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    check_graph(step, runs[0])
    torch._dynamo.reset()  # it refuses to compile one function for the ninth kind of inputs
    with torch.no_grad():
        assert torch.equal(torch.compile(op, fullgraph=True, backend="aot_eager")(*inputs), runs[0][0])


@pytest.mark.parametrize("columns", [0, 1, 2])
@pytest.mark.parametrize(
    ("width", "key_heads", "dtype"),
    [
        (32, 4, torch.bfloat16), (64, 2, torch.float16), (96, 4, torch.bfloat16), (128, 4, torch.bfloat16),
        (128, 1, torch.bfloat16), (256, 4, torch.bfloat16), (256, 4, torch.float16), (256, 2, torch.bfloat16),
        (200, 4, torch.bfloat16), (44, 4, torch.bfloat16), (64, 4, torch.float32),
        (128, 2, torch.float32),
    ],
)  # fmt: skip
def test_block_attention(width: int, key_heads: int, columns: int, dtype: torch.dtype) -> None:
    offsets = offsets_of(LENGTHS)
    rows = int(offsets[-1])
    q = random(rows, 4, width, dtype=dtype)
    k, v = random(rows, 2, key_heads, width, dtype=dtype, seed=2).unbind(1)
    positions = torch.rand(rows, columns, device="cuda") * 30 if columns else None
    frequencies = torch.rand(width // 2, device="cuda") if columns else None

    def op(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return block_attention(q, k, v, offsets, positions=positions, frequencies=frequencies, scale=0.4)

    compare(op, (q, k, v), dtype)
    if width >= 128:
        twice(op, (q, k, v))


@pytest.mark.parametrize("lengths", [[64] * 500, [0] * 700 + [1, 0, 130] * 20, [5000], [2]])
def test_block_attention_of_programs_that_stay(lengths: list[int]) -> None:
    """Heads of 256: all blocks whole, many sequences without rows, one long one, less than a block."""
    q, k, v = random(sum(lengths), 3, 4, 256, dtype=torch.bfloat16).unbind(1)
    compare(lambda q, k, v: block_attention(q, k, v, offsets_of(lengths)), (q, k, v), torch.bfloat16)


def test_block_attention_beyond_two_billion_elements() -> None:
    offsets = offsets_of([300, *[1] * 1_048_400, 150])
    q = torch.empty(int(offsets[-1]), 8, 256, dtype=torch.bfloat16, device="cuda").normal_(std=0.5)
    assert q.numel() > 2**31
    leaf = q.requires_grad_()
    out = block_attention(leaf, leaf.detach(), leaf.detach(), offsets)
    (gradient,) = torch.autograd.grad(out, leaf, q.detach())
    last, end = q.detach()[-150:].double().requires_grad_(), torch.tensor([0, 150], device="cuda")
    want = block_attention(last, last.detach(), last.detach(), end)
    (want_gradient,) = torch.autograd.grad(want, last, last.detach())
    for got, exact in ((out[-150:], want), (gradient[-150:], want_gradient)):
        assert (got.double() - exact).norm() / exact.norm() < TOLERANCE[torch.bfloat16]


OTHER = [2, 5, 0, 64, 3, 700, 1, 0, 40]
INDEX = [0, 0, 2, 2, 2, 3, 8]
MOVEMENTS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "to_padded": lambda x, y, dense: jagged.to_padded(x, offsets_of(LENGTHS), 100, 2.0),
    "from_padded": lambda x, y, dense: jagged.from_padded(dense[:, None] + x[:70], offsets_of(LENGTHS), x.shape[0]),
    "last_k": lambda x, y, dense: jagged.last_k(x, offsets_of(LENGTHS), 5)[0],
    "concat": lambda x, y, dense: jagged.concat(x, offsets_of(LENGTHS), y, offsets_of(OTHER))[0],
    "split": lambda x, y, dense: torch.cat(
        jagged.split(torch.cat([x, y]), offsets_of(LENGTHS), offsets_of(OTHER), x.shape[0])[::-1]
    ),
    "broadcast_add": lambda x, y, dense: jagged.broadcast_add(x, offsets_of(LENGTHS), dense),
    "segment_sum": lambda x, y, dense: jagged.segment_sum(x, offsets_of(LENGTHS)),
    "segment_mean": lambda x, y, dense: jagged.segment_mean(y, offsets_of(OTHER)),
    "segment_mean, short": lambda x, y, dense: jagged.segment_mean(x, offsets_of([*[7, 0, 3] * 80, 164])),
    "gather_rows": lambda x, y, dense: jagged.gather_rows(x, torch.arange(2000, device="cuda") * 7 % 900),
    "gather_rows, rising": lambda x, y, dense: jagged.gather_rows(
        x, torch.arange(2000, device="cuda") // 700, rising=True
    ),
    "gather_sequences": lambda x, y, dense: jagged.gather_sequences(
        x, offsets_of(LENGTHS), torch.tensor(INDEX[::-1], device="cuda"), total=2 + 1 + 3 * 700 + 6
    )[0],
    "gather_sequences, rising": lambda x, y, dense: jagged.gather_sequences(
        x, offsets_of(LENGTHS), torch.tensor(INDEX, device="cuda"), total=2 + 1 + 3 * 700 + 6, rising=True
    )[0],
    "embedding_add": lambda x, y, dense: jagged.embedding_add(
        x, dense, torch.arange(2 * x.shape[0], device="cuda").view(-1, 2) % 9
    ),
    "embedding_add, two tables": lambda x, y, dense: jagged.embedding_add(
        x,
        dense,
        torch.arange(x.shape[0], device="cuda")[:, None] % torch.tensor([6, 3], device="cuda")
        + torch.tensor([0, 6], device="cuda"),
        sizes=(6, 3),
    ),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", MOVEMENTS)
def test_movement(name: str, dtype: torch.dtype) -> None:
    for width in (1, 48, 1100):
        inputs = (
            random(sum(LENGTHS), 2, width, dtype=dtype)[:, 0],
            random(sum(OTHER), width, dtype=dtype, seed=2),
            random(len(LENGTHS), width, dtype=dtype, seed=3),
        )
        needed = [i for i in range(3) if f"{'xyd'[i]}" in used(name)]
        call = MOVEMENTS[name]

        def op(*tensors: Tensor, call=call, needed=needed, inputs=inputs) -> Tensor:  # type: ignore[no-untyped-def]
            full = list(inputs)
            for place, tensor in zip(needed, tensors, strict=True):
                full[place] = tensor
            return call(*full)

        compare(op, [inputs[i] for i in needed], dtype)


@pytest.mark.parametrize("name", MOVEMENTS)
def test_movement_with_offsets_that_do_not_lie_side_by_side(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = random(sum(LENGTHS), 48), random(sum(OTHER), 48, seed=2), random(len(LENGTHS), 48, seed=3)

    def step() -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in inputs]
        out = MOVEMENTS[name](*leaves)
        gradients = torch.autograd.grad(out, leaves, torch.ones_like(out), materialize_grads=True)
        return [out, *gradients]

    want = step()
    monkeypatch.setitem(
        globals(), "offsets_of", lambda lengths: apart(offsets_from_lengths(torch.tensor(lengths)).cuda())
    )
    assert all(torch.equal(a, b) for a, b in zip(step(), want, strict=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_sums_without_a_kernel_are_the_same_in_every_run(dtype: torch.dtype) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(300_000, 3, generator=generator, device="cuda", dtype=dtype)
    index = torch.randint(5, (300_000,), generator=generator, device="cuda")
    runs = [without_waiting(lambda: jagged.scatter_sum(x, index, 5)) for _ in range(5)]
    assert all(torch.equal(run, runs[0]) for run in runs)
    want = torch.stack([x[index == i].sum(0) for i in range(5)])
    assert (runs[0] - want).norm() / want.norm() < (1e-12 if dtype == torch.float64 else 1e-5)


def used(name: str) -> str:
    """Which of x, y and dense an entry of ``MOVEMENTS`` reads."""
    two = {"concat": "xy", "split": "xy", "segment_mean": "y"}
    return two.get(name, "xd" if name.startswith(("from_padded", "broadcast_add", "embedding_add")) else "x")


def moves(device: str) -> dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]]:
    """Movements with what they take; offsets and indexes lie on the device already, as a CUDA graph wants them."""
    offsets, other = (offsets_from_lengths(torch.tensor(lengths)).to(device) for lengths in (LENGTHS, OTHER))
    rows, batch, requests = sum(LENGTHS), len(LENGTHS), torch.tensor(INDEX)
    total = int(torch.tensor(LENGTHS)[requests].sum())
    requests, many = requests.to(device), torch.arange(2000, device=device)
    x, y, dense, padded = (
        torch.randn(*shape, 48, device=device).bfloat16() for shape in ((rows,), (sum(OTHER),), (batch,), (batch, 70))
    )
    return {
        "to_padded": (lambda x: jagged.to_padded(x, offsets, 100, 2.0), (x,)),
        "from_padded": (lambda padded: jagged.from_padded(padded, offsets, rows), (padded,)),
        "last_k": (lambda x: jagged.last_k(x, offsets, 5)[0], (x,)),
        "last_k, mask": (lambda x: x[: 5 * batch] * jagged.last_k(x, offsets, 5)[1].view(-1, 1), (x,)),
        "concat": (lambda x, y: jagged.concat(x, offsets, y, other)[0], (x, y)),
        "split": (lambda z: torch.cat(jagged.split(z, offsets, other, rows)[::-1]), (torch.cat([x, y]),)),
        "broadcast_add": (lambda x, dense: jagged.broadcast_add(x, offsets, dense), (x, dense)),
        "segment_sum": (lambda x: jagged.segment_sum(x, offsets), (x,)),
        "gather_rows": (lambda x: jagged.gather_rows(x, many * 7 % 900), (x,)),
        "gather_rows, rising": (lambda x: jagged.gather_rows(x, many // 700, rising=True), (x,)),
        "scatter_sum": (lambda x: jagged.scatter_sum(x, many[:rows] * 7 % 90, 90), (x,)),
        "gather_sequences": (lambda x: jagged.gather_sequences(x, offsets, requests.flip(0), total=total)[0], (x,)),
        "gather_sequences, rising": (
            lambda x: jagged.gather_sequences(x, offsets, requests, total=total, rising=True)[0],
            (x,),
        ),
        "embedding_add": (lambda x, table: jagged.embedding_add(x, table, many[:rows] * 7 % batch), (x, dense)),
    }


@pytest.mark.parametrize("count", [1, 1025, 4096, 4097, 70_000])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_offsets_of_gathered_sequences(dtype: torch.dtype, count: int) -> None:
    offsets = offsets_of(list(range(300)))
    index = torch.randint(300, (count,), dtype=dtype, device="cuda")
    lengths = offsets.diff().index_select(0, index)
    values = torch.arange(int(offsets[-1]), device="cuda")
    rows, new_offsets = jagged.gather_sequences(values, offsets, index)
    assert torch.equal(new_offsets, offsets_from_lengths(lengths))
    assert torch.equal(rows, sequence_rows(offsets, index)[0])


def test_which_rows_are_real_among_the_last() -> None:
    offsets = offsets_of(LENGTHS)
    for width, k in ((48, 5), (3000, 70), (0, 4), (1, 0)):
        rows, real = jagged.last_k(torch.ones(sum(LENGTHS), width, device="cuda"), offsets, k)
        want = torch.arange(k, 0, -1, device="cuda") <= offsets.diff()[:, None]
        assert torch.equal(real, want)
        assert torch.equal(rows, want[:, :, None].expand_as(rows).float())


@pytest.mark.parametrize("name", moves("meta"))
def test_every_movement_is_captured_with_its_gradients(name: str) -> None:
    twice(*moves("cuda")[name])


def test_movement_is_the_same_in_every_run_and_never_waits() -> None:
    offsets, other = offsets_of([16384, 0, 300, *range(40)]), offsets_of([3] * 43)
    rows = int(offsets[-1])
    index = torch.randint(50, (rows, 2), device="cuda")
    requests = torch.arange(43, device="cuda") // 2
    total = int(offsets.diff()[requests].sum())
    x, y, table = random(rows, 64), random(129, 64, seed=1), random(50, 64, seed=2)

    def op(x: Tensor, y: Tensor, table: Tensor) -> Tensor:
        joined, joined_offsets = jagged.concat(jagged.embedding_add(x, table, index), offsets, y, other)
        mean = jagged.segment_mean(joined, joined_offsets)
        taken, _ = jagged.gather_sequences(x, offsets, requests, total=total, rising=True)
        return jagged.broadcast_add(x, offsets, mean).sum(0) + jagged.last_k(taken, offsets, 2)[0].sum((0, 1))

    twice(op, (x, y, table))


@pytest.mark.parametrize("width", [3, 64, 256, 600])
def test_sums_of_long_sequences_whichever_part_ends_last(width: int) -> None:
    """Beside other work on the GPU, which changes the order in which their parts end."""
    lengths = [40_000, 0, 513, 1, 512, 1025, *range(0, 9000, 450), 70_000, *range(300, 900, 7)]
    offsets, x, ones = offsets_of(lengths), random(sum(lengths), width), torch.ones(64, 4096, device="cuda")
    exact = torch.stack([part.double().sum(0) for part in x.split(lengths)])
    beside = torch.cuda.Stream()
    first = jagged.segment_sum(x, offsets)
    assert (first.double() - exact).norm() / exact.norm() < TOLERANCE[torch.bfloat16]
    for run in range(40):
        with torch.cuda.stream(beside):
            for _ in range(run):
                ones.sum(1)
        assert torch.equal(jagged.segment_sum(x, offsets), first)


@pytest.mark.parametrize("width", [7, 50, 64, 128, 250, 256])
def test_gathered_sequences_of_any_width_and_stride(width: int) -> None:
    """In tiles that end within a sequence and span some: rows of 16 bytes and others, views of wider rows, odd ones."""
    offsets = offsets_of([900, *[0, 3, 1] * 90, 0, 700, 2])
    wide = random(int(offsets[-1]), 2 * width + 1)
    rising = torch.arange(offsets.shape[0] - 1, device="cuda").repeat_interleave(8)
    for values in (wide[:, :width].contiguous(), wide[:, :width], wide[:, 1 : width + 1]):
        for index in (rising, rising.flip(0)[:37]):
            rows, new_offsets = sequence_rows(offsets, index)
            got, got_offsets = jagged.gather_sequences(values, offsets, index, total=rows.shape[0])
            assert torch.equal(got, values[rows])
            assert torch.equal(got_offsets, new_offsets)
    total = int(offsets[-1]) * 8
    twice(lambda x: jagged.gather_sequences(x, offsets, rising, total=total, rising=True)[0], (wide[:, :width],))


@pytest.mark.parametrize("rows", [1, 200_000])
@pytest.mark.parametrize(
    ("width", "sizes", "dtype"),
    [
        *(
            (width, sizes, torch.bfloat16)
            for width, sizes in (
                (72, (2048, 64)), (72, (5, 700)), (72, (64, 64)), (72, (16_384, 1)), (64, (2048, 64)),
                (64, (16_384, 1)), (50, (5, 700)), (256, (2048, 64)), (16, (7, 130)), (336, (2048, 64)),
            )
        ),
        (64, (2048, 64), torch.float16), (256, (2048, 64), torch.float16),
    ],
)  # fmt: skip
def test_gradients_of_two_tables(width: int, sizes: tuple[int, int], dtype: torch.dtype, rows: int) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    columns = [torch.randint(n, (rows,), generator=generator, device="cuda") for n in sizes]
    columns[0] = columns[0] * columns[0] // sizes[0]  # more of the first rows
    index = torch.stack([columns[0], columns[1] + sizes[0]], dim=1)

    def op(x: Tensor, table: Tensor) -> Tensor:
        return jagged.embedding_add(x, table, index, sizes=sizes)

    inputs = (random(rows, width, dtype=dtype), random(sum(sizes), width, dtype=dtype, seed=1))
    compare(op, inputs, dtype)
    twice(op, inputs)


def test_movement_beyond_two_billion_elements() -> None:
    offsets = offsets_of([2**23, 40, 3])
    x = torch.empty(2**23 + 43, 260, dtype=torch.bfloat16, device="cuda").normal_()
    assert x.numel() > 2**31
    index = torch.arange(2**23 + 43, device="cuda")
    assert torch.equal(jagged.gather_rows(x, index), x)
    assert torch.equal(jagged.to_padded(x, offsets, 2)[2], x[-3:-1])
    total = jagged.segment_sum(x, offsets)
    assert torch.equal(total[1:], jagged.segment_sum(x[2**23 :].clone(), offsets_of([40, 3])))
    exact = sum(part.double().sum(0) for part in x[: 2**23].split(2**20))
    assert (total[0].double() - exact).norm() / exact.norm() < TOLERANCE[torch.bfloat16]
    a, b = jagged.split(x, offsets, torch.zeros_like(offsets), x.shape[0])
    assert torch.equal(a, x)
    assert b.shape[0] == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("width", [1, 96, 1000, 8192])
def test_norms(width: int, dtype: torch.dtype) -> None:
    x, other, gate = random(3, 70, width, dtype=dtype).mul(2).unbind(0)
    weight, bias = random(2, width, dtype=dtype, seed=4).unbind(0)
    if width > 1:
        compare(lambda x, w, b: layer_norm(x, w, b), (x, weight, bias), dtype)
        compare(
            lambda x, r, g, w, b: torch.cat(add_layer_norm(x, r, w, b, gate=g, act="silu")),
            (x, other, gate, weight, bias), dtype,
        )  # fmt: skip
    compare(lambda x, g, w: rms_norm(x, w, gate=g, eps=0.1), (x, gate, weight), dtype)


def test_norms_are_the_same_in_every_run_and_never_wait() -> None:
    x, other, gate = random(3, 50_000, 256).unbind(0)
    weight = random(256, seed=3)

    def op(x: Tensor, other: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
        y, z = add_layer_norm(x, other, weight, gate=gate)
        return rms_norm(y, weight) + z

    twice(op, (x, other, gate, weight))


def test_norms_beyond_two_billion_elements() -> None:
    x = torch.empty(2**20 + 5, 2050, dtype=torch.bfloat16, device="cuda").normal_()
    assert x.numel() > 2**31
    leaf = x.requires_grad_()
    out = rms_norm(leaf)
    (gradient,) = torch.autograd.grad(out, leaf, out.detach())
    last = x.detach()[-3:].clone().requires_grad_()
    want = rms_norm(last)
    (want_gradient,) = torch.autograd.grad(want, last, want.detach())
    assert torch.equal(out[-3:], want)
    assert torch.equal(gradient[-3:], want_gradient)


def test_interaction_products_are_the_same_in_every_run_and_never_wait() -> None:
    """Of views, whose rows do not stand side by side."""
    x, y, matrix = random(3000, 26, 2, 256)[:, :, 1], random(26, 32, seed=1), random(26, 28, seed=2)
    mix, maps = random(2, 28, 8, seed=3), random(2, 256, 256, seed=4)

    def op(x: Tensor, y: Tensor, matrix: Tensor, mix: Tensor, maps: Tensor) -> Tensor:
        return fm_block(x, y).sum((1, 2)) + sum_kron(mix_tokens(x, matrix), mix, maps).sum((1, 2))

    twice(op, (x, y, matrix, mix, maps))


@pytest.mark.parametrize("op", [fm_block, mix_tokens])
def test_interaction_products_beyond_two_billion_elements(op: Callable[[Tensor, Tensor], Tensor]) -> None:
    x = torch.empty(165_000, 26, 512, dtype=torch.bfloat16, device="cuda").normal_(std=0.5)
    assert x.numel() > 2**31
    matrix, leaf = random(26, 26), x.requires_grad_()
    out = op(leaf, matrix)
    (gradient,) = torch.autograd.grad(out, leaf, out.detach())
    last = x.detach()[-4:].clone().requires_grad_()
    want = op(last, matrix)
    (want_gradient,) = torch.autograd.grad(want, last, want.detach())
    assert torch.equal(out[-4:], want)
    assert torch.equal(gradient[-4:], want_gradient)
