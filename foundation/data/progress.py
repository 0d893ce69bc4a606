"""Progress bars on stderr. Silent when stderr is not a terminal, so logs and pipes stay clean."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

T = TypeVar("T")


def track(iterable: Iterable[T], description: str, total: float | None = None) -> Iterator[T]:
    """Yields the items of `iterable` and shows one bar while they are consumed.

    Args:
        iterable: anything; its length is used when `total` is not given and it has one.
        description: what is being done, such as "training".
        total: number of items, or None when unknown.
    """
    if total is None and isinstance(iterable, Sized):
        total = len(iterable)
    with progress(description, total) as advance:
        for item in iterable:
            yield item
            advance(1)


@contextmanager
def progress(description: str, total: float | None = None) -> Iterator[Callable[..., None]]:
    """Shows one bar and yields `advance(amount=1, description=None)`, for work that is not one iterable.

    Args:
        description: what is being done.
        total: the amount at which the bar is full (rows, bytes, steps), or None when unknown.
    """
    console = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )
    with bar:
        task = bar.add_task(description, total=total)

        def advance(amount: float = 1, description: str | None = None) -> None:
            bar.update(task, advance=amount, description=description)

        yield advance
