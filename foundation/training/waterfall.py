"""The waterfall of a run's time as SVG text: one bar per phase, each beginning where the one before it ends."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from foundation.training.phases import (
    AWAY,
    CHECKPOINT,
    COMMUNICATION,
    COMPUTE,
    DATA,
    DOWN,
    EVALUATION,
    OPTIMIZER,
    OTHER,
    PHASES,
    REPEATED,
)

# Of the palette of Okabe and Ito (2008), and greys; start-up has one colour.
COLOURS = {
    DATA: "#e69f00",
    COMPUTE: "#0072b2",
    COMMUNICATION: "#d55e00",
    OPTIMIZER: "#009e73",
    CHECKPOINT: "#cc79a7",
    EVALUATION: "#56b4e9",
    REPEATED: "#8b1e1e",
    OTHER: "#8a97a5",
    DOWN: "#4a4a4a",
}
_START = "#7b6aa8"
_INK, _QUIET, _LINE = "#1b2733", "#5b6b7b", "#dfe5ec"
_LABEL, _BARS, _VALUE, _ROW, _TOP = 190, 520, 150, 27, 8


def duration(seconds: float) -> str:
    """A time for people: "85 ms", "3.42 s", "4 min 05 s", "2 h 07 min"."""
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms" if seconds else "0 s"
    if seconds < 60:
        return f"{seconds:.3g} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60:,} h {minutes % 60:02d} min"


def waterfall(seconds: Mapping[str, float], title: str) -> str:
    """Phases that took time while the run held its machines, in the order of `PHASES`, and their sum.

    Args:
        seconds: by phase.
        title: what the picture shows, for readers that cannot see it.
    """
    shown = [name for name in PHASES if name != AWAY and seconds.get(name, 0.0) > 0]
    whole = sum(seconds[name] for name in shown)
    height, width = _TOP * 2 + _ROW * (len(shown) + 1) + 6, _LABEL + _BARS + _VALUE
    scale = _BARS / whole if whole else 0.0
    parts = [
        f'<line x1="{_LABEL + _BARS * tick / 4}" x2="{_LABEL + _BARS * tick / 4}" y1="{_TOP - 4}"'
        f' y2="{height - _TOP}" stroke="{_LINE}"/>'
        for tick in range(5)
    ]
    at = 0.0
    for row, name in enumerate(shown):
        x, y = _LABEL + at * scale, _TOP + row * _ROW
        size = seconds[name] * scale
        parts.append(_bar(name, x, y, max(size, 1.0), COLOURS.get(name, _START), seconds[name], whole))
        at += seconds[name]
        if row + 1 < len(shown):
            end = _LABEL + at * scale
            parts.append(f'<line x1="{end:.1f}" x2="{end:.1f}" y1="{y + 19}" y2="{y + _ROW + 2}" stroke="{_QUIET}"/>')
    parts.append(_bar("all", _LABEL, _TOP + len(shown) * _ROW + 4, _BARS, _INK, whole, whole))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img"'
        f' aria-label="{escape(title)}" font-family="system-ui, sans-serif" font-size="13">{"".join(parts)}</svg>'
    )


def _bar(name: str, x: float, y: float, size: float, colour: str, seconds: float, whole: float) -> str:
    share = f"{seconds / whole:.1%}" if whole else ""
    return (
        f'<text x="{_LABEL - 10}" y="{y + 15}" text-anchor="end" fill="{_INK}">{escape(name)}</text>'
        f'<rect x="{x:.1f}" y="{y + 2}" width="{size:.1f}" height="17" rx="2" fill="{colour}"/>'
        f'<text x="{_LABEL + _BARS + 82}" y="{y + 15}" text-anchor="end" fill="{_QUIET}">{duration(seconds)}</text>'
        f'<text x="{_LABEL + _BARS + _VALUE - 6}" y="{y + 15}" text-anchor="end" fill="{_INK}">{share}</text>'
    )
