"""A report page: one HTML file that needs nothing else, no script, no font, no image, no network."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from foundation.data.files import atomic_write

_STYLE = """
:root { color-scheme: light; --ink: #1b2733; --quiet: #5b6b7b; --line: #dfe5ec; --accent: #0072b2; }
* { box-sizing: border-box; }
body { margin: 0; background: #f4f6f9; color: var(--ink); font: 16px/1.5 system-ui, -apple-system, "Segoe UI",
  Roboto, "Helvetica Neue", Arial, sans-serif; }
header { background: #10212f; color: #fff; padding: 2.5rem max(1rem, calc((100% - 68rem) / 2)); }
header h1 { margin: 0 0 .25rem; font-size: 1.9rem; letter-spacing: -.01em; }
header p { margin: 0; color: #b9c7d4; max-width: 48rem; }
main { max-width: 70rem; margin: 0 auto; padding: 1rem; }
section { background: #fff; border: 1px solid var(--line); border-radius: 10px; padding: 1.25rem 1.5rem;
  margin: 1rem 0; }
h2 { margin: 0 0 .25rem; font-size: 1.2rem; }
p.lead { margin: 0 0 1rem; color: var(--quiet); max-width: 52rem; }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .75rem; margin: 0; }
.facts div { border-left: 3px solid var(--accent); padding: .1rem 0 .1rem .75rem; }
.facts dt { color: var(--quiet); font-size: .8rem; }
.facts dd { margin: 0; font-size: 1.35rem; font-weight: 600; font-variant-numeric: tabular-nums; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .92rem; font-variant-numeric: tabular-nums; }
th, td { padding: .4rem .7rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th { color: var(--quiet); font-weight: 600; border-bottom: 2px solid var(--line); }
th.text, td.text { text-align: left; }
td.text { white-space: normal; min-width: 9rem; }
tr.strong td { font-weight: 600; background: #f2f8fc; }
figure { margin: .5rem 0 0; }
figure svg { max-width: 100%; height: auto; display: block; margin: 0 auto; }
figcaption { color: var(--quiet); font-size: .88rem; margin-top: .4rem; text-align: center; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(18.5rem, 1fr)); gap: 1.25rem; align-items: end; }
pre { white-space: pre-wrap; overflow-wrap: anywhere;
  background: #f4f6f9; border: 1px solid var(--line); border-radius: 6px; padding: .8rem 1rem;
  font: .82rem/1.45 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; margin: .5rem 0; }
footer { color: var(--quiet); font-size: .85rem; text-align: center; padding: 1rem 0 2rem; }
@media print { body { background: #fff; } section { break-inside: avoid; } }
"""


class Page:
    """Collects sections, then writes the page. All text is escaped; only figures are taken as they are.

    Args:
        title: heading and window title.
        subtitle: one sentence below it.
    """

    def __init__(self, title: str, subtitle: str = "") -> None:
        self._title, self._subtitle = title, subtitle
        self._sections: list[list[str]] = []

    def section(self, heading: str, lead: str = "") -> None:
        """Begins a section; what is added next belongs to it."""
        parts = [f"<h2>{escape(heading)}</h2>"]
        if lead:
            parts.append(f'<p class="lead">{escape(lead)}</p>')
        self._sections.append(parts)

    def facts(self, facts: Sequence[tuple[str, str]]) -> None:
        """A row of numbers with their labels: `(label, value)`."""
        items = "".join(f"<div><dt>{escape(label)}</dt><dd>{escape(value)}</dd></div>" for label, value in facts)
        self._add(f'<dl class="facts">{items}</dl>')

    def table(
        self,
        columns: Sequence[str],
        rows: Sequence[Sequence[str]],
        *,
        text_columns: int = 1,
        strong: Sequence[int] = (),
    ) -> None:
        """A table of formatted cells.

        Args:
            columns: headings.
            rows: cells, as many per row as there are headings.
            text_columns: the first so many columns are text, aligned left; the others are numbers.
            strong: indices of rows to bring out.
        """

        def cells(tag: str, values: Sequence[str]) -> str:
            kinds = [' class="text"' if index < text_columns else "" for index in range(len(values))]
            return "".join(f"<{tag}{kind}>{escape(v)}</{tag}>" for kind, v in zip(kinds, values, strict=True))

        body = ""
        for index, row in enumerate(rows):
            assert len(row) == len(columns), (row, columns)
            kind = ' class="strong"' if index in strong else ""
            body += f"<tr{kind}>{cells('td', row)}</tr>"
        head = f"<thead><tr>{cells('th', columns)}</tr></thead>"
        self._add(f'<div class="scroll"><table>{head}<tbody>{body}</tbody></table></div>')

    def figures(self, *figures: tuple[str, str]) -> None:
        """Pictures side by side where there is room: `(svg, caption)`."""
        items = "".join(f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>" for svg, caption in figures)
        self._add(f'<div class="pair">{items}</div>' if len(figures) > 1 else items)

    def code(self, text: str) -> None:
        """Text in its own lines: a command, a request, a config."""
        self._add(f"<pre>{escape(text)}</pre>")

    def html(self, footer: str = "") -> str:
        """The whole page."""
        sections = "\n".join(f"<section>{''.join(parts)}</section>" for parts in self._sections)
        return (
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f"<title>{escape(self._title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
            f"<header><h1>{escape(self._title)}</h1><p>{escape(self._subtitle)}</p></header>\n"
            f"<main>\n{sections}\n</main>\n<footer>{escape(footer)}</footer>\n</body>\n</html>\n"
        )

    def write(self, path: Path, footer: str = "") -> None:
        """Writes the page, whole or not at all."""
        atomic_write(path, self.html(footer))

    def _add(self, html: str) -> None:
        assert self._sections, "begin a section first"
        self._sections[-1].append(html)
