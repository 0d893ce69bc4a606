"""`opengem prepare kuairand`: the KuaiRand data set, from its own files, to a dataset.

Takes the download of KuaiRand-Pure, -1K or -27K (Gao et al., CIKM 2022) as it is, or a slice of it whose earlier days
come as one list of video ids per user. What each column means is in ``configs/datasets/kuairand.yaml``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ibis
import ibis.expr.types as ir

from foundation.data.build import PLACE, REQUEST_TIME, SPLIT, Arranged, WriteOptions, arrange, write_dataset
from foundation.data.candidate_rates import Outcome, with_rates
from foundation.data.files import atomic_dir
from foundation.data.history import History
from foundation.data.prepare import (
    PrepareResult,
    SequenceSource,
    join_side,
    report,
    sequence_histories,
    with_calendar,
    working_folder,
)
from foundation.data.progress import progress
from foundation.data.schema import Schema
from foundation.data.settings import preset, save, show
from foundation.data.sources import PrepareError, SideTable, blank, connect, duckdb_errors, load, require_unique

DEDUPE = ("user_id", "video_id", "time_ms")
DURATION_BUCKETS = 20
# The download's own file names; `_pure`, `_1k`, `_27k`, `_part1` and so on follow.
LOGS, RANDOM_LOGS, USERS, VIDEOS = "log_standard_*", "log_random_*", "user_features_*", "video_features_basic_*"
EARLIER = "user_history_before_*.parquet"
# "Not known", in the words of the data set.
SENTINELS: dict[str, Sequence[int | float | str]] = {"*": (-124, "UNKNOWN")}
SHOWN_BEFORE = 2
# What became of earlier impressions of a candidate's video, author and tag, columns such as `video_like_rate`. The
# expected rates are those of the published slice's training rows.
RATE_KEYS = {"video": "video_id", "author": "author_id", "tag": "tag"}
RATE_OUTCOMES = {
    "click": Outcome(label="is_click", expected=0.442, strength=20),
    "long_view": Outcome(label="long_view", expected=0.311, strength=20),
    "like": Outcome(label="is_like", expected=0.017, strength=60),
    "profile_enter": Outcome(label="is_profile_enter", expected=0.019, strength=60),
}
RATES_KNOWN_AFTER_HOURS = 48.0

_LOG_TYPES = dict.fromkeys(
    ("user_id", "video_id", "time_ms", "duration_ms", "tab", "is_click", "is_like", "long_view", "is_profile_enter"),
    "BIGINT",
)
_SIDE_TYPES = {"user_id": "BIGINT", "video_id": "BIGINT", "author_id": "BIGINT", "tag": "VARCHAR"}
# The sequences a schema may have, and the column behind each attribute it may use.
_CONDITIONS = {"shown": None, "clicked": "is_click == 1"}
_ATTRIBUTES = {
    "video": "video_id",
    "author": "author_id",
    "tag": "tag",
    "tab": "tab",
    "click": "is_click",
    "long_view": "long_view",
    "like": "is_like",
    "profile_enter": "is_profile_enter",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class KuaiRandConfig:
    """What to read and where to write.

    Args:
        source: folder with the data set's files, or the download's folder above its `data`.
        out: folder to write.
        schema: YAML file of the dataset's schema, or the name of a preset.
        random_log: also read the randomly exposed impressions of the download.
        rows_from: wall time of the first row of the dataset; earlier ones only serve as history.
        write: sizes of files and memory.
        overwrite: replace `out` if it exists.
    """

    source: Path
    out: Path
    schema: str = "datasets/kuairand"
    random_log: bool = False
    rows_from: str | None = None
    write: WriteOptions = field(default_factory=WriteOptions)
    overwrite: bool = False


def prepare_kuairand(config: KuaiRandConfig) -> PrepareResult:
    """Makes a dataset of KuaiRand's files.

    Raises:
        PrepareError: a file is missing or is not what the data set has.
        FileExistsError: `out` exists and `overwrite` is false.
        OSError: the disk is full; nothing is left behind.
    """
    show(config, "prepare kuairand")
    schema = Schema.load(preset(config.schema, "schema", "datasets"))
    files = _find_files(config)
    histories = _histories(schema)
    finished = atomic_dir(config.out, overwrite=config.overwrite, inputs=[config.schema, config.source])
    with finished as folder, working_folder(folder) as work:
        connection = connect(work, config.write.memory_gb, config.write.threads)
        try:
            with duckdb_errors():
                manifest = _prepare(config, schema, histories, files, connection, folder)
        finally:
            connection.disconnect()
        save(config, folder / "prepare.yaml")
    report(config.out, manifest)
    return PrepareResult(out=config.out, manifest=manifest)


def _histories(schema: Schema) -> list[History]:
    """The schema's sequences, with the attributes it asks for."""
    sources = {}
    for sequence in schema.sequences:
        if sequence.name not in _CONDITIONS:
            known = ", ".join(_CONDITIONS)
            raise PrepareError(f"{schema.source}: sequences.{sequence.name}: must be one of {known}")
        for attribute in sequence.attributes:
            if attribute.name not in _ATTRIBUTES:
                key, known = f"sequences.{sequence.name}.attributes.{attribute.name}", ", ".join(_ATTRIBUTES)
                raise PrepareError(f"{schema.source}: {key}: must be one of {known}")
        attributes = {a.name: _ATTRIBUTES[a.name] for a in sequence.attributes}
        sources[sequence.name] = SequenceSource(attributes=attributes, where=_CONDITIONS[sequence.name])
    return sequence_histories(schema, sources)


