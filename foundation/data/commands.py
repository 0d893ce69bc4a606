"""How every command ends: a status, and for a user's error one line on stderr, with no traceback.

Both `opengem COMMAND` and the modules that are run by `python -m` go through `run_command`.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from typing import Any

USAGE_ERROR = 2
INTERRUPTED = 130


def run_command(command: Callable[[list[str]], Any], arguments: list[str]) -> int:
    """Runs a command; returns its exit status: its own, 0 for None, 2 for a user's error, 130 after Ctrl-C.

    Args:
        command: takes the arguments without the program's name.
    """
    try:
        return int(command(arguments) or 0)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
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


def _said(error: Exception) -> str:
    """What is wrong, in one line; of the system's errors the path first, under its final name."""
    text = str(error)
    if isinstance(error, OSError) and error.errno and error.filename:
        final = re.sub(r"\.tmp-[^/]*-[0-9]+(-old)?", "", os.fsdecode(error.filename))
        text = f"{final}: {error.strerror}"
    elif isinstance(error, MemoryError):
        text = f"there is not enough memory for sizes such as these{f' ({text})' if text else ''}"
    return " ".join(text.split())
