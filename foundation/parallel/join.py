"""Joins the processes that `torchrun` started, also after it has started them anew."""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist


def join_ranks(backend: str, timeout: timedelta | None = None) -> None:
    """Makes the default process group of the ranks of `torchrun`.

    Restarted ranks get the store of those before them (torch 2.13), with addresses that nobody listens at any more, and
    would fail to connect (https://github.com/pytorch/pytorch/issues/135712). So every start has keys of its own, on one
    host: several count restarts each for themselves, and need `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1` instead.

    With nccl collectives go before kernels that are queued: the host waits for numbers of ids of the next batch, which
    would wait for all that it has queued (`TORCH_NCCL_HIGH_PRIORITY=0` takes that back).

    Args:
        backend: gloo or nccl.
        timeout: of collectives; None takes torch's.
    """
    if backend == "nccl":
        os.environ.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")
    store, rank, world = next(iter(dist.rendezvous("env://")))
    if os.environ.get("GROUP_WORLD_SIZE", "1") == "1":
        store = dist.PrefixStore(f"restart-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
