"""Files stay small, and everything public is documented."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CODE = ("kernels", "foundation", "value_models", "transfer", "serving")
MAX_LINES = 500


def code_files() -> list[Path]:
    return [ROOT / "opengem.py", *sorted(path for folder in CODE for path in (ROOT / folder).rglob("*.py"))]


def undocumented(node: ast.Module | ast.ClassDef, prefix: str = "") -> Iterator[tuple[int, str]]:
    """Line and name of each public function, class and method without a docstring.

    Overloads, property setters and methods that a base class documents (`@override`) need none.
    """
    for child in node.body:
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        if child.name.startswith("_"):
            continue
        decorators = {ast.unparse(decorator).split(".")[-1] for decorator in child.decorator_list}
        if ast.get_docstring(child) is None and not decorators & {"overload", "override", "setter"}:
            yield child.lineno, f"{prefix}{child.name}"
        if isinstance(child, ast.ClassDef):
            yield from undocumented(child, f"{prefix}{child.name}.")


@pytest.mark.parametrize("path", code_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_public_names_are_documented(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree), f"{path.relative_to(ROOT)} has no module docstring"
    missing = [f"{path.relative_to(ROOT)}:{line} {name}" for line, name in undocumented(tree)]
    assert not missing, "\n".join(missing)


def test_undocumented_names_are_found() -> None:
    tree = ast.parse('class A:\n    """A."""\n    def b(self): ...\n    def _c(self): ...\ndef d(): ...\n')
    assert [name for _, name in undocumented(tree)] == ["A.b", "d"]


def test_files_are_small() -> None:
    files = [*code_files(), *(ROOT / "tests").rglob("*.py")]
    large = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in files}
    assert {name: lines for name, lines in large.items() if lines >= MAX_LINES} == {}
