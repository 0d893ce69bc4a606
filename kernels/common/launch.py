"""Launches the attention kernels for ``kernels.gdpa`` and ``kernels.jagged_attention``.

Nothing here waits for the device: grids come from tensor shapes alone (``kernels/common/sequences.py``), so a call can
be captured in a CUDA graph. What a call needs besides its tensors is worked out once per ``Signature``.

Legend: Tq query rows, Tk key rows, B sequences, H heads, G key heads (H is a multiple), d key width, e value width.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from kernels.common import tuning
from kernels.common.attention_backward import backward_kv, backward_q
from kernels.common.attention_forward import forward_general, forward_short
from kernels.common.backward_few import backward_few
from kernels.common.backward_long import backward_long_kv, backward_long_q
from kernels.common.forward_long import forward_long
from kernels.common.forward_stream import forward_stream
from kernels.common.launcher import Variant
from kernels.common.rows import head_rows

WIDEST = 256
"""The largest head width of the kernels."""

LONG = 256
"""Least mean number of keys, as a power of two, of the kernels for long sequences; and of queries, forward half."""

_TAKEN = (torch.bfloat16, torch.float16, torch.float32)

CROWD = 2**22
"""Programs whose descriptors, up to 512 bytes each, fill the 2^31 bytes that Triton can tell apart."""

Config = dict[str, Any]


class Signature(NamedTuple):
    """What of a call decides how it is launched, but for its numbers of rows."""

    device: torch.device
    dtype: torch.dtype
    heads: int
    kv_heads: int
    width: int
    value_width: int
    strides: tuple[int, ...]
    """Of rows and heads: of q, k and v."""
    aligned: bool
    """Whether the addresses of q, k and v are multiples of 16 bytes."""
    act: str
    scaled: bool
    causal: bool
    window: bool
    broadcast: bool
    dense: bool
    rounds: int
    bounded: bool
    """Whether ``keys`` bounds the keys of every sequence."""
    crowded: bool
    """Whether there may be ``CROWD`` programs with a tile each."""
    queries: int
    keys: int
    """Mean numbers of rows that meet, as powers of two (``tuning.bucket``)."""


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
    batch: int = field(init=False)
    """B."""
    strides: tuple[int, ...] = field(init=False)
    """Of rows and heads: of q, k and v."""
    q_shape: tuple[int, ...] = field(init=False)
    """Of q, as those below: to ask a tensor for its shape takes the host a while."""
    k_shape: tuple[int, ...] = field(init=False)
    v_width: int = field(init=False)
    """e."""
    out_rows: int = field(init=False)
    """Rows of the output and of the gradient of each copy of q."""

    def __post_init__(self) -> None:
        # Triton would compile an int of 1 into the kernel, and a bool as a bit, and others would be started with that.
        self.logit, self.factor = float(self.logit), float(self.factor)
        self.window, self.max_kv = int(self.window), int(self.max_kv)
        if self.q_offsets is not None:
            self.q_offsets = self.q_offsets.contiguous()
            self.batch = self.q_offsets.shape[0] - 1
        if self.kv_offsets is not None:
            self.kv_offsets = self.kv_offsets.contiguous()
            self.batch = self.kv_offsets.shape[0] - 1
        else:
            self.batch, self.max_kv = self.k.shape[:2]
            self.k, self.v = self.k.flatten(0, 1), self.v.flatten(0, 1)
        self.q, q_steps = head_rows(self.q)
        self.k, k_steps = head_rows(self.k)
        self.v, v_steps = head_rows(self.v)
        self.strides = (*q_steps, *k_steps, *v_steps)
        self.q_shape, self.k_shape, self.v_width = self.q.shape, self.k.shape, self.v.shape[2]
        self.out_rows = self.q_shape[0] * (self.batch if self.q_offsets is None else 1)

    def numbers(self) -> tuple[float, ...]:
        """The numbers that the kernels take."""
        return self.batch, self.q_shape[0], max(self.max_kv, 0), self.window, self.logit, self.factor

    def all_numbers(self) -> tuple[float, ...]:
        """The numbers that the kernels for long sequences take."""
        rows, heads, _ = self.q_shape
        return self.batch, rows, self.k_shape[0], self.window, self.logit, self.factor, heads, *self.strides

    def signature(self) -> Signature:
        """Of these tensors."""
        q, k, v, batch, most, window = self.q, self.k, self.v, self.batch, self.max_kv, self.window
        (_, heads, width), (all_keys, kv_heads, _), out_rows = self.q_shape, self.k_shape, self.out_rows
        sequences = batch or 1
        bounded = most >= 0
        keys = most if bounded else all_keys // sequences
        if window >= 0:
            span = 2 * window + 1
            keys, bounded = min(span, keys), bounded and most <= span
        crowded = ((out_rows if out_rows > all_keys else all_keys) // 32 + batch) * heads >= CROWD
        return Signature(
            q.device, q.dtype, heads, kv_heads, width, self.v_width, self.strides,
            not (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15,
            self.act, self.logit != 1.0, self.causal, window >= 0, self.q_offsets is None, self.kv_offsets is None,
            max(1, ((batch - 1).bit_length() + 4) // 5), bounded, crowded,
            tuning.bucket(out_rows // sequences), tuning.bucket(keys),
        )  # fmt: skip

    def q_tiles(self, block: int) -> int:
        """Blocks of query rows: enough for all sequences."""
        if self.q_offsets is None:
            return self.batch * triton.cdiv(self.q_shape[0], block)
        return self.q_shape[0] // block + self.batch

    def kv_tiles(self, block: int) -> int:
        """Blocks of key rows: enough for all sequences."""
        if self.kv_offsets is None:
            return self.batch * triton.cdiv(self.max_kv, block)
        return self.k_shape[0] // block + self.batch


def block_width(width: int, exact: bool) -> int:
    """Power of two that holds a row; at least 64 on tensor cores, where narrower products have gone wrong on Hopper."""
    return max(16 if exact else 64, triton.next_power_of_2(width))


def supports(q: Tensor, v: Tensor) -> bool:
    """Whether the kernels take these: 16-bit and float32 rows of at most ``WIDEST`` elements."""
    return q.dtype in _TAKEN and q.shape[2] <= WIDEST and v.shape[-1] <= WIDEST


def forward(call: Call, config: Config | None = None) -> tuple[Tensor, Tensor | None]:
    """Output ``[Tq, H, e]`` and, for softmax, LSE ``[Tq, H]``."""
    q, k, v, out_rows, heads, width = call.q, call.k, call.v, call.out_rows, call.q_shape[1], call.v_width
    tensors: tuple[Tensor | None, ...]
    out = q.new_empty(out_rows, heads, width)
    lse = q.new_empty(out_rows, heads, dtype=torch.float32) if call.act == "softmax" else None
    if not out_rows * heads * width:
        return out, lse
    if call.k_shape[0] == 0:
        return out.zero_(), lse if lse is None else lse.zero_()
    signature = call.signature()
    plan = _forward_plan(signature) if config is None else _build_forward(signature, config)
    where, constants, numbers = (call.q_offsets, call.kv_offsets), plan.constants, call.numbers()
    if "BUFFERS" in constants or "OVERLAP" in constants:
        numbers = (*numbers[:2], call.k_shape[0], *numbers[2:], heads, *call.strides)
        tensors = (q, k, v, out, *where)
        if "OVERLAP" in constants:
            taken = q.new_zeros(heads, dtype=torch.int32)
            tensors = (q, k, v, out, lse, *where, taken)
        plan.start(_programs(q.device, heads), tensors, numbers)
    elif "CHUNK" in constants:
        plan.start(call.q_tiles(constants["CHUNK"]) * heads, (q, k, v, out, *where), numbers)
    else:
        plan.start(call.q_tiles(constants["BLOCK_Q"]) * heads, (q, k, v, out, lse, *where), numbers)
    return out, lse


def backward(
    call: Call, grad: Tensor, out: Tensor | None, lse: Tensor | None, config: Config | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, each of the shape and dtype of what it belongs to, packed.

    grad ``[Tq, H, e]``; out and lse of the forward pass for softmax.
    """
    q, k, v, (_, heads, width), (all_keys, kv_heads, _) = call.q, call.k, call.v, call.q_shape, call.k_shape
    dk, dv = k.new_empty(*k.shape), v.new_empty(*v.shape)
    if call.batch == 0 or heads == 0 or call.out_rows == 0 or all_keys == 0:
        return torch.zeros_like(q), dk.zero_(), dv.zero_()
    grad = grad.contiguous()
    if out is not None and lse is not None:
        out, lse = out.contiguous(), lse.contiguous()
    if grad.data_ptr() & 15:
        grad = grad.clone()  # kernels by hand, and those with TMA, move 16 bytes at a time; plans look at q, k and v
    signature = call.signature()
    of_keys, of_queries = _backward_plans(signature) if config is None else _build_backward(signature, config)
    shared = call.q_offsets is None
    dq = q.new_empty(call.out_rows, heads, width, dtype=torch.float32 if shared else q.dtype)
    delta = None if lse is None else lse.new_empty(*lse.shape)
    where = (call.q_offsets, call.kv_offsets)
    tensors: tuple[Tensor | None, ...]
    if of_queries is not None:
        tensors = (q, k, v, grad, out, dq, lse, delta, *where)
        if "KEPT" in of_queries.constants:
            taken = q.new_zeros(heads, dtype=torch.int32)
            of_queries.start(_programs(q.device, heads), (*tensors, taken), call.all_numbers())
        else:
            of_queries.start(call.q_tiles(of_queries.constants["BLOCK_Q"]) * heads, tensors, call.numbers())
    if "KEPT" in of_keys.constants:
        taken = q.new_zeros(heads, dtype=torch.int32)
        tensors = (q, k, v, grad, dk, dv, lse, delta, *where, taken)
        of_keys.start(_programs(q.device, heads), tensors, call.all_numbers())
    elif "KEYS" in of_keys.constants:
        part = _part(call, dq, of_keys.constants["BLOCK_Q"]) if of_keys.constants["SEVERAL"] else None
        tensors = (q, k, v, grad, dq, part, dk, dv, *where)
        of_keys.start(call.batch * kv_heads, tensors, call.numbers())
    else:
        passes = of_keys.constants["PASSES"]
        tiles = call.batch if passes else call.kv_tiles(of_keys.constants["BLOCK_KV"])
        between = q.new_empty(*dq.shape, dtype=torch.float32) if passes > 1 else None
        tensors = (q, k, v, grad, dq, between, dk, dv, lse, delta, *where)
        of_keys.start(tiles * kv_heads, tensors, call.numbers())
    if shared:
        dq = dq.view(call.batch, *q.shape).sum(0).to(q.dtype)
    return dq, dk, dv


