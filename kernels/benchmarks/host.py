"""What eager calls cost the host: ``python -m kernels.benchmarks.host``, microseconds.

On inputs too small to keep the host waiting. ``forward``: nothing needs a gradient; ``both``: forward and backward
through autograd. The first lines are of calls of PyTorch alone, to compare hosts with.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from kernels import jagged
from kernels.benchmarks import command
from kernels.benchmarks.cases import host_times
from kernels.block_attention import block_attention
from kernels.gdpa import gdpa
from kernels.interaction import fm_block
from kernels.jagged_attention import jagged_attention
from kernels.norms import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from kernels.token_mixing import mix_tokens, sum_kron

Op = Callable[..., Tensor]


def random(*shape: int) -> Tensor:
    """bf16."""
    return torch.randn(*shape, device="cuda").bfloat16()


def calls() -> Iterator[tuple[str, Op, tuple[Tensor, ...]]]:
    """Name, function and what it is called with: 8 sequences of 64 rows."""
    yield "torch.add", torch.add, (random(8), random(8))
    yield "torch.nn.functional.layer_norm", lambda x: torch.nn.functional.layer_norm(x, (64,)), (random(8, 64),)
    offsets = torch.arange(9, device="cuda") * 64
    q, k, v = random(3, 512, 4, 64).unbind(0)
    wide = random(3, 512, 4, 128).unbind(0)
    dense = random(2, 8, 64, 4, 64).unbind(0)
    yield "gdpa, few keys", lambda q, k, v: gdpa(q, k, v, offsets, offsets, max_keys=64), (q, k, v)
    yield "gdpa", lambda q, k, v: gdpa(q, k, v, offsets, offsets), (q, k, v)
    yield "gdpa, dense keys", lambda q, k, v: gdpa(q, k, v, offsets), (q, *dense)
    yield "gdpa, d128", lambda q, k, v: gdpa(q, k, v, offsets, offsets), wide
    yield "jagged_attention", lambda q, k, v: jagged_attention(q, k, v, offsets, offsets), (q, k, v)
    yield (
        "jagged_attention, causal",
        lambda q, k, v: jagged_attention(q, k, v, offsets, offsets, causal=True),
        (q, k, v),
    )
    yield "jagged_attention, d128", lambda q, k, v: jagged_attention(q, k, v, offsets, offsets), wide
    two = torch.arange(3, device="cuda") * 512  # enough keys for the kernels that are scheduled by hand
    long = random(3, 1024, 4, 128).unbind(0)
    yield "jagged_attention, by hand", lambda q, k, v: jagged_attention(q, k, v, two, two), long
    place, turns = torch.arange(512, device="cuda").float(), torch.rand(32, device="cuda")
    yield "block_attention", lambda q, k, v: block_attention(q, k, v, offsets), (q, k, v)
    yield (
        "block_attention, rotary",
        lambda q, k, v: block_attention(q, k, v, offsets, positions=place, frequencies=turns),
        (q, k, v),
    )
    x, few, weight, bias = random(512, 64), random(8, 64), random(64), random(64)
    owner = torch.arange(8, device="cuda").repeat_interleave(64)
    half, first = offsets // 2, torch.arange(8, device="cuda")
    rest = offsets - half
    yield "to_padded", lambda x: jagged.to_padded(x, offsets, 64), (x,)
    yield "from_padded", lambda x: jagged.from_padded(x, offsets, 512), (random(8, 64, 64),)
    yield "last_k", lambda x: jagged.last_k(x, offsets, 10)[0], (x,)
    yield "concat", lambda a, b: jagged.concat(a, offsets, b, offsets)[0], (x, random(512, 64))
    yield "split", lambda x: jagged.split(x, half, rest, 256)[0], (x,)
    yield "gather_rows, rising", lambda x: jagged.gather_rows(x, owner, rising=True), (few,)
    yield "scatter_sum, rising", lambda x: jagged.scatter_sum(x, owner, 8, rising=True), (x,)
    yield "gather_sequences", lambda x: jagged.gather_sequences(x, offsets, first, total=512, rising=True)[0], (x,)
    yield "broadcast_add", lambda x, y: jagged.broadcast_add(x, offsets, y), (x, few)
    yield "segment_sum", lambda x: jagged.segment_sum(x, offsets), (x,)
    yield "segment_mean", lambda x: jagged.segment_mean(x, offsets), (x,)
    row = torch.arange(512, device="cuda")
    index = torch.stack([row % 130, 130 + row % 7], dim=1)
    yield "embedding_add", lambda x, t: jagged.embedding_add(x, t, index, sizes=(130, 7)), (x, random(137, 64))
    yield "rms_norm", rms_norm, (x, weight)
    yield "rms_norm, gate", lambda x, g, w: rms_norm(x, w, gate=g), (x, random(512, 64), weight)
    yield "layer_norm", layer_norm, (x, weight, bias)
    yield "add_rms_norm", lambda x, y, w: add_rms_norm(x, y, w)[0], (x, random(512, 64), weight)
    yield "add_layer_norm", lambda x, y, w, b: add_layer_norm(x, y, w, b)[0], (x, random(512, 64), weight, bias)
    tokens = random(8, 26, 512)
    yield "fm_block", fm_block, (tokens, random(26, 32))
    yield "mix_tokens", mix_tokens, (tokens, random(26, 28))
    yield "sum_kron", sum_kron, (tokens, random(2, 26, 8), random(2, 512, 512))


def main() -> None:
    """Prints the table."""
    print("| call | forward, least | median | both, least | median |\n|---|---|---|---|---|")
    for name, op, inputs in calls():
        leaves = [x.detach().requires_grad_() for x in inputs]
        with torch.no_grad():
            grad = torch.ones_like(op(*inputs))
            forward = host_times(lambda op=op, inputs=inputs: op(*inputs))  # type: ignore[misc]

        def both(op: Op = op, leaves: list[Tensor] = leaves, grad: Tensor = grad) -> object:
            return torch.autograd.grad(op(*leaves), leaves, grad)

        times = [(min(x), statistics.median(x)) for x in (forward, host_times(both, 5, 100))]
        print(f"| {name} | " + " | ".join(f"{us:.0f}" for pair in times for us in pair) + " |", flush=True)


if __name__ == "__main__":
    command.run("host", __doc__, main)
