"""Balanced batches: every row once, ranks in step, nearly equal events, never above the limit."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foundation.data.balance import balanced, base_size, base_stops, deal, fewest_batches, longest_history
from foundation.data.dataset import Dataset
from foundation.data.encoding import EncodedBatch
from foundation.data.logs import LogReader, ReaderConfig
from foundation.data.plan import PlanSettings, plan_epoch, window_batches, window_requests
from tests.foundation.data.builders import small_table, train_parts, write_dataset
from tests.foundation.data.test_plan import Request, make_index

QUICK = settings(deadline=None, max_examples=50)
sizes_ = st.lists(st.integers(1, 9), max_size=60).map(lambda sizes: np.array(sizes, dtype=np.int64))


@QUICK
@given(sizes=sizes_, rows=st.integers(9, 30))
def test_base_batches_hold_whole_requests_and_are_as_full_as_they_can_be(sizes: np.ndarray, rows: int) -> None:
    stops = base_stops(sizes, rows)
    starts = np.concatenate([[0], stops[:-1]]).astype(int) if len(stops) else stops
    held = [int(sizes[a:b].sum()) for a, b in zip(starts, stops, strict=True)]
    assert sum(held) == sizes.sum() and all(0 < count <= rows for count in held)
    assert all(count + sizes[stop] > rows for count, stop in zip(held, stops[:-1], strict=False))


@QUICK
@given(
    tokens=st.lists(st.integers(0, 10**6), max_size=60), most=st.integers(1, 8), finer=st.integers(0, 4), data=st.data()
)
def test_everything_is_dealt_and_no_batch_has_too_many(
    tokens: list[int], most: int, finer: int, data: st.DataObject
) -> None:
    batches = max(1, -(-len(tokens) // most)) + finer
    dealt = deal(np.array(tokens, dtype=np.int64), batches, most)
    assert sorted(number for own in dealt for number in own) == list(range(len(tokens)))
    assert all(len(own) <= -(-len(tokens) // batches) <= most for own in dealt)


@pytest.mark.parametrize("sigma", [0.5, 1.0, 1.5])
def test_batches_come_within_a_tenth_of_the_optimum(sigma: float) -> None:
    rng = np.random.default_rng(0)
    tokens = np.rint(np.minimum(rng.lognormal(0, sigma, 8192) * 500, 10_000)).astype(np.int64)
    sizes = rng.integers(1, 16, 8192)
    base = base_size(sizes, 128, 1024)
    count = fewest_batches(len(base_stops(sizes, base)), base, 1024)
    order, cuts = balanced(sizes, tokens, base, 1024, count, (1, 2))
    assert sorted(order.tolist()) == list(range(8192))
    stops = np.searchsorted(np.cumsum(sizes[order]), cuts[1:])
    held = np.diff(np.concatenate([[0], np.cumsum(tokens[order])])[np.concatenate([[0], stops + 1])])
    assert held.sum() == tokens.sum() and (np.diff(cuts) <= 1024).all()
    assert held.max() <= 1.1 * max(held.mean(), tokens.max())


@QUICK
@given(
    lengths=st.lists(st.integers(0, 50), min_size=1, max_size=30),
    most=st.integers(0, 300),
    copies=st.lists(st.integers(1, 4), min_size=30, max_size=30),
)
def test_histories_are_cut_no_more_than_needed(lengths: list[int], most: int, copies: list[int]) -> None:
    n, c = np.array(lengths), np.array(copies[: len(lengths)])
    found = longest_history(n, c, most)
    if found is None:
        assert n @ c <= most
    else:
        assert np.minimum(n, found) @ c <= most < np.minimum(n, found + 1) @ c


groups_ = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=12), min_size=1, max_size=6)


@QUICK
@given(
    groups=groups_,
    batch_size=st.integers(4, 24),
    base=st.integers(1, 12),
    window=st.integers(1, 60),
    worlds=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    copies=st.booleans(),
    max_tokens=st.sampled_from([0, 40]),
    data=st.data(),
)
def test_every_row_once_and_ranks_in_step_with_other_numbers_of_ranks_too(
    groups: list[list[int]],
    batch_size: int,
    base: int,
    window: int,
    worlds: list[int],
    copies: bool,
    max_tokens: int,
    data: st.DataObject,
) -> None:
    index = make_index(groups)
    plan = PlanSettings(
        batch_size=batch_size,
        window_rows=max(window, batch_size),
        shuffle=True,
        seed=3,
        base_batch=base,
        copies=copies,
        max_tokens=max_tokens,
    )
    events = [np.random.default_rng(g).integers(0, 30, len(sizes)) for g, sizes in enumerate(groups)]
    seen: Counter[Request] = Counter()
    segments: list[tuple[int, int]] = []
    for world in worlds:
        shares = plan_epoch(index, plan, 0, world, segments)
        (length,) = {sum(unit.length for unit in share) for share in shares}
        stop = length if world is worlds[-1] else data.draw(st.integers(0, length))
        for share in shares:
            left = stop
            for unit in share:
                taken = min(left, unit.length)
                left -= taken
                if not unit.pieces:
                    continue
                names = [(p.group, r) for p in unit.pieces for r in range(p.first, p.stop)]
                sizes, order = window_requests(index, unit)
                own = np.array([events[g][r] for g, r in names])
                order, cuts = window_batches(sizes, order, own, plan, unit)
                rows = [names[i] for i in order.tolist() for _ in range(int(sizes[i]))]
                for number in range(unit.first, unit.first + taken):
                    batch = rows[cuts[number] : cuts[number + 1]]
                    assert len(batch) <= batch_size
                    seen.update(batch)
        segments.append((world, stop))
        if stop == length:
            break
    assert seen == Counter({(g, r): size for g, sizes in enumerate(groups) for r, size in enumerate(sizes)})


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    sizes = [1 + i % 3 for i in range(300)]
    return write_dataset(tmp_path_factory.mktemp("balance"), train_parts(small_table(sizes)), row_group_size=50)


def read(dataset: Dataset, rank: int = 0, world: int = 1, **values: Any) -> list[EncodedBatch]:
    made = {"batch_size": 32, "base_batch": 4, "balance": "request", "workers": 0, "seed": 5, **values}
    return list(LogReader(dataset, "train", ReaderConfig(**made), rank=rank, world_size=world))


def events(batch: EncodedBatch, copies: bool = False) -> int:
    lengths = batch.request.lengths["watched.item"]
    return int(lengths[batch.request_index].sum() if copies else lengths.sum())


def ids(batches: list[EncodedBatch]) -> list[int]:
    return [i for batch in batches for i in batch.impression_id.tolist()]


def test_reading_in_order_balances_nothing() -> None:
    config = ReaderConfig(batch_size=32, balance="request", max_tokens=20, workers=0)
    assert config.in_order() == ReaderConfig(batch_size=32, shuffle_window=0, workers=0)


@pytest.mark.parametrize("balance", ["request", "impression"])
def test_the_reader_yields_the_same_rows_in_more_equal_batches(dataset: Dataset, balance: str) -> None:
    plain, even = read(dataset, balance="none"), read(dataset, balance=balance)
    assert sorted(ids(plain)) == sorted(ids(even)) and max(b.item.rows for b in even) <= 32
    copies = balance == "impression"
    spread = [np.ptp([events(b, copies) for b in batches[:-1]]) for batches in (plain, even)]
    assert spread[1] < spread[0]


@pytest.mark.parametrize("workers", [0, 2])
def test_ranks_stop_together_and_the_order_does_not_depend_on_workers(dataset: Dataset, workers: int) -> None:
    shares = [read(dataset, rank, 2, workers=workers) for rank in range(2)]
    assert len(shares[0]) == len(shares[1])
    assert [ids([b]) for b in shares[0]] == [ids([b]) for b in read(dataset, 0, 2)]
    assert sorted(ids(shares[0] + shares[1])) == sorted(ids(read(dataset)))


def test_no_batch_has_more_events_than_allowed_and_the_latest_are_kept(dataset: Dataset) -> None:
    config = ReaderConfig(batch_size=32, base_batch=4, balance="request", max_tokens=20, workers=0)
    reader = LogReader(dataset, "train", config)
    capped = list(reader)
    assert len(capped) > len(read(dataset))
    assert all(events(batch) <= 20 for batch in capped) and sorted(ids(capped)) == sorted(ids(read(dataset)))
    whole = {}
    for batch in read(dataset):
        times = np.split(batch.request.times["watched"], np.cumsum(batch.request.lengths["watched.item"])[:-1])
        whole |= {batch.impression_id[i]: times[r].tolist() for i, r in enumerate(batch.request_index.tolist())}
    cut = 0
    for batch in capped:
        times = np.split(batch.request.times["watched"], np.cumsum(batch.request.lengths["watched.item"])[:-1])
        for request, own in enumerate(times):
            all_of_it = whole[batch.impression_id[batch.request_index.tolist().index(request)]]
            assert own.tolist() == all_of_it[len(all_of_it) - len(own) :]
            cut += len(own) < len(all_of_it)
    assert reader.counters.get("histories", {}).get("cut to max_tokens", 0) == cut


def test_drop_last_leaves_out_batches_that_are_not_full(dataset: Dataset) -> None:
    shares = [read(dataset, rank, 2, drop_last=True) for rank in range(2)]
    assert len(shares[0]) == len(shares[1]) > 3
    seen = ids(shares[0] + shares[1])
    assert len(set(seen)) == len(seen) < len(ids(read(dataset)))
    assert all(
        batch.item.rows > 32 - 8 * 2 for share in shares for batch in share
    )  # a base batch lacks two rows at most


def test_a_run_goes_on_where_it_stopped_with_another_number_of_ranks(dataset: Dataset) -> None:
    config = ReaderConfig(batch_size=16, base_batch=4, balance="request", max_tokens=12, workers=0)
    seen, states = [], []
    for rank in range(2):
        reader = LogReader(dataset, "train", config, rank=rank, world_size=2)
        for number, batch in enumerate(reader):
            seen += batch.impression_id.tolist()
            if number == 4:
                states.append(reader.state_dict())
                break
    assert states[0] == states[1]
    for rank in range(3):
        reader = LogReader(dataset, "train", config, rank=rank, world_size=3)
        reader.load_state_dict(states[0])
        seen += ids(list(reader))
    assert sorted(seen) == sorted(ids(read(dataset)))


def test_a_position_of_other_batches_is_refused(dataset: Dataset) -> None:
    config = ReaderConfig(batch_size=32, balance="request", workers=0)
    state = LogReader(dataset, "train", config).state_dict()
    with pytest.raises(ValueError, match="balance was"):
        LogReader(dataset, "train", ReaderConfig(batch_size=32, workers=0)).load_state_dict(state)
    old = {**state, "made_with": {k: v for k, v in state["made_with"].items() if k != "balance"}}
    LogReader(dataset, "train", ReaderConfig(batch_size=32, workers=0)).load_state_dict(old)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"balance": "all"}, "must be none, request or impression"),
        ({"balance": "request", "shuffle_window": 0}, "set reader.shuffle_window"),
        ({"max_tokens": 5}, "needs reader.balance"),
        ({"base_batch": 0}, "at least 1"),
    ],
)
def test_options_that_do_not_go_together_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ReaderConfig(**values)


def test_empty_windows_and_requests_larger_than_a_batch_are_fine() -> None:
    assert fewest_batches(0, 128, 1024) == 0
    assert base_size(np.zeros(0, np.int64), 128, 1024) == 128
    assert base_size(np.array([2000]), 128, 1024) == 0
    assert deal(np.zeros(0, np.int64), 3, 2) == [[], [], []]