def _part(call: Call, dq: Tensor, block: int) -> Tensor:
    """Room for the query gradient of one block of keys, by tiles of ``block`` queries, in the type of ``dq``.

    float32 in place of float16, whose range may hold a sum and not its parts.
    """
    tiles = call.out_rows // block + call.batch
    dtype = torch.float32 if dq.dtype == torch.float16 else dq.dtype
    return dq.new_empty(tiles, *dq.shape[1:], block, dtype=dtype)


def forward_kernel(signature: Signature) -> str:
    """The family of configurations that a forward pass looks in."""
    short = signature.bounded and signature.keys <= tuning.SHORT_FORWARD and signature.width <= 128
    if signature.act != "softmax" and short:
        return "forward_short"
    return ("forward_softmax" if signature.act == "softmax" else "forward_general") + "_window" * signature.window


def backward_kernel(signature: Signature) -> str:
    """The family of configurations that a backward pass looks in."""
    short = signature.bounded and signature.keys <= tuning.SHORT_BACKWARD and signature.width <= 128
    if signature.act != "softmax" and short:
        return "backward_short"
    return ("backward_softmax" if signature.act == "softmax" else "backward_general") + "_window" * signature.window


def table_key(kernel: str, signature: Signature) -> str:
    """The row of ``tuned.json`` that a call asks for."""
    name = str(signature.dtype).removeprefix("torch.")
    width = max(signature.width, signature.value_width)
    device = tuning.device_name(signature.device)
    return tuning.key(kernel, device, name, width, signature.queries, signature.keys)


