"""The command line: its table, its options, its errors."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import opengem
from foundation.data.options import parse_config, whole_keys
from foundation.data.prepare import PrepareConfig
from foundation.model.gem import GEMConfig
from foundation.training.train import TrainConfig

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, kw_only=True, slots=True)
class Inner:
    """Inner settings.

    Args:
        width: how wide
    """

    width: int = 8

    def __post_init__(self) -> None:
        if self.width < 1:
            raise ValueError(f"inner.width must be at least 1, is {self.width}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """A stage's settings.

    Args:
        out: where to write
    """

    out: Path
    rate: float = 0.5
    surface: str | None = None
    sizes: tuple[int, ...] = (1, 2)
    weights: dict[str, float] = field(default_factory=dict)
    inner: Inner = Inner()
    other: Inner = Inner(width=3)
    items: int | None = None


def opengem_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "opengem", *arguments], cwd=ROOT, capture_output=True, text=True)


def test_commands_equal_those_in_the_readme() -> None:
    text = (ROOT / "README.md").read_text()
    section = text.split("## Commands")[1].split("\n## ")[0]
    assert re.findall(r"^\| `opengem ([a-z ]+)` \|", section, re.MULTILINE) == list(opengem.COMMANDS)


def test_every_command_of_the_docs_exists() -> None:
    text = "\n".join(path.read_text() for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
    used = set(re.findall(r"^opengem ((?:prepare |checkpoint )?[a-z]+)", text, re.MULTILINE))
    assert used and used <= set(opengem.COMMANDS)


@pytest.mark.parametrize("name", opengem.COMMANDS)
def test_every_command_has_a_stage_and_a_config(name: str) -> None:
    function, config_class = opengem.load(opengem.COMMANDS[name])
    assert callable(function)
    assert dataclasses.is_dataclass(config_class)
    assert "--help" in opengem_help(config_class, name)


def opengem_help(config_class: type, name: str) -> str:
    """The help text of a command, built from its config."""
    import contextlib
    import io

    out = io.StringIO()
    with contextlib.redirect_stdout(out), pytest.raises(SystemExit) as ended:
        parse_config(config_class, ["--help"], name=name)
    assert ended.value.code == 0
    return out.getvalue()


def test_help_imports_no_stage() -> None:
    code = (
        "import sys, opengem; status = opengem.main(['--help']);"
        "heavy = {'torch', 'pyarrow', 'numpy', 'jsonargparse'} & set(sys.modules); print(status, heavy)"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.stdout.splitlines()[-1] == "0 set()", result
    for name, command in opengem.COMMANDS.items():
        assert f"  {name}" in result.stdout and command.help in result.stdout


def test_help_of_commands_of_two_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert opengem.main(["checkpoint", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "checkpoint inspect" in shown and "prepare" not in shown


def test_config_from_options() -> None:
    arguments = ["--out", "x", "--rate", "1", "--sizes", "[4,5]", "--weights", "{a: 2}", "--weights.b", "3"]
    arguments += ["--items", "4"]
    arguments += ["--inner.width", "9", "--surface", "feed"]
    config = parse_config(Config, arguments, name="test")
    assert config == Config(
        out=Path("x"),
        rate=1.0,
        surface="feed",
        items=4,
        sizes=(4, 5),
        weights={"a": 2.0, "b": 3.0},
        inner=Inner(width=9),
    )
    assert config.other.width == 3


def test_a_path_below_home_that_no_shell_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shells leave `--out=~/x` alone, and what a file says."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "prepare.yaml").write_text("schema: ~/s\nlog: [~/a, b~/c]\nusers: {path: ~/u, key: id}\n")
    config = parse_config(PrepareConfig, ["--config=~/prepare.yaml", "--out=~/x"], name="prepare logs")
    assert config.users is not None
    found = (config.schema, *config.log, str(config.out), config.users.path)
    assert found == (f"{tmp_path}/s", f"{tmp_path}/a", "b~/c", f"{tmp_path}/x", f"{tmp_path}/u")


def test_options_win_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("out: x\nrate: 0.25\ninner: {width: 5}\nsurface: feed\n")
    arguments = ["--config", str(file), "--inner.width", "6", "--surface", "null"]
    config = parse_config(Config, arguments, name="test")
    assert config == Config(out=Path("x"), rate=0.25, inner=Inner(width=6))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "x", "--nope", "1"], "nope"),
        (["--out", "x", "--inner.widht", "1"], r"--inner\.widht 1; the nearest option is inner\.width"),
        (["--out", "x", "--inner.wid", "1"], r"--inner\.wid 1; the nearest option is inner\.width"),
        (["--out", "x", "--rate", "high"], r"^rate: expected a number, got high \(`opengem test --help`"),
        (["--out", "x", "--rate", "nan"], r"^rate: expected a number, got nan"),
        (["--out", "x", "--rate", ""], r"^rate: expected a number, got nothing"),
        (["--out", "x", "--items", "2.5"], r"^items: expected a whole number or null, got 2\.5"),
        (["--out", "x", "--weights", "x"], r"^weights: expected a mapping, got x"),
        (["--rate", "1"], "out"),
        (["--out", "x", "--rate", ".nan"], "^rate: expected a finite number, got nan"),
        (["--out", "x", "--rate", "1e400"], "^rate: expected a finite number, got inf"),
        (["--out", "x", "--weights", "{click: .inf}"], r"^weights\.click: expected a finite number, got inf"),
        (["--out", "x", "--items", "99999999999999999999"], "^items: expected a number of at most 64 bits"),
        (["--out", "x", "--inner.width", "0"], r"inner.width must be at least 1, is 0"),
        (["--out", "x", "--config", "does/not/exist"], "config: does/not/exist does not exist"),
    ],
)
def test_wrong_options_name_the_option(arguments: list[str], message: str) -> None:
    with pytest.raises((ValueError, OSError), match=message):
        parse_config(Config, arguments, name="test")


def test_unknown_key_in_a_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("out: x\ninner: {depth: 5}\n")
    with pytest.raises(ValueError, match="depth"):
        parse_config(Config, ["--config", str(file)], name="test")
    file.write_text("out: 2026\n")
    with pytest.raises(ValueError, match=r"^out: expected a path, got a whole number; write it in quotes"):
        parse_config(Config, ["--config", str(file)], name="test")
    assert parse_config(Config, ["--out", "2026"], name="test").out == Path("2026")
    with pytest.raises(ValueError, match=r"^config: /dev/null is not a regular file"):
        parse_config(Config, ["--config", "/dev/null"], name="test")


def test_a_nested_value_is_named_by_its_whole_key() -> None:
    for arguments, key in (
        (["--model.layer.interaction.block_tokens", "0"], "model.layer.interaction.block_tokens"),
        (["--model.embeddings.dim", "3"], "model.embeddings.dim"),
        (["--reader.batch_size", "0"], "reader.batch_size"),
        (["--parallel.dense.shard", "-1"], "parallel.dense.shard"),
    ):
        with pytest.raises(ValueError, match=rf"^{re.escape(key)}: must be"):
            parse_config(TrainConfig, ["--dataset", "x", "--out", "x", *arguments], name="train")


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ("cross.pooling_heads: width 33", "model.layer.cross.pooling_heads: width 33"),
        ("sequence.heads: width 32", "model.layer.sequence.heads: width 32"),
        ("streams.width.views: no such", "model.streams.width.views: no such"),
        ("heads.trunk: is", "model.heads.trunk: is"),
        ("nothing.of_it: is", "nothing.of_it: is"),
        ("cross.nothing: is", "cross.nothing: is"),
        ("no key at all", "no key at all"),
    ],
)
def test_what_a_part_of_the_model_refuses_is_named_by_its_whole_key(said: str, named: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(named)}$"), whole_keys(GEMConfig, "model"):
        raise ValueError(said)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("depth: 1", "Option 'depth' is not accepted"),
        ("rate: [", "Problems parsing config"),
        ("- 1", "expected options and their values, such as `seed: 1`, got - 1"),
        ("", "expected options and their values, such as `seed: 1`, got nothing"),
    ],
)
def test_what_only_a_file_can_get_wrong_names_the_file(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    for arguments in (["--config", str(file)], [f"--config={file}"]):
        with pytest.raises(ValueError, match=rf"^{re.escape(f'{file}: {message}')}"):
            parse_config(Config, ["--out", "x", *arguments], name="test")


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_bytes("rate: 1 # grö".encode("latin-1"))
    for arguments in (["--config", str(file)], [f"--config={file}"]):
        with pytest.raises(ValueError, match=rf"^{re.escape(str(file))}: not a text file in UTF-8"):
            parse_config(Config, ["--out", "x", *arguments], name="test")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("inner: 7", r"inner: expected a mapping of options, got 7"),
        ("inner: null", r"inner: expected a mapping of options, got None"),
        ("inner: {width: null}", r"inner\.width: expected a value, got null"),
        ("rate: null", r"rate: expected a value, got null"),
    ],
)
def test_null_and_plain_values_do_not_stand_for_options(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(f"out: x\n{text}\n")
    with pytest.raises(ValueError, match=message):
        parse_config(Config, ["--config", str(file)], name="test")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nope"], "error: there is no command 'nope'"),
        (["prepare"], "error: `opengem prepare` needs one of: prepare logs, prepare kuairand"),
        (["world", "--rows", "many"], "rows"),
    ],
)
def test_errors_are_one_line_and_exit_2(arguments: list[str], message: str) -> None:
    result = opengem_command(*arguments)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: ") and len(result.stderr.splitlines()) == 1
    assert message in result.stderr


def test_a_stage_error_exits_2_and_a_bug_does_not(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    outcome: list[BaseException] = [ValueError("part-0.parquet: column 'age'\n is missing")]

    def stage(config: Config) -> None:
        raise outcome[0]

    monkeypatch.setattr(opengem, "load", lambda command: (stage, Config))
    assert opengem.main(["world", "--out", "x"]) == 2
    assert capsys.readouterr().err == "error: part-0.parquet: column 'age' is missing\n"
    outcome[0] = OSError(28, "No space left on device")
    assert opengem.main(["world", "--out", "x"]) == 2
    assert "No space left on device" in capsys.readouterr().err
    # Of the system's errors the path comes first, without the temporary name that it has until it is whole.
    outcome[0] = PermissionError(13, "Permission denied", "/data/run.tmp-some-host-17/part-0.parquet")
    assert opengem.main(["world", "--out", "x"]) == 2
    assert capsys.readouterr().err == "error: /data/run/part-0.parquet: Permission denied\n"
    outcome[0] = MemoryError("Unable to allocate 93.1 GiB")
    assert opengem.main(["world", "--out", "x"]) == 2
    assert "not enough memory for sizes such as these (Unable to allocate 93.1 GiB)" in capsys.readouterr().err
    outcome[0] = KeyboardInterrupt()
    assert opengem.main(["world", "--out", "x"]) == 130
    assert capsys.readouterr().err == "interrupted\n"
    outcome[0] = RuntimeError("a bug")
    with pytest.raises(RuntimeError, match="a bug"):
        opengem.main(["world", "--out", "x"])


def test_exit_status_of_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass
    class Report:
        exit_code: int

    monkeypatch.setattr(opengem, "load", lambda command: (lambda config: Report(1), Config))
    assert opengem.main(["world", "--out", "x"]) == 1


@pytest.mark.parametrize("processes", [1, 2])
def test_ctrl_c_leaves_nothing(tmp_path: Path, processes: int) -> None:
    """A stage that is interrupted while writing exits 130 and removes what it had begun.

    As from a terminal, all its processes get the signal.
    """
    out = tmp_path / "raw"
    options = ["--rows", "50000000", "--processes", str(processes), "--out", str(out)]
    process = subprocess.Popen(
        [sys.executable, "-m", "opengem", "world", *options],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        while not list(tmp_path.glob("raw.tmp-*/users.parquet")):
            with contextlib.suppress(subprocess.TimeoutExpired):
                pytest.fail(f"ended with status {process.wait(0.05)}")
        os.killpg(process.pid, signal.SIGINT)
        _, error = process.communicate(timeout=240)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 130
    assert error.splitlines()[-1] == "interrupted"
    assert "Traceback" not in error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_import_that_swallows_ctrl_c_is_ended_by_it(number: signal.Signals, status: int, tmp_path: Path) -> None:
    """Modules of PyTorch swallow what is raised while they import others; the command would go on."""
    (tmp_path / "swallows.py").write_text(
        f"import os\ntry:\n    os.kill(os.getpid(), {int(number)})\nexcept BaseException:\n    pass\n"
    )
    code = (
        "import sys, opengem; opengem.COMMANDS['world'] = opengem.Command(stage='swallows:x', config='y', help='');"
        "sys.exit(opengem.main(['world']))"
    )
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    environment.pop("TORCHELASTIC_RUN_ID", None)
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (status, "")
    assert result.stderr == ("interrupted\n" if status == 130 else "terminated\n")
