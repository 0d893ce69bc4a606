"""Which block sizes, warps and stages a kernel runs with.

``tuned.json`` ships with the package: what ``python -m kernels.benchmarks.tune`` found fastest among configurations
whose results it had checked first. A shape that is not in it runs with the defaults here, so nothing is ever tuned
inside a user's process. A GPU without rows of its own runs with those of one that has the same multiprocessors.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch

SHORT_FORWARD = 256
"""Most keys per sequence of the forward kernel that keeps all of them."""

SHORT_BACKWARD = 256
"""Most keys per sequence of the backward kernel that goes over all of them in one program."""

STAND_INS = {(9, 0): "NVIDIA H200"}
"""By compute capability, the GPU whose rows serve others with the same multiprocessors: H100, GH200, H200 NVL."""

TUNED = Path(__file__).with_name("tuned.json")


def choose(
    kernel: str, devices: tuple[str, ...], dtype: torch.dtype, width: int, q_length: int, kv_length: int
) -> dict[str, Any]:
    """The configuration of one launch.

    Args:
        kernel: ``forward_`` or ``backward_`` and ``short``, ``general``, ``softmax``, ``general_window`` or
            ``softmax_window``; with ``_plain`` for tensors that no kernel scheduled by hand takes.
        devices: ``row_names`` of the tensors' device.
        width: head width. q_length: mean number of queries. kv_length: mean or largest number of keys that a query
            sees.
    """
    return _choose(kernel, devices, str(dtype).removeprefix("torch."), width, bucket(q_length), bucket(kv_length))


def bucket(length: int) -> int:
    """The power of two, from 64 to 16,384, that holds ``length``."""
    if length <= 64:
        return 64
    return min(1 << (length - 1).bit_length(), 16384)


def key(kernel: str, device: str, dtype: str, width: int, q_bucket: int, kv_bucket: int) -> str:
    """The name of a row of ``tuned.json``."""
    return f"{kernel}/{device}/{dtype}/d{width}/q{q_bucket}/kv{kv_bucket}"


@cache
def device_name(device: torch.device) -> str:
    """``NVIDIA H200`` and the like."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


@cache
def row_names(device: torch.device) -> tuple[str, ...]:
    """Names of the GPUs whose rows a device runs with, the first that has any: its own, then its stand-in's."""
    name = device_name(device)
    if device.type != "cuda":
        return (name,)
    stand_in = STAND_INS.get(torch.cuda.get_device_capability(device), name)
    return (name,) if stand_in == name else (name, stand_in)


@cache
def tuned() -> dict[str, dict[str, Any]]:
    """The shipped table."""
    if not TUNED.exists():
        return {}
    return json.loads(TUNED.read_text())["configurations"]


@cache
def _choose(
    kernel: str, devices: tuple[str, ...], dtype: str, width: int, q_bucket: int, kv_bucket: int
) -> dict[str, Any]:
    for device in devices:
        found = tuned().get(key(kernel, device, dtype, width, q_bucket, kv_bucket))
        found = found or _nearest(kernel, device, dtype, width, q_bucket, kv_bucket)
        if found is not None:
            return found
    return default(kernel, dtype, width, kv_bucket)


def _nearest(kernel: str, device: str, dtype: str, width: int, q_bucket: int, kv_bucket: int) -> dict[str, Any] | None:
    """The tuned row of the nearest length; short kernels are tied to their number of keys."""
    best, best_distance = None, 99
    for q in (64 << i for i in range(9)):
        for kv in (kv_bucket,) if "short" in kernel else (64 << i for i in range(9)):
            row = tuned().get(key(kernel, device, dtype, width, q, kv))
            distance = abs(q.bit_length() - q_bucket.bit_length()) + 2 * abs(kv.bit_length() - kv_bucket.bit_length())
            if row is not None and distance < best_distance:
                best, best_distance = row, distance
    return best


def default(kernel: str, dtype: str, width: int, kv_bucket: int) -> dict[str, Any]:
    """Safe choices: they fit every width up to 256 on every supported device."""
    exact, wide = dtype == "float32", width > 128
    rows = 32 if exact else 64
    plain = {
        "BLOCK_Q": rows,
        "BLOCK_KV": rows,
        "TMA": False,
        "STAGES": 1 if exact or wide else 2,
        "num_warps": 8 if wide else 4,
    }
    if kernel.startswith("forward_short"):
        halves = 2 if kv_bucket > (64 if exact else 128) else 1
        return {**plain, "BLOCK_KV": max(kv_bucket // halves, 64), "HALVES": halves, "CHUNK": 1024, "STAGES": 1}
    if kernel.startswith("backward_short"):
        return {**plain, "BLOCK_KV": min(kv_bucket, 128), "num_warps": 8 if kv_bucket > 64 else 4}
    if kernel.startswith("forward"):
        return plain
    return {**plain, "query": plain}
