"""The synthetic world: reproducible, sorted, true to its probabilities, driven by histories, flat in memory."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

from foundation.data import world as world_module
from foundation.data.options import parse_config
from foundation.data.prepare import PrepareConfig, prepare
from foundation.data.schema import Schema
from foundation.data.world import WorldConfig, world

ROOT = Path(__file__).resolve().parents[3]


def read_log(out: Path) -> dict[str, np.ndarray]:
    table = pq.read_table(out / "impressions")
    return {name: table[name].to_numpy() for name in table.column_names}


def digests(out: Path) -> dict[str, str]:
    """Of all files but the two that name the output folder."""
    own = {"world.yaml", "prepare.yaml"}
    files = [path for path in sorted(out.rglob("*")) if path.is_file() and path.name not in own]
    return {str(path.relative_to(out)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("world") / "raw"
    world(WorldConfig(out=out, rows=120_000, seed=3))
    return out


def test_counts_agree(small: Path) -> None:
    log, facts = read_log(small), json.loads((small / "world.json").read_text())
    assert len(log["click"]) == facts["impressions"] == 120_000
    assert len(np.unique(log["request_id"])) == facts["requests"]
    assert set(np.unique(log["user_id"])) == set(pq.read_table(small / "users.parquet")["user_id"].to_pylist())
    items = pq.read_table(small / "items.parquet")
    assert items["item_id"].to_pylist() == list(range(1, facts["items"] + 1))
    assert set(np.unique(log["item_id"])) <= set(items["item_id"].to_pylist())
    assert {task: int(log[task].sum()) for task in ("click", "like", "conversion")} == facts["positives"]


def test_log_is_a_log(small: Path) -> None:
    log = read_log(small)
    assert (np.diff(log["time_ms"]) >= 0).all()
    assert (log["impression_id"] == 1 + np.arange(len(log["impression_id"]))).all()
    # Requests are adjacent, of one user, one time and one surface, and never show an item twice.
    assert set(np.unique(np.diff(log["request_id"]))) == {0, 1}
    same = np.diff(log["request_id"]) == 0
    for column in ("user_id", "time_ms", "surface", "device"):
        assert (log[column][1:][same] == log[column][:-1][same]).all()
    pairs = np.stack([log["request_id"], log["item_id"]])
    assert np.unique(pairs, axis=1).shape[1] == len(log["click"])
    # A user's requests have different times, so that "strictly earlier" leaves none out.
    starts = np.concatenate([[True], ~same])
    assert np.unique(np.stack([log["user_id"][starts], log["time_ms"][starts]]), axis=1).shape[1] == starts.sum()
    assert set(np.unique(log["surface"])) == {"feed", "reels", "stories"}


def test_labels_follow_their_true_probabilities(small: Path) -> None:
    log = read_log(small)
    clicked = log["click"] == 1
    for task, rows in (("click", slice(None)), ("like", slice(None)), ("conversion", clicked)):
        truth, label = log[f"true_{task}"][rows].astype(float), log[task][rows]
        deviation = np.sqrt((truth * (1 - truth)).sum())
        assert abs(label.sum() - truth.sum()) < 4 * deviation, task
        # In every tenth of the predictions too.
        for part in np.array_split(np.argsort(truth), 10):
            assert abs(label[part].sum() - truth[part].sum()) < 4.5 * np.sqrt((truth * (1 - truth))[part].sum()), task
        assert roc_auc_score(label, truth) > 0.65
    assert not log["like"][~clicked].any() and not log["conversion"][~clicked].any()
    assert 0.15 < log["click"].mean() < 0.4


def test_surfaces_differ(small: Path) -> None:
    log = read_log(small)
    rates = {name: log["click"][log["surface"] == name].mean() for name in ("feed", "reels", "stories")}
    assert rates["reels"] > 1.3 * rates["feed"] > 1.3 * 1.3 * rates["stories"]


def test_conversions_come_later_within_the_window(small: Path) -> None:
    log = read_log(small)
    converted = log["conversion"] == 1
    assert np.isnan(log["conversion_time_ms"][~converted]).all()
    delay = (log["conversion_time_ms"] - log["time_ms"])[converted] / 3_600_000
    assert (delay >= 0).all() and (delay <= 24).all()
    assert np.median(delay) > 1


def test_history_lengths_are_heavy_tailed(small: Path) -> None:
    log = read_log(small)
    rows = np.bincount(log["user_id"].astype(int))[1:]
    assert rows.max() > 12 * np.median(rows)
    assert np.sort(rows)[-len(rows) // 10 :].sum() > 0.35 * rows.sum()


def test_histories_drive_the_labels(small: Path) -> None:
    """A logistic model that sees the topics of a user's earlier clicks beats one that sees none, by far."""
    log = read_log(small)
    items = pq.read_table(small / "items.parquet")
    topic = items["topic"].to_numpy()[log["item_id"] - 1]
    order = np.lexsort((log["impression_id"], log["user_id"]))
    similarity = np.zeros(len(order))
    user = request = -1
    for row in order:
        if log["user_id"][row] != user:
            user, state, clicks = log["user_id"][row], np.zeros(topic.max() + 1), []
        if log["request_id"][row] != request:
            request = log["request_id"][row]
            if clicks:
                state *= 0.7
                np.add.at(state, clicks, 1.0)
            clicks = []
        similarity[row] = state[topic[row]] / np.sqrt(1 + (state**2).sum())
        if log["click"][row]:
            clicks.append(topic[row])
    surface = np.stack([log["surface"] == name for name in ("feed", "reels")], axis=1)
    static = np.concatenate([surface, np.eye(topic.max() + 1)[topic]], axis=1)
    train = log["time_ms"] < np.quantile(log["time_ms"], 0.8)

    def test_auc(features: np.ndarray) -> float:
        model = LogisticRegression(max_iter=300).fit(features[train], log["click"][train])
        return float(roc_auc_score(log["click"][~train], model.predict_proba(features[~train])[:, 1]))

    without = test_auc(static)
    with_history = test_auc(np.concatenate([static, similarity[:, None]], axis=1))
    best = roc_auc_score(log["click"][~train], log["true_click"][~train])
    assert without + 0.06 < with_history < best


