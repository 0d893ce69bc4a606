"""One clear error for a wrong combination of torch, fbgemm and torchrec."""

from __future__ import annotations

from importlib import metadata

import pytest

from foundation.data import installation
from foundation.data.installation import InstallationError, pairing_problems


@pytest.mark.parametrize(
    ("torch", "fbgemm", "torchrec"),
    [("2.13.0+cpu", "1.8.0", "1.8.0"), ("2.13.1", "1.8.2", "1.8.0"), ("2.11.0+cu130", "1.6.0", "1.6.1")],
)
def test_supported_pairs(torch: str, fbgemm: str, torchrec: str) -> None:
    assert pairing_problems(torch, fbgemm, torchrec) == ()


@pytest.mark.parametrize(
    ("torch", "fbgemm", "torchrec", "advice"),
    [
        ("2.13.0", "1.7.0", "1.8.0", "'fbgemm-gpu-cpu==1.8.*'"),
        ("2.13.0", "1.8.0", "1.6.0", "'torchrec==1.8.*'"),
        ("2.11.0+cu130", "1.8.0", "1.8.0", "'fbgemm-gpu==1.6.*'"),
        ("2.12.0", "1.7.0", "1.7.0", "'torch==2.13.*'"),
        ("2.13.0", None, "1.8.0", "'fbgemm-gpu-cpu==1.8.*'"),
        ("2.13.0", "1.8.0", None, "pip install --no-deps 'torchrec==1.8.*'"),
        (None, None, None, "'torch==2.13.*'"),
        ("unknown", "1.8.0", "1.8.0", "'torch==2.13.*'"),
    ],
)
def test_wrong_pair_is_one_error_with_the_right_one(torch, fbgemm, torchrec, advice: str) -> None:
    (problem,) = pairing_problems(torch, fbgemm, torchrec)
    assert advice in problem
    assert "torch 2.13 + fbgemm 1.8 + torchrec 1.8" in problem
    for name, version in (("torch", torch), ("fbgemm", fbgemm), ("torchrec", torchrec)):
        assert f"{name} {version or 'not installed'}" in problem


@pytest.mark.parametrize(("python", "ok"), [((3, 10), False), ((3, 11), True), ((3, 13), True), ((3, 14), False)])
def test_python_version(python: tuple[int, int], ok: bool) -> None:
    problems = pairing_problems("2.13.0", "1.8.0", "1.8.0", python=python)
    assert (problems == ()) == ok


def test_report_of_this_installation_is_clean() -> None:
    report = installation.installation_report()
    assert report.ok, report.problems
    assert any(line.startswith("torch ") for line in report.lines())
    installation.require_installation()


def test_require_raises_on_a_wrong_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"torch": "2.13.0", "fbgemm-gpu": "1.7.0", "torchrec": "1.8.0"}

    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(installation.metadata, "version", version)
    with pytest.raises(InstallationError, match=r"fbgemm 1.7.0.*fbgemm 1.8"):
        installation.require_installation()
    assert any(line.startswith("error: ") for line in installation.installation_report().lines())
