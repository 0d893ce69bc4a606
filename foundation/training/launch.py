"""Starts training in this process: one of those that `torchrun` launched, or a single one."""

from __future__ import annotations

import gc
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.loggers import TensorBoardLogger

from foundation.parallel.join import join_ranks

Device = Literal["auto", "cpu", "cuda"]
Precision = Literal["fp32", "bf16"]


def pick_device(device: Device) -> torch.device:
    """The kind of device that a config asks for; auto takes CUDA where there is a device.

    Raises:
        ValueError: cuda is asked for and there is none, or the name is not known.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device: must be auto, cpu or cuda, got {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device: cuda is asked for, but torch finds no CUDA device; use cpu or auto")
    return torch.device("cuda" if device != "cpu" and torch.cuda.is_available() else "cpu")


def quiet_torchrec() -> None:
    """Without what TorchRec makes PyTorch say of TorchRec's own code, on every rank: nobody else can mend it."""
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)  # it asks a deprecated question
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torchrec\.")  # and passes a deprecated argument


@contextmanager
def launched(*, device: Device, precision: Precision, log_folder: Path, log_from: int = 0) -> Iterator[Fabric]:
    """A Fabric with its process group, devices, precision and TensorBoard logger.

    Under `torchrun` the ranks are those it started; else this process is the only one. A process group that exists
    already is used and left in place.

    Args:
        device: what to compute on; auto takes CUDA where there is a device.
        precision: bf16 runs matrix products in bfloat16 and keeps weights and optimizers in float32.
        log_folder: where TensorBoard's files go.
        log_from: step from which they are written; what an earlier run logged from there on is hidden.

    Raises:
        ValueError: cuda is asked for and there is none.
    """
    kind = pick_device(device).type
    gc.collect()  # sharded tables of an earlier run in this process hold one another in a ring
    quiet_torchrec()
    torchrun = dist.is_torchelastic_launched()
    local = int(os.environ["LOCAL_WORLD_SIZE"]) if torchrun else 1
    fabric = Fabric(
        accelerator=kind,
        strategy="ddp" if torchrun else "auto",
        devices=local,
        num_nodes=int(os.environ["WORLD_SIZE"]) // local if torchrun else 1,
        precision="bf16-mixed" if precision == "bf16" else "32-true",
        loggers=TensorBoardLogger(log_folder.parent, log_folder.name, version="", purge_step=log_from or None),
    )
    existed = dist.is_initialized()
    backend = "nccl" if kind == "cuda" else "gloo"
    if not existed and torchrun:
        join_ranks(backend)
    elif not existed:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    fabric.launch()
    try:
        yield fabric
        for logger in fabric.loggers:
            logger.finalize("finished")
    except BaseException:
        for logger in fabric.loggers:
            with suppress(Exception):  # what ended the run is what its user must hear
                logger.finalize("failed")
        raise
    finally:
        if not existed:
            dist.destroy_process_group()
