"""Which rank reads which rows in which order: the plan of an epoch.

A plan is a function of the split's index, the settings, the seed and the epoch alone, so every rank computes the
plan of all ranks and no rank has to talk to another:

1. Row groups, in shuffled or in file order, are dealt to the rank that has the fewest rows; one that would
   overfill a rank is split at the nearest request. All ranks end with nearly the same number of rows.
2. A rank's row groups are cut or gathered into windows. Inside a window, requests are shuffled.
3. A window is cut into batches of whole requests, all of nearly the same size. A rank that needs fewer batches
   than another cuts a little finer, so every rank has exactly the same number of them. Where batches are balanced by
   events (``foundation.data.balance``), the plan says how many there are, and the window's content what each holds.

When the number of ranks changes in mid-epoch, what the old ranks had left is dealt again to the new ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

import numpy as np

from foundation.data import balance
from foundation.data.index import SplitIndex

# Row groups larger than a window are read side by side, this many at a time: their windows mix better, and
# several workers can each read on in their own row group instead of skipping rows of a common one.
_LANES = 4
# Tells the random order of a window's batches from that of its requests.
_BATCH_ORDER = 1


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """What a plan depends on beside the data.

    ``window_rows`` is the greatest number of rows of a window, ``base_batch`` that of a base batch (0: batches are not
    balanced), ``copies`` whether each impression of a request counts its history anew, ``max_tokens`` the most
    events of a batch (0: any number).
    """

    batch_size: int
    window_rows: int
    shuffle: bool
    seed: int
    drop_last: bool = False
    base_batch: int = 0
    copies: bool = False
    max_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Piece:
    """Requests ``first .. stop - 1`` of a row group of the index, with ``rows`` wanted rows in all."""

    group: int
    first: int
    stop: int
    rows: int


@dataclass(frozen=True, slots=True)
class Unit:
    """A window: its pieces are read, shuffled with ``seed`` (``None``: file order) and cut into ``batches``.

    Batches ``first .. stop - 1`` of it are to be used. A unit without pieces stands for empty batches.
    """

    pieces: tuple[Piece, ...]
    seed: tuple[int, ...] | None
    batches: int
    first: int
    stop: int

    @property
    def length(self) -> int:
        """Batches to be used."""
        return self.stop - self.first


def plan_epoch(
    index: SplitIndex,
    settings: PlanSettings,
    epoch: int,
    world_size: int,
    segments: Sequence[tuple[int, int]] = (),
) -> list[list[Unit]]:
    """The units of every rank, each rank with the same total number of batches.

    Args:
        segments: what of this epoch was read with other numbers of ranks: (ranks, batches read on each).
    """
    worlds = [*(world for world, _ in segments), world_size]
    shares = _fresh(index, settings, epoch, worlds[0])
    for (_, consumed), world in zip(segments, worlds[1:], strict=True):
        shares = _deal_units(_remaining(shares, consumed), world)
    return shares


def window_requests(index: SplitIndex, unit: Unit) -> tuple[np.ndarray, np.ndarray]:
    """The requests of a window.

    Returns:
        rows of each wanted request in file order, int64 ``[r]``; the order in which they are used, int64 ``[r]``.
    """
    sizes = _sizes(index, unit.pieces)
    if unit.seed is None:
        return sizes, np.arange(len(sizes))
    return sizes, np.random.default_rng(unit.seed).permutation(len(sizes))


def window_batches(
    sizes: np.ndarray, order: np.ndarray, events: np.ndarray, settings: PlanSettings, unit: Unit
) -> tuple[np.ndarray, np.ndarray]:
    """The batches of a window.

    Args:
        sizes: rows of each request in file order, int64 ``[r]``.
        order: the shuffled requests, int64 ``[r]``.
        events: of the histories of each request in file order, int64 ``[r]``.

    Returns:
        the requests in the order of use, int64; row positions between batches in that order, int64 ``[batches + 1]``.
    """
    base = _base(sizes, settings)
    if not base:
        return order, batch_cuts(sizes[order], settings, unit.batches)
    assert unit.seed is not None
    tokens = (events * sizes if settings.copies else events)[order]
    places, cuts = balance.balanced(
        sizes[order], tokens, base, settings.batch_size, unit.batches, (*unit.seed, _BATCH_ORDER)
    )
    return order[places], cuts


def batch_cuts(sizes: np.ndarray, settings: PlanSettings, batches: int) -> np.ndarray:
    """Where a window is cut.

    Args:
        sizes: rows of each request in the order of use.
        batches: how many batches to make, at least :func:`fewest_batches`.

    Returns:
        row positions, int64 ``[batches + 1]``, ascending. No batch has more than ``batch_size`` rows, and none
        ends inside a request unless that alone is larger.
    """
    ends = _ends(sizes, settings.batch_size)
    total = int(ends[-1]) if len(ends) else 0
    if settings.drop_last:
        return _full_cuts(ends, settings.batch_size)[: batches + 1]
    filled = min(batches, len(ends))
    cuts = np.full(batches + 1, total, dtype=np.int64)
    cuts[0] = 0
    # The least end of batch j from which the rest still fits into the batches that follow.
    least = np.zeros(filled + 1, dtype=np.int64)
    place = len(ends) - 1
    for j in range(filled - 1, 0, -1):
        place = int(np.searchsorted(ends, ends[place] - settings.batch_size))
        least[j] = place
        if place == 0:
            break
    previous = -1
    for j in range(1, filled):
        start = int(ends[previous]) if previous >= 0 else 0
        low = max(int(least[j]), previous + 1)
        high = int(np.searchsorted(ends, start + settings.batch_size, side="right")) - 1
        high = min(high, len(ends) - 1 - (filled - j))
        ideal = int(np.searchsorted(ends, total * j / filled - 0.5))
        previous = min(max(ideal, low), high)
        cuts[j] = ends[previous]
    return cuts


def fewest_batches(sizes: np.ndarray, settings: PlanSettings) -> int:
    """The least number of batches for requests of these sizes in this order; with drop_last, of full ones."""
    base = _base(sizes, settings)
    if base:
        count = len(balance.base_stops(sizes, base))
        return balance.fewest_batches(count, base, settings.batch_size, drop_last=settings.drop_last)
    ends = _ends(sizes, settings.batch_size)
    if settings.drop_last:
        return len(_full_cuts(ends, settings.batch_size)) - 1
    position, count = 0, 0
    total = int(ends[-1]) if len(ends) else 0
    while position < total:
        place = int(np.searchsorted(ends, position + settings.batch_size, side="right")) - 1
        position = int(ends[place])
        count += 1
    return count


def _ends(sizes: np.ndarray, batch_size: int) -> np.ndarray:
    """Row positions at which a batch may end: after each request, and inside those larger than a batch."""
    ends = np.cumsum(sizes)
    if len(sizes) and int(sizes.max()) > batch_size:
        inside = [
            np.arange(end - size + batch_size, end, batch_size)
            for end, size in zip(ends.tolist(), sizes.tolist(), strict=True)
            if size > batch_size
        ]
        ends = np.union1d(ends, np.concatenate(inside))
    return ends


def _full_cuts(ends: np.ndarray, batch_size: int) -> np.ndarray:
    """Cuts of the fullest batches from the front; a last one that the window's end left short is dropped."""
    cuts = [0]
    total = int(ends[-1]) if len(ends) else 0
    while total - cuts[-1] >= batch_size:
        cuts.append(int(ends[int(np.searchsorted(ends, cuts[-1] + batch_size, side="right")) - 1]))
    return np.array(cuts, dtype=np.int64)


