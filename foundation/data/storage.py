"""Where a dataset's files lie: a local folder, or any URL that fsspec knows (``s3://``, ``gs://``, ``memory://``).

Free of torch. Every fault is one DatasetError that names the file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

# A column chunk is read in pieces of this size, so that memory does not grow with the size of a row group.
_READ_BUFFER = 1 << 18


class DatasetError(ValueError):
    """A dataset that cannot be read as it is; the message names the file and, where there is one, the column."""


def is_url(path: str | Path) -> bool:
    """Whether ``path`` is a URL for fsspec rather than a local path."""
    return "://" in str(path)


def join(folder: str | Path, *names: str) -> str:
    """The path of a file below ``folder``."""
    return "/".join([str(folder).rstrip("/") if str(folder) != "/" else "", *names])


def read_bytes(path: str | Path) -> bytes:
    """The content of a small file. Raises DatasetError if it is missing or cannot be read."""
    try:
        if not is_url(path):
            return Path(path).read_bytes()
        import fsspec

        with fsspec.open(str(path), "rb") as file:
            return bytes(file.read())
    except FileNotFoundError:
        raise DatasetError(f"{path}: no such file") from None
    except OSError as error:
        raise DatasetError(f"{path}: cannot be read: {error}") from None


def list_parquet(folder: str | Path) -> list[str]:
    """Names of the ``.parquet`` files in ``folder``, sorted; none if there is no such folder."""
    if not is_url(folder):
        return sorted(p.name for p in Path(folder).glob("*.parquet"))
    import fsspec

    filesystem, path = fsspec.core.url_to_fs(str(folder))
    return sorted(found.rsplit("/", 1)[-1] for found in filesystem.glob(f"{path}/*.parquet"))


def open_parquet(path: str | Path, read_dictionary: list[str] | None = None) -> pq.ParquetFile:
    """Opens a Parquet file for streaming.

    Args:
        read_dictionary: leaf columns of strings that are to come as dictionary arrays.

    Raises:
        DatasetError: the file is missing, truncated, or not Parquet.
    """
    options: dict[str, Any] = {"pre_buffer": False, "buffer_size": _READ_BUFFER}
    try:
        if is_url(path):
            import fsspec

            filesystem, inner = fsspec.core.url_to_fs(str(path))
            return pq.ParquetFile(inner, filesystem=filesystem, read_dictionary=read_dictionary, **options)
        return pq.ParquetFile(str(path), read_dictionary=read_dictionary, **options)
    except FileNotFoundError:
        raise DatasetError(f"{path}: no such file") from None
    except (pa.ArrowException, OSError) as error:
        raise DatasetError(
            f"{path}: not a readable Parquet file; it may be truncated or still being written ({error})"
        ) from None
