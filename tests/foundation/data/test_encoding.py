"""Encoding: ids to rows, numbers to floats, jagged to padded; against plain Python."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from foundation.data.encoder_fit import EncoderFit
from foundation.data.encoding import (
    NO_TIME,
    Column,
    Encoder,
    EncodingError,
    encode_rows,
    jagged_index,
    model_inputs,
    model_signature,
    pad,
)
from foundation.data.ids import VocabularyIndex, canonical_ids, hash_rows, range_rows, xxhash64
from foundation.data.schema import Schema
from tests.foundation.data.test_schema import EXAMPLE

INT64 = st.integers(-(2**63), 2**63 - 1)


@given(st.lists(INT64, max_size=20), st.integers(0, 2**32))
def test_xxhash_of_integers_equals_the_library(values: list[int], seed: int) -> None:
    ours = xxhash64(np.array(values, dtype=np.int64), seed)
    theirs = [xxhash.xxh64_intdigest(v.to_bytes(8, "little", signed=True), seed) for v in values]
    assert ours.tolist() == theirs


@given(st.lists(INT64, max_size=50), st.integers(3, 1000))
def test_hash_rows_stay_inside_the_table(values: list[int], rows: int) -> None:
    found = hash_rows(np.array(values, dtype=np.int64), rows, 0)
    assert ((found >= 2) & (found < rows)).all()


@given(st.lists(INT64, max_size=50))
def test_range_never_gives_somebody_elses_row(values: list[int]) -> None:
    rows = range_rows(np.array(values, dtype=np.int64), 12)
    assert rows.tolist() == [v + 2 if 0 <= v < 10 else 1 for v in values]


@pytest.mark.parametrize("far", [0, 2**40], ids=["direct", "searched"])
@given(known=st.sets(st.integers(-100, 100)), asked=st.lists(st.integers(-120, 120), max_size=60))
def test_vocabulary_rows(far: int, known: set[int], asked: list[int]) -> None:
    vocabulary = sorted(known | ({far} if far else set()))
    rows = VocabularyIndex(np.array(vocabulary, dtype=np.int64)).rows(np.array(asked, dtype=np.int64))
    assert rows.tolist() == [vocabulary.index(v) + 2 if v in vocabulary else 1 for v in asked]


@given(known=st.sets(st.integers(0, 50), min_size=1), asked=st.lists(INT64, min_size=1, max_size=20))
def test_vocabulary_takes_any_integer(known: set[int], asked: list[int]) -> None:
    rows = VocabularyIndex(np.array(sorted(known), dtype=np.int64)).rows(np.array(asked, dtype=np.int64))
    assert rows.tolist() == [sorted(known).index(v) + 2 if v in known else 1 for v in asked]


def test_canonical_ids() -> None:
    assert canonical_ids(np.array([1.0, 2.0]), "x").dtype == np.int64
    assert canonical_ids(np.array([True, False]), "x").tolist() == [1, 0]
    with pytest.raises(ValueError, match=r"x: ids must be whole numbers or strings, got .*1\.5"):
        canonical_ids(np.array([1.5]), "x")
    with pytest.raises(ValueError, match="x: expected string ids, got 3"):
        canonical_ids(np.array(["a", 3], dtype=object), "x")
    with pytest.raises(ValueError, match="does not fit into int64"):
        canonical_ids(np.array([2**63], dtype=np.uint64), "x")


def lists(rows: list[list[Any]], dtype: Any = np.int64, nulls: tuple[int, ...] = ()) -> Column:
    values = np.array([v for row in rows for v in row], dtype=dtype)
    valid = np.ones(len(values), dtype=bool)
    valid[list(nulls)] = False
    return Column(values, valid if nulls else None, np.cumsum([0] + [len(r) for r in rows]))


def columns() -> dict[str, Column]:
    return {
        "user_id": Column(np.array([7, 8, 9]), np.array([True, False, True])),
        "hour": Column(np.array([0, 23, 24])),
        "item_id": Column(np.array([10, 20, 10])),
        "price": Column(np.array([0.0, np.e - 1, np.nan])),
        "watched_item": lists([[10, 20, 99], [], [20]]),
        "watched_time_ms": lists([[1000, 2000, 3000], [], [500]], nulls=(1,)),
    }


def example(changes: dict[str, Any] | None = None) -> Schema:
    data = copy.deepcopy(EXAMPLE)
    data["sequences"]["watched"].update(changes or {})
    return Schema.from_dict(data)


def fitted(schema: Schema) -> Encoder:
    fit = EncoderFit(schema)
    fit.update(columns())
    return fit.finish()


def test_encode_rows_by_hand() -> None:
    schema = example()
    encoder = fitted(schema)
    rows = encode_rows(encoder, schema.features, schema.sequences, columns(), 3)
    assert rows.ids["item_id"].tolist() == [2, 3, 2]
    assert rows.ids["user_id"][1] == 0
    assert rows.ids["hour"].tolist() == [2, 25, 1]
    assert rows.ids["watched.item"].tolist() == [2, 3, 1, 3]
    assert rows.lengths["watched.item"].tolist() == [3, 0, 1]
    assert rows.times["watched"].tolist() == [1000, NO_TIME, 3000, 500]
    np.testing.assert_allclose(rows.dense[:, 0], [0, 1, 0], atol=1e-7)
    assert encoder.counters["user_id"] == {"missing": 1, "unknown": 0}
    assert encoder.counters["hour"] == {"missing": 0, "unknown": 1}
    assert encoder.counters["watched.item"]["unknown"] == 1
    assert encoder.counters["price"]["missing"] == 1


def test_latest_and_earliest_events_are_kept() -> None:
    for keep, items, times in (
        ("latest", [3, 1, 3], [-1, 3000, 500]),
        ("earliest", [2, 3, 3], [1000, -1, 500]),
    ):
        schema = example({"max_length": 2, "keep": keep})
        rows = encode_rows(fitted(schema), (), schema.sequences, columns(), 3)
        assert rows.ids["watched.item"].tolist() == items
        assert rows.times["watched"].tolist() == times


def test_outcomes_are_hidden_until_they_are_known() -> None:
    """A younger event keeps its place in the history; only its outcome reads as missing."""
    data = copy.deepcopy(EXAMPLE)
    data["sequences"]["watched"]["attributes"]["click"] = {
        "column": "watched_click",
        "table": "hour",
        "known_after_hours": 2,
    }
    schema = Schema.from_dict(data)
    hour = 3_600_000
    raw = {
        "watched_item": lists([[10, 20, 10], [20]]),
        "watched_click": lists([[1, 0, 1], [1]]),
        "watched_time_ms": lists([[0, 8 * hour, 8 * hour + 1], [0]], nulls=(3,)),
    }
    rows = encode_rows(fitted(schema), (), schema.sequences, raw, 2, np.array([10 * hour, 10 * hour]))
    assert rows.ids["watched.click"].tolist() == [3, 2, 0, 3]
    assert rows.ids["watched.item"].tolist() == [2, 3, 2, 3]


def test_padded_inputs_match_the_signature() -> None:
    schema = example()
    rows = encode_rows(fitted(schema), schema.request_features, schema.sequences, columns(), 3)
    items = encode_rows(fitted(schema), schema.item_features, (), columns(), 3)
    index = np.array([0, 0, 2])
    inputs = model_inputs(schema, rows, items, index, np.array([5000, 5000, 5000]))
    sizes = {"R": 3, "N": 3}
    specs = model_signature(schema)
    assert list(inputs) == [s.name for s in specs]
    for spec in specs:
        assert inputs[spec.name].dtype == spec.dtype
        assert inputs[spec.name].shape == tuple(sizes.get(str(d), d) for d in spec.dims)
    np.testing.assert_allclose(inputs["watched.age"][0, :4], [np.log1p(4), 0, np.log1p(2), 0], rtol=1e-6)
    assert inputs["watched.item"][0, :4].tolist() == [2, 3, 1, 0]


@given(st.lists(st.lists(st.integers(0, 9), max_size=5), max_size=6), st.data())
def test_take_equals_taking_python_rows(rows: list[list[int]], data: st.DataObject) -> None:
    schema = example()
    chosen = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=6) if rows else st.just([]))
    raw = {"watched_item": lists(rows), "watched_time_ms": lists(rows)}
    whole = encode_rows(fitted(schema), (), schema.sequences, raw, len(rows))
    part = whole.take(np.array(chosen, dtype=np.int64))
    again = {
        "watched_item": lists([rows[i] for i in chosen]),
        "watched_time_ms": lists([rows[i] for i in chosen]),
    }
    want = encode_rows(fitted(schema), (), schema.sequences, again, len(chosen))
    for name in ("ids", "lengths", "times"):
        got, expected = getattr(part, name), getattr(want, name)
        assert all(np.array_equal(got[k], expected[k]) for k in expected)


@given(st.lists(st.integers(0, 4), max_size=8))
def test_pad_and_jagged_index(lengths: list[int]) -> None:
    values = np.arange(sum(lengths)) + 1
    padded = pad(values, np.array(lengths, dtype=np.int64), 4)
    assert padded[padded > 0].tolist() == values.tolist()
    starts = np.cumsum([0, *lengths])[:-1].astype(np.int64)
    assert jagged_index(starts, np.array(lengths, dtype=np.int64)).tolist() == (values - 1).tolist()


def test_encoder_round_trip(tmp_path: Path) -> None:
    schema = example()
    encoder = fitted(schema)
    encoder.save(tmp_path / "encoder.npz")
    again = Encoder.load(tmp_path / "encoder.npz", schema)
    assert again.hash == encoder.hash
    assert again.table_rows == {"user": 100, "item": 4, "hour": 26}


def test_encoder_faults_are_named(tmp_path: Path) -> None:
    schema = example()
    path = tmp_path / "encoder.npz"
    with pytest.raises(EncodingError, match="no such encoder file"):
        Encoder.load(path, schema)
    fitted(schema).save(path)
    with pytest.raises(EncodingError, match="made for schema"):
        Encoder.load(path, example({"max_length": 9}))
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(EncodingError, match="damaged"):
        Encoder.load(path, schema)


def test_column_faults_are_named() -> None:
    schema = example()
    encoder = fitted(schema)

    def encode(**changes: Column) -> None:
        encode_rows(encoder, schema.features, schema.sequences, columns() | changes, 3)

    with pytest.raises(EncodingError, match="watched_time_ms: row 1 has 1 events, but watched_item has 0"):
        encode(watched_time_ms=lists([[1, 2, 3], [4], [5]]))
    with pytest.raises(ValueError, match="item_id: table item holds integer ids, got the string 'a'"):
        encode(item_id=Column(np.array(["a", "b", "c"])))
    with pytest.raises(EncodingError, match="price: expected numbers"):
        encode(price=Column(np.array(["a", "b", "c"])))
    with pytest.raises(EncodingError, match="watched_item: expected a list column"):
        encode(watched_item=Column(np.array([1, 2, 3])))
    with pytest.raises(EncodingError, match="price: column is missing"):
        encode_rows(encoder, schema.features, (), {k: v for k, v in columns().items() if k != "price"}, 3)


def strings(*values: str) -> Column:
    return Column(np.arange(len(values)), dictionary=np.array(values, dtype=object))


@given(st.lists(INT64, min_size=1, max_size=9))
def test_a_string_that_spells_an_integer_reads_the_row_of_the_integer(values: list[int]) -> None:
    encoder = fitted(example())
    for table in ("user", "item", "hour"):  # a hash, a vocabulary, a range
        want = encoder.encode_ids(table, Column(np.array(values)), "x").tolist()
        assert encoder.encode_ids(table, strings(*map(str, values)), "x").tolist() == want
        assert encoder.encode_ids(table, Column(np.array(values).astype(str)), "x").tolist() == want


@pytest.mark.parametrize("text", ["007", "7.0", "+7", "-0", " 7", "", "٧", "1_0", str(2**63), "x" * 9])
@pytest.mark.parametrize("table", ["user", "item", "hour"])
def test_other_strings_are_no_integers(table: str, text: str) -> None:
    with pytest.raises(ValueError, match=f"^x: table {table} holds integer ids, got the string"):
        fitted(example()).encode_ids(table, strings("7", text), "x")


@pytest.mark.parametrize("table", ["user", "item"])
def test_an_integer_is_no_string(tmp_path: Path, table: str) -> None:
    """7 may stand for "7" or "007", whose rows differ."""
    schema = example()
    fit = EncoderFit(schema)
    fit.update(columns() | {"user_id": strings("7", "8", "7"), "item_id": strings("7", "007", "7")})
    fit.finish().save(tmp_path / "encoder.npz")
    encoder = Encoder.load(tmp_path / "encoder.npz", schema)
    assert encoder.hash == fit.finish().hash != fitted(schema).hash
    assert encoder.encode_ids(table, strings("7"), "x") != encoder.encode_ids(table, strings("007"), "x")
    with pytest.raises(ValueError, match=f"^x: table {table} holds string ids, got the integer 7; give ids as strings"):
        encoder.encode_ids(table, Column(np.array([7])), "x")


def test_type_of_ids_needs_an_id() -> None:
    data = copy.deepcopy(EXAMPLE)
    data["tables"]["item"] = {"kind": "hash", "rows": 50}
    schema = Schema.from_dict(data)
    fit = EncoderFit(schema)
    nothing = Column(np.zeros(3, np.int64), np.zeros(3, bool))
    fit.update(columns() | {"user_id": nothing, "item_id": strings("a", "b", "a"), "watched_item": lists([[], [], []])})
    assert fit.finish().hash_ids == {"item": "string"}
    with pytest.raises(EncodingError, match="watched_item: has integer ids, but item_id has string ids in the same"):
        fit.update(columns() | {"item_id": strings("a", "b", "a")})


def test_vocabulary_keeps_the_frequent_ids() -> None:
    data = copy.deepcopy(EXAMPLE)
    data["tables"]["item"].update(min_count=2)
    fit = EncoderFit(Schema.from_dict(data))
    for _ in range(2):
        fit.update(columns() | {"item_id": Column(np.array([10, 20, 10]))})
    fit.update(columns() | {"item_id": Column(np.array([30, 20, 20]))})
    assert fit.finish().vocabularies["item"].tolist() == [10, 20]
    data["tables"]["item"].update(min_count=1, rows=3)
    small = EncoderFit(Schema.from_dict(data))
    small.update(columns() | {"item_id": Column(np.array([30, 30, 10]))})
    assert small.finish().vocabularies["item"].tolist() == [30]


@given(st.lists(st.integers(-(10**6), 10**6), min_size=2, max_size=40), st.integers(1, 39))
def test_statistics_do_not_depend_on_the_chunks(numbers: list[int], cut: int) -> None:
    data = copy.deepcopy(EXAMPLE)
    data["features"]["price"]["transform"] = "standardize"
    fit = EncoderFit(Schema.from_dict(data))
    for part in (numbers[:cut], numbers[cut:]):
        fit.update(columns() | {"price": Column(np.array(part, dtype=np.float64))})
    mean, deviation = fit.finish().statistics["price"]
    np.testing.assert_allclose(mean, np.mean(numbers), rtol=1e-9, atol=1e-6)
    np.testing.assert_allclose(deviation, np.std(numbers) or 1.0, rtol=1e-6, atol=1e-3)
