"""Pictures of a report as SVG text: the pipeline, curves, dots per group, reliability, latencies.

Colours are from the palette of Okabe and Ito (2008), which colour-blind readers can tell apart.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLOURS = ("#0072b2", "#8a97a5", "#d55e00", "#009e73", "#cc79a7", "#e69f00")
MARKERS = ("o", "s", "D", "|", "^", "v")
_INK, _QUIET, _LINE = "#1b2733", "#5b6b7b", "#dfe5ec"
_STYLE: Any = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.edgecolor": _LINE,
    "axes.labelcolor": _QUIET,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _LINE,
    "grid.linewidth": 0.8,
    "xtick.color": _QUIET,
    "ytick.color": _QUIET,
    "text.color": _INK,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
}

Points = tuple[Sequence[float] | np.ndarray, Sequence[float] | np.ndarray]


def pipeline(stages: Sequence[tuple[str, str]], per_row: int = 5) -> str:
    """The stages as boxes joined by arrows, left to right, row by row.

    Args:
        stages: `(name, detail)`; the detail is shown below the name, its lines divided by newlines.
        per_row: boxes in a row.
    """
    width, height, gap, line = 172, 78, 34, 15
    rows = -(-len(stages) // per_row)
    parts = []
    for index, (name, detail) in enumerate(stages):
        x, y = (index % per_row) * (width + gap), (index // per_row) * (height + gap + 6)
        details = "".join(
            f'<text x="{x + width / 2}" y="{y + 44 + line * number}" text-anchor="middle" font-size="11.5"'
            f' fill="{_QUIET}">{escape(text)}</text>'
            for number, text in enumerate(detail.split("\n"))
        )
        parts.append(
            f'<rect x="{x + 1}" y="{y + 1}" width="{width - 2}" height="{height - 2}" rx="9" fill="#f2f8fc"'
            f' stroke="{COLOURS[0]}" stroke-width="1.4"/><text x="{x + width / 2}" y="{y + 24}" text-anchor="middle"'
            f' font-size="14.5" font-weight="600" fill="{_INK}">{escape(name)}</text>{details}'
        )
        if index + 1 < len(stages):
            middle = y + height / 2
            if (index + 1) % per_row:
                path = f"M{x + width + 4} {middle} h{gap - 13}"
            else:
                turn = y + height + (gap + 6) / 2
                path = f"M{x + width / 2} {y + height + 4} V{turn} H{width / 2} V{turn + (gap + 6) / 2 - 8}"
            parts.append(
                f'<path d="{path}" fill="none" stroke="{_QUIET}" stroke-width="1.6" marker-end="url(#arrow)"/>'
            )
    total_width = per_row * (width + gap) - gap
    total_height = rows * (height + gap + 6) - gap - 6
    arrow = (
        '<defs><marker id="arrow" viewBox="0 0 8 8" refX="3" refY="4" markerWidth="6" markerHeight="6" orient="auto">'
        f'<path d="M0 0 L8 4 L0 8 z" fill="{_QUIET}"/></marker></defs>'
    )
    names = ", ".join(name for name, _ in stages)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total_width} {total_height}" width="{total_width}"'
        f' role="img" aria-label="{escape(f"Pipeline: {names}")}" font-family="system-ui, sans-serif">'
        f"{arrow}{''.join(parts)}</svg>"
    )


@matplotlib.rc_context(_STYLE)
def curves(series: Mapping[str, Points], *, x: str, y: str, title: str) -> str:
    """Lines by name, each `(x values, y values)`; values that are not finite are left out."""
    figure, axes = _axes()
    for index, (name, (at, values)) in enumerate(series.items()):
        at, values = np.asarray(at, float), np.asarray(values, float)
        keep = np.isfinite(values)
        marker = "o" if keep.sum() < 12 else None
        axes.plot(at[keep], values[keep], color=COLOURS[index % len(COLOURS)], label=name, marker=marker, ms=4)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if len(series) > 1:
        axes.legend()
    return _svg(figure, title)


@matplotlib.rc_context(_STYLE)
def dots(groups: Sequence[str], series: Mapping[str, Sequence[float]], *, x: str, title: str) -> str:
    """One line per group with a mark per series, for values whose axis does not begin at 0.

    Args:
        groups: names of the lines, top to bottom.
        series: name to one value per group; NaN draws nothing.
        x: label of the axis.
        title: what the picture shows, for readers that cannot see it.
    """
    figure, axes = _axes(height=max(1.8, 0.9 + 0.42 * len(groups)), width=7.6)
    places = np.arange(len(groups))[::-1]
    values = np.array([[np.nan if v is None else v for v in row] for row in series.values()], float)
    seen = np.isfinite(values)
    for place, column, present in zip(places, values.T, seen.T, strict=True):
        if present.any():
            axes.plot([column[present].min(), column[present].max()], [place, place], color=_LINE, lw=5, zorder=1)
    for index, name in enumerate(series):
        colour, marker = COLOURS[index % len(COLOURS)], MARKERS[index % len(MARKERS)]
        size = 190 if marker == "|" else 48
        axes.scatter(values[index], places, color=colour, marker=marker, s=size, label=name, zorder=2, linewidths=2)
    axes.set_yticks(places, list(groups))
    axes.tick_params(axis="y", length=0, labelcolor=_INK)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(x)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(series), handletextpad=0.2)
    return _svg(figure, title)


@matplotlib.rc_context(_STYLE)
def reliability(predictions: Mapping[str, tuple[np.ndarray, np.ndarray]], *, title: str, bins: int = 10) -> str:
    """Observed rate against mean prediction in bins of equally many rows.

    Args:
        predictions: name to `(probability [N], label [N])`.
        bins: number of bins.
    """
    figure, axes = _axes(height=4.2, width=4.6)
    top = 0.0
    for index, (name, (probability, label)) in enumerate(predictions.items()):
        if len(label) < bins:
            continue
        parts = np.array_split(np.argsort(probability, kind="stable"), bins)
        means = np.array([[probability[part].mean(), label[part].mean()] for part in parts])
        top = max(top, means.max())
        colour, marker = COLOURS[index % len(COLOURS)], MARKERS[index % len(MARKERS)]
        axes.plot(means[:, 0], means[:, 1], color=colour, marker=marker, ms=5, lw=1.3, label=name)
    top = top * 1.05 or 1.0
    axes.plot([0, top], [0, top], color=_QUIET, lw=1, ls=(0, (4, 3)), zorder=0)
    axes.set_xlim(0, top)
    axes.set_ylim(0, top)
    axes.set_aspect("equal")
    axes.set_xlabel("predicted probability")
    axes.set_ylabel("observed rate")
    axes.legend()
    return _svg(figure, title)


@matplotlib.rc_context(_STYLE)
def latencies(milliseconds: Mapping[str, Sequence[float] | np.ndarray], *, title: str) -> str:
    """Histogram of latencies in ms by name, cut at the 99.5th percentile, with marks at the median and the 99th."""
    figure, axes = _axes(height=3.6, width=5.6)
    every = np.concatenate([np.asarray(v, float) for v in milliseconds.values()])
    edges = np.linspace(0, float(np.percentile(every, 99.5)) * 1.02, 41)
    for index, (name, values) in enumerate(milliseconds.items()):
        colour = COLOURS[2 * index % len(COLOURS)]
        p50, p99 = np.percentile(values, (50, 99))
        label = f"{name}: p50 {p50:.1f} ms, p99 {p99:.1f} ms"
        axes.hist(np.asarray(values, float), bins=edges.tolist(), color=colour, alpha=0.55, label=label)
        for value, style in ((p50, "-"), (p99, "--")):
            axes.axvline(value, color=colour, lw=1.4, ls=style)
    axes.set_xlabel("milliseconds")
    axes.set_ylabel("requests")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0))
    return _svg(figure, title)


def _axes(height: float = 3.4, width: float = 5.6) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def _svg(figure: Figure, title: str) -> str:
    """The figure as an inline `<svg>` element: no declarations, no date, ids that differ between figures."""
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": title}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :].strip()
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    # Matplotlib names groups figure_1, axes_1, ... in every picture; ids must be unique in a page.
    prefix = re.sub(r"\W+", "-", title)
    text = re.sub(r'\bid="([\w.]+_\d+)"', rf'id="{prefix}-\1"', text)
    return text.replace("<svg ", f'<svg role="img" aria-label="{escape(title)}" ', 1)
