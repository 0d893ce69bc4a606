"""`opengem prepare kuairand` on files in the download's layout, and on the real slice where it is there."""

from __future__ import annotations

import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any

import ibis
import ibis.expr.types as ir
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest

import opengem
from foundation.data import kuairand
from foundation.data.build import WriteOptions
from foundation.data.dataset import Dataset
from foundation.data.doctor import examine
from foundation.data.files import sha256_file
from foundation.data.kuairand import KuaiRandConfig, prepare_kuairand
from foundation.data.prepare import PrepareResult
from foundation.data.schema import Schema
from foundation.data.settings import preset
from foundation.data.sources import PrepareError
from tests.data_paths import kuairand_dir

APRIL_20, DAY = 1_650_384_000_000, 86_400_000  # 2022-04-20 00:00 in Shanghai
CLICKED = {"video": "video_id", "author": "author_id", "tag": "tag", "tab": "tab"}
LABELS = ("is_click", "is_like", "is_follow", "is_comment", "is_forward", "is_hate", "long_view", "is_profile_enter")


def _log(rows: int, first_day: int, days: int, seed: int) -> pa.Table:
    rng = np.random.default_rng(seed)
    times = np.sort(rng.integers(first_day, first_day + days, rows) * DAY + rng.integers(0, 24, rows) * 3_600_000)
    columns: dict[str, Any] = {
        "user_id": rng.integers(0, 15, rows),
        "video_id": rng.integers(0, 40, rows),
        "date": np.full(rows, 20220420),
        "hourmin": np.full(rows, 1200),
        "time_ms": times + APRIL_20,
    }
    columns |= {name: rng.integers(0, 2, rows) for name in LABELS}
    columns |= {"play_time_ms": rng.integers(0, 9999, rows), "duration_ms": rng.integers(0, 99_999, rows)}
    return pa.table(columns | {"is_rand": np.zeros(rows, np.int64), "tab": rng.integers(0, 9, rows)})


def _users(count: int = 15) -> pa.Table:
    columns: dict[str, Any] = {"user_id": list(range(count))}
    columns["user_active_degree"] = ["UNKNOWN" if i == 3 else "full_active" for i in range(count)]
    columns |= {"is_lowactive_period": [0] * count, "is_live_streamer": [-124 if i % 2 else 1 for i in range(count)]}
    columns["is_video_author"] = [i % 2 for i in range(count)]
    for name in ("follow_user_num", "fans_user_num", "friend_user_num", "register_days"):
        columns |= {name: list(range(count)), f"{name}_range": [f"({i % 3},{i % 3 + 1}]" for i in range(count)]}
    for i in range(18):
        columns[f"onehot_feat{i}"] = [None if i >= 12 and u == 5 else float(u % 3) for u in range(count)]
    return pa.table(columns)


