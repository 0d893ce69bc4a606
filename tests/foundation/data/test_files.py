"""Outputs appear whole or not at all."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from foundation.data.files import atomic_dir, atomic_path, atomic_write, empty_folder, require_free, sha256_file

ROOT = Path(__file__).resolve().parents[3]


def test_dir_appears_when_the_block_ends(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    with atomic_dir(out) as temporary:
        (temporary / "sub").mkdir()
        (temporary / "sub" / "a.txt").write_text("a")
        assert not out.exists()
        assert temporary.parent == out.parent
    assert (out / "sub" / "a.txt").read_text() == "a"
    assert [path.name for path in out.parent.iterdir()] == ["out"]


@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt(), OSError(errno.ENOSPC, "disk full")])
def test_nothing_is_left_when_the_block_fails(tmp_path: Path, error: BaseException) -> None:
    with pytest.raises(type(error)), atomic_dir(tmp_path / "out") as temporary:
        (temporary / "a.txt").write_text("a")
        raise error
    assert list(tmp_path.iterdir()) == []


def test_existing_dir_is_refused_before_the_block(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old.txt").write_text("old")
    with pytest.raises(FileExistsError, match=r"out exists; .* overwrite"), atomic_dir(tmp_path / "out"):
        pytest.fail("the block ran")
    assert (tmp_path / "out" / "old.txt").read_text() == "old"


def test_overwrite_replaces_whole(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old.txt").write_text("old")
    with atomic_dir(tmp_path / "out", overwrite=True) as temporary:
        (temporary / "new.txt").write_text("new")
        assert (tmp_path / "out" / "old.txt").exists()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["new.txt"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_failed_overwrite_keeps_the_old(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old.txt").write_text("old")
    with pytest.raises(ValueError), atomic_dir(tmp_path / "out", overwrite=True):
        raise ValueError
    assert (tmp_path / "out" / "old.txt").read_text() == "old"


def test_empty_dir_counts_as_free(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with atomic_dir(tmp_path / "out") as temporary:
        (temporary / "a").write_text("a")
    assert (tmp_path / "out" / "a").exists()


def test_a_dir_never_replaces_a_file(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file")
    with pytest.raises(NotADirectoryError, match="is a file"):
        require_free(tmp_path / "out", overwrite=True)


def test_inputs_and_the_current_folder_are_never_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "runs" / "a"
    run.mkdir(parents=True)
    (run / "file").write_text("kept")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for out in (run, tmp_path / "runs", Path("../runs")):
        with pytest.raises(ValueError, match=r"to overwrite it would remove .*a, which is read; choose another output"):
            require_free(out, overwrite=True, inputs=[None, "", "s3://bucket/a", run])
        with (
            pytest.raises(ValueError, match="which is read"),
            atomic_dir(out, overwrite=True, inputs=[str(run / "*.csv")]),
        ):
            raise AssertionError
    (tmp_path / "here" / "file").write_text("kept")
    for out in (Path("."), tmp_path):
        with pytest.raises(ValueError, match="would remove the current folder"):
            require_free(out, overwrite=True)
    assert (run / "file").is_file()
    require_free(tmp_path / "runs", overwrite=True, inputs=[tmp_path / "other"])
    require_free(run / "new", overwrite=True, inputs=[run])


def test_what_stands_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    (tmp_path / "folder").mkdir()
    for out in (tmp_path / "file" / "out", tmp_path / "file" / "more" / "out"):
        with pytest.raises(NotADirectoryError, match=rf"^{tmp_path / 'file'} is a file; {out} cannot be written below"):
            require_free(out)
        with pytest.raises(NotADirectoryError, match=rf"^{tmp_path / 'file'} is a file; {out} cannot be written below"):
            atomic_write(out, "text")
    with pytest.raises(IsADirectoryError, match=r"folder is a folder; a file is to be written there"):
        atomic_write(tmp_path / "folder", "text")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


def test_killed_process_is_cleaned_up_by_the_next(tmp_path: Path) -> None:
    code = (
        "import os, sys; from foundation.data.files import atomic_dir\n"
        "with atomic_dir(sys.argv[1]) as t:\n  (t / 'half').write_text('x'); os.kill(os.getpid(), 9)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "out")], cwd=ROOT)
    assert len(list(tmp_path.glob("out.tmp-*"))) == 1
    with atomic_dir(tmp_path / "out") as temporary:
        (temporary / "whole").write_text("x")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_folder_whose_replacement_was_killed_is_put_back(tmp_path: Path) -> None:
    """Killed between the two renames: neither the old folder nor the new one has its name."""
    write_both = (
        "import os, sys; from foundation.data import files\n"
        "for text in ('old', 'new'):\n"
        "  if text == 'new': files._sync_tree = lambda _: setattr(os, 'rename', kill_second)\n"
        "  with files.atomic_dir(sys.argv[1], overwrite=True) as t: (t / 'file').write_text(text)\n"
    )
    kill_second = (
        "import os; rename = os.rename\n"
        "def kill_second(a, b): os.kill(os.getpid(), 9) if str(b) == sys.argv[1] else rename(a, b)\n"
    )
    out = tmp_path / "out"
    subprocess.run([sys.executable, "-c", kill_second + write_both, str(out)], cwd=ROOT)
    assert sorted(path.name.rsplit("-", 1)[-1] for path in tmp_path.iterdir() if path.name.endswith("-old")) == ["old"]
    assert not out.exists()
    with pytest.raises(FileExistsError), atomic_dir(out):
        pytest.fail("the block ran")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (out / "file").read_text() == "old"


@pytest.mark.parametrize("old", [False, True])
def test_ctrl_c_after_any_step_leaves_old_or_new(tmp_path: Path, old: bool) -> None:
    """KeyboardInterrupt is raised before each line that runs, of ours and of the context manager, one line a run."""
    out = tmp_path / "out"

    def contents() -> str:
        names = [path.name for path in tmp_path.iterdir()]
        assert names in ([], ["out"])
        return (out / "file").read_text() if names else ""

    def run(line: int) -> bool:
        """Writes the folder anew; whether the interrupt came."""
        out.is_dir() and shutil.rmtree(out)
        if old:
            out.mkdir()
            (out / "file").write_text("old")
        lines = 0

        def trace(frame: FrameType, event: str, argument: object) -> object:
            nonlocal lines
            if Path(frame.f_code.co_filename).name not in ("files.py", "contextlib.py"):
                return None
            if event == "line":
                lines += 1
                if lines == line:
                    raise KeyboardInterrupt
            return trace

        before = sys.gettrace()
        try:
            sys.settrace(trace)
            with atomic_dir(out, overwrite=old) as temporary:
                (temporary / "file").write_text("new")
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)
        return False

    line, seen = 1, set()
    # In a thread of its own: where a trace function raises, an exception may count as being handled for ever after.
    with ThreadPoolExecutor(1) as thread:
        while thread.submit(run, line).result():
            seen.add(contents())
            line += 1
    assert line > 50
    assert seen == {"old" if old else "", "new"}
    assert contents() == "new"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_ctrl_c_does_not_disturb_the_tidying_up(
    tmp_path: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    def pressed_again(path: Path, **options: Any) -> None:
        os.kill(os.getpid(), number)
        remove(path, **options)

    remove, before = shutil.rmtree, signal.signal(number, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt, match="first"), atomic_dir(tmp_path / "out") as folder:
            (folder / "file").touch()
            monkeypatch.setattr(shutil, "rmtree", pressed_again)
            raise KeyboardInterrupt("first")
        assert signal.getsignal(number) is interrupt
    finally:
        signal.signal(number, before)
    assert not list(tmp_path.iterdir())


def test_other_runs_temporary_is_left_alone(tmp_path: Path) -> None:
    with atomic_dir(tmp_path / "a") as first, atomic_dir(tmp_path / "b") as second:
        assert first != second
    import socket

    running = tmp_path / f"a.tmp-{socket.gethostname()}-{os.getppid()}"
    running.mkdir()
    with atomic_dir(tmp_path / "a", overwrite=True):
        pass
    assert running.exists()
    shutil.rmtree(tmp_path / "a")
    with pytest.raises(FileExistsError, match=f"a is being written by process {os.getppid()}; choose another output"):
        atomic_dir(tmp_path / "a").__enter__()


def test_what_another_process_wrote_meanwhile_stays(tmp_path: Path) -> None:
    with pytest.raises(FileExistsError, match="out exists; choose another output"), atomic_dir(tmp_path / "out"):
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "theirs").touch()
    assert [str(path.relative_to(tmp_path)) for path in sorted(tmp_path.rglob("*"))] == ["out", "out/theirs"]


@pytest.mark.parametrize("there", [True, False])
def test_a_link_is_followed(tmp_path: Path, there: bool) -> None:
    """A link leads to where there is space; it stays, and what it leads to is written."""
    link, target = tmp_path / "link", tmp_path / "disk" / "out"
    if there:
        target.mkdir(parents=True)
    link.symlink_to("disk/out")
    for text in ("old", "new"):
        with atomic_dir(link, overwrite=text == "new") as folder:
            (folder / "file").write_text(text)
        assert link.is_symlink() and (target / "file").read_text() == text
    (tmp_path / "note").symlink_to(target / "file")
    atomic_write(tmp_path / "note", "newer")
    assert (tmp_path / "note").is_symlink() and (target / "file").read_text() == "newer"
    assert [path.name for path in target.parent.iterdir()] == ["out"]


def test_a_mount_is_refused_before_the_block_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "is_mount", lambda path: path == tmp_path / "out")
    with pytest.raises(ValueError, match=r"out: is a mount.* a folder below it"), atomic_dir(tmp_path / "out"):
        pytest.fail("the block ran")
    with atomic_dir(tmp_path / "out" / "run"):
        pass


def test_folders_that_were_made_for_nothing_are_removed(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    for output in (atomic_dir, atomic_path):
        with pytest.raises(KeyboardInterrupt), output(tmp_path / "mine" / "models" / "feed" / "1"):
            raise KeyboardInterrupt
        assert [path.name for path in tmp_path.rglob("*")] == ["mine"]


def test_a_folder_is_emptied_and_stays(tmp_path: Path) -> None:
    kept, folder = tmp_path / "kept", tmp_path / "folder"
    for path in (kept, folder):
        (path / "sub").mkdir(parents=True)
        (path / "sub" / "file").touch()
    (folder / "link").symlink_to(kept)
    number = folder.stat().st_ino
    for path in (folder, tmp_path / "none"):
        empty_folder(path)
        assert path.is_dir() and not list(path.iterdir())
    assert folder.stat().st_ino == number and (kept / "sub" / "file").exists()


def test_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    atomic_write(path, "é")
    atomic_write(path, b"new")
    assert path.read_bytes() == b"new"
    with pytest.raises(ValueError), atomic_path(path) as temporary:
        temporary.write_text("half")
        raise ValueError
    assert path.read_bytes() == b"new"
    assert [item.name for item in tmp_path.iterdir()] == ["a.json"]


def test_full_disk_leaves_nothing(tmp_path: Path) -> None:
    """A real ENOSPC: /dev/full refuses every write."""
    if not Path("/dev/full").exists():
        pytest.skip("/dev/full: this system has none")
    named = rf"No space left on device; nothing was written: '{tmp_path}/out'"
    with pytest.raises(OSError, match=named), atomic_dir(tmp_path / "out") as temporary:
        (temporary / "a.txt").write_text("a")
        with open("/dev/full", "w") as full:
            full.write("x")
            full.flush()
    assert list(tmp_path.iterdir()) == []


def test_sha256(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"abc" * 1000)
    assert sha256_file(path) == hashlib.sha256(b"abc" * 1000).hexdigest()
