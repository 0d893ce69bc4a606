"""Where the tests find real data: `../shared/data` beside the checkout. Without it they skip."""

from __future__ import annotations

from pathlib import Path

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


def kuairand_dir() -> Path | None:
    """The slice of KuaiRand-Pure, or None where it is missing."""
    folder = SHARED_DATA / "kuairand_pure"
    return folder if (folder / "split.parquet").is_file() else None
