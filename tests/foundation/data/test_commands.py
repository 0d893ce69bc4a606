"""How commands end: one line and a status for a user's error, whichever way the command is started."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import pytest

from foundation.data.commands import INTERRUPTED, TERMINATED, USAGE_ERROR, run_command
from foundation.data.files import atomic_dir

ROOT = Path(__file__).parents[3]
MODULES = [
    path.relative_to(ROOT)
    for path in sorted(ROOT.glob("foundation/**/*.py"))
    if re.search(r'main\(arguments: list\[str\]\).*__name__ == "__main__"', path.read_text(), re.DOTALL)
]


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (ValueError("key: two\nlines"), USAGE_ERROR, "error: key: two lines\n"),
        (OSError(errno.ENOSPC, "No space left", "/x/run.tmp-host-12/part"), USAGE_ERROR,
         "error: /x/run/part: No space left\n"),
        (OSError(errno.EACCES, "Failed to open local file 'run.tmp-host-12/part'. Detail"), USAGE_ERROR,
         "error: [Errno 13] Failed to open local file 'run/part'. Detail\n"),
        (FileExistsError("out is being written; else remove out.tmp-host-12"), USAGE_ERROR,
         "error: out is being written; else remove out.tmp-host-12\n"),
        (MemoryError(), USAGE_ERROR, "error: there is not enough memory for sizes such as these\n"),
        (BrokenProcessPool("terminated abruptly"), USAGE_ERROR,
         "error: one of the processes was killed, mostly for want of memory; use fewer `processes`\n"),
        (KeyboardInterrupt(), INTERRUPTED, "interrupted\n"),
    ],
)  # fmt: skip
def test_an_error_is_one_line(
    error: BaseException, status: int, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)

    def command(arguments: list[str]) -> Any:
        raise error

    assert run_command(command, []) == status
    assert capsys.readouterr().err == said


def test_sigterm_ends_a_command_as_ctrl_c_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL

    def command(arguments: list[str]) -> None:
        with atomic_dir(tmp_path / "out") as folder:
            (folder / "half").touch()
            os.kill(os.getpid(), signal.SIGTERM)

    assert run_command(command, []) == TERMINATED
    assert capsys.readouterr().err == "terminated\n"
    assert not list(tmp_path.iterdir())
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_sigterm_ends_forks_and_ranks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun ends ranks so that wait inside a collective, where Python raises nothing."""
    found: list[object] = []

    def command(arguments: list[str]) -> None:
        found.append(signal.getsignal(signal.SIGTERM))
        child = os.fork()
        if not child:
            try:
                os.kill(os.getpid(), signal.SIGTERM)
            finally:
                os._exit(1)
        found.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    run_command(command, [])
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    run_command(command, [])
    assert callable(found[0]) and found[1:] == [-signal.SIGTERM, signal.SIG_DFL, -signal.SIGTERM]


def test_streams_that_a_caller_has_closed_are_not_the_next_file(tmp_path: Path) -> None:
    code = (
        "import os, sys\nfrom foundation.data.commands import run_command\n"
        "def command(arguments):\n"
        "    assert open(arguments[0], 'w').fileno() > 2 and not sys.stdout.isatty()\n"
        "    print('said'), print('said', file=sys.stderr), os.write(2, b'said')\n"
        "sys.exit(run_command(command, sys.argv[1:]))"
    )
    line = 'exec "$@" <&- >&- 2>&-'
    found = subprocess.run(["sh", "-c", line, "sh", sys.executable, "-c", code, str(tmp_path / "file")], cwd=ROOT)
    assert found.returncode == 0 and (tmp_path / "file").read_bytes() == b""


def test_what_stdout_cannot_encode_is_no_error() -> None:
    code = (
        "from foundation.data.commands import run_command; print(run_command(lambda _: print('\\udc80 \\u00e9'), []))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, "PYTHONIOENCODING": "ascii"}, capture_output=True
    )
    assert found.stdout == b"\\udc80 \\xe9\n0\n", found.stderr


def test_a_command_has_its_own_status() -> None:
    assert run_command(lambda arguments: None, []) == 0
    assert run_command(lambda arguments: len(arguments), ["a", "b", "c"]) == 3


def test_a_fault_of_ours_keeps_its_traceback() -> None:
    with pytest.raises(KeyError):
        run_command(lambda arguments: {}[arguments[0]], ["a"])
    with pytest.raises(RuntimeError, match="ours"):
        run_command(lambda arguments: (_ for _ in ()).throw(RuntimeError("ours")), [])


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_modules_that_are_commands_end_in_the_same_way(path: Path) -> None:
    text = (ROOT / path).read_text()
    module = str(path.with_suffix("")).replace("/", ".")
    assert text.endswith('if __name__ == "__main__":\n    sys.exit(run_command(main, sys.argv[1:]))\n')
    assert f'name="python -m {module}"' in text, "what the command's own help and errors call it"


def test_a_module_run_by_python_names_itself() -> None:
    module = "foundation.data.benchmarks.balance"
    found = subprocess.run(
        [sys.executable, "-m", module, "--wrong", "1"], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert found.returncode == USAGE_ERROR and "Traceback" not in found.stderr
    assert found.stderr.splitlines()[-1].startswith("error: ")
    assert f"(`python -m {module} --help` lists the options)" in found.stderr
