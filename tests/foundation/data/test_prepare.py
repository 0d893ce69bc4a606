"""`opengem prepare logs`: content, order, histories, splits, determinism, faults."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

import opengem
from foundation.data.build import WriteOptions
from foundation.data.dataset import Dataset
from foundation.data.doctor import examine
from foundation.data.files import sha256_file
from foundation.data.options import parse_config
from foundation.data.prepare import EarlierHistory, PrepareConfig, PrepareResult, SequenceSource, prepare
from foundation.data.sources import PrepareError, SideTable

DAY = 86_400_000
START = 1_700_006_400_000  # 2023-11-15 00:00 UTC
SCHEMA: dict[str, Any] = {
    "name": "shop",
    "user": "user_id",
    "request_id": "request_id",
    "impression_id": "impression_id",
    "timestamp": {"column": "time_ms"},
    "surface": {"column": "place", "values": ["home", "search"]},
    "tables": {"user": {"kind": "vocabulary"}, "item": {"kind": "vocabulary"}, "city": {"kind": "vocabulary"},
               "hour": {"kind": "range", "rows": 26}, "flag": {"kind": "range", "rows": 4}},
    "features": {
        "user_id": {"side": "user", "kind": "categorical", "table": "user"},
        "city": {"side": "user", "kind": "categorical", "table": "city"},
        "hour": {"side": "context", "kind": "categorical", "table": "hour"},
        "item_id": {"side": "item", "kind": "categorical", "table": "item"},
        "price": {"side": "item", "kind": "dense", "transform": "log1p_standardize"},
    },
    "sequences": {
        "seen": {"timestamp": "seen_time", "max_length": 5, "attributes": {
            "item": {"column": "seen_item", "table": "item"}, "click": {"column": "seen_click", "table": "flag"}}},
        "clicked": {"max_length": 3, "attributes": {"item": {"column": "clicked_item", "table": "item"}}},
    },
    "tasks": {"click": {"label": "click"}, "buy": {"label": "buy", "given": "click", "delay_hours": 24}},
    "split": {"train_until": "2023-11-18", "validation_until": "2023-11-19", "timezone": "UTC"},
}  # fmt: skip
SEQUENCES = {
    "seen": SequenceSource(attributes={"item": "item_id", "click": "click"}),
    "clicked": SequenceSource(attributes={"item": "item_id"}, where="click == 1"),
}


def raw_log(requests: int = 400, seed: int = 0) -> pa.Table:
    """Requests of 1 to 4 impressions, shuffled; some of one user at the same millisecond."""
    rng = np.random.default_rng(seed)
    rows: list[dict[str, Any]] = []
    for request in range(requests):
        user = int(rng.integers(0, 12))
        time = START + int(rng.integers(0, 50)) * DAY // 10
        place = str(rng.choice(["home", "search", "else"]))
        for position in range(int(rng.integers(1, 5))):
            click = int(rng.integers(0, 2))
            rows.append(
                {"user_id": f"u{user}", "request_id": request, "time_ms": time + position, "place": place,
                 "item_id": int(rng.integers(0, 40)), "click": click, "buy": click * int(rng.integers(0, 2))}
            )  # fmt: skip
    table = pa.Table.from_pylist(rows)
    return table.take(pa.array(rng.permutation(table.num_rows)))


USERS = pa.table({"user_id": [f"u{i}" for i in range(11)], "city": ["rome", "UNKNOWN", None, *["oslo"] * 8]})
ITEMS = pa.table({"id": list(range(40)), "price": [-1.0 if i == 3 else i / 2 for i in range(40)]})


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_source(tmp_path, raw_log())


def write_source(folder: Path, log: pa.Table, **schema: Any) -> Path:
    (folder / "schema.yaml").write_text(yaml.safe_dump({**SCHEMA, **schema}, sort_keys=False))
    pq.write_table(log, folder / "log.parquet")
    pq.write_table(USERS, folder / "users.parquet")
    pq.write_table(ITEMS, folder / "items.parquet")
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> PrepareResult:
    """The dataset of the settings below, for tests that only read it."""
    return prepare(config(write_source(tmp_path_factory.mktemp("whole"), raw_log())))


def config(source: Path, out: str = "out", **changes: Any) -> PrepareConfig:
    given: dict[str, Any] = {
        "schema": str(source / "schema.yaml"),
        "log": [str(source / "log.parquet")],
        "out": source / out,
        "users": SideTable(path=str(source / "users.parquet"), key="user_id"),
        "items": SideTable(path=str(source / "items.parquet"), key="id", log_key="item_id"),
        "sequences": SEQUENCES,
        "missing": {"city": ["UNKNOWN"], "price": [-1]},
        "calendar": {"hour": "hour"},
        "write": WriteOptions(threads=1),
    }
    return PrepareConfig(**given | changes)


def read(result: PrepareResult) -> pa.Table:
    files = [result.out / f["path"] for s in result.manifest["splits"].values() for f in s["files"]]
    return pa.concat_tables([pq.read_table(f) for f in files])


def sums(result: PrepareResult) -> dict[str, str]:
    names = [p for p in result.out.rglob("*") if p.is_file() and p.name not in ("dataset.json", "prepare.yaml")]
    return {str(p.relative_to(result.out)): sha256_file(p) for p in names}


def test_rows_are_those_of_the_log_with_their_features_in_time_order(whole: PrepareResult) -> None:
    result = whole
    log = {(r["request_id"], r["time_ms"]): r for r in raw_log().to_pylist()}
    rows = read(result).to_pylist()
    assert len(rows) == len(log) == sum(result.rows.values())
    assert [r["impression_id"] for r in rows] == list(range(len(rows)))
    cities = dict(zip(*USERS.to_pydict().values(), strict=True)) | {"u1": None}
    for row in rows:
        raw = log[row["request_id"], row["time_ms"]]
        assert {k: row[k] for k in raw} == raw
        assert row["city"] == cities.get(row["user_id"])
        assert row["price"] == (None if row["item_id"] == 3 else row["item_id"] / 2)
    requests: dict[int, int] = {}
    for row in rows:
        requests.setdefault(row["request_id"], row["time_ms"])
    starts = list(requests.items())
    assert starts == sorted(starts, key=lambda s: (s[1], s[0]))
    changes = sum(a["request_id"] != b["request_id"] for a, b in pairwise(rows))
    assert changes + 1 == len(requests), "rows of a request are adjacent"
    assert result.manifest["counts"]["missing_values"] == {"users.city": 2, "items.price": 1}
    assert examine(result.out).exit_code == 0


def test_splits_are_cut_by_the_time_of_the_request(whole: PrepareResult) -> None:
    result = whole
    cuts = [START + 3 * DAY, START + 4 * DAY]
    rows = read(result).to_pylist()
    first = {}
    for row in rows:
        first[row["request_id"]] = min(first.get(row["request_id"], row["time_ms"]), row["time_ms"])
    expected = [sum(sum(first[r["request_id"]] >= c for c in cuts) == s for r in rows) for s in range(3)]
    assert list(result.rows.values()) == expected and min(expected) > 0
    dataset = Dataset.open(result.out)
    for split, entry in dataset.manifest.splits.items():
        low, high = entry.time_range or (0, 0)
        assert (split == "train") == (low < cuts[0]) and (split == "test") == (high > cuts[1])


def test_histories_hold_nothing_at_or_after_the_request(whole: PrepareResult) -> None:
    """Against brute force; the rows of a request come at different milliseconds and share one history."""
    rows = read(whole).to_pylist()
    first: dict[int, int] = {}
    for row in rows:
        first[row["request_id"]] = min(first.get(row["request_id"], row["time_ms"]), row["time_ms"])
    place = {row["impression_id"]: i for i, row in enumerate(rows)}
    compared = 0
    for row in rows:
        earlier = [r for r in rows if r["user_id"] == row["user_id"] and r["time_ms"] < first[row["request_id"]]]
        earlier.sort(key=lambda r: (r["time_ms"], place[r["impression_id"]]))
        assert [r["time_ms"] for r in earlier][-5:] == row["seen_time"]
        assert [(r["item_id"], r["click"]) for r in earlier][-5:] == list(
            zip(row["seen_item"], row["seen_click"], strict=True)
        )
        assert [r["item_id"] for r in earlier if r["click"]][-3:] == row["clicked_item"]
        compared += len(earlier) > 0
    assert compared > 500


def test_vocabularies_and_statistics_come_from_training_rows_only(tmp_path: Path) -> None:
    log = raw_log()
    late = [i for i, t in enumerate(log["time_ms"].to_pylist()) if t >= START + 4 * DAY]
    items = log["item_id"].to_pylist()
    for i in late:
        items[i] += 1000
    source = write_source(tmp_path, log.set_column(4, "item_id", pa.array(items)))
    result = prepare(config(source))
    encoder = Dataset.open(result.out).encoder
    assert len(encoder.vocabularies["item"]) == 40 and encoder.vocabularies["item"].max() < 1000
    train = pq.read_table(result.out / "train")
    price = np.log1p([p for p in train["price"].to_pylist() if p is not None])
    assert encoder.statistics["price"] == pytest.approx((price.mean(), price.std()))


def test_the_same_input_gives_the_same_bytes_however_it_is_worked_on(source: Path, whole: PrepareResult) -> None:
    one, again = whole, prepare(config(source, "b"))
    buckets = prepare(config(source, "c", write=WriteOptions(bucket_rows=300, threads=2)))
    assert sums(one) == sums(again) == sums(buckets)
    assert one.manifest["schema_hash"] == again.manifest["schema_hash"]
    same = {k: v for k, v in one.manifest.items() if k != "created"}
    assert same == {k: v for k, v in buckets.manifest.items() if k != "created"}
    assert not list(source.glob("**/.work")) and not list(source.glob("**/run-*"))


def test_duplicates_keep_the_first_and_are_counted(tmp_path: Path) -> None:
    log = raw_log(60)
    opposite = log.slice(0, 20)
    opposite = opposite.set_column(5, "click", pa.array([1 - c for c in opposite["click"].to_pylist()]))
    source = write_source(tmp_path, pa.concat_tables([log, opposite, log.slice(5, 3)]))
    dedupe = ["user_id", "request_id", "item_id", "time_ms"]
    result = prepare(config(source, dedupe=dedupe))
    assert result.manifest["counts"]["duplicates_dropped"] == 23
    assert result.manifest["counts"]["rows_read"] == log.num_rows + 23
    kept = {(r["request_id"], r["time_ms"]): r["click"] for r in read(result).to_pylist()}
    assert kept == {(r["request_id"], r["time_ms"]): r["click"] for r in log.to_pylist()}


def test_earlier_rows_may_serve_as_history_only(source: Path, whole: PrepareResult) -> None:
    every = read(whole).to_pylist()
    result = prepare(config(source, "late", rows_from="2023-11-17"))
    rows = read(result).to_pylist()
    wanted = [r for r in every if r["request_id"] in {x["request_id"] for x in rows}]
    assert [{k: v for k, v in r.items() if k != "impression_id"} for r in rows] == [
        {k: v for k, v in r.items() if k != "impression_id"} for r in wanted
    ]
    assert rows[0]["impression_id"] == 0 and min(r["time_ms"] for r in rows) >= START + 2 * DAY
    assert result.manifest["counts"]["history_only_rows"] == len(every) - len(rows) > 0


def test_filtered_rows_are_counted(source: Path) -> None:
    result = prepare(config(source, where="place in ['home', 'search']"))
    gone = raw_log()["place"].to_pylist().count("else")
    assert result.manifest["counts"]["filtered_out"] == gone
    assert set(read(result)["place"].to_pylist()) == {"home", "search"}


def test_history_from_before_the_log(source: Path) -> None:
    earlier = {
        "user_id": ["u1", "u1", "u2"], "item_id": [7, 8, 9], "nr": [1, 0, 0], "last": [START, START, START + 2 * DAY]
    }  # fmt: skip
    pq.write_table(pa.table(earlier), source / "earlier.parquet")
    spec = EarlierHistory(path=str(source / "earlier.parquet"), position="nr", until="last")
    rows = read(prepare(config(source, earlier=spec, write=WriteOptions(bucket_rows=300, threads=1)))).to_pylist()
    first = {user: next(r for r in rows if r["user_id"] == user) for user in ("u1", "u2", "u3")}
    assert first["u1"]["seen_item"][:2] == [8, 7] and first["u1"]["seen_time"][:2] == [None, None]
    assert first["u1"]["seen_click"][:2] == [None, None] and first["u1"]["clicked_item"] == []
    assert first["u2"]["seen_item"] == [] and first["u3"]["seen_item"] == []
    assert all(9 not in r["seen_item"][:1] or r["seen_time"][0] is not None for r in rows
               if r["user_id"] == "u2" and r["time_ms"] <= START + 2 * DAY)  # fmt: skip


def test_columns_may_be_carried_along(source: Path) -> None:
    result = prepare(config(source, carry=["user_id", "buy"]))
    assert "buy" in read(result).column_names
    with pytest.raises(PrepareError, match="no column 'true_click'"):
        prepare(config(source, "other", carry=["true_click"]))


def test_histories_that_the_log_has_already_are_kept(whole: PrepareResult, tmp_path: Path) -> None:
    parts = [str(whole.out / f["path"]) for s in whole.manifest["splits"].values() for f in s["files"]]
    schema = str(whole.out / "schema.yaml")
    again = prepare(PrepareConfig(schema=schema, log=parts, out=tmp_path / "again", write=WriteOptions(threads=1)))
    assert sorted(read(again).to_pylist(), key=lambda r: r["impression_id"]) == sorted(
        read(whole).to_pylist(), key=lambda r: r["impression_id"]
    )
    assert sums(again) == sums(whole)


@pytest.mark.parametrize(
    ("ids", "problem"),
    [
        (lambda n: [5, *range(1, n)], "impression id 5 (column 'impression_id') is in 2 rows"),
        (lambda n: [None, *range(1, n)], "impression id None (column 'impression_id') is in 1 rows"),
        (lambda n: [f"i{i}" for i in range(n)], "column 'impression_id' is string; impression ids are integers"),
    ],
)
def test_impression_ids_differ(tmp_path: Path, ids: Callable[[int], list[Any]], problem: str) -> None:
    log = raw_log(60)
    source = write_source(tmp_path, log.append_column("impression_id", pa.array(ids(log.num_rows))))
    with pytest.raises(PrepareError) as error:
        prepare(config(source))
    assert problem in str(error.value)


def test_from_csv_with_lists_as_text(tmp_path: Path) -> None:
    """A log without requests, in CSV: text becomes lists and numbers; whole floats become ids."""
    schema = {
        **SCHEMA, "request_id": None,
        "tables": {**SCHEMA["tables"], "tag": {"kind": "vocabulary"}},
        "features": {**SCHEMA["features"], "tags": {"side": "item", "kind": "multi", "table": "tag", "max_length": 3}},
    }  # fmt: skip
    lines = ["user_id,time_ms,place,item_id,click,buy,tags"]
    lines += [f'{i % 5},{START + i * DAY // 20},home,{i % 7}.0,{i % 2},0," a , b{i % 3}"' for i in range(100)]
    source = write_source(tmp_path, raw_log(3))
    (source / "schema.yaml").write_text(yaml.safe_dump(schema, sort_keys=False))
    (source / "log.csv").write_text("\n".join(lines) + "\n")
    pq.write_table(pa.table({"user_id": [0, 1], "city": ["rome", "oslo"]}), source / "users.parquet")
    result = prepare(config(source, log=[str(source / "log.csv")]))
    table = read(result)
    assert table.schema.field("item_id").type == pa.int64() and table.schema.field("user_id").type == pa.int64()
    assert table["tags"].to_pylist()[:2] == [["a", "b0"], ["a", "b1"]]
    assert result.manifest["splits"]["train"]["requests"] == result.rows["train"]


def test_seconds(tmp_path: Path) -> None:
    log = raw_log()
    seconds = pa.array([t // 1000 for t in log["time_ms"].to_pylist()])
    source = write_source(tmp_path, log.set_column(2, "time_ms", seconds), timestamp={"column": "time_ms", "unit": "s"})
    result = prepare(config(source))
    low, high = result.manifest["splits"]["train"]["time_range"]
    assert START <= low <= high < START + 3 * DAY
    assert all(t % 1000 == 0 for r in read(result).to_pylist() for t in r["seen_time"]), "event times are in ms"
    assert examine(result.out).exit_code == 0


def _log(change: Callable[[dict[str, list[Any]]], None]) -> pa.Table:
    columns = raw_log(60).to_pydict()
    change(columns)
    return pa.table(columns)


def _set(column: str, row: int, value: Any) -> Callable[[dict[str, list[Any]]], None]:
    def change(columns: dict[str, list[Any]]) -> None:
        columns[column][row] = value

    return change


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda c: c.pop("click"), "log: no column 'click'"),
        (lambda c: c.pop("user_id"), "log: no column 'user_id'"),
        (lambda c: c.pop("place"), "log: no column 'place'"),
        (_set("user_id", 3, None), "log: column 'user_id' is null in 1 rows; drop them with `where: user_id is not"),
        (_set("request_id", 3, None), "log: column 'request_id' is null in 1 rows"),
        (_set("click", 3, 2), "log: label column 'click' has 1 values that are not 0 or 1, such as 2"),
        (_set("buy", 3, -1), "log: label column 'buy' has 1 values that are not 0 or 1, such as -1"),
        (lambda c: c.update(click=[str(v) for v in c["click"]]), "log: label column 'click' is string"),
        (lambda c: c.update(time_ms=[float(v) for v in c["time_ms"]]), "log: column 'time_ms' is float64; store times"),
        (lambda c: c.update(time_ms=[v // 1000 for v in c["time_ms"]]), "is its unit really 'ms'?"),
        (lambda c: c.update(user_id=[int(u[1:]) for u in c["user_id"]]), "use one type of id in all files"),
        (lambda c: c.update(user_id=[f"x{i}" for i in range(len(c["user_id"]))]), "different values of 'user_id'"),
        (lambda c: c.update(item_id=[i + 0.5 for i in c["item_id"]]), "'item_id' has 158 ids with a fraction"),
        (_set("item_id", 3, 1e30), "'item_id' has 1 ids beyond 64 bits with a sign; store them as strings"),
        (lambda c: c.update(item_id=pa.array([2**64 - 1] * 158, pa.uint64())), "ids beyond 64 bits with a sign"),
        (lambda c: c.update(item_id=[{"id": i} for i in c["item_id"]]), "log: column 'item_id' is struct<id: int64>;"),
        (lambda c: [v.clear() for v in c.values()], "log: there are no rows"),
    ],
)  # fmt: skip
def test_a_fault_of_the_log_is_one_clear_error_and_leaves_nothing(
    tmp_path: Path, change: Callable[[dict[str, list[Any]]], None], problem: str
) -> None:
    source = write_source(tmp_path, _log(change))
    before = sorted(source.iterdir())
    with pytest.raises(PrepareError) as error:
        prepare(config(source))
    assert problem in str(error.value)
    assert sorted(source.iterdir()) == before


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"log": ["gone.parquet"]}, "log: gone.parquet: no such file"),
        ({"users": SideTable(path="gone.csv", key="user_id")}, "users: gone.csv: no such file"),
        ({"sequences": {"see": SEQUENCES["seen"]}}, "sequences.see: the schema's sequences are clicked, seen"),
        ({"sequences": {"seen": SequenceSource(attributes={"item": "item_id"})}}, "seen.attributes.click: is missing"),
        ({"sequences": SEQUENCES | {"clicked": SequenceSource(attributes={"item": "item"})}}, "no event column 'item'"),
        ({"sequences": {}}, "no column 'seen_item'"),
        ({"sequences": {**SEQUENCES, "clicked": SequenceSource(attributes={"item": "item_id"}, where="buy == 1")}},
         "sequences.clicked.where: 'buy' is known only hours after the event"),
        ({"where": "price >"}, "where: 'price >' is not a condition"),
        ({"where": "click == 5"}, "log: there are no rows"),
        ({"rows_from": "2030-01-01"}, "no row is left from 2030-01-01 on"),
        ({"dedupe": ["color"]}, "log: no column 'color'"),
        ({"calendar": {}}, "no column 'hour'"),
        ({"calendar": {"hour": "hour", "click": "weekday"}}, "calendar.click: the files have a column of this name"),
        ({"missing": {"prize": [-1]}}, "missing.prize: no file has this column; columns are buy, city, click, id,"),
    ],
)  # fmt: skip
def test_a_wrong_setting_is_named(source: Path, changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=r".") as error:
        prepare(config(source, **changes))
    assert problem in str(error.value)
    assert not (source / "out").exists()


def test_no_training_rows(tmp_path: Path) -> None:
    split = {"train_until": "2020-01-01", "validation_until": "2023-11-19"}
    source = write_source(tmp_path, raw_log(), split=split)
    with pytest.raises(PrepareError, match="no row is before train_until"):
        prepare(config(source))
    assert not (source / "out").exists()


def test_repeated_users(source: Path) -> None:
    pq.write_table(pa.concat_tables([USERS, USERS.slice(0, 2)]), source / "users.parquet")
    with pytest.raises(PrepareError, match="users: 2 rows have a null 'user_id' or repeat one"):
        prepare(config(source))


def test_a_full_disk_leaves_nothing(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = sorted(source.iterdir())
    original = pq.ParquetWriter.write_table
    written = []

    def full(self: pq.ParquetWriter, table: pa.Table, **options: Any) -> None:
        written.append(table.num_rows)
        if len(written) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        original(self, table, **options)

    monkeypatch.setattr(pq.ParquetWriter, "write_table", full)
    with pytest.raises(OSError, match="No space left on device"):
        prepare(config(source, write=WriteOptions(threads=1, row_group_rows=100)))
    assert len(written) == 3 and sorted(source.iterdir()) == before


def test_an_old_dataset_stays_when_the_new_one_fails(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = prepare(config(source))
    before = sums(result)
    with pytest.raises(FileExistsError, match="overwrite"):
        prepare(config(source))

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(pq.ParquetWriter, "write_table", full)
        with pytest.raises(OSError, match="No space"):
            prepare(config(source, overwrite=True))
    assert sums(result) == before
    assert sums(prepare(config(source, overwrite=True))) == before


def test_command_line_with_a_settings_file(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {
        "schema": str(source / "schema.yaml"), "log": [str(source / "log.parquet")],
        "users": {"path": str(source / "users.parquet"), "key": "user_id"},
        "items": {"path": str(source / "items.parquet"), "key": "id", "log_key": "item_id"},
        "sequences": {name: {"attributes": s.attributes, "where": s.where} for name, s in SEQUENCES.items()},
        "missing": {"city": ["UNKNOWN"], "price": [-1]}, "calendar": {"hour": "hour"},
        "write": {"threads": 1, "row_group_rows": 128},
    }  # fmt: skip
    (source / "prepare.yaml").write_text(yaml.safe_dump(settings))
    out = source / "cli"
    assert opengem.main(["prepare", "logs", "--config", str(source / "prepare.yaml"), "--out", str(out)]) == 0
    assert "duplicates dropped" in capsys.readouterr().out
    saved = parse_config(PrepareConfig, ["--config", str(out / "prepare.yaml")], name="prepare logs")
    assert saved == config(source, "cli", write=WriteOptions(threads=1, row_group_rows=128))
    assert json.loads((out / "dataset.json").read_text())["splits"]["train"]["files"][0]["row_groups"] > 3
    assert opengem.main(["prepare", "logs", "--config", str(source / "prepare.yaml"), "--out", str(out)]) == 2
    assert "overwrite" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"log": []}, "log: is empty"),
        ({"calendar": {"hour": "minute"}}, "calendar.hour: must be one of hour, weekday"),
    ],
)
def test_settings_are_checked(source: Path, changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=r".") as error:
        config(source, **changes)
    assert problem in str(error.value)


@pytest.mark.parametrize("key", ["row_group_rows", "part_rows", "memory_gb", "threads", "bucket_rows"])
def test_sizes_must_be_positive(key: str) -> None:
    with pytest.raises(ValueError, match=f"{key} must be positive"):
        WriteOptions(**{key: 0})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="row_group_rows must be at most 65536"):
        WriteOptions(row_group_rows=65_537)
