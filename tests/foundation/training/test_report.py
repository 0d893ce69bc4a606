"""Report pages are whole, escape what they are given, and need nothing else."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from foundation.training import charts
from foundation.training.report import Page

SVG = "{http://www.w3.org/2000/svg}"


class Checker(HTMLParser):
    """Collects tags, ids and links, and checks that tags close in order."""

    void = frozenset({"meta", "link", "br", "img", "path", "rect", "use"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.ids += [value or "" for name, value in attrs if name == "id"]
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag not in self.void:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.void:
            assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.void:
            self.open.pop()


def check(html: str) -> Checker:
    checker = Checker()
    checker.feed(html)
    checker.close()
    assert checker.open == []
    assert len(checker.ids) == len(set(checker.ids))
    assert all(link.startswith("#") for link in checker.links), "a page needs nothing else"
    assert "script" not in checker.seen and "@import" not in html and "url(http" not in html
    return checker


def some_charts() -> list[tuple[str, str]]:
    rng = np.random.default_rng(0)
    probability = rng.random(500)
    label = (rng.random(500) < probability).astype(int)
    return [
        (charts.pipeline([(f"stage {i}", "two\nlines") for i in range(8)]), "pipeline"),
        (charts.curves({"a": ([1, 2, 3], [3.0, 2.0, float("nan")]), "b": ([1], [1.0])}, x="x", y="y", title="C"), "c"),
        (charts.dots(["feed", "reels"], {"m": [0.8, 0.9], "n": [0.7, float("nan")]}, x="NE", title="D"), "dots"),
        (charts.reliability({"m": (probability, label)}, title="R"), "reliability"),
        (charts.latencies({"client": rng.gamma(2, 2, 300)}, title="L"), "latencies"),
    ]


def test_page_is_one_valid_file(tmp_path: Path) -> None:
    page = Page("A <title>", "and & more")
    page.section("First", "lead")
    page.facts([("rows", "1,000")])
    page.table(["name", "NE"], [["a", "0.9"], ["b <b>", "0.8"]], strong=[1])
    page.section("Pictures")
    page.figures(*some_charts())
    page.code("opengem demo > out && echo '<done>'")
    page.write(tmp_path / "report.html", footer="end")
    html = (tmp_path / "report.html").read_text()
    checker = check(html)
    assert checker.seen.count("svg") == checker.seen.count("figure") == 5
    assert "A &lt;title&gt;" in html and "b &lt;b&gt;" in html and "&lt;done&gt;" in html
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_charts_are_svg_with_a_name_and_text() -> None:
    for svg, _ in some_charts():
        root = ET.fromstring(svg)
        assert root.tag == f"{SVG}svg"
        assert root.get("role") == "img" and root.get("aria-label")
    texts = "".join(ET.fromstring(some_charts()[2][0]).itertext())
    assert "feed" in texts and "NE" in texts


def test_charts_are_the_same_every_time() -> None:
    assert some_charts() == some_charts()


def test_reliability_draws_the_mean_of_each_bin() -> None:
    """Ten rows at 0.2 with two positives, ten at 0.8 with eight: both bins lie on the diagonal."""
    probability = np.array([0.2] * 10 + [0.8] * 10)
    label = np.array([1] * 2 + [0] * 8 + [1] * 8 + [0] * 2)
    svg = charts.reliability({"exact": (probability, label)}, title="R", bins=2)
    lines = re.findall(r'<path d="M ([\d.]+) ([\d.]+) ?\n?L ([\d.]+) ([\d.]+) ?\n?"[^>]*clip-path', svg)
    diagonal = [line for line in lines if float(line[0]) < float(line[2]) and float(line[1]) > float(line[3])]
    slopes = {round((float(y1) - float(y2)) / (float(x2) - float(x1)), 3) for x1, y1, x2, y2 in diagonal}
    assert slopes == {1.0}


def test_content_needs_a_section() -> None:
    with pytest.raises(AssertionError, match="begin a section"):
        Page("title").code("x")
