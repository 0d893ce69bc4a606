"""Finds the fastest correct configuration of the kernels that memory bounds: ``kernels/common/memory_tuned.json``.

    python -m kernels.benchmarks.tune_memory [--output FILE] [--seconds 120] [--kernels sum norm_backward]

A candidate is run on random inputs and compared with the float64 reference first; only one that moves every row where
it belongs and whose sums are within bf16 rounding may win. Candidates are compiled in parallel processes beforehand.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.errors import TritonError

from kernels.benchmarks import command
from kernels.benchmarks.bandwidth import packed_lengths
from kernels.benchmarks.cases import milliseconds, relative_error, runs_kernels_by_hand
from kernels.benchmarks.jagged import CASES, COPIES
from kernels.block_attention import reference as block_reference
from kernels.block_attention import triton as block_kernels
from kernels.common import memory_tuning
from kernels.common.tuning import device_name
from kernels.interaction import reference as fm_reference
from kernels.interaction import triton as fm_kernels
from kernels.jagged import offsets_from_lengths, tables_triton
from kernels.jagged import reference as jagged_reference
from kernels.jagged import triton as jagged_kernels
from kernels.jagged.short_sums_triton import SHORT
from kernels.norms import reference as norm_reference
from kernels.norms import triton as norm_kernels
from kernels.token_mixing import reference as mix_reference
from kernels.token_mixing import triton as mix_kernels

TOLERANCE = {torch.bfloat16: 6e-3, torch.float16: 1e-3}
"""Norm of the error over that of the reference. bf16 rounds to 2^-9, fp16 to 2^-12; inputs of the products, and the
result, do so."""

PIECE = 4096
"""Elements that are compared together: over all of them one wrong row of very many would vanish."""

Config = dict[str, Any]
Inputs = tuple[Callable[..., Any], Callable[..., Any], tuple[Any, ...]]
"""A function that starts a kernel, the reference, and what both are called with."""


@dataclass(frozen=True, slots=True)
class Job:
    """A kernel to tune at a row width; ``length``: mean rows of a sequence, or tokens, where the key has them.

    Only ``tables`` is made for other types than bf16.
    """

    kernel: str
    width: int
    length: int = 1
    dtype: torch.dtype = torch.bfloat16


FM = {(128, 32): 32, (256, 64): 32, (256, 128): 64, (512, 26): 32}
MIX = {(128, 32): 32, (256, 64): 64, (512, 26): 28, (1536, 128): 16}
"""Width and tokens, with the rank or the tokens out."""

JOBS = [
    *(
        Job(f"block_{way}{rotary}", width)
        for way in ("forward", "backward")
        for rotary in ("", "_rotary")
        for width in (64, 128, 256)
    ),
    *(
        Job(f"{name}_kernel", width)
        for name in ("pad", "unpad", "gather", "spread", "concat", "split", "sequences", "copies")
        for width in (64, 256)
    ),
    *(Job("sum", width, length) for width in (64, 256) for length in (32, 512)),
    *(Job("short_sum", width) for width in (64, 256)),
    *(Job(f"norm_{way}", width) for way in ("forward", "backward") for width in (128, 256, 1024, 4096)),
    *(Job("tables", width, dtype=dtype) for width in (64, 256) for dtype in (torch.bfloat16, torch.float16)),
    *(Job(f"fm_{way}", *shape) for way in ("forward", "backward") for shape in FM),
    *(Job(f"mix_{way}", *shape) for way in ("forward", "backward") for shape in MIX),
]


_CAPPED: Config = {"num_warps": 8, "maxnreg": 128}

STAYING: dict[tuple[bool, int], list[Config]] = {
    (False, 128): [{"STAY": 3, "num_warps": 4}, {"STAY": 4, "num_warps": 4}, {"STAY": 2, "num_warps": 8}],
    (False, 256): [{"STAY": 2, "num_warps": 4}, {"STAY": 1, "num_warps": 8}, {"STAY": 2, **_CAPPED}],
    (True, 128): [
        {"STAY": 1, "PLACES": 2, "num_warps": 4},
        {"STAY": 1, "PLACES": 2, "num_warps": 8},
        {"STAY": 2, "PLACES": 1, **_CAPPED},
    ],
    (True, 256): [{"STAY": 1, "PLACES": 2, "num_warps": 8}],
}
"""Of block attention's programs that stay (``kernels/block_attention/persistent.py``), by backward and width."""


