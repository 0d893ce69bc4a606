"""Launches the attention kernels for ``kernels.gdpa`` and ``kernels.jagged_attention``.

Nothing here waits for the device: grids come from tensor shapes alone (``kernels/common/sequences.py``), so a call can
be captured in a CUDA graph.

Legend: Tq query rows, Tk key rows, B sequences, H heads, G key heads (H is a multiple), d key width, e value width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from kernels.common import tuning
from kernels.common.attention_backward import backward_kv, backward_q, output_dot
from kernels.common.attention_forward import forward_general, forward_short

WIDEST = 256
"""The largest head width of the kernels."""

Config = dict[str, Any]


@dataclass(slots=True)
class Call:
    """One attention over a packed batch.

    Args:
        q: ``[Tq, H, d]``, or ``[Q, H, d]`` for all sequences where ``q_offsets`` is ``None``.
        k, v: ``[Tk, G, d]`` and ``[Tk, G, e]``, or with a leading ``[B, M]`` where ``kv_offsets`` is ``None``.
        act: an activation, or ``softmax``. logit, factor: inside and after it.
        window: -1 for none.
        max_kv: a bound on the keys of a sequence that is known without a look at the offsets; -1 for none.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    q_offsets: Tensor | None
    kv_offsets: Tensor | None
    act: str
    logit: float
    factor: float
    causal: bool
    window: int
    max_kv: int

    def __post_init__(self) -> None:
        if self.kv_offsets is None:
            self.max_kv = self.k.shape[1]
            self.k, self.v = self.k.flatten(0, 1), self.v.flatten(0, 1)
        self.q, self.k, self.v = (x if x.stride(2) == 1 else x.contiguous() for x in (self.q, self.k, self.v))

    @property
    def batch(self) -> int:
        """B."""
        if self.kv_offsets is not None:
            return self.kv_offsets.shape[0] - 1
        if self.q_offsets is not None:
            return self.q_offsets.shape[0] - 1
        return self.k.shape[0] // max(self.max_kv, 1)

    @property
    def out_rows(self) -> int:
        """Rows of the output and of the gradient of each copy of q."""
        return self.q.shape[0] * (self.batch if self.q_offsets is None else 1)

    def lengths(self) -> tuple[int, int]:
        """Queries and keys per sequence where all have the same number, as the kernels take them."""
        return self.q.shape[0], max(self.max_kv, 0)

    def scalars(self) -> tuple[float, float, int]:
        """What the kernels take as numbers."""
        return self.logit, self.factor, self.window

    def constants(self) -> dict[str, Any]:
        """What all attention kernels are compiled for."""
        d = self.q.shape[2]
        exact = self.q.dtype == torch.float32
        return {
            "GROUP": self.q.shape[1] // self.k.shape[1],
            "D": d,
            "BLOCK_D": block_width(d, exact),
            "ACT": self.act,
            "WINDOW": self.window >= 0,
            "BROADCAST": self.q_offsets is None,
            "DENSE": self.kv_offsets is None,
            "ROUNDS": max(1, math.ceil(math.log(max(self.batch, 1), 32) - 1e-9)),
            "FAST": not exact,
            "PRECISION": "ieee" if exact else "tf32",
        }

    def value_constants(self) -> dict[str, Any]:
        """What kernels with values of another width than the keys are compiled for besides."""
        e = self.v.shape[2]
        return {"E": e, "BLOCK_E": block_width(e, self.q.dtype == torch.float32), "CAUSAL": self.causal}

    def q_tiles(self, block: int) -> int:
        """Blocks of query rows: enough for all sequences."""
        if self.q_offsets is None:
            return self.batch * triton.cdiv(self.q.shape[0], block)
        return self.q.shape[0] // block + self.batch

    def kv_tiles(self, block: int) -> int:
        """Blocks of key rows: enough for all sequences."""
        if self.kv_offsets is None:
            return self.batch * triton.cdiv(self.max_kv, block)
        return self.k.shape[0] // block + self.batch

    def config(self, kernel: str) -> Config:
        """The tuned configuration of a kernel for these tensors."""
        return tuning.choose(kernel, *self._place())

    def key(self, kernel: str) -> str:
        """The row of ``tuned.json`` that these tensors ask for."""
        device, dtype, width, queries, keys = self._place()
        name = str(dtype).removeprefix("torch.")
        return tuning.key(kernel, device, name, width, tuning.bucket(queries), tuning.bucket(keys))

    def _place(self) -> tuple[str, torch.dtype, int, int, int]:
        batch = max(self.batch, 1)
        keys = self.max_kv if self.max_kv >= 0 else self.k.shape[0] // batch
        width = max(self.q.shape[2], self.v.shape[2])
        return tuning.device_name(self.q.device), self.q.dtype, width, self.out_rows // batch, keys


def block_width(width: int, exact: bool) -> int:
    """Power of two that holds a row; at least 64 on tensor cores, where narrower products have gone wrong on Hopper."""
    return max(16 if exact else 64, triton.next_power_of_2(width))


def supports(q: Tensor, v: Tensor) -> bool:
    """Whether the kernels take these: 16-bit and float32 rows of at most ``WIDEST`` elements."""
    return q.dtype in (torch.float32, torch.bfloat16, torch.float16) and max(q.shape[2], v.shape[-1]) <= WIDEST


