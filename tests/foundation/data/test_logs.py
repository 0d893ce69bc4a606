"""The reader end to end on real Parquet files: content, order, ranks, position, epochs."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foundation.data import encoding, parquet_rows, window
from foundation.data.dataset import Dataset
from foundation.data.encoding import Column, EncodedBatch, EncodedRows, encode_rows
from foundation.data.ids import xxhash64
from foundation.data.logs import LogReader, ReaderConfig
from foundation.data.storage import DatasetError
from tests.foundation.data.builders import (
    SURFACES,
    small_rows,
    small_schema,
    small_table,
    train_parts,
    write_dataset,
)

SIZES = [1, 3, 2, 5, 1, 9, 2, 1, 1, 4] * 4
SECOND = [2, 1, 6] * 5
TOTAL = sum(SIZES) + sum(SECOND)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Two files with small row groups across which requests run on."""
    tables = small_table(SIZES), small_table(SECOND, seed=1, first_id=1000)
    return write_dataset(tmp_path_factory.mktemp("logs"), train_parts(*tables), row_group_size=7)


@pytest.fixture(scope="module")
def single_rows(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Each row its own request, in row groups larger than the windows of the tests."""
    schema = small_schema(request_id=None)
    tables = small_table([1] * 300), small_table([1] * 41, seed=1, first_id=1000)
    return write_dataset(tmp_path_factory.mktemp("single"), train_parts(*tables), schema, row_group_size=130)


def ids(batches: Iterable[EncodedBatch]) -> list[int]:
    return [i for batch in batches for i in batch.impression_id.tolist()]


def config(**values: Any) -> ReaderConfig:
    return ReaderConfig(**({"batch_size": 8, "shuffle_window": 24, "workers": 0, "seed": 5} | values))


def read(dataset: Dataset, **values: Any) -> list[EncodedBatch]:
    return list(LogReader(dataset, "train", config(**values)))


def same(left: EncodedBatch, right: EncodedBatch) -> None:
    """Both batches hold equal arrays of equal dtypes."""
    for name in left.__slots__:
        a, b = getattr(left, name), getattr(right, name)
        if not isinstance(a, EncodedRows):
            np.testing.assert_array_equal(a, b)
            assert a.dtype == b.dtype
            continue
        for part in ("ids", "lengths", "weights", "times"):
            assert list(getattr(a, part)) == list(getattr(b, part))
            for key, value in getattr(a, part).items():
                np.testing.assert_array_equal(value, getattr(b, part)[key])
                assert value.dtype == getattr(b, part)[key].dtype
        np.testing.assert_array_equal(a.dense, b.dense)


def encode_one(dataset: Dataset, row: dict[str, Any]) -> tuple[EncodedRows, EncodedRows]:
    """One row encoded by itself, from plain Python values."""
    schema = dataset.schema
    columns = {}
    for name, value in row.items():
        if isinstance(value, list) or name == "likes":
            values = value or []
            kind: Any = object if name in ("likes", "topics") else np.float64 if name == "image" else None
            kind = np.float64 if name == "topic_weights" else kind
            array = np.array(values, dtype=kind) if values else np.zeros(0, kind or np.int64)
            columns[name] = Column(array, offsets=np.array([0, len(values)]))
        elif value is None:
            columns[name] = Column(np.zeros(1), valid=np.zeros(1, bool))
        else:
            columns[name] = Column(np.array([value], dtype=object if isinstance(value, str) else None))
    return (
        encode_rows(dataset.encoder, schema.request_features, schema.sequences, columns, 1),
        encode_rows(dataset.encoder, schema.item_features, (), columns, 1),
    )


@pytest.mark.parametrize("window", [0, 24, 1000])
def test_every_value_equals_the_row_encoded_by_itself(dataset: Dataset, window: int) -> None:
    rows: dict[int, dict[str, Any]] = {}
    for columns in (small_rows(SIZES), small_rows(SECOND, 1, 1000)):
        for values in zip(*columns.values(), strict=True):
            row = dict(zip(columns, values, strict=True))
            rows[row["impression_id"]] = row
    seen = set()
    for batch in read(dataset, shuffle_window=window):
        assert (np.diff(batch.request_index) >= 0).all()
        assert set(batch.request_index.tolist()) == set(range(batch.request.rows))
        for n, (impression, r) in enumerate(zip(batch.impression_id.tolist(), batch.request_index, strict=True)):
            row = rows[impression]
            request, item = encode_one(dataset, row)
            seen.add(impression)
            for side, number, expected in ((batch.request, int(r), request), (batch.item, n, item)):
                one = side.take(np.array([number]))
                for part in ("ids", "lengths", "weights", "times"):
                    for key, value in getattr(expected, part).items():
                        assert getattr(one, part)[key].tolist() == value.tolist(), (key, row)
                np.testing.assert_array_equal(one.dense, expected.dense)
            assert batch.request_time[r] == row["time_ms"]
            assert batch.surface[r] == [*SURFACES, "elsewhere"].index(row["surface"])
            assert batch.user_id[r] == xxhash64(np.array([row["user_id"]], dtype=object), 0).view(np.int64)[0]
            labels = [row["click"], row["like"], row["conversion"]]
            valid = [True, row["like"] is not None, row["click"] == 1]
            assert batch.label_valid[n].tolist() == valid
            assert [x for x, ok in zip(batch.labels[n].tolist(), valid, strict=True) if ok] == [
                x for x, ok in zip(labels, valid, strict=True) if ok
            ]
    assert seen == set(rows)


def test_requests_stay_whole_unless_larger_than_a_batch(dataset: Dataset) -> None:
    for batch in read(dataset, batch_size=9):
        assert 0 < len(batch.impression_id) <= 9
        requests = {i: int(r) for i, r in zip(batch.impression_id.tolist(), batch.request_index, strict=True)}
        for impression, request in requests.items():
            rest = np.flatnonzero(batch.request_index == request)
            assert batch.impression_id[rest].tolist() == sorted(batch.impression_id[rest].tolist())
            assert impression in batch.impression_id[rest]
    parts = [
        b for b in read(dataset, batch_size=4) if 9 in np.bincount(b.request_index).tolist() or b.request.rows == 1
    ]
    assert max(len(b.impression_id) for b in parts) <= 4


@pytest.mark.parametrize("window", [0, 24])
def test_order_does_not_depend_on_workers(dataset: Dataset, single_rows: Dataset, window: int) -> None:
    for source in (dataset, single_rows):
        alone = read(source, shuffle_window=window)
        for workers in (1, 2, 3):
            many = read(source, shuffle_window=window, workers=workers, prefetch=workers)
            assert len(many) == len(alone)
            for left, right in zip(alone, many, strict=True):
                same(left, right)


@pytest.mark.parametrize("workers", [0, 1])
def test_content_does_not_depend_on_portions(dataset: Dataset, monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    """How many values are looked up at once, how many rows are decoded at once, and how memory grows."""
    expected = read(dataset)
    monkeypatch.setattr(encoding, "_LOOKUP", 3)
    monkeypatch.setattr(window, "_MANY", 1)
    monkeypatch.setattr(parquet_rows, "_BATCH_ROWS", 2)
    for left, right in zip(expected, read(dataset, workers=workers), strict=True):
        same(left, right)


def test_counters_do_not_depend_on_workers(dataset: Dataset) -> None:
    readers = [LogReader(dataset, "train", config(workers=workers)) for workers in (0, 1, 2)]
    for reader in readers:
        list(reader)
    counts = [json.loads(json.dumps(reader.counters)) for reader in readers]
    assert counts[0] == counts[1] == counts[2]
    assert counts[0]["watched"]["truncated"] > 0
    likes = small_rows(SIZES)["like"] + small_rows(SECOND, 1, 1000)["like"]
    assert counts[0]["like"]["null"] == sum(v is None for v in likes)


def test_file_order_is_the_order_of_files(dataset: Dataset) -> None:
    assert ids(read(dataset, shuffle_window=0)) == [*range(sum(SIZES)), *range(1000, 1000 + sum(SECOND))]


def test_epochs_reshuffle_and_repeat_exactly(dataset: Dataset) -> None:
    reader = LogReader(dataset, "train", config())
    first, second = ids(reader), ids(reader)
    assert reader.epoch == 2
    assert first != second and sorted(first) == sorted(second) and len(set(first)) == TOTAL
    again = LogReader(dataset, "train", config())
    again.set_epoch(1)
    assert ids(again) == second
    again.set_epoch(0)
    assert ids(again) == first
    assert ids(LogReader(dataset, "train", config(seed=6))) != first


def test_length_is_the_number_of_batches(dataset: Dataset, single_rows: Dataset) -> None:
    for source in (dataset, single_rows):
        reader = LogReader(source, "train", config())
        for _ in range(3):
            expected = len(reader)
            assert len(list(reader)) == expected


@pytest.mark.parametrize("world_size", [2, 3, 7])
def test_ranks_share_rows_and_stop_together(dataset: Dataset, single_rows: Dataset, world_size: int) -> None:
    for source, total in ((dataset, TOTAL), (single_rows, 341)):
        shares = [
            list(LogReader(source, "train", config(), rank=rank, world_size=world_size)) for rank in range(world_size)
        ]
        assert len({len(share) for share in shares}) == 1
        rows = [ids(share) for share in shares]
        assert len({i for share in rows for i in share}) == sum(map(len, rows)) == total
        assert max(map(len, rows)) - min(map(len, rows)) <= 9


def test_a_rank_without_rows_yields_empty_batches(tmp_path: Path) -> None:
    tiny = write_dataset(tmp_path, train_parts(small_table([3, 2])))
    shares = [list(LogReader(tiny, "train", config(batch_size=2), rank=r, world_size=4)) for r in range(4)]
    assert len({len(share) for share in shares}) == 1
    assert sorted(i for share in shares for i in ids(share)) == [0, 1, 2, 3, 4]
    empty = [batch for share in shares for batch in share if not len(batch.impression_id)]
    full = next(batch for share in shares for batch in share if len(batch.impression_id))
    assert empty
    for batch in empty:
        assert batch.request.rows == batch.item.rows == 0
        assert batch.labels.shape == (0, 3) and batch.item.dense.shape == (0, 4)
        assert batch.request.ids.keys() == full.request.ids.keys()
        assert batch.item.ids.keys() == full.item.ids.keys()


def test_only_one_surface(dataset: Dataset) -> None:
    everything = read(dataset, shuffle_window=0)
    for number, name in enumerate([*SURFACES, "other"]):
        expected = [
            i
            for b in everything
            for i, s in zip(b.impression_id, b.surface[b.request_index], strict=True)
            if s == number
        ]
        reader = LogReader(dataset, "train", config(shuffle_window=0), surface=name)
        assert ids(reader) == expected and reader.rows == len(expected)
        shuffled = LogReader(dataset, "train", config(workers=2), surface=name)
        assert sorted(ids(shuffled)) == expected
    with pytest.raises(ValueError, match="surface 'tv' is not one of feed"):
        LogReader(dataset, "train", config(), surface="tv")


def test_only_some_tasks(dataset: Dataset, tmp_path: Path) -> None:
    batches = list(LogReader(dataset, "train", config(shuffle_window=0), tasks=["conversion"]))
    everything = read(dataset, shuffle_window=0)
    for some, every in zip(batches, everything, strict=True):
        assert not some.label_valid[:, :2].any()
        np.testing.assert_array_equal(some.label_valid[:, 2], every.label_valid[:, 2])
        np.testing.assert_array_equal(some.labels[:, 2], every.labels[:, 2])
    none = write_dataset(tmp_path, train_parts(small_table([2, 3])))
    file = tmp_path / "train/part-00000.parquet"
    import pyarrow.parquet as pq

    pq.write_table(pq.read_table(file).drop_columns(["click", "like", "conversion"]), file)
    with pytest.raises(DatasetError, match="column 'click' is missing"):
        LogReader(none, "train", config())
    (batch,) = LogReader(none, "train", config(), tasks=[])
    assert len(batch.impression_id) == 5 and not batch.label_valid.any()
    with pytest.raises(ValueError, match="tasks: 'buy' is not one of click"):
        LogReader(dataset, "train", config(), tasks=["buy"])


@settings(deadline=None, max_examples=12)
@given(
    window=st.sampled_from([0, 8, 24, 1000]),
    batch_size=st.integers(1, 16),
    world_size=st.integers(1, 3),
    stop=st.floats(0, 1),
    epoch=st.integers(0, 2),
    one_each=st.booleans(),
)
def test_kill_and_resume_equals_the_uninterrupted_run(
    dataset: Dataset,
    single_rows: Dataset,
    window: int,
    batch_size: int,
    world_size: int,
    stop: float,
    epoch: int,
    one_each: bool,
) -> None:
    source = single_rows if one_each else dataset
    values: Any = {"config": config(batch_size=batch_size, shuffle_window=window), "world_size": world_size}
    for rank in range(world_size):
        whole = LogReader(source, "train", rank=rank, **values)
        whole.set_epoch(epoch)
        expected = [ids([batch]) for _ in range(2) for batch in whole]
        killed = LogReader(source, "train", rank=rank, **values)
        killed.set_epoch(epoch)
        steps = round(stop * len(killed))
        iterator = iter(killed)
        seen = [ids([next(iterator)]) for _ in range(steps)]
        state = json.loads(json.dumps(killed.state_dict()))
        resumed = LogReader(source, "train", rank=rank, **values)
        resumed.load_state_dict(state)
        resumed.set_epoch(epoch)
        assert resumed.state_dict() == state
        assert seen + [ids([batch]) for _ in range(2) for batch in resumed] == expected


@pytest.mark.parametrize(("before", "after"), [(0, 2), (2, 0), (3, 1), (1, 3)])
def test_resume_with_another_number_of_workers(dataset: Dataset, before: int, after: int) -> None:
    expected = ids(read(dataset))
    reader = LogReader(dataset, "train", config(workers=before))
    iterator = iter(reader)
    seen = ids(next(iterator) for _ in range(len(reader) // 2))
    state = reader.state_dict()
    resumed = LogReader(dataset, "train", config(workers=after))
    resumed.load_state_dict(state)
    assert seen + ids(resumed) == expected


@settings(deadline=None, max_examples=8)
@given(worlds=st.lists(st.integers(1, 4), min_size=2, max_size=3), stops=st.lists(st.floats(0, 1), min_size=2))
def test_resume_with_another_number_of_ranks(dataset: Dataset, worlds: list[int], stops: list[float]) -> None:
    state: dict[str, Any] | None = None
    seen: list[int] = []
    for world, stop in zip(worlds, [*stops[: len(worlds) - 1], 2.0], strict=False):
        readers = [LogReader(dataset, "train", config(), rank=rank, world_size=world) for rank in range(world)]
        states = []
        for reader in readers:
            if state is not None:
                reader.load_state_dict(state)
            done = 0 if state is None else sum(count for _, count in state["segments"]) + state["batch"]
            left = len(reader) - done
            iterator = iter(reader)
            seen += ids(next(iterator) for _ in range(min(round(stop * left), left)))
            states.append(reader.state_dict())
        assert all(s == states[0] for s in states)
        state = json.loads(json.dumps(states[0]))
    assert sorted(seen) == sorted(ids(read(dataset)))


def test_a_state_from_other_settings_is_refused(dataset: Dataset) -> None:
    state = LogReader(dataset, "train", config()).state_dict()
    for key, values in (("batch_size", {"batch_size": 9}), ("seed", {"seed": 1}), ("shuffle", {"shuffle_window": 0})):
        with pytest.raises(ValueError, match=f"reader state: {key} was"):
            LogReader(dataset, "train", config(**values)).load_state_dict(state)
    with pytest.raises(ValueError, match="reader state: surface was None, now it is 'feed'"):
        LogReader(dataset, "train", config(), surface="feed").load_state_dict(state)


def test_leaving_an_epoch_early_starts_it_anew(dataset: Dataset) -> None:
    reader = LogReader(dataset, "train", config(workers=2))
    whole = ids(read(dataset))
    for _ in range(2):
        for batch in reader:
            assert ids([batch]) == whole[: len(batch.impression_id)]
            break
    assert ids(reader) == whole


def test_drop_last_keeps_full_batches(single_rows: Dataset) -> None:
    batches = read(single_rows, drop_last=True, shuffle_window=100)
    assert {len(batch.impression_id) for batch in batches} == {8}
    with pytest.raises(DatasetError, match="do not fill one batch of 1000"):
        LogReader(single_rows, "train", config(batch_size=1000, drop_last=True))


def test_long_histories_make_windows_smaller(tmp_path: Path) -> None:
    table = small_table([1] * 64)
    events = list(range(2000))
    for name in ("watched_item", "watched_action", "watched_time"):
        index = table.schema.get_field_index(name)
        table = table.set_column(index, name, pa.array([events] * 64, pa.list_(pa.int64())))
    sequences = small_schema().to_dict()["sequences"]
    sequences["watched"]["max_length"] = 2000
    large = write_dataset(tmp_path, train_parts(table), small_schema(sequences=sequences))
    reader = LogReader(large, "train", config(batch_size=4, shuffle_window=64, window_mb=1))
    assert reader._settings.window_rows == 2**20 // (2000 * 16)
    assert sorted(ids(reader)) == list(range(64))
    assert next(iter(reader)).request.lengths["watched.item"].tolist() == [2000] * 4


def test_times_in_seconds_become_milliseconds(tmp_path: Path) -> None:
    schema = small_schema(timestamp={"column": "time_ms", "unit": "s"})
    seconds = write_dataset(tmp_path, train_parts(small_table([2, 1])), schema)
    assert seconds.manifest.splits["train"].time_range == (1_000_000_000, 1_001_000_000)
    (batch,) = read(seconds, shuffle_window=0)
    assert batch.request_time.tolist() == [1_000_000_000, 1_001_000_000]


def test_weight_and_sampling_rate_columns(tmp_path: Path) -> None:
    table = small_table([2, 1])
    table = table.append_column("w", pa.array([0.5, 0.0, 2.0])).append_column("rate", pa.array([1.0, 0.25, 0.5]))
    weighted = write_dataset(tmp_path, train_parts(table), small_schema(weight="w", sampling_rate="rate"))
    (batch,) = read(weighted, shuffle_window=0)
    assert batch.weight.tolist() == [0.5, 0.0, 2.0]
    assert batch.sampling_rate.tolist() == [1.0, 0.25, 0.5]


@pytest.mark.parametrize(
    ("key", "value"), [("batch_size", 0), ("shuffle_window", -1), ("workers", -1), ("prefetch", 0), ("window_mb", 0)]
)
def test_config_is_checked(key: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"reader.{key}: must be at least"):
        ReaderConfig(**{key: value})
