"""Histories hold exactly the events strictly before the row's time: checked against a brute-force oracle."""

from __future__ import annotations

from typing import Any

import ibis
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from ibis.backends.sql.compilers.pyspark import PySparkCompiler

from foundation.data.history import EventLog, History, with_histories

SHOWN = History(name="shown", attributes={"shown_item": "item", "shown_click": "click"}, timestamp="shown_time",
                max_length=4)  # fmt: skip
CLICKED = History(name="clicked", attributes={"clicked_item": "item"}, max_length=2, where="click == 1")

Event = tuple[int, int, int, int]  # user, time, item, click
EVENTS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 12), st.integers(0, 99), st.integers(0, 1)), max_size=60)
SEEDS = st.lists(st.tuples(st.integers(0, 2), st.integers(100, 199)), max_size=12)


def _table(
    connection: ibis.BaseBackend, name: str, columns: dict[str, Any], types: dict[str, pa.DataType]
) -> ibis.Table:
    arrow = pa.table({c: pa.array(v, types[c]) for c, v in columns.items()})
    connection.con.register("arrow", arrow)
    connection.raw_sql(f"CREATE OR REPLACE TABLE {name} AS SELECT * FROM arrow")
    connection.con.unregister("arrow")
    return connection.table(name)


INT = pa.int64()
# Queries by what they depend on: writing one takes longer than running it.
_SQL: dict[tuple[Any, ...], str] = {}


def build(
    connection: ibis.BaseBackend,
    events: list[Event],
    asked: list[tuple[int, int]],
    histories: list[History],
    seeds: list[tuple[int, int]] | None = None,
    until: dict[int, int] | None = None,
) -> list[dict[str, Any]]:
    names = ("user", "time", "item", "click")
    columns: dict[str, Any] = {n: [e[i] for e in events] for i, n in enumerate(names)}
    columns["place"] = list(range(len(events)))
    log = _table(connection, "events", columns, dict.fromkeys(columns, INT))
    rows = _table(
        connection, "asked",
        {"row": list(range(len(asked))), "who": [a[0] for a in asked], "at": [a[1] for a in asked]},
        {"row": INT, "who": INT, "at": INT},
    )  # fmt: skip
    seed = None
    if seeds is not None:
        seed_columns = {
            "user": [s[0] for s in seeds],
            "item": [s[1] for s in seeds],
            "position": list(range(len(seeds))),
            "until": [(until or {}).get(s[0], -1) for s in seeds],
        }
        seed = _table(connection, "seeds", seed_columns, dict.fromkeys(seed_columns, INT))
    source = EventLog(
        events=log, user="user", time="time", order=("place",), seed=seed, seed_until=None if until is None else "until"
    )
    key = (*map(str, histories), seed is None, until is None)
    if key not in _SQL:
        result = with_histories(rows, source, histories, user="who", time="at").order_by("row")
        _SQL[key] = str(ibis.to_sql(result, dialect="duckdb"))
    return connection.con.sql(_SQL[key]).to_arrow_table().to_pylist()


def oracle(
    events: list[Event],
    user: int,
    time: int,
    seeds: list[tuple[int, int]],
    until: dict[int, int],
) -> dict[str, list[Any]]:
    earlier = sorted(
        ((t, place, item, click) for place, (u, t, item, click) in enumerate(events) if u == user and t < time)
    )
    before = [item for u, item in seeds if u == user] if time > until.get(user, -1) else []
    shown = [(item, None, None) for item in before] + [(item, click, t) for t, _, item, click in earlier]
    clicked = [item for _, _, item, click in earlier if click == 1]
    shown = shown[-4:]
    return {
        "shown_item": [s[0] for s in shown],
        "shown_click": [s[1] for s in shown],
        "shown_time": [s[2] for s in shown],
        "clicked_item": clicked[-2:],
    }


@pytest.fixture(scope="module")
def connection() -> ibis.BaseBackend:
    return ibis.duckdb.connect(threads=1)


@given(events=EVENTS, seeds=SEEDS, until=st.dictionaries(st.integers(0, 2), st.integers(0, 12)))
@settings(max_examples=30, deadline=None)
@example(events=[], seeds=[], until={})
@example(events=[(0, 5, 1, 1)] * 9, seeds=[(0, 100)], until={0: 5})
@example(events=[(0, t, t, 1) for t in range(13)], seeds=[(0, 100 + i) for i in range(6)], until={})
def test_equals_the_oracle_on_random_logs(
    connection: ibis.BaseBackend, events: list[Event], seeds: list[tuple[int, int]], until: dict[int, int]
) -> None:
    asked = [(e[0], e[1]) for e in events] + [(u, t) for u in range(4) for t in (0, 6, 13)]
    rows = build(connection, events, asked, [SHOWN, CLICKED], seeds, until)
    assert len(rows) == len(asked)
    for row in rows:
        expected = oracle(events, row["who"], row["at"], seeds, until)
        assert {name: row[name] for name in expected} == expected
        assert all(t is None or t < row["at"] for t in row["shown_time"])


