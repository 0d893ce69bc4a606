"""The history builder on Spark gives what it gives on DuckDB. Needs pyspark (below 4.1) and Java; else it skips."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import ibis
import pyarrow as pa
import pytest

from foundation.data.history import EventLog, History, with_histories

pytestmark = pytest.mark.slow

EVENTS = ("user", "time", "item", "click", "place")
SEEDS = ("user", "item", "position", "until")
HISTORIES = [
    History(
        name="shown",
        attributes={"shown_item": "item", "shown_click": "click"},
        timestamp="shown_time",
        max_length=7,
    ),
    History(name="clicked", attributes={"clicked_item": "item"}, max_length=3, where="click == 1"),
]


@pytest.fixture(scope="module")
def spark() -> Iterator[Any]:
    session = pytest.importorskip("pyspark.sql", reason="pyspark is not installed").SparkSession
    builder = session.builder.master("local[1]").config("spark.sql.shuffle.partitions", "2")
    running = builder.config("spark.ui.enabled", "false").getOrCreate()
    yield running
    running.stop()


def histories(connection: ibis.BaseBackend) -> ibis.Table:
    events, seed = connection.table("events"), connection.table("seeds")
    log = EventLog(events=events, user="user", time="time", order=("place",), seed=seed, seed_until="until")
    rows = with_histories(events.select("user", "time", "place"), log, HISTORIES, user="user", time="time")
    return rows.order_by("place")


def test_spark_and_duckdb_agree(spark: Any) -> None:
    rng = random.Random(0)
    events = [(rng.randrange(4), rng.randrange(30), rng.randrange(99), rng.randrange(2), i) for i in range(300)]
    seeds = [(rng.randrange(4), 100 + i, i, 12) for i in range(20)]
    duckdb = ibis.duckdb.connect()
    for name, columns, rows in (("events", EVENTS, events), ("seeds", SEEDS, seeds)):
        spark.createDataFrame(rows, ", ".join(f"{c} long" for c in columns)).createOrReplaceTempView(name)
        table = pa.table({c: [row[i] for row in rows] for i, c in enumerate(columns)})
        duckdb.con.register("arrow", table)
        duckdb.raw_sql(f"CREATE TABLE {name} AS FROM arrow")
        duckdb.con.unregister("arrow")
    expected = histories(duckdb)
    one = duckdb.con.sql(duckdb.compile(expected)).to_arrow_table().to_pylist()
    other = histories(ibis.pyspark.connect(spark)).to_pyarrow().to_pylist()
    assert other == one and len(one) == 300 and any(len(row["shown_item"]) == 7 for row in one)
