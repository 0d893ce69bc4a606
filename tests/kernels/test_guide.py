"""What docs/kernels.md shows runs as it stands, on a CPU; it names every operator, with its defaults."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels import block_attention, gdpa, interaction, jagged, jagged_attention, norms, token_mixing

DOCS = Path(__file__).resolve().parents[2] / "docs"
GUIDE = (DOCS / "kernels.md").read_text()
PACKAGES = (gdpa, jagged_attention, block_attention, jagged, norms, interaction, token_mixing)
EXPORTS = [(package, name) for package in PACKAGES for name in package.__all__]


def run(code: str, names: dict[str, Any]) -> None:
    """Runs code, and compares what its comments say of results with them: ``[...]``, a shape or integers."""
    lines = code.splitlines()
    for statement in ast.parse(code).body:
        assert statement.end_lineno is not None
        exec(compile(ast.unparse(statement), "docs/kernels.md", "exec"), names)
        said = re.search(r"  # (\[[\d, ]+\])", lines[statement.end_lineno - 1])
        if said:
            target = statement.targets[0] if isinstance(statement, ast.Assign) else statement.value  # type: ignore[attr-defined]
            found = eval(ast.unparse(target), names)
            tensor = isinstance(found, torch.Tensor)
            forms = [list(found.shape), found.tolist()] if tensor else [list(found)]
            assert ast.literal_eval(said[1]) in forms, f"{lines[statement.end_lineno - 1]}: {forms}"


def test_the_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL):
        run(block, names)
    assert names["device"] == "cpu"


@pytest.mark.parametrize("comment", ["[2, 3]", "[0, 0]", "[1, 2, 3, 4, 5, 6]"])
def test_a_wrong_comment_is_found(comment: str) -> None:
    code = f"x = torch.arange(6).view(3, 2)  # {comment}\n"
    with pytest.raises(AssertionError):
        run(code, {"torch": torch})
    run(code.replace(comment, "[3, 2]: pairs"), {"torch": torch})


def signature(function: Callable[..., Any]) -> str:
    """Names and defaults."""
    parts, keywords = [], False
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not keywords:
            keywords = True
            parts.append("*")
        default = parameter.default
        shown = f'"{default}"' if isinstance(default, str) else repr(default)
        parts.append(parameter.name if default is parameter.empty else f"{parameter.name}={shown}")
    return f"{function.__name__}({', '.join(parts)})"


@pytest.mark.parametrize(("package", "name"), EXPORTS, ids=lambda x: x if isinstance(x, str) else x.__name__)
def test_the_guide_names_all_there_is(package: Any, name: str) -> None:
    thing = getattr(package, name)
    assert re.search(rf"\b{name}\b", GUIDE)
    if callable(thing) and thing is not interaction.products_first:
        assert signature(thing) in re.sub(r"\s+", " ", GUIDE)


def test_activations_are_those_of_the_guide() -> None:
    (row,) = re.findall(r"^\| `activation` \| (.*?) \(`ACTIVATIONS`\)", GUIDE, re.MULTILINE)
    assert re.findall(r"`(\w+)`", row) == list(gdpa.ACTIVATIONS)


@pytest.mark.parametrize("page", ["kernels.md", "kernels_internals.md"])
def test_links_lead_somewhere(page: str) -> None:
    text = (DOCS / page).read_text()
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", text):
        name, _, anchor = target.partition("#")
        other = (DOCS / (name or page)).read_text()
        heads = [re.sub(r"[^\w -]", "", x.lower()) for x in re.findall(r"^#+ (.*)$", other, re.MULTILINE)]
        assert not anchor or anchor in [x.replace(" ", "-") for x in heads], target
    for path in re.findall(r"`((?:kernels|tests)/[\w/.]+)`", text):
        assert (DOCS.parent / path).exists(), path
