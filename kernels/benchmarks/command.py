"""What the commands of this package share: they need a GPU, refuse names that are not there, and write tables."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch


def parser(module: str, text: str | None) -> argparse.ArgumentParser:
    """The options of ``python -m kernels.benchmarks.<module>``, ``""`` for the package; described by a docstring."""
    name = f"kernels.benchmarks.{module}".removesuffix(".")
    return argparse.ArgumentParser(prog=f"python -m {name}", description=(text or "").split("\n")[0])


def require_gpu(options: argparse.ArgumentParser) -> None:
    """Ends the command with a line and exit code 2 where there is no GPU to measure on."""
    if not torch.cuda.is_available():
        options.exit(2, f"{options.prog}: needs a CUDA GPU, and torch {torch.__version__} finds none\n")


def require_known(
    options: argparse.ArgumentParser, asked: Iterable[str], known: Iterable[str], *, parts: bool = False
) -> None:
    """Ends the command with exit code 2 if a name is not there, and says which are.

    Args:
        parts: a part of a name will do.
    """
    names = list(dict.fromkeys(known))
    unknown = [x for x in asked if not (any(x in name for name in names) if parts else x in names)]
    if unknown:
        options.error(f"{'; '.join(unknown)}: not there, there are: {'; '.join(names)}")


def run(module: str, text: str | None, table: Callable[[], None]) -> None:
    """A command without options, which prints a table."""
    options = parser(module, text)
    options.parse_args()
    require_gpu(options)
    table()


def versions() -> str:
    """Of what a measurement is made with."""
    import triton  # not everywhere where a command may say that there is no GPU

    return f"torch {torch.__version__}, triton {triton.__version__}"


def write_table(shipped: Path, output: Path, found: dict[str, dict[str, Any]]) -> None:
    """Writes the configurations of the file, or the shipped ones, with those found now, and where these come from.

    ``sources`` names versions and date by row; rows without an entry of their own have that of their GPU. Rows that
    were not measured now keep theirs.

    Raises:
        SystemExit: nothing was found; the file is left as it is.
    """
    if not found:
        raise SystemExit(f"nothing was found: {output} is left as it is")
    before = output if output.exists() else shipped
    table = json.loads(before.read_text()) if before.exists() else {"configurations": {}, "sources": {}}
    now = f"{versions()}, {time.strftime('%Y-%m-%d')}"
    table["configurations"].update(found)
    table["sources"].update(dict.fromkeys(found, now))
    output.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")
    print(f"{len(found)} rows of {len(table['configurations'])} are new in {output}")
