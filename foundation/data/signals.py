"""What Ctrl-C and SIGTERM do for the length of a block."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

Handler = Callable[[int, FrameType | None], object] | signal.Handlers


def in_main_thread() -> bool:
    """Whether this is the thread that may set handlers of signals."""
    return threading.current_thread() is threading.main_thread()


@contextmanager
def signals_go_to(handler: Handler) -> Iterator[None]:
    """Ctrl-C and SIGTERM go to `handler` within the block, where Python handles them; others stay as they are."""
    caught = [n for n in (signal.SIGINT, signal.SIGTERM) if in_main_thread() and callable(signal.getsignal(n))]
    before = [signal.signal(number, handler) for number in caught]
    try:
        yield
    finally:
        for number, old in zip(caught, before, strict=True):
            signal.signal(number, old)