def _find_files(config: KuaiRandConfig) -> dict[str, list[Path]]:
    """The data set's files by kind. Of a log that is there in two formats, the Parquet one is taken."""
    folder = config.source
    if not folder.is_dir():
        raise PrepareError(f"source: {folder}: no such folder")
    if not list(folder.glob(LOGS)) and (folder / "data").is_dir():
        folder = folder / "data"
    patterns = {"log": LOGS, "users": USERS, "videos": VIDEOS, "earlier": EARLIER}
    found = {kind: _one_format(sorted(folder.glob(pattern))) for kind, pattern in patterns.items()}
    if config.random_log:
        random = _one_format(sorted(folder.glob(RANDOM_LOGS)))
        if not random:
            raise PrepareError(f"source: {folder}: no file {RANDOM_LOGS}; leave random_log out")
        found["log"] += random
    for kind in ("log", "users", "videos"):
        if not found[kind]:
            raise PrepareError(f"source: {folder}: no file {patterns[kind]}; is it the data set's folder?")
    return found


def _one_format(paths: Sequence[Path]) -> list[Path]:
    by_name: dict[str, Path] = {}
    for path in paths:
        name = path.name.split(".")[0]
        if path.suffix == ".parquet" or name not in by_name:
            by_name[name] = path
    return list(by_name.values())


