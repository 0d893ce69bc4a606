"""Small calls of the kernels for NVIDIA's checker of memory accesses and races, on a GPU:

    compute-sanitizer --tool memcheck python -m tests.kernels.sanitized forward_long

compares with float64 as well; ``forward_long:2`` takes the third of ``MASKS`` only. The cases are as small as they
can be with every branch in them, because a kernel runs ten to a hundred times as long there.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kernels import jagged
from kernels.benchmarks.command import require_gpu
from kernels.benchmarks.tune import few_keys
from kernels.block_attention import block_attention
from kernels.common import launch
from kernels.common.launch import Call, Config
from kernels.gdpa import reference as gdpa_reference
from kernels.interaction import fm_block
from kernels.jagged import offsets_from_lengths
from kernels.jagged_attention import reference as softmax_reference
from kernels.norms import add_layer_norm, rms_norm
from kernels.token_mixing import mix_tokens, sum_kron

LENGTHS = [3, 0, 200, 1, 129, 64, 0, 65, 2, 128]
KEYS = [5, 7, 0, 130, 256, 1, 3, 64, 200, 63]
BY_HAND: Config = {"KEPT": 4, "STAGES": 3, "TMA": True, "num_warps": 4}
NARROW: Config = {"KEPT": 3, "STAGES": 4}
"""For windows."""
Masks = list[tuple[str, bool, int]]
MASKS: Masks = [
    ("silu", False, -1),
    ("gelu", False, 50),
    ("softmax", False, -1),
    ("softmax", True, -1),
    ("softmax", True, 40),
]
TOLERANCE = 6e-3
"""bf16, as in ``test_triton_gpu.py``."""


def make(keys: list[int], width: int) -> tuple[Tensor, ...]:
    """q, k, v, gradient and both offsets; 2 heads."""
    torch.manual_seed(0)
    where = [offsets_from_lengths(torch.tensor(x)).cuda() for x in (LENGTHS, keys)]
    rows, key_rows = (int(x[-1]) for x in where)
    q, k, v, grad = (
        torch.randn(n, 2, width).mul_(0.5).bfloat16().cuda() for n in (rows, key_rows, key_rows, rows)
    )  # fmt: skip
    return q, k, v, grad, *where


def check(mask: tuple[str, bool, int], keys: list[int], width: int, ahead: Config, back: Config | None) -> None:
    """Forward and, with a configuration for it, backward."""
    act, causal, window = mask
    q, k, v, grad, *where = make(LENGTHS if causal else keys, width)
    bound = max(keys) if max(keys) <= 256 and window < 0 and act != "softmax" else -1
    factor = 1.0 if act == "softmax" else 0.5
    call = Call(q, k, v, *where, act, 0.3, factor, causal, window, bound)
    out, lse = launch.forward(call, ahead)
    exact = (q.double(), k.double(), v.double(), *where)
    if lse is None:
        want = [gdpa_reference.forward(*exact, act, factor, 0.3, window)]
        want += gdpa_reference.backward(grad.double(), *exact, act, factor, 0.3, window)
    else:
        choice = (0.3, causal, window)
        first = softmax_reference.forward(*exact, *choice)
        rest = softmax_reference.backward(grad.double(), *exact[:3], *first, *exact[3:], *choice)
        want = [first[0], *rest]
    got = [out]
    if back is not None:
        got += launch.backward(call, grad, None if lse is None else out, lse, back)
    for index, (a, b) in enumerate(zip(got, want, strict=False)):
        error = float((a.double() - b).norm() / b.norm())
        assert error < TOLERANCE, (mask, width, ahead, back, index, error)
    print(mask, width, ahead, back, "checked", flush=True)


def forward_stream(masks: Masks) -> None:
    """Few keys, in one block and in two."""
    for blocks in (1, 2):
        keys = [min(x, 128 * blocks) for x in KEYS]
        for width in (64, 128):
            config = {"BLOCK_KV": 128, "BLOCKS": blocks, "BUFFERS": 3 - blocks, "STAGES": 4, "TMA": True}
            check(MASKS[0], keys, width, {**config, "num_warps": 4}, None)


def backward_few(masks: Masks) -> None:
    """Few keys, as they are tuned, and wide and narrow heads."""
    plain = {"BLOCK_Q": 64, "BLOCK_KV": 64, "TMA": False, "STAGES": 1, "num_warps": 4}
    for width, most, extra in ((128, 64, {}), (128, 128, {}), (128, 256, {}), (64, 64, {"maxnreg": 168})):
        check(MASKS[0], [min(x, most) for x in KEYS], width, plain, few_keys(most, **extra))


def forward_long(masks: Masks) -> None:
    """All masks, with the two ways of taking turns."""
    for block, stages, overlap in ((128, 2, True), (64, 4, True), (64, 4, False)):
        for mask in masks:
            config = {"BLOCK_KV": block, "STAGES": stages, "OVERLAP": overlap, "TMA": True, "num_warps": 4}
            check(mask, KEYS, 128, config, None)


def backward_long(masks: Masks) -> None:
    """All masks."""
    plain = {"BLOCK_Q": 64, "BLOCK_KV": 64, "TMA": False, "STAGES": 1, "num_warps": 4}
    for mask in masks:
        check(mask, KEYS, 128, plain, {**BY_HAND, "query": BY_HAND})
        if mask[2] >= 0:
            check(mask, KEYS, 128, plain, {**BY_HAND, **NARROW, "query": {**BY_HAND, **NARROW}})


def block(masks: Masks) -> None:
    """Block attention, with and without rotary; programs for each block, and such that stay."""
    for width, columns in ((64, 0), (64, 2), (256, 0), (256, 2)):
        q, k, v, grad, offsets, _ = make(LENGTHS, width)
        positions = torch.rand(q.shape[0], 2, device="cuda") if columns else None
        frequencies = torch.rand(width // 2, device="cuda") if columns else None
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = block_attention(*leaves, offsets, positions=positions, frequencies=frequencies)
        torch.autograd.grad(out, leaves, grad)
        print(width, columns, "run", flush=True)


def run(name: str, op: Callable[..., Tensor], inputs: Sequence[Tensor]) -> None:
    """Forward and all gradients, against float64."""
    results: list[tuple[Tensor, ...]] = []
    grad: Tensor | None = None
    for precise in (False, True):
        leaves = [(x.double() if precise else x).detach().requires_grad_() for x in inputs]
        out = op(*leaves)
        # Independent numbers: sums of a ramp nearly vanish now and then, and what was rounded before does not.
        grad = values(*out.shape) if grad is None else grad
        results.append((out, *torch.autograd.grad(out, leaves, grad.to(out.dtype))))
    errors = [float((got.double() - want).norm() / want.norm()) for got, want in zip(*results, strict=True)]
    assert max(errors) < TOLERANCE, (name, errors)
    print(name, "checked", flush=True)


def values(*shape: int) -> Tensor:
    """Random numbers, bf16."""
    return torch.randn(shape).bfloat16().cuda()


def interaction(masks: Masks) -> None:
    """Ragged tiles, one step over the width and two, and Y of each row."""
    for rows, tokens, width, rank in ((5, 9, 24, 4), (3, 26, 270, 33), (2, 70, 130, 10)):
        x, y = values(rows, tokens, width), values(tokens, rank)
        run("fm_block", fm_block, (x, y))
        run("fm_block, own Y", fm_block, (x, values(rows, tokens, rank)))
        run("mix_tokens", mix_tokens, (x, y))
        run("sum_kron", sum_kron, (x, values(3, tokens, rank), values(3, width, 5)))


def movement(masks: Masks) -> None:
    """Every kernel, on rows that fill no block."""
    offsets = offsets_from_lengths(torch.tensor(LENGTHS)).cuda()
    rows, batch = int(offsets[-1]), len(LENGTHS)
    short = offsets_from_lengths(torch.tensor([*[5, 0, 3] * 60, 112])).cuda()
    few = torch.tensor([0, 0, 2, 2, 2, 8], device="cuda")
    total = int(offsets.diff()[few].sum())
    choice = torch.stack([torch.randint(130, (rows,)), 130 + torch.randint(7, (rows,))], dim=1).cuda()
    for width in (7, 70):
        x, y, dense, table = values(rows, width), values(rows, width), values(batch, width), values(137, width)
        run("to_padded", lambda x: jagged.to_padded(x, offsets, 100), (x,))
        run("from_padded", lambda x: jagged.from_padded(x, offsets, total=rows), (values(batch, 210, width),))
        run("last_k", lambda x: jagged.last_k(x, offsets, 5)[0], (x,))
        run("concat", lambda x, y: jagged.concat(x, offsets, y, offsets)[0], (x, y))
        run("split", lambda x: torch.cat(jagged.split(x, offsets, offsets, rows)[::-1]), (torch.cat([x, y]),))
        run("broadcast_add", lambda x, d: jagged.broadcast_add(x, offsets, d), (x, dense))
        run("segment_mean", lambda x: jagged.segment_mean(x, offsets), (x,))
        run("short sums", lambda x: jagged.segment_sum(x, short), (x,))
        for rising, index in ((True, few), (False, few.flip(0))):
            run("gather_rows", lambda d, i=index, r=rising: jagged.gather_rows(d, i, rising=r), (dense,))
            run(
                "gather_sequences",
                lambda x, i=index, r=rising: jagged.gather_sequences(x, offsets, i, total=total, rising=r)[0], (x,),
            )  # fmt: skip
        run("embedding_add", lambda x, t: jagged.embedding_add(x, t, choice), (x, table))
        run("two tables", lambda x, t: jagged.embedding_add(x, t, choice, sizes=(130, 7)), (x, table))
    for width in (16, 272):  # rows that are copied 16 bytes at a time, whole columns of a tile beside some
        inputs = values(rows, width), values(137, width)
        run("two tables, wide rows", lambda x, t: jagged.embedding_add(x, t, choice, sizes=(130, 7)), inputs)


def norms(masks: Masks) -> None:
    """Widths that fill no block."""
    for width in (7, 70, 1100):
        x, other, gate, weight, bias = values(37, width), values(37, width), values(37, width), *values(2, width)
        run("layer norm", lambda *a: torch.cat(add_layer_norm(*a[:4], gate=a[4])), (x, other, weight, bias, gate))
        run("RMS norm", rms_norm, (x, weight))


GROUPS = {
    group.__name__: group
    for group in (forward_stream, forward_long, backward_long, backward_few, block, movement, norms, interaction)
}


def wanted(text: str) -> tuple[Callable[[Masks], None], Masks]:
    """What an argument names: a group of calls, and the masks to run it with."""
    name, _, index = text.partition(":")
    if name not in GROUPS:
        raise argparse.ArgumentTypeError(f"{name!r} is not there, there are: {', '.join(GROUPS)}")
    if index and index not in [str(i) for i in range(len(MASKS))]:
        raise argparse.ArgumentTypeError(f"{text!r}: the masks are 0 to {len(MASKS) - 1}")
    return GROUPS[name], [MASKS[int(index)]] if index else MASKS


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs what is asked for."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.kernels.sanitized", description="Small calls of the kernels, for compute-sanitizer"
    )
    parser.add_argument(
        "groups",
        nargs="+",
        type=wanted,
        metavar="GROUP[:MASK]",
        help=f"some of {', '.join(GROUPS)}; MASK: one of MASKS",
    )
    groups = parser.parse_args(arguments).groups
    require_gpu(parser)
    os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # so that a tensor's end is the end of its allocation
    for group, masks in groups:
        torch.manual_seed(0)
        group(masks)
        torch.cuda.synchronize()
    print("checked")


if __name__ == "__main__":
    main()
