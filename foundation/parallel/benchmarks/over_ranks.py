"""Numbers of all ranks, and waiting for them; for benchmarks, since each call waits for the device."""

from __future__ import annotations

import torch
import torch.distributed as dist


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
