"""The plan of an epoch: every request once, ranks in step, batches within bounds, for any shape of data."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foundation.data.index import RowGroup, SplitIndex
from foundation.data.plan import PlanSettings, Unit, batch_cuts, fewest_batches, plan_epoch, window_requests

Request = tuple[int, int]
QUICK = settings(deadline=None, max_examples=60)


def make_index(groups: list[list[int]], wanted: list[list[bool]] | None = None) -> SplitIndex:
    """One file with these requests per row group, numbers of rows given."""
    made = []
    row = 0
    for number, sizes in enumerate(groups):
        array = np.array(sizes, dtype=np.int64)
        mask = np.array(wanted[number], dtype=bool) if wanted else np.ones(len(sizes), dtype=bool)
        made.append(
            RowGroup(
                file=0,
                group=number,
                first_row=row,
                rows=int(array.sum()),
                first_start=row,
                requests=len(sizes),
                selected_rows=int(array[mask].sum()),
                sizes=None if (array == 1).all() else array.astype(np.uint8),
                selected=None if mask.all() else np.packbits(mask),
            )
        )
        row += int(array.sum())
    return SplitIndex(("file",), (row,), tuple(made), 0.0)


def plan_settings(batch_size: int, window_rows: int, shuffle: bool = True, drop_last: bool = False) -> PlanSettings:
    return PlanSettings(
        batch_size=batch_size, window_rows=max(window_rows, batch_size), shuffle=shuffle, seed=3, drop_last=drop_last
    )


def batches_of(index: SplitIndex, plan: PlanSettings, unit: Unit) -> list[Counter[Request]]:
    """The rows of each request in every batch of a unit that is to be used."""
    requests = [
        (piece.group, request)
        for piece in unit.pieces
        for request in range(piece.first, piece.stop)
        if index.groups[piece.group].wanted_sizes(request, request + 1)[0]
    ]
    sizes, order = window_requests(index, unit)
    assert len(sizes) == len(requests)
    assert sum(piece.rows for piece in unit.pieces) == sizes.sum()
    rows = [requests[i] for i in order.tolist() for _ in range(int(sizes[i]))]
    cuts = batch_cuts(sizes[order], plan, unit.batches)
    return [Counter(rows[cuts[i] : cuts[i + 1]]) for i in range(unit.first, unit.stop)]


groups_ = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=12), min_size=1, max_size=6)
ones_ = st.lists(st.integers(1, 40).map(lambda n: [1] * n), min_size=1, max_size=6)


@QUICK
@given(
    groups=st.one_of(groups_, ones_),
    batch_size=st.integers(1, 12),
    window=st.integers(1, 40),
    ranks=st.integers(1, 5),
    epoch=st.integers(0, 3),
    shuffle=st.booleans(),
    data=st.data(),
)
def test_every_wanted_row_once_and_ranks_in_step(
    groups: list[list[int]],
    batch_size: int,
    window: int,
    ranks: int,
    epoch: int,
    shuffle: bool,
    data: st.DataObject,
) -> None:
    wanted = [data.draw(st.lists(st.booleans(), min_size=len(g), max_size=len(g))) for g in groups]
    index = make_index(groups, wanted)
    plan = plan_settings(batch_size, window, shuffle)
    shares = plan_epoch(index, plan, epoch, ranks)
    assert len({sum(unit.length for unit in share) for share in shares}) == 1
    seen: Counter[Request] = Counter()
    rows_of_rank = []
    for share in shares:
        batches = [batch for unit in share for batch in batches_of(index, plan, unit)]
        rows_of_rank.append(sum(batch.total() for batch in batches))
        for batch in batches:
            assert batch.total() <= batch_size
            for (group, request), count in batch.items():
                assert count == groups[group][request] or groups[group][request] > batch_size
            seen += batch
    assert seen == Counter(
        {(g, r): size for g, sizes in enumerate(groups) for r, size in enumerate(sizes) if wanted[g][r]}
    )
    # Each cut between ranks is off by at most one request.
    assert max(rows_of_rank) - min(rows_of_rank) <= 9 * ranks


@QUICK
@given(sizes=st.lists(st.integers(1, 20), max_size=40), batch_size=st.integers(1, 12), finer=st.integers(0, 5))
def test_cuts_fit_and_are_even(sizes: list[int], batch_size: int, finer: int) -> None:
    plan = plan_settings(batch_size, 1000)
    array = np.array(sizes, dtype=np.int64)
    least = fewest_batches(array, plan)
    cuts = batch_cuts(array, plan, least + finer)
    assert cuts[0] == 0 and cuts[-1] == array.sum() and len(cuts) == least + finer + 1
    widths = np.diff(cuts)
    assert (widths >= 0).all() and (widths <= batch_size).all()
    if finer == 0:
        assert (widths > 0).all()
        assert least >= -(-int(array.sum()) // batch_size)


@QUICK
@given(rows=st.integers(1, 5000), batch_size=st.integers(1, 300))
def test_single_rows_make_full_even_batches(rows: int, batch_size: int) -> None:
    plan = plan_settings(batch_size, 1)
    ones = np.ones(rows, dtype=np.int64)
    least = fewest_batches(ones, plan)
    assert least == -(-rows // batch_size)
    widths = np.diff(batch_cuts(ones, plan, least))
    assert widths.max() - widths.min() <= 1


@QUICK
@given(
    groups=st.one_of(groups_, ones_),
    batch_size=st.integers(1, 12),
    window=st.integers(1, 40),
    worlds=st.lists(st.integers(1, 4), min_size=2, max_size=4),
    data=st.data(),
)
def test_what_is_left_goes_to_other_numbers_of_ranks(
    groups: list[list[int]], batch_size: int, window: int, worlds: list[int], data: st.DataObject
) -> None:
    index = make_index(groups)
    plan = plan_settings(batch_size, window)
    seen: Counter[Request] = Counter()
    segments: list[tuple[int, int]] = []
    for step, world in enumerate(worlds):
        shares = plan_epoch(index, plan, 1, world, segments)
        lengths = {sum(unit.length for unit in share) for share in shares}
        assert len(lengths) == 1
        last = step == len(worlds) - 1
        consumed = lengths.pop() if last else data.draw(st.integers(0, max(lengths)))
        for share in shares:
            batches = [batch for unit in share for batch in batches_of(index, plan, unit)]
            seen = sum(batches[:consumed], seen)
        segments.append((world, consumed))
    assert seen == Counter({(g, r): size for g, sizes in enumerate(groups) for r, size in enumerate(sizes)})


@QUICK
@given(groups=ones_, batch_size=st.integers(1, 12), ranks=st.integers(1, 4))
def test_drop_last_gives_full_batches_only(groups: list[list[int]], batch_size: int, ranks: int) -> None:
    index = make_index(groups)
    plan = plan_settings(batch_size, 16, drop_last=True)
    shares = plan_epoch(index, plan, 0, ranks)
    assert len({sum(unit.length for unit in share) for share in shares}) == 1
    for share in shares:
        for unit in share:
            assert all(batch.total() == batch_size for batch in batches_of(index, plan, unit))


def test_windows_stay_inside_row_groups_and_within_size() -> None:
    index = make_index([[1] * 100, [1] * 30, [1] * 30, [1] * 30, [1] * 250])
    plan = plan_settings(10, 100)
    (share,) = plan_epoch(index, plan, 0, 1)
    for unit in share:
        assert sum(piece.rows for piece in unit.pieces) <= 100
    whole = [p for unit in share for p in unit.pieces if p.group in (0, 1, 2, 3)]
    assert all(piece.rows == index.groups[piece.group].rows for piece in whole)


def test_large_row_groups_are_read_side_by_side_each_in_order() -> None:
    index = make_index([[1] * 400, [1] * 400, [1] * 400])
    (share,) = plan_epoch(index, plan_settings(10, 100), 0, 1)
    order = [piece.group for unit in share for piece in unit.pieces]
    assert order[:3] != [order[0]] * 3
    for group in range(3):
        firsts = [p.first for unit in share for p in unit.pieces if p.group == group]
        assert firsts == sorted(firsts)


def test_file_order_without_shuffle() -> None:
    index = make_index([[2, 1, 3], [1, 1], [4, 4]])
    plan = plan_settings(4, 6, shuffle=False)
    (share,) = plan_epoch(index, plan, 5, 1)
    seen = [request for unit in share for batch in batches_of(index, plan, unit) for request in batch]
    assert seen == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1)]


def test_epochs_and_seeds_give_other_orders() -> None:
    index = make_index([[1] * 50] * 4)

    def order(epoch: int, seed: int) -> list[Request]:
        plan = PlanSettings(batch_size=10, window_rows=100, shuffle=True, seed=seed)
        (share,) = plan_epoch(index, plan, epoch, 1)
        return [r for unit in share for batch in batches_of(index, plan, unit) for r in batch]

    assert order(0, 1) == order(0, 1)
    assert len({tuple(order(epoch, seed)) for epoch in (0, 1) for seed in (1, 2)}) == 4


@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_ranks_have_equal_rows_from_few_unequal_row_groups(ranks: int) -> None:
    index = make_index([[1] * 1000, [1] * 10, [1] * 400])
    shares = plan_epoch(index, plan_settings(16, 64), 0, ranks)
    rows = [sum(piece.rows for unit in share for piece in unit.pieces) for share in shares]
    assert max(rows) - min(rows) <= 1
    assert all(unit.pieces for share in shares for unit in share)
