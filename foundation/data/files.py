"""Files and folders that appear whole or not at all.

A stage writes under a temporary name in the same folder, flushes to disk and renames. A crash, a full disk or
Ctrl-C leaves the old result, or none; a process that was killed leaves a `NAME.tmp-...` entry, which the next
run removes. Where it was killed while it replaced a folder, that run first puts the old one back.
"""

from __future__ import annotations

import errno
import glob
import hashlib
import os
import re
import shutil
import signal
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from foundation.data.signals import signals_go_to

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What the system answers when a file does not fit."""

_ASIDE = "-old"
"""How the name of a folder ends that is being replaced."""


@contextmanager
def atomic_dir(
    path: str | Path, *, overwrite: bool = False, inputs: Iterable[str | Path | None] = ()
) -> Iterator[Path]:
    """Yields an empty temporary folder that becomes `path` when the block ends without an exception.

    Args:
        path: the final folder; its parents are created. Where it is a link, it is the folder that it leads to.
        overwrite: replace a folder that exists. The old one stays until the new one is whole.
        inputs: as in :func:`require_free`.

    Raises:
        FileExistsError: `path` exists, is not empty, and `overwrite` is false; or another process is writing it. Raised
            before the block runs, unless another process wrote `path` meanwhile.
        ValueError: what :func:`require_free` refuses to replace; `path` is a mount, which nothing can be renamed to.
        OSError: the disk is full, or the folder cannot be written. Nothing is left behind.
    """
    final = _target(path)
    if final.is_mount():
        raise ValueError(f"{path}: is a mount, which cannot be replaced as a whole; write to a folder below it")
    writer = next((path for path in _clear_stale(final) if not path.name.endswith(_ASIDE)), None)
    require_free(final, overwrite=overwrite, inputs=inputs)
    if writer and not overwrite:
        raise FileExistsError(
            f"{final} is being written by process {writer.name.split('-')[-1]}; choose another output, or wait for it. "
            f"If that process does something else, remove {writer}"
        )
    temporary, above = _temporary(final), _not_there(final.parents)
    aside = final.with_name(temporary.name + _ASIDE)
    # Ctrl-C can come after any step, so all that leave something are in the block.
    try:
        temporary.mkdir(parents=True)
        yield temporary
        _sync_tree(temporary)
        require_free(final, overwrite=overwrite)  # another process may have written it meanwhile
        _replace_dir(temporary, final, aside)
    except BaseException as error:
        with signals_go_to(signal.SIG_IGN):  # a second Ctrl-C does not disturb the tidying up
            shutil.rmtree(temporary, ignore_errors=True)
            _settle(aside, final)
            _remove_empty(above)
        _name_full_disk(error, final)
        raise


@contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """Yields a temporary file path that is renamed to `path` when the block ends without an exception.

    The block must create the file. An existing `path` is replaced; a link leads to the file, as elsewhere.

    Raises:
        IsADirectoryError, NotADirectoryError: `path` is a folder, or lies below a file.
        OSError: the disk is full, or the folder cannot be written. Nothing is left behind.
    """
    final = _target(path)
    if final.is_dir():
        raise IsADirectoryError(f"{final} is a folder; a file is to be written there, choose another output")
    require_folder_above(final)
    _clear_stale(final)
    temporary, above = _temporary(final), _not_there(final.parents)
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        _sync(temporary)
        os.replace(temporary, final)
        _sync(final.parent)
    except BaseException as error:
        with signals_go_to(signal.SIG_IGN):
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            _remove_empty(above)
        _name_full_disk(error, final)
        raise


def atomic_write(path: str | Path, data: str | bytes) -> None:
    """Writes `data` (text as UTF-8) to `path`, whole or not at all.

    Raises:
        OSError: the disk is full, or the folder cannot be written. Nothing is left behind.
    """
    with atomic_path(path) as temporary:
        temporary.write_bytes(data.encode() if isinstance(data, str) else data)


def require_free(path: str | Path, *, overwrite: bool = False, inputs: Iterable[str | Path | None] = ()) -> None:
    """Refuses an output that exists already or cannot be one, before any work is done.

    Args:
        path: the output folder.
        overwrite: it may be replaced.
        inputs: files and folders that are read; None, an empty text and a URL are passed over. They are never replaced.

    Raises:
        FileExistsError: `path` is a file, or a folder with something in it, and `overwrite` is false.
        NotADirectoryError: `path` lies below a file, or is one and `overwrite` is true: a folder never replaces a file.
        ValueError: `path` is or holds an input or the current folder, and `overwrite` is true.
    """
    final = Path(path)
    require_folder_above(final)
    if not final.exists() or (final.is_dir() and not any(final.iterdir())):
        return
    if not overwrite:
        raise FileExistsError(f"{final} exists; choose another output, or set overwrite to true")
    if not final.is_dir():
        raise NotADirectoryError(f"{final} is a file; a folder is to be written there")
    for kept in (*(path for path in inputs if path), Path.cwd()):
        if Path(kept).resolve().is_relative_to(final.resolve()):
            what = "the current folder" if kept == Path.cwd() else f"{kept}, which is read"
            raise ValueError(f"{final}: to overwrite it would remove {what}; choose another output")


def empty_folder(path: Path) -> None:
    """Removes what is in a folder; the folder stays, which may be a link or a mount, and is made if it is not there."""
    _target(path).mkdir(parents=True, exist_ok=True)
    for inner in path.iterdir():
        if inner.is_dir() and not inner.is_symlink():
            shutil.rmtree(inner)
        else:
            inner.unlink()


def require_folder_above(final: Path) -> None:
    """Raises NotADirectoryError where a file stands in the way of the folder that is to hold `final`."""
    for above in final.parents:
        if above.is_dir():
            return
        if above.exists():
            raise NotADirectoryError(f"{above} is a file; {final} cannot be written below it, choose another output")


def sha256_file(path: str | Path) -> str:
    """SHA-256 of a file's bytes as 64 hex digits, read in pieces."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def may_pass(error: BaseException | None) -> bool:
    """Whether the system refused something behind this error that it may grant another time: a disk, a network.

    A path or a permission that is wrong stays so, and so does a damaged file, of which libraries say OSError without a
    number.
    """
    lasting = (FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError, PermissionError)
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, OSError) and error.errno is not None and not isinstance(error, lasting):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def full_disk(error: BaseException | None) -> OSError | None:
    """The system's error behind an exception that comes from a full disk or quota; None if it comes from anything else.

    Libraries hide it: Lightning behind an error of its own, safetensors in the text of one.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, OSError) and error.errno in FULL:
            return error
        said = re.search(r"\(os error ([0-9]+)\)", str(error))  # how Rust says it
        if said and int(said[1]) in FULL:
            return OSError(int(said[1]), os.strerror(int(said[1])))
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return None


def _name_full_disk(error: BaseException, final: Path) -> None:
    """Raises what says which output did not fit; libraries that write files do not."""
    full = full_disk(error)
    if full is not None:
        code = full.errno or errno.ENOSPC
        raise OSError(code, f"{os.strerror(code)}; nothing was written", str(final)) from error


def _target(path: str | Path) -> Path:
    """The path itself, or where it leads to if it is a link: a link to another disk is there to be followed."""
    return Path(os.path.realpath(path)) if os.path.islink(path) else Path(path)


def _temporary(final: Path) -> Path:
    """The name beside `final` that is this process's own."""
    return final.with_name(f"{final.name}.tmp-{socket.gethostname()}-{os.getpid()}")