def _config(kernel: str, signature: Signature) -> Config:
    width = max(signature.width, signature.value_width)
    names = tuning.row_names(signature.device)
    return tuning.choose(kernel, names, signature.dtype, width, signature.queries, signature.keys)


@cache
def _forward_plan(signature: Signature) -> Variant:
    kernel = forward_kernel(signature)
    config = _config(kernel, signature)
    if ("BUFFERS" in config and not _streams(signature)) or ("OVERLAP" in config and not _long(signature, LONG // 2)):
        config = _config(f"{kernel}_plain", signature)
    return _build_forward(signature, config)


def _fits_tensor_cores(signature: Signature) -> bool:
    """Whether kernels scheduled by hand have heads of that width and type."""
    wide = signature.width == signature.value_width and signature.width in (64, 128)
    return wide and signature.dtype != torch.float32


def _streams(signature: Signature) -> bool:
    """Whether ``forward_stream`` takes these tensors."""
    plain = not signature.broadcast and not signature.window
    return plain and _fits_tensor_cores(signature) and _descriptors_fit(signature)


def _few(signature: Signature, config: Config) -> bool:
    """Whether ``backward_few`` takes these tensors.

    What it keeps between two blocks of keys takes whole tiles of queries: many times their room where they are few.
    """
    whole = signature.aligned and not any(x % 8 for x in signature.strides)
    room = signature.keys <= config["KEYS"] or signature.queries > config["BLOCK_Q"]
    return whole and room and not signature.window and _fits_tensor_cores(signature)


def _long(signature: Signature, queries: int) -> bool:
    """Whether the kernels for long sequences take these tensors. On short ones their tiles of 128 rows are no gain."""
    enough = signature.queries >= queries and signature.keys >= LONG
    return enough and not signature.broadcast and _fits_tensor_cores(signature) and _descriptors_fit(signature)


@cache
def _programs(device: torch.device, heads: int) -> int:
    """A program per multiprocessor, the same number for every head."""
    return max(1, torch.cuda.get_device_properties(device).multi_processor_count // heads) * heads


@cache
def _backward_plans(signature: Signature) -> tuple[Variant, Variant | None]:
    kernel = backward_kernel(signature)
    config = _config(kernel, signature)
    by_hand = "KEPT" in config or "KEPT" in config.get("query", {})
    fits = signature.heads == signature.kv_heads and not signature.dense and _long(signature, LONG)
    if (by_hand and not fits) or ("KEYS" in config and not _few(signature, config)):
        config = _config(f"{kernel}_plain", signature)
    return _build_backward(signature, config)


def _build_forward(signature: Signature, config: Config) -> Variant:
    if "BUFFERS" in config:
        return _variant(forward_stream, signature, config)
    if "OVERLAP" in config:
        return _variant(forward_long, signature, config)
    return _variant(forward_short if "CHUNK" in config else forward_general, signature, config)


def _build_backward(signature: Signature, config: Config) -> tuple[Variant, Variant | None]:
    """Of the kernel for keys, and of that for queries unless the first makes all gradients."""
    if "KEYS" in config:
        assert signature.bounded
        return _variant(backward_few, signature, {**config, "SEVERAL": signature.keys > config["KEYS"]}), None
    config = dict(config)
    query = config.pop("query", None)
    passes = 0 if query else triton.cdiv(signature.keys, config["BLOCK_KV"])
    assert query or signature.act != "softmax"
    of_keys = _variant(backward_long_kv if "KEPT" in config else backward_kv, signature, {**config, "PASSES": passes})
    if not query:
        return of_keys, None
    return of_keys, _variant(backward_long_q if "KEPT" in query else backward_q, signature, query)


def _variant(kernel: Any, signature: Signature, config: Config) -> Variant:
    exact = signature.dtype == torch.float32
    constants = {
        "HEADS": signature.heads,
        "KV_HEADS": signature.kv_heads,
        **dict(zip(("STQ", "SHQ", "STK", "SHK", "STV", "SHV"), signature.strides, strict=True)),
        "GROUP": signature.heads // signature.kv_heads,
        "D": signature.width,
        "E": signature.value_width,
        "BLOCK_D": block_width(signature.width, exact),
        "BLOCK_E": block_width(signature.value_width, exact),
        "ACT": signature.act,
        "CAUSAL": signature.causal,
        "WINDOW": signature.window,
        "BROADCAST": signature.broadcast,
        "DENSE": signature.dense,
        "ROUNDS": signature.rounds,
        "SCALED": signature.scaled,
        "FAST": not exact,
        "PRECISION": "ieee" if exact else "tf32",
        **config,
    }
    options: dict[str, int] = {name: constants.pop(name) for name in ("num_warps", "maxnreg") if name in constants}
    if kernel in (forward_stream, forward_long, backward_long_q, backward_long_kv):
        del constants["HEADS"]  # a number there
    constants["TMA"] = config.get("TMA", False) and _descriptors_fit(signature)
    constants["TMA_OUT"] = constants["TMA"] and config.get("TMA_OUT", False)
    return Variant(kernel, constants, options)


def _descriptors_fit(signature: Signature) -> bool:
    """TMA takes rows whose addresses are multiples of 16 bytes; each program makes descriptors of its own."""
    size = signature.dtype.itemsize
    steps = (*signature.strides, signature.width, signature.value_width)
    fits = signature.aligned and not signature.crowded
    return fits and all(signature.strides[::2]) and not any(x * size % 16 for x in steps)
