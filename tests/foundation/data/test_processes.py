"""Ctrl-C ends a pool of processes at once, whatever they are at, and they say nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import as_completed
from pathlib import Path

import pytest

from foundation.data.processes import ProcessPool

ROOT = Path(__file__).resolve().parents[3]

INTERRUPTED = """
import sys, time
from foundation.data.processes import ProcessPool

def work(argument):
    time.sleep(argument)

if __name__ == "__main__":
    try:
        with ProcessPool(2, tasks_per_process=int(sys.argv[2]) or None) as pool:
            futures = [pool.submit(work, float(sys.argv[1])) for _ in range(5_000)]
            futures[0].result() if sys.argv[1] == "0" else pool.submit(time.sleep, 0)
            print("started", flush=True)
            for future in futures:
                future.result()
    except KeyboardInterrupt:
        print("interrupted")
"""


@pytest.mark.parametrize(("seconds", "tasks_per_process"), [("0", "0"), ("0", "1"), ("3600", "0")])
def test_ctrl_c_ends_all_at_once(tmp_path: Path, seconds: str, tasks_per_process: str) -> None:
    """While results come in, while processes start, and while every one is at work for long."""
    process = started(tmp_path, seconds, tasks_per_process)
    os.killpg(process.pid, signal.SIGINT)
    # Ends when no process has the pipes open any more.
    said, errors = process.communicate(timeout=240)
    assert (said, errors, process.returncode) == ("interrupted\n", "", 0)


def test_processes_end_with_a_main_process_that_is_killed(tmp_path: Path) -> None:
    process = started(tmp_path, "3600", "0")
    process.kill()
    assert process.communicate(timeout=240)[0] == ""


def started(folder: Path, seconds: str, tasks_per_process: str) -> subprocess.Popen[str]:
    (folder / "script.py").write_text(INTERRUPTED)
    process = subprocess.Popen(
        [sys.executable, str(folder / "script.py"), seconds, tasks_per_process],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    return process


def test_results_come_in_and_an_error_ends_the_rest() -> None:
    with ProcessPool(2) as pool:
        futures = [pool.submit(abs, -number) for number in range(5)]
        assert sorted(future.result() for future in as_completed(futures)) == list(range(5))
    with pytest.raises(TypeError), ProcessPool(2) as pool:
        pool.submit(time.sleep, 3600)
        pool.submit(abs, None).result()
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
