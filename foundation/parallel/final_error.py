"""A user's error under `torchrun`: it is said once, and torchrun does not start the ranks again to hear it again.

torchrun restarts whatever ends badly, since it knows no exit code of an error that is final. It does stop for good when
it is told to end, which one rank of each host does.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

from foundation.data.files import may_pass

WAIT = timedelta(seconds=5)


def is_final(error: BaseException) -> bool:
    """Whether another try would meet the same error; a disk or a network may recover."""
    return isinstance(error, (ValueError, FileExistsError, FileNotFoundError)) and not may_pass(error)


def report(text: str, *, final: bool) -> None:
    """Prints an error to stderr, and ends torchrun if there is one and the error is final.

    Args:
        text: of ranks that say the same, the first is heard.
        final: another try would end in the same way.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        print(text, file=sys.stderr)
        return
    store, start = _store(), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    told = hashlib.sha256(text.encode()).hexdigest()
    if _first(store, f"opengem/{start}/said/{told}", alone=True):
        print(text, file=sys.stderr, flush=True)
    tries_left = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > int(start)
    if final and tries_left and _is_torchrun(os.getppid()):
        host = os.environ.get("GROUP_RANK", "0")
        if _first(store, f"opengem/{start}/ended/{host}", alone=os.environ.get("LOCAL_RANK") == "0"):
            print("torchrun is told to end: a restart would meet the same error", file=sys.stderr, flush=True)
            os.kill(os.getppid(), signal.SIGTERM)


def _store() -> Any:
    """What ranks can leave notes in; None where there is nothing of the kind, or no longer."""
    import torch.distributed as dist

    try:
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            return dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=WAIT)
        return dist.distributed_c10d._get_default_store() if dist.is_initialized() else None
    except (RuntimeError, ValueError):
        return None


def _first(store: Any, key: str, *, alone: bool) -> bool:
    """Whether no rank has asked for this key before; `alone` is the answer where ranks have no store."""
    if store is None:
        return alone
    try:
        return int(store.add(key, 1)) == 1
    except RuntimeError:
        return alone


def _is_torchrun(process: int) -> bool:
    try:
        command = Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return False
    return b"torchrun" in command or b"torch.distributed.run" in command or b"torch/distributed/run" in command