def _sizes(index: SplitIndex, pieces: Iterable[Piece]) -> np.ndarray:
    """Rows of each wanted request of the pieces, int64."""
    parts = []
    for piece in pieces:
        sizes = index.groups[piece.group].wanted_sizes(piece.first, piece.stop)
        parts.append(sizes[sizes > 0])
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def _fresh(index: SplitIndex, settings: PlanSettings, epoch: int, world_size: int) -> list[list[Unit]]:
    groups = [
        Piece(number, 0, group.requests, group.selected_rows)
        for number, group in enumerate(index.groups)
        if group.selected_rows
    ]
    if settings.shuffle:
        order = np.random.default_rng((settings.seed, epoch)).permutation(len(groups))
        groups = [groups[i] for i in order.tolist()]
    shares = [
        _windows(index, settings, (settings.seed, epoch, world_size, rank), share)
        for rank, share in enumerate(_deal_pieces(index, groups, world_size))
    ]
    if settings.drop_last:
        fewest = min(_total(share) for share in shares)
        return [_take(share, fewest) for share in shares]
    most = max(_total(share) for share in shares)
    return [_stretch(index, settings, share, most) for share in shares]


def _deal_pieces(index: SplitIndex, pieces: list[Piece], world_size: int) -> list[list[Piece]]:
    """Deals pieces to the rank with the most room; a piece larger than the room is split at a request."""
    total = sum(piece.rows for piece in pieces)
    room = [total * (rank + 1) // world_size - total * rank // world_size for rank in range(world_size)]
    shares: list[list[Piece]] = [[] for _ in room]
    queue = deque(pieces)
    while queue:
        piece = queue.popleft()
        rank = max(range(world_size), key=room.__getitem__)
        if piece.rows > room[rank]:
            parts = _split(index, piece, [room[rank]])
            piece = parts[0]
            queue.extendleft(reversed(parts[1:]))
        shares[rank].append(piece)
        room[rank] -= piece.rows
    return shares


def _split(index: SplitIndex, piece: Piece, rows: list[int]) -> list[Piece]:
    """Splits a piece near the given numbers of rows from its start, at requests; no part is without rows."""
    group = index.groups[piece.group]
    if group.sizes is None and group.selected is None:
        marks = [0, *(cut for cut in rows if cut < piece.rows), piece.rows]
        stops, ends = marks, marks
    else:
        filled = np.cumsum(group.wanted_sizes(piece.first, piece.stop))
        cuts = np.array([cut for cut in rows if cut < piece.rows], dtype=np.int64)
        found = np.searchsorted(filled, cuts)
        before = filled[np.maximum(found - 1, 0)]
        found -= (found > 0) & (before > 0) & (cuts - before < filled[found] - cuts)
        stops = [0, *sorted({int(place) + 1 for place in found} | {piece.stop - piece.first})]
        ends = [0, *(int(filled[stop - 1]) for stop in stops[1:])]
    return [
        Piece(piece.group, piece.first + stops[i], piece.first + stops[i + 1], ends[i + 1] - ends[i])
        for i in range(len(stops) - 1)
        if ends[i + 1] > ends[i]
    ]


def _windows(index: SplitIndex, settings: PlanSettings, seed: tuple[int, ...], share: list[Piece]) -> list[Unit]:
    """Cuts large pieces, gathers small ones, and counts each window's batches."""
    limit = settings.window_rows
    cut: list[list[Piece]] = []
    for piece in share:
        count = -(-piece.rows // limit)
        cut.append(_split(index, piece, [piece.rows * i // count for i in range(1, count)]))
    pieces = _interleave(cut) if settings.shuffle else [piece for parts in cut for piece in parts]
    gathered: list[list[Piece]] = []
    rows = limit
    for piece in pieces:
        if rows + piece.rows > limit:
            gathered.append([])
            rows = 0
        gathered[-1].append(piece)
        rows += piece.rows
    units = []
    for number, window in enumerate(gathered):
        unit = Unit(tuple(window), (*seed, number) if settings.shuffle else None, 0, 0, 0)
        count = _count(index, settings, unit)
        units.append(replace(unit, batches=count, stop=count))
    return [unit for unit in units if unit.batches]


def _interleave(parts: list[list[Piece]]) -> list[Piece]:
    """One piece of each of the first few row groups in turn; a row group that ends makes room for the next."""
    waiting = deque(deque(p) for p in parts)
    lanes: deque[deque[Piece]] = deque()
    out = []
    while waiting or lanes:
        while waiting and len(lanes) < _LANES:
            lanes.append(waiting.popleft())
        lane = lanes.popleft()
        out.append(lane.popleft())
        if lane:
            lanes.append(lane)
    return out


def _base(sizes: np.ndarray, settings: PlanSettings) -> int:
    """Rows of a base batch of this window; 0 where its batches are cut in the order of use."""
    return balance.base_size(sizes, settings.base_batch, settings.batch_size) if settings.base_batch else 0


def _most_batches(index: SplitIndex, settings: PlanSettings, unit: Unit) -> int:
    """How finely a window can be cut."""
    sizes, order = window_requests(index, unit)
    base = _base(sizes, settings)
    return len(balance.base_stops(sizes[order], base)) if base else len(_ends(sizes, settings.batch_size))


def _count(index: SplitIndex, settings: PlanSettings, unit: Unit) -> int:
    if not settings.base_batch and all(index.groups[piece.group].sizes is None for piece in unit.pieces):
        rows = sum(piece.rows for piece in unit.pieces)
        return rows // settings.batch_size if settings.drop_last else -(-rows // settings.batch_size)
    sizes, order = window_requests(index, unit)
    count = fewest_batches(sizes[order], settings)
    if settings.max_tokens:
        wanted = -(-int(balance.MARGIN * _expected_tokens(index, settings, unit)) // settings.max_tokens)
        count = max(count, min(wanted, _most_batches(index, settings, unit)))
    return count


def _expected_tokens(index: SplitIndex, settings: PlanSettings, unit: Unit) -> float:
    """Events of a window as the files' footers tell them: so many of each row of a row group on average."""
    total = 0.0
    for piece in unit.pieces:
        group = index.groups[piece.group]
        counted = piece.rows if settings.copies else int((group.wanted_sizes(piece.first, piece.stop) > 0).sum())
        total += group.events * counted
    return total


def _total(units: Iterable[Unit]) -> int:
    return sum(unit.length for unit in units)


def _take(units: list[Unit], batches: int) -> list[Unit]:
    """The first ``batches`` batches."""
    out = []
    for unit in units:
        if batches:
            used = min(batches, unit.length)
            out.append(replace(unit, stop=unit.first + used))
            batches -= used
    return out


def _stretch(index: SplitIndex, settings: PlanSettings, units: list[Unit], batches: int) -> list[Unit]:
    """Cuts windows finer until there are ``batches`` batches; empty ones follow if there are too few requests."""
    lacking = batches - _total(units)
    out = list(units)
    while lacking:
        before = lacking
        for i, unit in enumerate(out):
            if lacking and unit.batches < _most_batches(index, settings, unit):
                out[i] = replace(unit, batches=unit.batches + 1, stop=unit.stop + 1)
                lacking -= 1
        if lacking == before:
            out.append(_empty(lacking))
            lacking = 0
    return out


def _empty(batches: int) -> Unit:
    return Unit((), None, batches, 0, batches)


def _remaining(shares: list[list[Unit]], consumed: int) -> list[Unit]:
    """What is left of all ranks' units, in the order in which they would have been read."""
    left = []
    for share in shares:
        skip, rest = consumed, []
        for unit in share:
            used = min(skip, unit.length)
            skip -= used
            if unit.pieces and used < unit.length:
                rest.append(replace(unit, first=unit.first + used))
        left.append(rest)
    return [unit for column in zip_longest(*left) for unit in column if unit is not None]


def _deal_units(units: list[Unit], world_size: int) -> list[list[Unit]]:
    """Deals batches of existing windows to ranks; a window may be shared by several."""
    total = _total(units)
    room = [total * (rank + 1) // world_size - total * rank // world_size for rank in range(world_size)]
    most = max(room)
    shares: list[list[Unit]] = [[] for _ in room]
    queue = deque(units)
    while queue:
        unit = queue.popleft()
        rank = max(range(world_size), key=room.__getitem__)
        if unit.length > room[rank]:
            queue.appendleft(replace(unit, first=unit.first + room[rank]))
            unit = replace(unit, stop=unit.first + room[rank])
        shares[rank].append(unit)
        room[rank] -= unit.length
    return [[*share, _empty(most - _total(share))] if _total(share) < most else share for share in shares]
