"""Finds the fastest correct configuration of each attention kernel on this GPU: ``kernels/common/tuned.json``.

    python -m kernels.benchmarks.tune [--output FILE] [--seconds 600] [--cases "short 64" fp16]

A candidate is run on random inputs and all of its output and gradients are compared with the float64 reference first;
only one that is within bf16 rounding in every few sequences may win. Candidates are compiled in parallel processes
beforehand.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels.benchmarks import command
from kernels.benchmarks.cases import Case, Inputs, make, milliseconds, relative_error, runs_kernels_by_hand
from kernels.common import launch, tuning
from kernels.common.launch import Call, Config
from kernels.gdpa import reference as gdpa_reference
from kernels.jagged import reference as jagged_reference
from kernels.jagged_attention import reference as softmax_reference

TOLERANCE = {torch.bfloat16: 6e-3, torch.float16: 1e-3}
"""Norm of the error over that of the reference: two roundings to 2^-9 or 2^-12, of operands and of the result."""

AT_ONCE = 64
"""Sequences whose reference is made at a time: of all at once it would take tens of GB."""

TOGETHER = 4
"""Sequences whose error is one number. Over all, a row that is wrong would be lost among the others; over one there may
be nothing to compare with: with one key, softmax has gradients of zero."""

CASES = [
    Case(name="short 64", batch=1024, width=128, queries=512, keys=64),
    Case(name="short 64, s=.5", batch=1024, width=128, queries=512, keys=64, lengths="uniform"),
    Case(name="short 64, d 64, s=.5", batch=1024, width=64, queries=512, keys=64, lengths="uniform"),
    Case(name="short 128", batch=1024, width=128, queries=512, keys=128),
    Case(name="short 256", batch=1152, width=128, queries=512, keys=256),
    Case(name="short 256, s=.5", batch=1152, width=128, queries=512, keys=256, lengths="uniform"),
    Case(name="short 256, q 128", batch=4096, width=128, queries=128, keys=256),
    Case(name="short 128, s=.5", batch=1024, width=128, queries=512, keys=128, lengths="uniform"),
    Case(name="self 2048", batch=128, width=128, queries=2048),
    Case(name="self 2048, s=.5", batch=256, width=128, queries=2048, lengths="uniform"),
    Case(name="softmax 2048", batch=128, width=128, queries=2048, act="softmax"),
    Case(name="softmax 2048, s=.5", batch=256, width=128, queries=2048, lengths="uniform", act="softmax"),
    Case(
        name="softmax 2048, s=.5, window 128",
        batch=256, width=128, queries=2048, lengths="uniform", act="softmax", window=128,
    ),
    Case(
        name="self 2048, s=.5, window 128",
        batch=256, width=128, queries=2048, lengths="uniform", window=128,
    ),
    Case(name="self 512", batch=512, width=128, queries=512),
    Case(name="softmax 512, d 64", batch=1024, width=64, queries=512, act="softmax"),
    Case(name="self 512, d 64", batch=1024, width=64, queries=512),
    Case(name="self 2048, s=.5, d 64", batch=256, width=64, queries=2048, lengths="uniform"),
    Case(name="softmax 2048, s=.5, d 64", batch=256, width=64, queries=2048, lengths="uniform", act="softmax"),
    *(
        Case(name=f"{act} 1024, s=.5, d {width}", batch=512, width=width, queries=1024, lengths="uniform", act=act)
        for width in (32, 96, 256)
        for act in ("gelu_tanh", "softmax")
    ),
    *(
        Case(name=f"short {keys}, s=.5, d {width}", batch=1024, width=width, queries=512, keys=keys, lengths="uniform")
        for width, keys in ((32, 64), (96, 64), (96, 128), (64, 128), (64, 256))
    ),
    Case(name="short 64, fp16", batch=1024, width=128, queries=512, keys=64, dtype=torch.float16),
    Case(name="short 128, fp16", batch=1024, width=128, queries=512, keys=128, dtype=torch.float16),
    Case(name="short 256, fp16", batch=1152, width=128, queries=512, keys=256, dtype=torch.float16),
    *(
        Case(
            name=f"{act} 2048, s=.5, fp16",
            batch=256, width=128, queries=2048, lengths="uniform", act=act, dtype=torch.float16,
        )
        for act in ("gelu_tanh", "softmax")
    ),
]  # fmt: skip


def config(q: int, kv: int, tma: bool, stages: int, warps: int, **extra: Any) -> Config:
    """A configuration by its numbers."""
    return {"BLOCK_Q": q, "BLOCK_KV": kv, "TMA": tma, "STAGES": stages, "num_warps": warps, **extra}


def stream(kv: int, blocks: int, buffers: int, stages: int) -> Config:
    """A configuration of ``forward_stream``."""
    return {"BLOCK_KV": kv, "BLOCKS": blocks, "BUFFERS": buffers, "STAGES": stages, "TMA": True, "num_warps": 4}


def long(kv: int, stages: int, overlap: bool) -> Config:
    """A configuration of ``forward_long``."""
    return {"BLOCK_KV": kv, "STAGES": stages, "OVERLAP": overlap, "TMA": True, "num_warps": 4}


def backward_long(kept: int, stages: int) -> Config:
    """A configuration of ``backward_long_kv`` or ``backward_long_q``."""
    return {"KEPT": kept, "STAGES": stages, "TMA": True, "num_warps": 4}


def few_keys(most: int, **extra: int) -> Config:
    """A configuration of ``backward_few`` for so many keys at most, of which it has 64 or 128 at a time."""
    keys = 64 if most <= 64 else 128
    return {"BLOCK_Q": 64, "KEYS": keys, "num_warps": keys // 16, **extra}


def candidates(case: Case) -> dict[str, list[Config]]:
    """Plain kernels that may win, by pass. Product sides under 64 are left out: they have gone wrong on Hopper."""
    return {"forward": _forward_candidates(case), "backward": _backward_candidates(case)}


def by_hand(case: Case, plain: dict[str, Config]) -> dict[str, list[Config]]:
    """Kernels scheduled by hand that may win against the best plain ones, where they run."""
    if case.width not in (64, 128) or not runs_kernels_by_hand():
        return {}
    few = case.keys if case.window < 0 else 0
    found: dict[str, list[Config]] = {}
    if 0 < few <= tuning.SHORT_FORWARD:
        block = min(max(64, few), 128)
        blocks = 2 if few > 128 else 1
        found["forward"] = [stream(block, blocks, 3 - blocks, stages) for stages in (4, 5)]
    if min(2 * case.queries, few or case.queries) >= launch.LONG:
        found.setdefault("forward", []).extend(
            long(kv, 256 // kv, overlap) for kv in (64, 128) for overlap in (True, False)
        )
    if min(case.queries, few or case.queries) >= launch.LONG:
        both = backward_long(4, 3)
        keys = {name: value for name, value in plain.get("backward", {}).items() if name != "query"}
        found["backward"] = [{**both, "query": both}]
        if case.window >= 0:
            more = backward_long(3, 4)
            found["backward"] += [{**x, "query": y} for x in (both, more) for y in (both, more)][1:]
        if "query" in plain.get("backward", {}):
            found["backward"] += [{**keys, "query": both}, {**both, "query": plain["backward"]["query"]}]
    if 0 < few <= tuning.SHORT_BACKWARD:
        found.setdefault("backward", []).append(few_keys(few))
        if case.width == 64 and few <= 64:  # three programs on a multiprocessor
            found["backward"].append(few_keys(64, maxnreg=168))
    return found


def _forward_candidates(case: Case) -> list[Config]:
    general = [
        config(128, 64, True, 2, 8, maxnreg=128),
        config(128, 64, True, 3, 8),
        config(64, 64, True, 3, 4),
    ]
    if case.width > 128:
        general += [config(64, 64, False, 1, 8), config(64, 64, True, 2, 8), config(128, 64, True, 1, 8)]
    if case.window >= 0:
        return [
            config(64, 64, False, 2, 4),
            config(64, 64, False, 1, 4, maxnreg=128),
            config(128, 64, False, 2, 8, maxnreg=128),
            *general,
        ]
    if not 0 < case.keys <= tuning.SHORT_FORWARD:
        return general
    block = max(64, case.keys)
    one: Config = {"HALVES": 1, "CHUNK": 1024}
    two: Config = {"HALVES": 2, "CHUNK": 1024}
    if block == 256:
        return [
            config(64, 256, False, 3, 4, **one),
            config(128, 128, True, 1, 8, **two),
        ]
    return [
        config(64, block, False, 1, 4, **one),
        config(64, block, False, 2, 4, **one),
        config(64, block, True, 1, 4, **one),
        config(64, block, True, 3, 4, **one),
        config(128, block, True, 1, 8, maxnreg=128, **one),
    ]


def _backward_candidates(case: Case) -> list[Config]:
    kv = [
        config(64, 128, True, 3, 8),
        config(64, 64, True, 2, 4),
        config(64, 64, False, 2, 4),
    ]
    query = [
        config(128, 64, True, 3, 8),
        config(64, 64, True, 2, 4),
        config(64, 64, False, 2, 4),
    ]
    if case.width > 128:
        kv += [config(64, 64, False, 1, 8), config(64, 64, True, 2, 8), config(64, 64, True, 1, 8)]
        query = [config(64, 64, False, 1, 8), config(64, 64, True, 2, 8), *query]
    general = [{**x, "query": query[0]} for x in kv] + [{"query": x} for x in query[1:]]
    if not 0 < case.keys <= tuning.SHORT_BACKWARD:
        return general
    if case.keys > 128:
        passes = [config(64, 128, tma, 2, 8) for tma in (True, False)]
        return [*general, *passes, config(64, 128, True, 2, 8, TMA_OUT=True)]
    block = max(64, case.keys)
    warps = 4 if block == 64 else 8
    short = [config(64, block, tma, n, warps) for n in (2, 3) for tma in (True, False)]
    return [*short, *({**x, "TMA_OUT": True} for x in short if x["TMA"])]


def to_call(case: Case, inputs: Inputs) -> Call:
    """The launch of a case."""
    logit = case.width**-0.5 if case.act == "softmax" else 1.0
    bound = case.keys if case.keys else -1
    x = inputs
    return Call(x.q, x.k, x.v, x.q_offsets, x.kv_offsets, case.act, logit, 1.0, False, case.window, bound)


def expected(call: Call, grad: Tensor) -> list[Tensor]:
    """Output and gradients, in float64."""
    assert call.q_offsets is not None and call.kv_offsets is not None
    want = [torch.empty_like(x, dtype=torch.float64) for x in (grad, call.q, call.k, call.v)]
    for first in range(0, call.batch, AT_ONCE):
        ends = [x[first : first + AT_ONCE + 1] for x in (call.q_offsets, call.kv_offsets)]
        rows, keys = (slice(int(x[0]), int(x[-1])) for x in ends)
        q, k, v, g = (x[at].double() for x, at in ((call.q, rows), (call.k, keys), (call.v, keys), (grad, rows)))
        part = _expected(call, q, k, v, g, ends[0] - rows.start, ends[1] - keys.start)
        for x, at, exact in zip(want, (rows, rows, keys, keys), part, strict=True):
            x[at] = exact
    return want


def _expected(
    call: Call, q: Tensor, k: Tensor, v: Tensor, grad: Tensor, q_offsets: Tensor, kv_offsets: Tensor
) -> list[Tensor]:
    """Output and gradients of some sequences, whose tensors are float64."""
    if call.act == "softmax":
        choice = (q_offsets, kv_offsets, call.logit, call.causal, call.window)
        out, lse = softmax_reference.forward(q, k, v, *choice)
        return [out, *softmax_reference.backward(grad, q, k, v, out, lse, *choice)]
    options = (q_offsets, kv_offsets, call.act, call.factor, call.logit, call.window)
    out = gdpa_reference.forward(q, k, v, *options)
    return [out, *gdpa_reference.backward(grad, q, k, v, *options)]


def error(got: Sequence[Tensor], want: Sequence[Tensor], offsets: Sequence[Tensor]) -> float:
    """The largest relative error over the tensors and every ``TOGETHER`` sequences; infinite if any is not finite."""
    some = [torch.cat([ends[:-1:TOGETHER], ends[-1:]]) for ends in offsets]
    parts = zip(got, want, some, strict=True)
    return max(relative_error(a, b, partial(_squares, offsets=ends)) for a, b, ends in parts)


def _squares(x: Tensor, offsets: Tensor) -> Tensor:
    """Sum of squares over each sequence of ``x [T, H, d]``: ``[B]``."""
    return jagged_reference.segment_sum(x.square().flatten(1).sum(1), offsets, False)


def _compile(job: tuple[Case, str, Config]) -> None:
    case, kind, choice = job
    small = replace(case, batch=40 if case.batch <= 1024 else case.batch, queries=16 if case.keys else 130)
    inputs = make(small)
    call = to_call(small, inputs)
    if kind == "forward":
        launch.forward(call, choice)
    else:
        softmax = case.act == "softmax"
        lse = inputs.q.new_zeros(inputs.q.shape[:2], dtype=torch.float32) if softmax else None
        launch.backward(call, inputs.grad, inputs.grad if softmax else None, lse, choice)
    torch.cuda.synchronize()


def _try(job: tuple[Case, str, Config]) -> str | None:
    try:
        _compile(job)
    except (RuntimeError, triton_errors()) as problem:
        return str(problem)[:100]
    return None


def triton_errors() -> type[Exception]:
    """What Triton raises for a kernel that needs more than the device has."""
    from triton.runtime.errors import TritonError

    return TritonError


def tune_case(case: Case) -> dict[str, Config]:
    """The fastest correct configuration of each kernel of a case, by its key in the table.

    Where a kernel scheduled by hand wins, the best plain one stands in a row of its own, for what the other refuses.
    """
    inputs = make(case)
    call = to_call(case, inputs)
    want = expected(call, inputs.grad)
    plain = _fastest(case, call, inputs, want, candidates(case))
    other = _fastest(case, call, inputs, want, by_hand(case, {kind: choice for kind, (_, choice) in plain.items()}))
    signature = call.signature()
    names = {"forward": launch.forward_kernel(signature), "backward": launch.backward_kernel(signature)}
    found: dict[str, Config] = {}
    for kind, (ms, choice) in plain.items():
        wins = kind in other and other[kind][0] < ms
        found[launch.table_key(names[kind] + "_plain" * wins, signature)] = choice
        if wins:
            found[launch.table_key(names[kind], signature)] = other[kind][1]
    return found


def _fastest(
    case: Case, call: Call, inputs: Inputs, want: list[Tensor], choices: dict[str, list[Config]]
) -> dict[str, tuple[float, Config]]:
    """The fastest correct configuration by pass, and its ms."""
    out, lse = launch.forward(call)
    saved = out if call.act == "softmax" else None
    ends = [inputs.q_offsets, inputs.q_offsets, inputs.kv_offsets, inputs.kv_offsets]
    best: dict[str, tuple[float, Config]] = {}
    for kind, some in choices.items():
        for choice in some:
            if set(choice) == {"query"}:
                if kind not in best:
                    continue
                choice = {**best[kind][1], **choice}

            def run(kind: str = kind, choice: Config = choice) -> tuple[Tensor, ...]:
                if kind == "forward":
                    return launch.forward(call, choice)[:1]
                return launch.backward(call, inputs.grad, saved, lse, choice)

            try:
                part = slice(1) if kind == "forward" else slice(1, None)
                wrong = error(run(), want[part], ends[part])
            except (RuntimeError, triton_errors()) as problem:
                print(f"{case.name} {kind} does not run: {choice}: {str(problem)[:80]}")
                continue
            if not wrong < TOLERANCE[case.dtype]:
                print(f"{case.name} {kind} WRONG by {wrong:.1e}: {choice}")
                continue
            ms = milliseconds(run, graph=True, rep=20)
            print(f"{case.name} {kind} {ms:.3f} ms, error {wrong:.1e}: {choice}")
            if kind not in best or ms < best[kind][0]:
                best[kind] = (ms, choice)
    return best


def main(arguments: Sequence[str] | None = None) -> None:
    """Tunes every case and writes the table."""
    parser = command.parser("tune", __doc__)
    parser.add_argument("--output", type=Path, default=tuning.TUNED)
    parser.add_argument("--cases", nargs="+", default=[""], help="only cases whose names have one of these in them")
    parser.add_argument("--seconds", type=float, default=600, help="start no further case after this long")
    options = parser.parse_args(arguments)
    command.require_known(parser, options.cases, (case.name for case in CASES), parts=True)
    command.require_gpu(parser)
    start = time.time()
    jobs = []
    cases = [case for case in CASES if any(part in case.name for part in options.cases)]
    for case in cases:
        plain = candidates(case)
        for choices in (plain, by_hand(case, {kind: some[0] for kind, some in plain.items()})):
            for kind, some in choices.items():
                jobs += [(case, kind, {**some[0], **choice}) for choice in some]
    with multiprocessing.get_context("spawn").Pool(len(os.sched_getaffinity(0))) as pool:
        pool.map(_try, jobs, chunksize=1)
    print(f"compiled {len(jobs)} candidates in {time.time() - start:.0f} s")
    found: dict[str, Config] = {}
    for case in cases:
        if time.time() - start > options.seconds:
            print(f"no time for {case.name}")
            continue
        found.update(tune_case(case))
        torch.cuda.empty_cache()
    command.write_table(tuning.TUNED, options.output, found)


if __name__ == "__main__":
    main()
