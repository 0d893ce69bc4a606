"""torchrun starts killed ranks anew, and they find one another."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from foundation.parallel.join import join_ranks

PRIORITY = "TORCH_NCCL_HIGH_PRIORITY"
SCRIPT = """
import os, signal
import torch, torch.distributed as dist
from foundation.parallel.join import join_ranks

join_ranks("gloo")
group = dist.new_group([0, 1])
total = torch.ones(1)
dist.all_reduce(total, group=group)
restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
print(f"restarts {restarts} total {int(total)}\\n", end="", flush=True)
dist.barrier()
if restarts < 2 and dist.get_rank() == restarts:
    os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
"""


@pytest.mark.parametrize(
    ("backend", "own", "expected"), [("nccl", None, "1"), ("nccl", "0", "0"), ("gloo", None, None)]
)
def test_collectives_of_nccl_go_first(
    backend: str, own: str | None, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[str | None] = []
    monkeypatch.setattr(dist, "rendezvous", lambda _: iter([(dist.HashStore(), 0, 1)]))
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: found.append(os.environ.get(PRIORITY)))
    monkeypatch.setenv(PRIORITY, own or "")
    if own is None:
        monkeypatch.delenv(PRIORITY)
    join_ranks(backend)
    monkeypatch.delenv(PRIORITY, raising=False)
    assert found == [expected]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(300)
def test_ranks_that_were_killed_and_started_anew_find_one_another(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--max-restarts", "2"]
    command += ["--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0", str(script)]
    environment = os.environ | {"PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert [done.stdout.count(f"restarts {count} total 2") for count in range(3)] == [2, 2, 2]