def forward(call: Call, config: Config | None = None) -> tuple[Tensor, Tensor | None]:
    """Output ``[Tq, H, e]`` and, for softmax, LSE ``[Tq, H]``."""
    q, k, v, heads = call.q, call.k, call.v, call.q.shape[1]
    out = q.new_empty((call.out_rows, heads, v.shape[2]))
    lse = q.new_empty((call.out_rows, heads), dtype=torch.float32) if call.act == "softmax" else None
    if out.numel() == 0:
        return out, lse
    if config is None:
        config = call.config(forward_kernel(call))
    options, short, meta = _options(config, (q, k, v, out))
    strides = (*q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *out.stride()[:2])
    where = (call.q_offsets, call.kv_offsets, call.batch, heads, *call.lengths(), *call.scalars())
    if short:
        grid = (call.q_tiles(meta["CHUNK"]) * heads,)
        forward_short[grid](q, k, v, out, *where, *strides, **call.constants(), **meta, **options)
    else:
        grid = (call.q_tiles(meta["BLOCK_Q"]) * heads,)
        constants = {**call.constants(), **call.value_constants()}
        forward_general[grid](q, k, v, out, lse, *where, *strides, **constants, **meta, **options)
    return out, lse


def backward(
    call: Call, grad: Tensor, out: Tensor | None, lse: Tensor | None, config: Config | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, each of the shape and dtype of what it belongs to, packed."""
    q, k, v, heads, kv_heads = call.q, call.k, call.v, call.q.shape[1], call.k.shape[1]
    dk, dv = torch.empty_like(k, memory_format=torch.contiguous_format), v.new_empty(v.shape)
    if call.batch == 0 or heads == 0:
        return torch.zeros_like(q), dk.zero_(), dv.zero_()
    if config is None:
        config = call.config(backward_kernel(call))
    whole, shared = "query" not in config, call.q_offsets is None
    dq = q.new_empty((call.out_rows, heads, q.shape[2]), dtype=torch.float32 if shared else q.dtype)
    delta = _delta(grad, out) if out is not None else None
    inputs = (q, k, v, grad, dq)
    strides = tuple(step for x in inputs for step in x.stride()[:2])
    tail = (*dk.stride()[:2], *dv.stride()[:2])
    where = (*call.lengths(), *call.scalars())
    constants = {**call.constants(), **call.value_constants()}
    options, _, meta = _options({key: x for key, x in config.items() if key != "query"}, inputs)
    tiles = call.batch if whole else call.kv_tiles(meta["BLOCK_KV"])
    if tiles:
        backward_kv[(tiles * kv_heads,)](
            q, k, v, grad, dq, dk, dv, lse, delta, call.q_offsets, call.kv_offsets, call.batch, kv_heads,
            *where, *strides, *tail, **constants, WHOLE=whole, **meta, **options,
        )  # fmt: skip
    if not whole and call.out_rows:
        options, _, meta = _options(config["query"], inputs)
        backward_q[(call.q_tiles(meta["BLOCK_Q"]) * heads,)](
            q, k, v, grad, dq, lse, delta, call.q_offsets, call.kv_offsets, call.batch, heads,
            *where, *strides, **constants, **meta, **options,
        )  # fmt: skip
    if shared:
        dq = dq.view(call.batch, *q.shape).sum(0)
    return dq.to(q.dtype), dk, dv


def forward_kernel(call: Call) -> str:
    """The row of configurations that a forward pass looks in."""
    short = call.act != "softmax" and 0 <= call.max_kv <= tuning.SHORT_FORWARD and call.q.shape[2] <= 128
    return "forward_short" if short else "forward_softmax" if call.act == "softmax" else "forward_general"


def backward_kernel(call: Call) -> str:
    """The row of configurations that a backward pass looks in."""
    if 0 <= call.max_kv <= tuning.SHORT_BACKWARD and call.q.shape[2] <= 128 and call.v.shape[2] <= 128:
        return "backward_short"
    return "backward_softmax" if call.act == "softmax" else "backward_general"


def _options(config: Config, tensors: tuple[Tensor, ...]) -> tuple[dict[str, int], bool, dict[str, Any]]:
    """Launch options, whether the configuration is one of ``forward_short``, and its constants."""
    meta = dict(config)
    options: dict[str, int] = {name: meta.pop(name) for name in ("num_warps", "maxnreg") if name in meta}
    if meta["TMA"]:
        meta["TMA"] = all(map(_descriptor_fits, tensors))
        if meta["TMA"]:
            triton.set_allocator(_scratch)
    return options, "CHUNK" in meta, meta


def _descriptor_fits(x: Tensor) -> bool:
    """TMA reads rows whose addresses are multiples of 16 bytes."""
    size = x.element_size()
    return not (x.data_ptr() % 16 or (x.stride(0) * size) % 16 or (x.stride(1) * size) % 16)


def _scratch(size: int, alignment: int, stream: int | None) -> Tensor:
    """Device memory for descriptors, from PyTorch's allocator, which aligns to 512 bytes."""
    return torch.empty(size, dtype=torch.int8, device="cuda")


def _delta(grad: Tensor, out: Tensor) -> Tensor:
    rows, heads, width = out.shape
    delta = out.new_empty((rows, heads), dtype=torch.float32)
    if rows:
        block_e = triton.next_power_of_2(width)
        block = max(1, 4096 // block_e)
        output_dot[(triton.cdiv(rows * heads, block),)](
            grad, out, delta, heads, *grad.stride()[:2], *out.stride()[:2], rows * heads, width, block_e, block
        )
    return delta