def test_events_of_one_time_never_see_each_other(connection: ibis.BaseBackend) -> None:
    events = [(1, 10, 7, 1), (1, 10, 8, 1), (1, 10, 9, 0), (1, 11, 5, 0)]
    rows = build(connection, events, [(1, 10), (1, 11), (1, 12)], [SHOWN])
    assert [row["shown_item"] for row in rows] == [[], [7, 8, 9], [7, 8, 9, 5]]


def test_a_history_longer_than_two_chunks_keeps_the_latest(connection: ibis.BaseBackend) -> None:
    events = [(1, t, t, t % 3 == 0) for t in range(1, 40)]
    rows = build(connection, [(u, t, i, int(c)) for u, t, i, c in events], [(1, 40), (1, 20)], [SHOWN, CLICKED])
    assert rows[0]["shown_item"] == [36, 37, 38, 39] and rows[0]["clicked_item"] == [36, 39]
    assert rows[1]["shown_item"] == [16, 17, 18, 19] and rows[1]["clicked_item"] == [15, 18]


def test_lists_are_empty_not_null_without_events(connection: ibis.BaseBackend) -> None:
    rows = build(connection, [(1, 5, 1, 0)], [(1, 5), (2, 9)], [SHOWN, CLICKED])
    for row in rows:
        assert row["shown_item"] == row["shown_click"] == row["shown_time"] == row["clicked_item"] == []


def test_null_attributes_stay_in_their_place(connection: ibis.BaseBackend) -> None:
    events: Any = [(1, 1, 4, 1), (1, 2, None, 0), (1, 3, 6, None)]
    (row,) = build(connection, events, [(1, 9)], [SHOWN])
    assert row["shown_item"] == [4, None, 6] and row["shown_click"] == [1, 0, None]


def test_works_for_string_users_and_attributes(connection: ibis.BaseBackend) -> None:
    columns = {"user": ["a", "a", "b"], "time": [1, 2, 2], "tag": ["x", "y", "z"]}
    types = {"user": pa.string(), "time": INT, "tag": pa.string()}
    log = _table(connection, "texts", columns, types)
    result = with_histories(
        log.select("user", "time"), EventLog(events=log, user="user", time="time"),
        [History(name="h", attributes={"tags": "tag"})], user="user", time="time",
    )  # fmt: skip
    assert sorted((r["user"], r["time"], tuple(r["tags"])) for r in result.to_pyarrow().to_pylist()) == [
        ("a", 1, ()), ("a", 2, ("x",)), ("b", 2, ()),
    ]  # fmt: skip


def test_the_expression_can_be_compiled_for_spark() -> None:
    log = ibis.table({"user": "int64", "time": "int64", "item": "int64", "click": "int64", "place": "int64"}, name="e")
    seed = ibis.table({"user": "int64", "item": "int64", "position": "int64", "until": "int64"}, name="s")
    source = EventLog(events=log, user="user", time="time", order=("place",), seed=seed, seed_until="until")
    result = with_histories(log.select("user", "time"), source, [SHOWN, CLICKED], user="user", time="time")
    sql = PySparkCompiler().to_sqlglot(result).sql("spark")
    assert "OVER (PARTITION BY" in sql and "TRANSFORM" in sql


@pytest.mark.parametrize(
    ("history", "problem"),
    [
        (History(name="h", attributes={"items": "thing"}), "h.attributes: no event column 'thing'"),
        (History(name="h", attributes={"at": "item"}), "history column 'at' is there twice"),
        (History(name="h", attributes={"items": "item"}, where="clicks == 1"), "h.where: 'clicks == 1': no column"),
    ],
)
def test_faults_name_the_history(connection: ibis.BaseBackend, history: History, problem: str) -> None:
    with pytest.raises(ValueError, match=r".") as error:
        build(connection, [(1, 1, 1, 1)], [(1, 1)], [history])
    assert problem in str(error.value)


def test_times_must_be_integers() -> None:
    log = ibis.table({"user": "int64", "time": "float64", "item": "int64"}, name="e")
    with pytest.raises(ValueError, match="'time' must be an integer time"):
        EventLog(events=log, user="user", time="time")


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match=r"h\.max_length: must be at least 1, got 0"):
        History(name="h", attributes={"a": "b"}, max_length=0)
    with pytest.raises(ValueError, match=r"h\.attributes: is empty"):
        History(name="h", attributes={})