def _not_there(folders: Iterable[Path]) -> list[Path]:
    return [folder for folder in folders if not folder.exists()]


def _remove_empty(folders: Iterable[Path]) -> None:
    """Removes the folders that were made for nothing; the inner ones come first."""
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


def _clear_stale(final: Path) -> list[Path]:
    """Removes what processes of this host that are gone left beside `final`, and what this one did.

    Returns:
        What is there of processes that are not gone.
    """
    kept: list[Path] = []
    left = re.compile(rf"{re.escape(final.name)}\.tmp-{re.escape(socket.gethostname())}-(\d+)({_ASIDE})?")
    for path in list(final.parent.glob(f"{glob.escape(final.name)}.tmp-*")):
        found = left.fullmatch(path.name)
        if found is None:
            continue
        if int(found[1]) != os.getpid() and _alive(int(found[1])):
            kept.append(path)
        elif found[2]:
            _settle(path, final)
        else:
            _remove(path)
    return kept


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def _replace_dir(temporary: Path, final: Path, aside: Path) -> None:
    """Puts `temporary` in place of `final`; an old folder is moved aside first and removed last."""
    if final.exists():
        os.rename(final, aside)
    os.rename(temporary, final)
    _sync(final.parent)
    _settle(aside, final)


def _settle(aside: Path, final: Path) -> None:
    """Puts an old folder back if nothing took its place, and removes it if something did."""
    if aside.exists() and not final.exists():
        os.rename(aside, final)
    else:
        _remove(aside)


def _sync_tree(folder: Path) -> None:
    for directory, _, names in os.walk(folder):
        for name in names:
            _sync(Path(directory) / name)
        _sync(Path(directory))


def _sync(path: Path) -> None:
    """Flushes a file or a folder's entries to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
