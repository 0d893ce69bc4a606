"""What the benchmarks time computes what their baselines do; their commands say what is wrong with a call."""

from __future__ import annotations

import runpy
import sys
import warnings

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from kernels.benchmarks import jagged
from kernels.benchmarks.__main__ import TABLES

COMMANDS = ["", *(f".{name}" for name in (*TABLES, "tune", "tune_memory"))]


def test_jagged_movement() -> None:
    for one in jagged.passes("small", 16, 40, 4, "s=.5", device="cpu"):
        results = [(x,) if isinstance(x, Tensor) else x for x in (one.eager(), one.baselines["torch"]())]
        for got, want in zip(*results, strict=True):  # type: ignore[call-overload]
            torch.testing.assert_close(got, want, rtol=0.02, atol=0.02, msg=one.name)


def leave(command: str, *arguments: str, monkeypatch: pytest.MonkeyPatch) -> object:
    """The exit code of ``python -m command`` where there is no GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", [command, *arguments])
    with warnings.catch_warnings(), pytest.raises(SystemExit) as left:
        warnings.simplefilter("ignore", RuntimeWarning)  # the module is imported already
        runpy.run_module(command, run_name="__main__")
    return left.value.code


@pytest.mark.parametrize("command", [*(f"kernels.benchmarks{x}" for x in COMMANDS), "tests.kernels.sanitized norms"])
def test_commands_need_a_gpu_and_say_so_first(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert leave(*command.split(), monkeypatch=monkeypatch) == 2
    said = capsys.readouterr()
    name = command.split()[0]
    assert said.out == ""
    assert said.err == f"python -m {name}: needs a CUDA GPU, and torch {torch.__version__} finds none\n"


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("kernels.benchmarks gdpa nope", "nope: not there, there are: gdpa; "),
        ("kernels.benchmarks.gdpa nope", "unrecognized arguments: nope"),
        ("tests.kernels.sanitized", "the following arguments are required"),
        ("tests.kernels.sanitized norms nope", "'nope' is not there, there are: forward_stream, "),
        ("tests.kernels.sanitized forward_long:5", "the masks are 0 to 4"),
        ("tests.kernels.sanitized forward_long:-1", "the masks are 0 to 4"),
    ],
)
def test_commands_refuse_names_that_are_not_there(
    command: str, why: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert leave(*command.split(), monkeypatch=monkeypatch) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert why in said.err.splitlines()[-1]
    assert said.err.startswith(f"usage: python -m {command.split()[0]} ")
