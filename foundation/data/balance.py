"""Batches of a window that hold nearly the same number of events, and no more than a batch may.

Base batch shuffling: requests, in their shuffled order, fill base batches of a hundred rows or so. Base batches are
dealt to batches, the heaviest first, each to the batch with the fewest events that has room: heavy ones meet light
ones. All batches of a window then come close to the window's mean. Windows are large and drawn alike on all ranks, so
their means are close to one another, and so are the batches that the ranks compute in the same step. No rank needs to
know what another one read; which requests a batch has depends on its window alone.

Legend: r requests, n base batches.
"""

from __future__ import annotations

import heapq

import numpy as np

MARGIN = 1.05
"""Batches are planned for so many times the expected events; without it, every other window had some to cut."""


def base_size(sizes: np.ndarray, base_batch: int, batch_size: int) -> int:
    """Rows that a base batch may have: as asked for, but enough for the largest request.

    Returns:
        0 where a request is larger than a batch: such a window is cut in the order of its requests.
    """
    largest = int(sizes.max()) if len(sizes) else 1
    return 0 if largest > batch_size else min(batch_size, max(base_batch, largest))


def base_stops(sizes: np.ndarray, rows: int) -> np.ndarray:
    """Fills base batches of at most ``rows`` rows with whole requests in their order.

    Args:
        sizes: rows of each request, int64 ``[r]``, none above ``rows``.

    Returns:
        The number of requests up to the end of each base batch, int64 ``[n]``.
    """
    ends = np.cumsum(sizes)
    stops = []
    position = stop = 0
    while stop < len(ends):
        stop = int(np.searchsorted(ends, position + rows, side="right"))
        position = int(ends[stop - 1])
        stops.append(stop)
    return np.array(stops, dtype=np.int64)


def fewest_batches(count: int, base: int, batch_size: int, *, drop_last: bool = False) -> int:
    """The least number of batches for ``count`` base batches; with ``drop_last``, of full ones."""
    each = batch_size // base
    return count // each if drop_last else -(-count // each)


def deal(tokens: np.ndarray, batches: int, most: int) -> list[list[int]]:
    """Base batches of each batch, in rising order.

    Args:
        tokens: of each base batch, int64 ``[n]``, ``n <= batches * most``.
        most: base batches that a batch may have.
    """
    assert len(tokens) <= batches * most
    most = min(most, -(-len(tokens) // batches)) if len(tokens) else most
    dealt: list[list[int]] = [[] for _ in range(batches)]
    lightest = [(0, batch) for batch in range(batches)]
    for number in np.argsort(-tokens, kind="stable").tolist():
        held, batch = heapq.heappop(lightest)
        dealt[batch].append(number)
        if len(dealt[batch]) < most:
            heapq.heappush(lightest, (held + int(tokens[number]), batch))
    return [sorted(own) for own in dealt]


def balanced(
    sizes: np.ndarray, tokens: np.ndarray, base: int, batch_size: int, batches: int, seed: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """Which requests each batch has.

    Args:
        sizes, tokens: rows and tokens of each request in the order of use, int64 ``[r]``.
        base: rows of a base batch.
        batches: at least `fewest_batches`, or fewer to leave out the last base batches.
        seed: for the order of the batches.

    Returns:
        the requests in their new order, as places in the old one, int64 ``[r']``; row positions between batches in that
        order, int64 ``[batches + 1]``.
    """
    stops = base_stops(sizes, base)[: batches * (batch_size // base)]
    starts = np.concatenate([[0], stops[:-1]]) if len(stops) else stops
    ends = np.concatenate([[0], np.cumsum(tokens)])
    dealt = deal(ends[stops] - ends[starts], batches, batch_size // base)
    dealt = [dealt[place] for place in np.random.default_rng(seed).permutation(batches).tolist()]
    requests = [np.arange(starts[number], stops[number]) for own in dealt for number in own]
    order = np.concatenate(requests) if requests else np.zeros(0, dtype=np.int64)
    rows = np.concatenate([[0], np.cumsum(sizes)])
    held = [sum(int(rows[stops[number]] - rows[starts[number]]) for number in own) for own in dealt]
    return order, np.concatenate([[0], np.cumsum(held, dtype=np.int64)])


def longest_history(lengths: np.ndarray, copies: np.ndarray, most: int) -> int | None:
    """The length to which histories must be cut so that together they have at most ``most`` events.

    Args:
        lengths: events of each history, int64 ``[histories]``.
        copies: how often each counts.

    Returns:
        ``None`` where nothing needs to be cut.
    """
    if int(lengths @ copies) <= most:
        return None
    low, high = 0, int(lengths.max())
    while low < high - 1:
        middle = (low + high) // 2
        if int(np.minimum(lengths, middle) @ copies) <= most:
            low = middle
        else:
            high = middle
    return low
