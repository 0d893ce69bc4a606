"""Joins the processes that `torchrun` started, also after it has started them anew."""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist


def join_ranks(backend: str, timeout: timedelta | None = None) -> None:
    """Makes the default process group of the ranks of `torchrun`.

    Restarted ranks get the store of those before them (torch 2.13), with addresses that nobody listens at any more, and
    would fail to connect. So every start has keys of its own.

    Args:
        backend: gloo or nccl.
        timeout: of collectives; None takes torch's.
    """
    store, rank, world = next(iter(dist.rendezvous("env://")))
    own = dist.PrefixStore(f"restart-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    dist.init_process_group(backend, store=own, rank=rank, world_size=world, timeout=timeout)