def _videos(count: int = 40) -> pa.Table:
    columns: dict[str, Any] = {
        "video_id": list(range(count)),
        "author_id": [i // 2 for i in range(count)],
        "video_type": ["AD" if i == 0 else "NORMAL" for i in range(count)],
        "upload_dt": ["2022-04-10"] * count,
        "upload_type": ["UNKNOWN" if i == 1 else "Web" for i in range(count)],
        "visible_status": [0.0] * count,
        "video_duration": [9.0] * count,
        "music_id": list(range(count)),
        "music_type": [None if i == 2 else 9.0 for i in range(count)],
        "tag": [None if i == 7 else f"{i % 5},{i % 3}" for i in range(count)],
    }
    return pa.table(columns)


def write_download(folder: Path) -> Path:
    """A tiny download of KuaiRand-1K: CSV files below `data`, the first log in two parts, no list of earlier videos."""
    folder = folder / "KuaiRand-1K" / "data"
    folder.mkdir(parents=True)
    early, late = _log(300, 0, 2, 0), _log(500, 2, 19, 1)
    pacsv.write_csv(early.slice(0, 150), folder / "log_standard_4_08_to_4_21_1k_part1.csv")
    pacsv.write_csv(early.slice(150), folder / "log_standard_4_08_to_4_21_1k_part2.csv")
    pacsv.write_csv(late, folder / "log_standard_4_22_to_5_08_1k.csv")
    pacsv.write_csv(_log(100, 3, 10, 2), folder / "log_random_4_22_to_5_08_1k.csv")
    pacsv.write_csv(_users(), folder / "user_features_1k.csv")
    pacsv.write_csv(_videos(), folder / "video_features_basic_1k.csv")
    return folder.parent


@pytest.fixture
def download(tmp_path: Path) -> Path:
    """A download that a test may change."""
    return write_download(tmp_path)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> PrepareResult:
    """What becomes of a download with no other options."""
    folder = tmp_path_factory.mktemp("plain")
    return prepare_kuairand(config(write_download(folder), folder / "out"))


def config(source: Path, out: Path, **changes: Any) -> KuaiRandConfig:
    given = {"source": source, "out": out, "schema": both_sequences(out.parent), "write": WriteOptions(threads=1)}
    return KuaiRandConfig(**given | changes)


def both_sequences(folder: Path) -> str:
    """A schema file: the preset, with the clicked videos beside the shown ones."""
    schema = Schema.load(preset("datasets/kuairand")).to_dict()
    attributes = {name: {"column": f"clicked_{name}", "table": table} for name, table in CLICKED.items()}
    schema["sequences"]["clicked"] = {"timestamp": "clicked_time_ms", "max_length": 20, "attributes": attributes}
    path = folder / "schema.yaml"
    Schema.from_dict(schema).save(path)
    return str(path)


def read(result: PrepareResult) -> list[dict[str, Any]]:
    names = [f["path"] for s in result.manifest["splits"].values() for f in s["files"]]
    rows: list[dict[str, Any]] = pa.concat_tables([pq.read_table(result.out / n) for n in names]).to_pylist()
    return rows


def test_the_preset_has_the_features_of_the_peers() -> None:
    schema = Schema.load(preset("datasets/kuairand"))
    categorical = [f.name for f in schema.features if f.kind == "categorical"]
    assert len(categorical) == 37 and sum(f.side == "user" for f in schema.features if f.kind == "categorical") == 26
    assert schema.sequence("shown").max_length == 50
    assert schema.task_names == ("is_click", "long_view", "is_like", "is_profile_enter")
    assert schema.surface.column == "tab"


def test_a_full_download_without_earlier_videos(plain: PrepareResult) -> None:
    rows = read(plain)
    log = pa.concat_tables([_log(300, 0, 2, 0), _log(500, 2, 19, 1)]).to_pylist()
    kept: dict[tuple[int, int, int], dict[str, Any]] = {}
    for row in log:
        kept.setdefault((row["user_id"], row["video_id"], row["time_ms"]), row)
    assert plain.manifest["counts"]["duplicates_dropped"] == len(log) - len(kept)
    keys = [(r["time_ms"], r["user_id"], r["video_id"]) for r in rows]
    assert keys == sorted((t, u, v) for u, v, t in kept)
    for row in rows:
        raw = kept[row["user_id"], row["video_id"], row["time_ms"]]
        assert all(row[name] == raw[name] for name in ("is_click", "long_view", "is_like", "is_profile_enter", "tab"))
        assert all(t < row["time_ms"] for t in row["shown_time_ms"] + row["clicked_time_ms"])
    cut = APRIL_20 + 14 * DAY
    assert plain.rows["train"] == sum(k[0] < cut for k in keys)
    assert plain.rows["train"] + plain.rows["validation"] == sum(k[0] < cut + 2 * DAY for k in keys)
    assert examine(plain.out).exit_code == 0


def test_sentinels_are_missing_and_counted(plain: PrepareResult) -> None:
    counts = plain.manifest["counts"]["missing_values"]
    assert counts["users.is_live_streamer"] == 7 and counts["users.user_active_degree"] == 1
    assert counts["users.onehot_feat12"] == 1 and counts["videos.upload_type"] == 1
    assert counts["videos.music_type"] == 1 and counts["videos.tag"] == 1
    for row in read(plain):
        assert row["is_live_streamer"] == (None if row["user_id"] % 2 else 1)
        assert row["user_active_degree"] == (None if row["user_id"] == 3 else "full_active")
        assert row["onehot_feat12"] == (None if row["user_id"] == 5 else row["user_id"] % 3)
        assert row["upload_type"] == (None if row["video_id"] == 1 else "Web")
        assert row["tag"] == (None if row["video_id"] == 7 else row["video_id"] % 5), "the first of its tags"


def test_duration_buckets_are_equal_parts_of_the_training_rows(plain: PrepareResult) -> None:
    edges = plain.manifest["duration_bucket_edges_ms"]
    assert len(edges) == 19 and edges == sorted(set(edges))
    for row in read(plain):
        assert row["duration_bucket"] == sum(edge <= row["duration_ms"] for edge in edges)
    train = pq.read_table(plain.out / "train", columns=["duration_bucket"])["duration_bucket"]
    sizes = pc.value_counts(train).field("counts").to_pylist()
    assert len(sizes) == 20 and max(sizes) - min(sizes) <= 3


def test_earlier_days_may_serve_as_history_only(download: Path, plain: PrepareResult, tmp_path: Path) -> None:
    whole = read(plain)
    result = prepare_kuairand(config(download, tmp_path / "late", rows_from="2022-04-25"))
    rows = read(result)
    assert len(rows) + result.manifest["counts"]["history_only_rows"] == len(whole)
    for one, other in zip(rows, whole[-len(rows) :], strict=True):
        assert one["shown_video"] == other["shown_video"] and one["clicked_time_ms"] == other["clicked_time_ms"]


def test_rates_are_counted_once_for_all_parts_of_the_users(
    download: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queries: list[str] = []
    write = kuairand.write_dataset

    def watched(folder: Path, schema: Schema, rows: ir.Table, *more: Any, **options: Any) -> dict[str, Any]:
        queries.append(str(ibis.to_sql(rows)))
        return write(folder, schema, rows, *more, **options)

    monkeypatch.setattr(kuairand, "write_dataset", watched)
    parts = WriteOptions(threads=1, bucket_rows=200)
    rows = read(prepare_kuairand(config(download, tmp_path / "parts", write=parts)))
    assert " OVER " not in queries[0]
    late = 48 * 3_600_000
    for row in rows[::7]:
        times = [other["time_ms"] for other in rows if other["tag"] == row["tag"]]
        seen = sum(time <= row["time_ms"] - late for time in times)
        assert row["tag_shown"] == (None if row["tag"] is None else pytest.approx(np.log1p(seen)))


def test_the_random_log_is_left_out_unless_asked_for(download: Path, tmp_path: Path) -> None:
    result = prepare_kuairand(config(download, tmp_path / "out", random_log=True))
    assert result.manifest["counts"]["rows_read"] == 900
    (download / "data/log_random_4_22_to_5_08_1k.csv").unlink()
    with pytest.raises(PrepareError, match=r"no file log_random_\*; leave random_log out"):
        prepare_kuairand(config(download, tmp_path / "none", random_log=True))


def test_missing_files_are_named(download: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["prepare", "kuairand", "--out", str(tmp_path / "out"), "--source"]
    assert opengem.main([*arguments, str(tmp_path / "nowhere")]) == 2
    assert "source: " in capsys.readouterr().err
    (download / "data/user_features_1k.csv").unlink()
    assert opengem.main([*arguments, str(download)]) == 2
    assert "no file user_features_*; is it the data set's folder?" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "attribute", "problem"),
    [
        ("liked", "video", "sequences.liked: must be one of shown, clicked"),
        ("clicked", "music", "sequences.clicked.attributes.music: must be one of video, author"),
    ],
)
def test_sequences_it_does_not_know_are_named(
    download: Path, tmp_path: Path, name: str, attribute: str, problem: str
) -> None:
    schema = Schema.load(preset("datasets/kuairand")).to_dict()
    schema["sequences"][name] = {"attributes": {attribute: {"column": "x", "table": "video_id"}}}
    Schema.from_dict(schema).save(tmp_path / "other.yaml")
    with pytest.raises(PrepareError) as error:
        prepare_kuairand(config(download, tmp_path / "out", schema=str(tmp_path / "other.yaml")))
    assert problem in str(error.value) and "other.yaml" in str(error.value)


def test_a_log_without_a_column(download: Path, tmp_path: Path) -> None:
    for path in (download / "data").glob("log_standard*"):
        pacsv.write_csv(pacsv.read_csv(path).drop_columns(["long_view"]), path)
    with pytest.raises(PrepareError, match="log: no column 'long_view'"):
        prepare_kuairand(config(download, tmp_path / "out"))


# --- the real slice ---


@pytest.fixture(scope="module")
def slice_dir() -> Path:
    folder = kuairand_dir()
    if folder is None:
        pytest.skip("the KuaiRand slice is not beside the checkout (../shared/data/kuairand_pure)")
    return folder


@pytest.fixture(scope="module")
def prepared(slice_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> PrepareResult:
    out = tmp_path_factory.mktemp("kuairand") / "dataset"
    return prepare_kuairand(config(slice_dir, out, write=WriteOptions()))


@pytest.fixture(scope="module")
def rows(prepared: PrepareResult) -> pa.Table:
    files = [f["path"] for s in prepared.manifest["splits"].values() for f in s["files"]]
    return pa.concat_tables([pq.read_table(prepared.out / f) for f in files])


def test_slice_split_is_the_published_one(slice_dir: Path, prepared: PrepareResult, rows: pa.Table) -> None:
    published = pq.read_table(slice_dir / "split.parquet")
    for name in ("user_id", "video_id", "time_ms"):
        assert rows[name].to_pylist() == published[name].to_pylist()
    assert prepared.rows == {"train": 149_888, "validation": 30_241, "test": 42_315}
    names = {"val": "validation"}
    expected = [names.get(s, s) for s in published["split"].to_pylist()]
    assert [s for s, n in prepared.rows.items() for _ in range(n)] == expected


def test_slice_duplicates_keep_the_first(slice_dir: Path, prepared: PrepareResult, rows: pa.Table) -> None:
    assert prepared.manifest["counts"]["duplicates_dropped"] == 5_885
    log = pq.read_table(slice_dir / "log_standard_4_25_to_5_08_pure.parquet")
    names = ["user_id", "video_id", "time_ms", "is_click", "long_view", "is_like", "is_profile_enter", "tab"]
    first: dict[tuple[int, ...], tuple[int, ...]] = {}
    for row in zip(*(log[n].to_pylist() for n in names), strict=True):
        first.setdefault(row[:3], row)
    assert {row[:3]: row for row in zip(*(rows[n].to_pylist() for n in names), strict=True)} == first


@pytest.mark.parametrize("sequence", ["shown", "clicked"])
def test_slice_no_history_holds_an_event_at_or_after_its_rows_time(rows: pa.Table, sequence: str) -> None:
    """All rows. In the videos of the log, an event is where its user, video and time are those of a row."""
    lists = rows[f"{sequence}_time_ms"].combine_chunks()
    lengths = pc.list_value_length(lists).to_numpy()
    row = np.repeat(np.arange(rows.num_rows), lengths)
    times = pc.list_flatten(lists)
    known = times.is_valid().to_numpy(zero_copy_only=False)
    times = times.fill_null(0).to_numpy()
    assert known.sum() > 500_000
    assert (times[known] < rows["time_ms"].to_numpy()[row[known]]).all()
    backwards = (np.diff(times) < 0) & (np.diff(row) == 0) & known[1:] & known[:-1]
    assert not backwards.any()
    videos = pc.list_flatten(rows[f"{sequence}_video"].combine_chunks()).to_numpy()
    users = rows["user_id"].to_numpy()
    in_log = set(zip(users.tolist(), rows["video_id"].to_pylist(), rows["time_ms"].to_pylist(), strict=True))
    events = set(zip(users[row[known]].tolist(), videos[known].tolist(), times[known].tolist(), strict=True))
    assert events <= in_log


def test_slice_histories_equal_brute_force(slice_dir: Path, rows: pa.Table) -> None:
    """Of every tenth user: the events strictly before the row, from the log and before it, and nothing else."""
    rows = rows.filter(pc.equal(pc.subtract(rows["user_id"], pc.multiply(pc.divide(rows["user_id"], 10), 10)), 0))
    earlier = pq.read_table(slice_dir / "user_history_before_4_25.parquet").to_pydict()
    before = {
        user: (list(seen), set(liked), last)
        for user, seen, liked, last in zip(
            earlier["user_id"], earlier["watch_seq"], earlier["like_seq"], earlier["last_time_ms"], strict=True
        )
    }
    names = ["user_id", "time_ms", "video_id", "author_id", "tag", "tab"]
    names += ["is_click", "long_view", "is_like", "is_profile_enter"]
    columns = [rows[n].to_pylist() for n in names]
    by_user: dict[int, list[tuple[Any, ...]]] = defaultdict(list)
    for event in zip(*columns, strict=True):
        by_user[event[0]].append(event[1:])  # rows come in time order
    built = {n: rows[n].to_pylist() for n in rows.column_names if n.startswith(("shown_", "clicked_"))}
    for i, (user, time) in enumerate(zip(columns[0], columns[1], strict=True)):
        past = [e for e in by_user[user] if e[0] < time]
        seen, liked, last = before.get(user, ([], set(), 0))
        seeds = [(None, v, None, None, None, 2, None, int(v in liked), None) for v in (seen if time > last else [])]
        shown = (seeds + past)[-50:]
        clicked = [e for e in past if e[5] == 1][-20:]
        assert built["shown_video"][i] == [e[1] for e in shown]
        assert built["shown_time_ms"][i] == [e[0] for e in shown]
        assert built["shown_tab"][i] == [e[4] for e in shown]
        assert built["shown_click"][i] == [e[5] for e in shown]
        assert built["shown_long_view"][i] == [e[6] for e in shown]
        assert built["shown_like"][i] == [e[7] for e in shown]
        assert built["shown_profile_enter"][i] == [e[8] for e in shown]
        assert built["clicked_video"][i] == [e[1] for e in clicked]
        assert built["clicked_author"][i] == [e[2] for e in clicked]
        assert built["clicked_tag"][i] == [e[3] for e in clicked]
        assert built["clicked_time_ms"][i] == [e[0] for e in clicked]
    assert len(columns[0]) > 20_000


def test_slice_authors_and_tags_of_shown_videos(slice_dir: Path, rows: pa.Table) -> None:
    videos = pacsv.read_csv(slice_dir / "video_features_basic_pure.csv").to_pydict()
    author = dict(zip(videos["video_id"], videos["author_id"], strict=True))
    tags = (str(t).split(",")[0] for t in videos["tag"])
    tag = dict(zip(videos["video_id"], (int(t) if t else None for t in tags), strict=True))
    sample = rows.take(pa.array(range(0, rows.num_rows, 101)))
    for shown, authors, shown_tags in zip(
        sample["shown_video"].to_pylist(), sample["shown_author"].to_pylist(), sample["shown_tag"].to_pylist(),
        strict=True,
    ):  # fmt: skip
        assert authors == [author[v] for v in shown] and shown_tags == [tag[v] for v in shown]


def test_slice_is_healthy_and_its_reader_opens_it(prepared: PrepareResult) -> None:
    report = examine(prepared.out)
    assert report.exit_code == 0 and report.rows == 222_444
    assert Dataset.open(prepared.out).encoder.table_rows["user_id"] > 15_000


@pytest.mark.slow
def test_slice_from_csv_gives_the_same_bytes(slice_dir: Path, prepared: PrepareResult, tmp_path: Path) -> None:
    """Another format, other threads and buckets, another run."""
    source = tmp_path / "source"
    source.mkdir()
    for path in slice_dir.iterdir():
        if path.suffix in (".csv", ".gz") or path.name.startswith("user_history"):
            shutil.copy(path, source / path.name)
    options = WriteOptions(bucket_rows=80_000, threads=2)
    other = prepare_kuairand(config(source, tmp_path / "out", write=options))
    for name in [f["path"] for s in other.manifest["splits"].values() for f in s["files"]] + ["encoder.npz"]:
        assert sha256_file(other.out / name) == sha256_file(prepared.out / name)