GROUPED = {
    64: [(3, 64, 64, 4, 4), (2, 64, 64, 6, 4), (2, 128, 64, 3, 4), (2, 128, 64, 5, 4)],
    256: [(2, 64, 128, 4, 4), (2, 64, 128, 6, 4), (1, 64, 256, 4, 8), (1, 64, 256, 6, 8), (1, 32, 256, 8, 8)],
}
"""Of the pass over two tables that is scheduled by hand (``kernels/jagged/tables_hopper.py``), by width: ``STAY``,
``TILE``, ``BLOCK``, ``STAGES`` and warps."""


def runs_here(config: Config) -> bool:
    """Whether it can on this GPU: programs that stay are written for Hopper."""
    return "STAY" not in config or runs_kernels_by_hand()


def candidates(job: Job) -> list[Config]:
    """What may win."""
    if job.kernel.startswith("block"):
        found: list[Config] = [{"num_warps": 4}, {"num_warps": 8}]
        backward = "backward" in job.kernel
        found += [{"num_warps": 4, "maxnreg": 168 if backward else 128}]
        found += [{"num_warps": 8, "maxnreg": 128}] if backward else []
        return found + STAYING.get((backward, job.width), [])
    if job.kernel.startswith(("fm", "mix")):
        mixes, steps = job.kernel.startswith("mix"), (128,) if job.width == 128 else (128, 256)
        return [
            {
                **({"GROUP": group} if mixes else {}),
                "STEP": step,
                "STAGES": stages,
                "PROGRAMS": more,
                "num_warps": warps,
            }
            for group in ((1, 2) if job.kernel == "mix_backward" and job.length <= 32 else (1,))
            for step, warps in itertools.product(steps, (4, 8))
            for stages in ((2, 4) if mixes else (2, 3, 4))
            for more in ((8, 256) if job.kernel == "fm_forward" else (4, 8))
        ]
    if job.kernel == "tables":
        shapes = [(64, 64, 4), (128, 64, 4), (64, 64, 8)]
        if job.width > 64:
            shapes = [(64, 128, 4), (128, 128, 4), (64, 64, 4), (64, 128, 8)]
        shared = ("TILE", "BLOCK", "STAGES", "num_warps")
        return [
            *(
                {"PROGRAMS": more, **dict(zip(shared, (tile, block, stages, warps), strict=True))}
                for tile, block, warps in shapes
                for more in (2, 3)
                for stages in (2, 3)
            ),
            *({"STAY": stay, **dict(zip(shared, shape, strict=True))} for stay, *shape in GROUPED[job.width]),
        ]
    block = triton.next_power_of_2(job.width)
    if job.kernel == "short_sum":
        shapes = [(4096, 2, 4), (4096, 4, 2), (8192, 2, 4), (8192, 4, 4), (8192, 8, 4), (16384, 4, 8), (16384, 8, 8)]
        return [
            {"GROUP": max(1, size // (rows * block)), "ROWS": rows, "num_warps": warps} for size, rows, warps in shapes
        ]
    if job.kernel == "sum":
        tiles = [(1024, 1), (2048, 2), (4096, 4), (8192, 4)] if job.length > 64 else [(256, 1), (512, 1), (1024, 1)]
        chunks = (128, 256, 512) if job.length > 64 else (512,)
        return [
            {"CHUNK": chunk, "ROWS": size // block, "num_warps": warps, "STAGES": stages}
            for size, warps in tiles
            for chunk in chunks
            for stages in (1, 3, 4)
        ]
    if job.kernel == "norm_forward":
        tiles = [(2048, 4), (4096, 4), (8192, 8), (4096, 8), (1024, 2)]
        return [{"ROWS": max(1, size // block), "num_warps": warps} for size, warps in tiles]
    if job.kernel == "norm_backward":
        shapes = [(1024, 2, 4), (2048, 4, 4), (2048, 2, 4)] if block < 4096 else [(1, 4, 2), (1, 8, 1)]
        return [
            {"ROWS": max(1, size // block), "num_warps": warps, "PROGRAMS": more * programs, "STAGES": stages}
            for size, warps, programs in shapes
            for more in (1, 2)
            for stages in (1, 2, 3)
        ]
    if job.kernel == "copies_kernel":
        tiles = [(4096, 4), (8192, 4), (16384, 4)]
        return [
            {"ROWS": min(256, size // block), "num_warps": warps, "STAGES": stages}
            for size, warps in tiles
            for stages in (1, 2, 3)
        ]
    tiles = [(2048, 2), (4096, 4), (16384, 8)]
    found = [{"ROWS": min(256, size // block), "num_warps": warps} for size, warps in tiles]
    if job.kernel == "sequences_kernel":  # a large tile whose addresses take all registers leaves room for few warps
        found += [{"ROWS": size // block, "num_warps": 4} for size in (8192, 16384)]
        found += [{"ROWS": 16384 // block, "num_warps": 4, "maxnreg": most} for most in (96, 128)]
    return found


def batches(job: Job) -> list[tuple[int, int, str]]:
    """What jagged movement is timed on: sequences, the longest, and the kind of their lengths; the sum of times counts.

    What serves all lengths of a width is timed on the cases of the benchmark where that makes a difference.
    """
    if job.kernel == "sequences_kernel":
        return [(batch, longest, kind) for _, batch, longest, width, kind in CASES if width == job.width]
    longest = {"sum": 2 * job.length, "short_sum": 16}.get(job.kernel, 1024)
    return [(2**28 // job.width // longest, longest, "s=.5")]


def inputs(job: Job, small: bool) -> list[Inputs]:
    """All that a kernel is timed on, about 256 MB each unless ``small``, which is for compiling."""
    if job.kernel.startswith(("norm", "block", "fm", "mix", "tables")):
        return [arguments(job, small)]
    return [movement(job, *batch, small) for batch in batches(job)]


def arguments(job: Job, small: bool) -> Inputs:
    """Of the kernels that know no sequences, of any length."""
    width = job.width
    if job.kernel.startswith("norm"):
        rows = 100 if small else 2**27 // width
        x, grad = torch.randn(2, rows, width, device="cuda").bfloat16()
        weight, bias = torch.rand(2, width, device="cuda").bfloat16()
        if job.kernel == "norm_forward":
            options = (x, None, None, weight, bias, 1e-5, True, "sigmoid", torch.bfloat16)
            return norm_kernels.forward, norm_reference.forward, options
        return (
            norm_kernels.backward,
            norm_reference.backward,
            (grad, None, x, None, weight, bias, 1e-5, True, "sigmoid"),
        )
    if job.kernel.startswith("block"):
        offsets = offsets_from_lengths(packed_lengths(2 if small else 2**13 // width, 2000, "s=.7")).cuda()
        q, k, v, grad = torch.randn(int(offsets[-1]), 4, 4, width, device="cuda").bfloat16().unbind(1)
        places, turns = torch.rand(q.shape[0], device="cuda") * 9, torch.rand(width // 2, device="cuda")
        rest = (offsets, *((places, turns) if job.kernel.endswith("rotary") else (None, None)), width**-0.5)
        if job.kernel.startswith("block_forward"):
            return block_kernels.forward, block_reference.forward, (q, k, v, *rest)
        return block_kernels.backward, block_reference.backward, (grad, q, k, v, *rest)
    if job.kernel.startswith(("fm", "mix")):
        is_fm = job.kernel.startswith("fm")
        own: Any = fm_kernels if is_fm else mix_kernels
        reference: Any = fm_reference if is_fm else mix_reference
        columns = (FM if is_fm else MIX)[width, job.length]
        rows = 5 if small else 2**26 // (width * job.length)
        x = torch.randn(rows, job.length, width, device="cuda").bfloat16()
        small_matrix = torch.randn(job.length, columns, device="cuda").bfloat16()
        if job.kernel.endswith("forward"):
            return own.forward, reference.forward, (x, small_matrix)
        out = (rows, job.length, columns) if is_fm else (rows, columns, width)
        return own.backward, reference.backward, (torch.randn(out, device="cuda").bfloat16(), x, small_matrix)
    assert job.kernel == "tables"
    rows = 2000 if small else 2**27 // width
    x = torch.randn(rows, width, device="cuda").to(job.dtype)
    index = torch.stack([torch.randint(2048, (rows,)), 2048 + torch.randint(64, (rows,))], dim=1).cuda()
    return tables_triton.table_sum, jagged_reference.table_sum, (x, index, (2048, 64))


def movement(job: Job, batch: int, longest: int, kind: str, small: bool) -> Inputs:
    """Of jagged movement. ``small``: as many sequences, for which kernels are compiled, but of few rows."""
    width = job.width
    lengths = packed_lengths(batch, longest, kind)
    if small:
        longest = min(longest, 2 * SHORT)
        lengths = lengths.clamp(max=longest)
    offsets = offsets_from_lengths(lengths).cuda()
    total = int(offsets[-1])
    x, y = torch.randn(2, total, width, device="cuda").bfloat16()
    dense = torch.randn(batch, width, device="cuda").bfloat16()
    index = torch.arange(batch // COPIES, device="cuda").repeat_interleave(COPIES)
    few = offsets[: index[-1] + 2]
    source = x[: int(few[-1])]
    new = offsets_from_lengths(few.diff()[index])
    copied = int(new[-1])
    if job.kernel == "copies_kernel":
        x = torch.randn(copied, width, device="cuda").bfloat16()
    padded = jagged_reference.to_padded(x, offsets, longest, 0.0, False) if job.kernel == "unpad_kernel" else x
    name, given = {
        "pad_kernel": ("to_padded", (x, offsets, longest, 0.0, False)),
        "unpad_kernel": ("from_padded", (padded, offsets, total, False)),
        "gather_kernel": ("gather_rows", (x, torch.randint(total, (total,), device="cuda"))),
        "spread_kernel": ("broadcast_add", (x, offsets, dense)),
        "concat_kernel": ("concat", (x, y, offsets, 2 * offsets)),
        "split_kernel": ("split", (torch.cat([x, y]), offsets, 2 * offsets, total)),
        "sequences_kernel": ("gather_sequences", (source, few, index, new, copied)),
        "copies_kernel": ("sum_sequences", (x, few, index, new, source.shape[0], True)),
        "sum": ("segment_sum", (x, offsets, False)),
        "short_sum": ("segment_sum", (x, offsets, False)),
    }[job.kernel]
    return getattr(jagged_kernels, name), getattr(jagged_reference, name), given


def expected(reference: Callable[..., Any], given: tuple[Any, ...]) -> Any:
    """What the reference makes of the same in float64."""
    exact = [x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in given]
    return reference(*(torch.float64 if x is torch.bfloat16 else x for x in exact))


def error(got: Any, want: Any) -> float:
    """The largest relative error over the results and every ``PIECE`` elements; infinite where any is not finite."""
    pairs = zip(*((x,) if isinstance(x, Tensor) else x for x in (got, want)), strict=True)
    return max(relative_error(a, b, _squares) for a, b in pairs)


def _squares(x: Tensor) -> Tensor:
    """Sums of squares over every ``PIECE`` elements, the last time over what is left as well."""
    x = x.flatten()
    pieces = max(1, x.shape[0] // PIECE)
    sums = x[: pieces * PIECE].square().view(pieces, -1).sum(1)
    sums[-1] += x[pieces * PIECE :].square().sum()
    return sums


def _compile(work: tuple[Job, Config]) -> None:
    job, config = work
    try:
        with memory_tuning.forced(job.kernel, config):
            for own, _, given in inputs(job, small=True):
                own(*given)
        torch.cuda.synchronize()
    except (RuntimeError, TritonError):
        return


def to_compile(jobs: list[Job]) -> list[tuple[Job, Config]]:
    """The kernels of all candidates, each once: how many programs run is no constant of a kernel, that they stay is."""
    found: dict[tuple[object, ...], tuple[Job, Config]] = {}
    for job in jobs:
        for config in filter(runs_here, candidates(job)):
            fixed = {k: v for k, v in config.items() if k not in ("PROGRAMS", "STAY")}
            found[job, "STAY" in config, *fixed.items()] = (job, config)
    return list(found.values())


def tune(job: Job) -> tuple[str, Config] | None:
    """The fastest correct configuration, by its key in the table."""
    cases = [(own, given, expected(reference, given)) for own, reference, given in inputs(job, small=False)]
    best: tuple[float, Config] | None = None
    plain: tuple[float, Config] | None = None
    for config in filter(runs_here, candidates(job)):
        with memory_tuning.forced(job.kernel, config):
            try:
                wrong = max(error(own(*given), want) for own, given, want in cases)
            except (RuntimeError, TritonError) as problem:
                print(f"{job} does not run: {config}: {str(problem)[:80]}")
                continue
            if not wrong < TOLERANCE[job.dtype]:
                print(f"{job} WRONG by {wrong:.1e}: {config}")
                continue
            ms = sum(milliseconds(partial(own, *given), graph=True, rep=10) for own, given, _ in cases)
        print(f"{job.kernel} {job.width} {job.length}: {ms:.4f} ms, error {wrong:.1e}: {config}", flush=True)
        if best is None or ms < best[0]:
            best = (ms, config)
        if "STAY" not in config and (plain is None or ms < plain[0]):
            plain = (ms, config)
    if best is None:
        return None
    if plain is not None and "STAY" in best[1]:  # for rows that cannot be copied that way
        best = (best[0], {**best[1], "plain": plain[1]})
    name = device_name(torch.device("cuda"))
    bucket = memory_tuning.bucket
    return memory_tuning.key(job.kernel, name, job.dtype, bucket(job.width), bucket(job.length)), best[1]


def main(arguments: Sequence[str] | None = None) -> None:
    """Tunes every kernel and writes the table."""
    parser = command.parser("tune_memory", __doc__)
    parser.add_argument("--output", type=Path, default=memory_tuning.TUNED)
    parser.add_argument("--seconds", type=float, default=120, help="start no further kernel after this long")
    parser.add_argument("--kernels", nargs="+", default=[], help="only these; default all")
    options = parser.parse_args(arguments)
    command.require_known(parser, options.kernels, (job.kernel for job in JOBS))
    command.require_gpu(parser)
    start = time.time()
    jobs = [job for job in JOBS if not options.kernels or job.kernel in options.kernels]
    with multiprocessing.get_context("spawn").Pool(max(1, len(os.sched_getaffinity(0)) - 1)) as pool:
        pool.map(_compile, to_compile(jobs), chunksize=1)
    print(f"compiled in {time.time() - start:.0f} s", flush=True)
    found: dict[str, Config] = {}
    for job in jobs:
        if time.time() - start > options.seconds:
            print(f"no time for {job}")
            continue
        result = tune(job)
        if result is not None:
            found[result[0]] = result[1]
        torch.cuda.empty_cache()
    command.write_table(memory_tuning.TUNED, options.output, found)
    print(f"tuned in {time.time() - start:.0f} s")


if __name__ == "__main__":
    main()