def _prepare(
    config: KuaiRandConfig,
    schema: Schema,
    histories: list[History],
    files: dict[str, list[Path]],
    connection: ibis.BaseBackend,
    folder: Path,
) -> dict[str, Any]:
    missing: dict[str, int] = {}

    def read(name: str, types: dict[str, str], columns: Sequence[str] | None = None) -> ir.Table:
        table = load(connection, name, files[name], "source", types=types, columns=columns)
        advance(1)
        table, found = blank(table, SENTINELS)
        missing.update({f"{name}.{column}": count for column, count in sorted(found.items())})
        return table

    with progress("reading", 4) as advance:
        log = read("log", _LOG_TYPES, columns=tuple(_LOG_TYPES))
        users = read("users", _SIDE_TYPES)
        videos = read("videos", _SIDE_TYPES)
        advance(1)
    require_unique(users, "user_id", "users")
    require_unique(videos, "video_id", "videos")
    # A video has several tags, the main one first.
    videos = videos.mutate(tag=videos["tag"].split(",")[0].try_cast("int64"))
    with progress("sorting", None):
        arranged = arrange(connection, log, schema, dedupe=DEDUPE, rows_from=config.rows_from)
    arranged.counts["missing_values"] = missing
    edges = duration_edges(arranged)
    with progress("rates of candidates", None):
        rows = _rated(connection, arranged.rows, videos)
    rows = join_side(rows, users, SideTable(path="", key="user_id"), "users")
    rows = join_side(rows, videos, SideTable(path="", key="video_id"), "videos")
    rows = with_calendar(rows, arranged, {"hour": "hour", "weekday": "weekday"}, schema)
    rows = rows.mutate(duration_bucket=rows["duration_ms"].bucket(edges, include_under=True, include_over=True))
    return write_dataset(
        folder,
        schema,
        rows,
        arranged,
        histories,
        seed=_earlier(connection, files["earlier"], videos),
        seed_until="last_time_ms",
        facts={"duration_bucket_edges_ms": edges, "sources": _source_rows(files)},
        options=config.write,
    )


def _rated(connection: ibis.BaseBackend, rows: ir.Table, videos: ir.Table) -> ir.Table:
    """The rows with the rates of their candidates, as a table: users are worked on in parts, rates are of all."""
    keys = [column for column in RATE_KEYS.values() if column not in rows.columns]
    keyed = join_side(rows, videos.select("video_id", *keys), SideTable(path="", key="video_id"), "videos")
    rated = with_rates(keyed, RATE_KEYS, RATE_OUTCOMES, REQUEST_TIME, RATES_KNOWN_AFTER_HOURS).drop(*keys)
    connection.create_table("rated", rated.order_by(PLACE))
    return connection.table("rated")


def duration_edges(arranged: Arranged) -> list[int]:
    """Ends in ms of the buckets of equal size, by the video's duration in the training rows.

    A duration d is in bucket i if i edges are <= d. Fewer edges where many rows share a duration.
    """
    train = arranged.rows.filter(arranged.rows[SPLIT] == 0)
    if not int(train.count().to_pyarrow().as_py()):
        raise PrepareError("split: no row is before train_until, so there is nothing to train on")
    parts = [i / DURATION_BUCKETS for i in range(1, DURATION_BUCKETS)]
    found = train.aggregate(**{f"q{i}": train["duration_ms"].quantile(p) for i, p in enumerate(parts)})
    return sorted({int(value) for value in found.to_pyarrow().to_pylist()[0].values()})


def _earlier(connection: ibis.BaseBackend, files: Sequence[Path], videos: ir.Table) -> ir.Table | None:
    """One row per video shown before the log: what is known of it, its position, the user's last time."""
    if not files:
        return None
    lists = load(connection, "earlier", files, "source")
    liked = lists.select("user_id", video_id=lists["like_seq"].unnest()).distinct().mutate(is_like=1)
    shown = lists.select(
        "user_id",
        "last_time_ms",
        video_id=lists["watch_seq"].unnest(),
        position=ibis.range(lists["watch_seq"].length()).unnest(),
    )
    liked = liked.rename(_user="user_id", _video="video_id")
    shown = shown.left_join(liked, [shown["user_id"] == liked["_user"], shown["video_id"] == liked["_video"]])
    shown = shown.mutate(is_click=ibis.literal(SHOWN_BEFORE), is_like=shown["is_like"].fill_null(0))
    shown = shown.drop("_user", "_video")
    return join_side(shown, videos.select("video_id", "author_id", "tag"), SideTable(path="", key="video_id"), "videos")


def _source_rows(files: dict[str, list[Path]]) -> dict[str, int]:
    """Size in bytes of each file read, so that another copy of the data set can be told apart."""
    return {path.name: path.stat().st_size for paths in files.values() for path in paths}
