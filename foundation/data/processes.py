"""A pool of processes that Ctrl-C ends at once and whole.

A terminal sends Ctrl-C to every process of a command. One that it meets while it hands back a result takes the
queue's lock with it, and the command waits for ever; so here it is for the main process alone, which ends the others.
Should that one be killed, they end by themselves.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from types import TracebackType
from typing import Any, Literal


class ProcessPool(ProcessPoolExecutor):
    """The standard library's pool, in new processes that do not see Ctrl-C; an exception in its block ends them.

    Args:
        processes: so many at most.
        tasks_per_process: a process ends after so many tasks; None for no limit.
        method: how processes start, `spawn` or `forkserver`.

    Example:
        >>> with ProcessPool(2) as pool:
        ...     future = pool.submit(abs, -1)
        >>> future.result()
        1
    """

    def __init__(
        self,
        processes: int,
        *,
        tasks_per_process: int | None = None,
        method: Literal["spawn", "forkserver"] = "spawn",
    ) -> None:
        context = multiprocessing.get_context(method)
        super().__init__(
            processes, mp_context=context, max_tasks_per_child=tasks_per_process, initializer=_end_with_parent
        )

    def submit(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """As in the standard library."""
        # The processes, and the thread that starts more of them, begin with the signals blocked that are blocked here.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            return super().submit(call, *args, **kwargs)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Waits for what was submitted; after an exception ends the processes instead."""
        if error is not None:
            for process in multiprocessing.active_children():
                process.terminate()
        self.shutdown(wait=True, cancel_futures=error is not None)


def _end_with_parent() -> None:
    """Ends this process when the main one is gone: it would wait for its next task for ever, or train on unseen."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, name="watches the main process", daemon=True).start()