def test_seed_decides_everything(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        world(WorldConfig(out=tmp_path / name, rows=3_000, seed=seed))
    assert digests(tmp_path / "a") == digests(tmp_path / "b")
    assert digests(tmp_path / "a") != digests(tmp_path / "c")


def test_blocks_and_stretches_do_not_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With many small blocks and files the log is as sorted and as consistent as with one."""
    monkeypatch.setattr(world_module, "BLOCK_ROWS", 2_000)
    world(WorldConfig(out=tmp_path / "raw", rows=20_000))
    assert len(list((tmp_path / "raw" / "impressions").iterdir())) == 10
    test_counts = read_log(tmp_path / "raw")
    assert len(test_counts["click"]) == 20_000
    test_log_is_a_log(tmp_path / "raw")
    assert not list((tmp_path / "raw").glob("block-*"))


def test_number_of_processes_does_not_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last blocks are begun with too many users, or have more rows than are left, and are done again."""
    monkeypatch.setattr(world_module, "BLOCK_ROWS", 2_000)
    for processes in (1, 2):
        out = tmp_path / str(processes)
        world(WorldConfig(out=out, rows=9_000, requests_per_user=40, processes=processes))
        assert not list(out.glob("block-*"))
    assert digests(tmp_path / "1") == digests(tmp_path / "2")


def test_schema_names_columns_that_are_there(small: Path) -> None:
    schema = Schema.load(small / "schema.yaml")
    names = set(pq.read_schema(next((small / "impressions").iterdir())).names)
    for file in ("users.parquet", "items.parquet"):
        names |= set(pq.read_schema(small / file).names)
    histories = {a.column for s in schema.sequences for a in s.attributes} | {s.timestamp for s in schema.sequences}
    assert set(schema.columns()) <= names | histories
    assert schema.task("conversion").given == "click"
    log = read_log(small)
    items = pq.read_table(small / "items.parquet")
    tags = items["tags"].combine_chunks().flatten().to_numpy()
    for table, values in (
        ("item", log["item_id"]),
        ("device", log["device"]),
        ("topic", items["topic"].to_numpy()),
        ("tag", tags),
        ("country", pq.read_table(small / "users.parquet")["country"].to_numpy()),
    ):
        assert values.min() >= 0 and values.max() < schema.table(table).rows - 2, table


def test_prepare_makes_a_dataset_of_it(small: Path, tmp_path: Path) -> None:
    """Histories are the user's last clicks, strictly before the row; rows and truth arrive unchanged."""
    arguments = ["--config", str(small / "prepare.yaml"), "--out", str(tmp_path / "dataset")]
    prepare(parse_config(PrepareConfig, arguments, name="prepare logs"))
    columns = ["impression_id", "user_id", "time_ms", "true_click", "clicked_item", "clicked_time_ms"]
    splits = [pq.read_table(tmp_path / "dataset" / name, columns=columns) for name in ("train", "validation", "test")]
    table = pa.concat_tables(splits)
    log = read_log(small)
    assert table["impression_id"].to_pylist() == log["impression_id"].tolist()
    assert (table["true_click"].to_numpy() == log["true_click"]).all()
    assert splits[0]["time_ms"].to_numpy().max() < splits[1]["time_ms"].to_numpy().min()
    clicked, items, times = log["click"] == 1, table["clicked_item"], table["clicked_time_ms"]
    for row in range(0, table.num_rows, 4001):
        earlier = clicked & (log["user_id"] == log["user_id"][row]) & (log["time_ms"] < log["time_ms"][row])
        assert sorted(times[row].as_py()) == times[row].as_py() == log["time_ms"][earlier][-50:].tolist()
        # Clicks of one request share a time; which of them the limit of 50 cuts off is not defined.
        if earlier.sum() <= 50:
            assert sorted(items[row].as_py()) == sorted(log["item_id"][earlier].tolist())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rows": 0}, "rows must be positive"),
        ({"surfaces": ("feed", "reels")}, "surfaces must be at least 3"),
        ({"surfaces": ("feed", "reels", "feed")}, "different names"),
        ({"items": 3}, "items must be at least"),
        ({"days": 4}, "days must leave"),
        ({"fade_per_click": 1.5}, "fade_per_click"),
        ({"start": "yesterday"}, "start must be a date"),
    ],
)
def test_config_is_checked(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WorldConfig(out=Path("x"), **settings)


def test_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = []
    real = pq.write_table

    def write(table: pa.Table, path: Path, **settings) -> None:
        written.append(path)
        if len(written) == 2:
            raise OSError(28, "No space left on device")
        real(table, path, **settings)

    monkeypatch.setattr(world_module.pq, "write_table", write)
    with pytest.raises(OSError, match="No space left"):
        world(WorldConfig(out=tmp_path / "raw", rows=2_000))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_memory_is_flat(tmp_path: Path) -> None:
    """Eight times the rows take at most 100 MB more at the peak."""
    code = (
        "import resource, sys; from pathlib import Path; from foundation.data.world import WorldConfig, world\n"
        "world(WorldConfig(out=Path(sys.argv[1]), rows=int(sys.argv[2])))\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)\n"
    )
    peaks = []
    for rows in (1_000_000, 8_000_000):
        arguments = [sys.executable, "-c", code, str(tmp_path / str(rows)), str(rows)]
        result = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, check=True)
        peaks.append(float(result.stdout.splitlines()[-1]))
    assert peaks[1] < peaks[0] + 100, peaks
    assert peaks[1] < 700, peaks
