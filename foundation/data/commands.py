"""How every command ends: a status, and for a user's error one line on stderr, with no traceback.

Both `opengem COMMAND` and the modules that are run by `python -m` go through `run_command`.
"""

from __future__ import annotations

import io
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from foundation.data.signals import in_main_thread, signals_go_to

USAGE_ERROR = 2
INTERRUPTED = 130
TERMINATED = 143


def run_command(command: Callable[[list[str]], Any], arguments: list[str]) -> int:
    """Runs a command; returns its exit status: its own, 0 for None, 2 for a user's error.

    After Ctrl-C it is 130, and 143 after SIGTERM, with which batch systems and containers end a command.

    Args:
        command: takes the arguments without the program's name.
    """
    _make_streams_sure()
    ended_by: list[int] = []
    try:
        with _sigterm_raises(ended_by):
            return int(command(arguments) or 0)
    except KeyboardInterrupt:
        # It does not tell which of the two it was: Lightning raises one of its own.
        print("terminated" if ended_by else "interrupted", file=sys.stderr)
        return TERMINATED if ended_by else INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has gone (`| head`); the exit must not try to flush to it again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, OSError, MemoryError) as error:
        from foundation.parallel.final_error import is_final, report

        report(f"error: {_said(error)}", final=is_final(error))
        return USAGE_ERROR
    except RuntimeError as error:
        from concurrent.futures.process import BrokenProcessPool

        if not isinstance(error, BrokenProcessPool):
            raise
        print(
            "error: one of the processes was killed, mostly for want of memory; use fewer `processes`", file=sys.stderr
        )
        return USAGE_ERROR


def _make_streams_sure() -> None:
    """Opens what a caller has closed (`>&-`): the next file opened would take its place, and get what is printed.

    And stdout, like stderr, takes what its encoding does not have: the name of a file must not end a command that has
    written it.
    """
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), "r" if name == "stdin" else "w"))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


@contextmanager
def nothing_to_tidy() -> Iterator[None]:
    """Within the block Ctrl-C and SIGTERM end the process as it is: for imports, in which libraries swallow exceptions.

    An exception that a module of PyTorch caught for one of its own would be a Ctrl-C that does nothing.
    """
    said = {signal.SIGINT: ("interrupted", INTERRUPTED), signal.SIGTERM: ("terminated", TERMINATED)}

    def handler(number: int, _: object) -> None:
        text, status = said[signal.Signals(number)]
        os.write(2, f"{text}\n".encode())
        os._exit(status)

    with signals_go_to(handler):
        yield


@contextmanager
def _sigterm_raises(ended_by: list[int]) -> Iterator[None]:
    """SIGTERM is a Ctrl-C, so that no half output and no process stays; a second one ends at once.

    The signal is put into `ended_by` too.

    Not for ranks of `torchrun`: it ends them with this signal, also where one waits inside a collective for a rank
    that is gone and would never raise anything.
    """
    owner = os.getpid()
    others = "TORCHELASTIC_RUN_ID" in os.environ or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    if others or not in_main_thread():
        yield
        return

    def handler(number: int, _: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if os.getpid() != owner:  # in a fork
            os.kill(os.getpid(), number)
        ended_by.append(number)
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is handler:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _said(error: Exception) -> str:
    """What is wrong, in one line; of the system's errors the path first, under its final name."""
    text = str(error)
    if isinstance(error, OSError) and error.errno:  # without a number it is what we say
        if error.filename:
            text = f"{os.fsdecode(error.filename)}: {error.strerror}"
        text = re.sub(r"\.tmp-[^/\s]*-[0-9]+(-old)?", "", text)
    elif isinstance(error, MemoryError):
        text = f"there is not enough memory for sizes such as these{f' ({text})' if text else ''}"
    return " ".join(text.split())
