"""Joining the ranks, numbers of all of them, waiting for them; for benchmarks, since each call waits for the device."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from foundation.parallel.join import join_ranks


def joined(kind: str) -> torch.device:
    """Joins the ranks of a launch, by NCCL on cuda and by Gloo on cpu; returns this rank's device."""
    if kind == "cpu":
        join_ranks("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    torch.backends.cuda.matmul.allow_tf32 = False
    join_ranks("nccl")
    return device


def total(value: float, device: torch.device) -> float:
    """The sum of what the ranks have."""
    return _reduced(value, device, dist.ReduceOp.SUM)


def most(value: float, device: torch.device) -> float:
    """The largest of what the ranks have."""
    return _reduced(value, device, dist.ReduceOp.MAX)


def wait(device: torch.device) -> None:
    """Until this device and all ranks are done."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


def _reduced(value: float, device: torch.device, how: dist.ReduceOp.RedOpType) -> float:
    number = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(number, op=how)
    return number.item()
