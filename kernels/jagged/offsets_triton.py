"""Offsets of sequences that an index names, on the GPU.

Several small operations of PyTorch make them too, and keep the host three times as long as a kernel does. Up to
``AT_ONCE`` sequences one program adds their lengths up; of more, many write lengths, and a running sum follows.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.common.launcher import Launch

AT_ONCE = 4096

BLOCK = 1024


@triton.jit(do_not_specialize=["N", "R"])
def lengths_kernel(OFFSETS, INDEX, NEW_OFFSETS, N, R, SCAN: tl.constexpr, BLOCK: tl.constexpr):
    """Into ``NEW_OFFSETS [N + 1]`` behind a zero, lengths of the sequences ``INDEX`` of R; ``SCAN``: their running sum.

    All integers are int64, but an index may be int32. One that is not below R stops the program.
    """
    tl.store(NEW_OFFSETS, tl.zeros([], tl.int64), mask=tl.program_id(0) == 0)
    first = tl.program_id(0) * BLOCK
    end = first + BLOCK
    if SCAN:
        end = N
    before = tl.zeros([], tl.int64)
    for start in range(first, end, BLOCK):
        n = start + tl.arange(0, BLOCK)
        b = tl.load(INDEX + n, mask=n < N, other=0)
        inside = (b >= 0) & (b < R)
        tl.device_assert(inside | (n >= N), "an index names a sequence that is not there")
        live = inside & (n < N)
        lengths = tl.load(OFFSETS + b + 1, mask=live, other=0) - tl.load(OFFSETS + b, mask=live, other=0)
        if SCAN:
            total = tl.sum(lengths, 0)
            lengths = before + tl.cumsum(lengths, 0)
            before += total
        tl.store(NEW_OFFSETS + 1 + n, lengths, mask=n < N)


def gathered_offsets(offsets: Tensor, index: Tensor) -> Tensor:
    """See ``reference.gathered_offsets``."""
    count = index.shape[0]
    out = offsets.new_empty(count + 1)
    if count == 0:
        return out.zero_()
    scan = count <= AT_ONCE
    programs = 1 if scan else -(-count // BLOCK)
    tensors, numbers = (offsets.contiguous(), index.contiguous(), out), (count, offsets.shape[0] - 1)
    _launch(offsets.device, scan).start(programs, tensors, numbers)
    return out if scan else out.cumsum_(0)


@cache
def _launch(device: torch.device, scan: bool) -> Launch:
    return Launch(lengths_kernel, {"SCAN": scan, "BLOCK": BLOCK, "num_warps": 4, "debug": True})
