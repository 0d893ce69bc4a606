"""Imports point only the way the layout says, and the server starts without torch."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from foundation.data.onnx_runtime import SWITCH

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("kernels", "foundation", "value_models", "transfer", "serving")
# What each package may import of the others; a name allows itself and everything below it.
ALLOWED = {
    "kernels": ("kernels",),
    "foundation": ("foundation", "kernels"),
    "value_models": ("value_models", "kernels", "foundation.data"),
    "transfer": ("transfer", "foundation", "value_models"),
    "serving": (
        "serving",
        "foundation.data.schema",
        "foundation.data.encoding",
        "foundation.data.ids",
        "foundation.data.value_expression",
        "foundation.data.onnx_runtime",
    ),
}
# Distributions that are not called like their package.
DISTRIBUTIONS = {
    "yaml": "pyyaml",
    "sklearn": "scikit-learn",
    "google": "protobuf",
    "grpc": "grpcio",
    "ibis": "ibis-framework",
}
HEAVY = ("torch", "pyarrow", "torchrec", "fbgemm_gpu", "lightning", "duckdb", "ibis")


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def imported_modules(path: Path) -> set[str]:
    """Every module that a file imports anywhere, as dotted names; `from a import b` counts as `a.b` and `a`."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            assert node.module is not None
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def below(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(f"{prefix}.")


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_only_what_the_layout_allows(package: str) -> None:
    files = python_files(package)
    assert files
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in files
        for name in sorted(imported_modules(path))
        if name.split(".")[0] in (*PACKAGES, "opengem", "tests")
        and not any(below(name, prefix) for prefix in ALLOWED[package])
    ]
    assert not wrong, "\n".join(wrong)


def test_package_init_files_import_nothing() -> None:
    wrong = [
        str(path.relative_to(ROOT))
        for path in python_files(*PACKAGES)
        if path.name == "__init__.py"
        and imported_modules(path)
        and not (path.parent.parent.name == "kernels" and path.parent.name != "benchmarks")
    ]
    assert not wrong, f"hold a docstring only: {wrong}"


def distributions(*extras: str) -> set[str]:
    """Names that pyproject.toml asks for, with the given extras; `torchrec` has an install step of its own."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = list(project["dependencies"])
    for extra in extras:
        lines += project["optional-dependencies"][extra]
    return {re.split(r"[^A-Za-z0-9_.-]", line)[0].lower() for line in lines} | {"torchrec"}


@pytest.mark.parametrize(
    ("folders", "extras"),
    [
        (("serving",), ("serve",)),
        (("kernels", "foundation", "value_models"), ("cpu", "pipeline")),
        (("transfer",), ("cpu", "pipeline", "serve")),
        (("tests",), ("cpu", "pipeline", "serve", "dev")),
    ],
)
def test_every_imported_package_is_declared(folders: tuple[str, ...], extras: tuple[str, ...]) -> None:
    imported = {name.split(".")[0] for path in python_files(*folders) for name in imported_modules(path)}
    imported -= {*PACKAGES, "opengem", "tests", *sys.stdlib_module_names}
    wanted = {DISTRIBUTIONS.get(name, name.replace("_", "-")) for name in imported}
    assert wanted <= distributions(*extras), wanted - distributions(*extras)


def test_no_other_code_folder() -> None:
    tracked = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    top = {line.split("/")[0] for line in tracked.stdout.splitlines()}
    assert top <= {*PACKAGES, "tests", "opengem.py", "docs"}, sorted(top)


def run_without(modules: tuple[str, ...], code: str) -> subprocess.CompletedProcess[str]:
    """Runs `code` in a fresh interpreter in which importing any of `modules` fails."""
    blocker = f"""
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {modules!r}:
            raise ModuleNotFoundError(f"blocked: {{name}}", name=name)
sys.meta_path.insert(0, Blocker())
"""
    return subprocess.run([sys.executable, "-c", blocker + code], cwd=ROOT, capture_output=True, text=True)


def module_names(package: str) -> list[str]:
    return [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in python_files(package)]


def test_serving_imports_without_torch_and_arrow() -> None:
    names = [name.removesuffix(".__init__") for name in module_names("serving")]
    result = run_without(HEAVY, "\n".join(f"import {name}" for name in names))
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    "module",
    [
        "foundation.data.schema",
        "foundation.data.encoding",
        "foundation.data.value_expression",
        "foundation.data.onnx_runtime",
        "foundation.data.files",
        "foundation.data.progress",
        "foundation.data.settings",
        "foundation.data.installation",
        "foundation.data.options",
        "opengem",
    ],
)
def test_module_imports_without_torch(module: str) -> None:
    result = run_without(HEAVY, f"import {module}")
    assert result.returncode == 0, result.stderr


def test_onnx_runtime_is_imported_where_its_telemetry_is_switched_off() -> None:
    """Types aside, which are not imported when the program runs."""
    found = [
        path.relative_to(ROOT)
        for path in python_files(*PACKAGES)
        if re.search(
            r"^\s*(import|from) onnxruntime", re.sub(r"if TYPE_CHECKING:\n(    .*\n)+", "", path.read_text()), re.M
        )
    ]
    assert found == [Path("foundation/data/onnx_runtime.py")]


def test_onnx_runtime_leaves_nothing_in_the_home_folder(tmp_path: Path) -> None:
    """Telemetry would keep a database and an id of the machine there. It is off where CI is set, too."""
    kept = {name: value for name, value in os.environ.items() if name not in ("CI", "XDG_CACHE_HOME", SWITCH)}
    code = "from foundation.data.onnx_runtime import onnx_runtime; print(onnx_runtime().get_available_providers())"
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={**kept, "HOME": str(tmp_path)}, capture_output=True, text=True
    )
    assert "CPUExecutionProvider" in found.stdout, found.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_blocker_blocks() -> None:
    assert "blocked: torch" in run_without(HEAVY, "import torch").stderr
