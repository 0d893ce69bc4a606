"""Do the installed torch, fbgemm and torchrec belong together? Read from package metadata, without importing.

The three are built against each other: fbgemm 1.X is compiled for torch 2.(X+5), and torchrec follows
fbgemm's minor version. A wrong pair fails at import with an undefined symbol that names none of them.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from importlib import metadata

# (torch, fbgemm, torchrec): the combinations that the tests run on.
PAIRS = (("2.13", "1.8", "1.8"), ("2.11", "1.6", "1.6"))
FBGEMM_NAMES = ("fbgemm-gpu-cpu", "fbgemm-gpu")
PYTHONS = ((3, 11), (3, 13))


class InstallationError(ValueError):
    """The installed packages do not work together; the message names the combination that does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InstallationReport:
    """What is installed and what is wrong with it.

    Args:
        versions: package name to version, None where it is not installed.
        problems: one line per fault, empty when the pipeline can run.
    """

    versions: dict[str, str | None]
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """No fault was found."""
        return not self.problems

    def lines(self) -> list[str]:
        """The report as text, one line per package, then one per fault."""
        found = [f"{name:<16} {version or 'not installed'}" for name, version in self.versions.items()]
        return found + [f"error: {problem}" for problem in self.problems]


def pairing_problems(
    torch: str | None, fbgemm: str | None, torchrec: str | None, *, python: tuple[int, int] = (3, 11)
) -> tuple[str, ...]:
    """Faults in a combination of versions, at most one for the three packages and one for Python.

    Args:
        torch: version such as "2.13.0+cpu"; None when not installed. The same for the others.
        fbgemm: version of fbgemm-gpu or fbgemm-gpu-cpu.
        torchrec: version of torchrec.
        python: major and minor version of the interpreter.
    """
    problems = []
    if not PYTHONS[0] <= python <= PYTHONS[1]:
        problems.append(
            f"Python {python[0]}.{python[1]} is not supported; use {PYTHONS[0][0]}.{PYTHONS[0][1]}"
            f" to {PYTHONS[1][0]}.{PYTHONS[1][1]}"
        )
    given = {"torch": torch, "fbgemm": fbgemm, "torchrec": torchrec}
    combination = tuple(_minor(version) if version else None for version in given.values())
    if combination in PAIRS:
        return tuple(problems)
    found = ", ".join(f"{name} {version or 'not installed'}" for name, version in given.items())
    problems.append(f"{found}: this combination does not work. {_advice(combination)}")
    return tuple(problems)


def installation_report() -> InstallationReport:
    """Looks at the running interpreter's packages. Imports none of them."""
    versions: dict[str, str | None] = {
        "python": f"{sys.version_info.major}.{sys.version_info.minor}.{sys.version_info.micro}",
        "torch": _version("torch"),
        "fbgemm": next((version for name in FBGEMM_NAMES if (version := _version(name))), None),
        "torchrec": _version("torchrec"),
    }
    for name in ("lightning", "torchmetrics", "onnx", "onnxruntime", "pyarrow", "duckdb", "tritonclient"):
        versions[name] = _version(name)
    problems = pairing_problems(
        versions["torch"], versions["fbgemm"], versions["torchrec"], python=sys.version_info[:2]
    )
    return InstallationReport(versions=versions, problems=problems)


def require_installation() -> None:
    """Checks the combination before a stage imports torch.

    Raises:
        InstallationError: with every fault and the commands that mend it.
    """
    report = installation_report()
    if not report.ok:
        raise InstallationError("; ".join(report.problems))


def _advice(combination: tuple[str | None, ...]) -> str:
    """The supported combination nearest to what is there: the same torch if possible, else the first one."""
    torch, fbgemm, torchrec = next((pair for pair in PAIRS if pair[0] == combination[0]), PAIRS[0])
    distribution = "fbgemm-gpu-cpu" if (torch, fbgemm, torchrec) == PAIRS[0] else "fbgemm-gpu"
    others = " or ".join(f"torch {pair[0]} + fbgemm {pair[1]} + torchrec {pair[2]}" for pair in PAIRS)
    return (
        f"Supported: {others}. Install it with: pip install 'torch=={torch}.*' '{distribution}=={fbgemm}.*'"
        f" && pip install --no-deps 'torchrec=={torchrec}.*'"
    )


def _minor(version: str) -> str:
    """ "2.13.0+cpu" -> "2.13"; a version without two numbers is returned as it is."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return f"{match[1]}.{match[2]}" if match else version


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
