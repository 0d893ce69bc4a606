"""A plan as text for the terminal, and as a page."""

from __future__ import annotations

from pathlib import Path

from foundation.parallel.preview.meter import COPIES
from foundation.parallel.preview.result import Plan
from foundation.parallel.topology import Link
from foundation.training.report import Page

LINKS: tuple[Link, ...] = ("host", "zone", "cluster")
_SHOWN = 12

Rows = list[list[str]]


def memory_rows(plan: Plan) -> Rows:
    """Term, GB."""
    rows = [[name, _gb(count)] for name, count in plan.memory.terms.items()]
    return [*rows, ["all", _gb(plan.memory.total)], ["a GPU has", _gb(plan.capacity)]]


def kept_rows(plan: Plan) -> Rows:
    """Part of the model, GB of activations at the end of the forward pass."""
    parts: dict[str, int] = {}
    for name, count in plan.kept.items():
        words = name.split(".")
        part = " ".join(words[2:]) if words[0] == "layers" else (name or "between modules")
        parts[part] = parts.get(part, 0) + count
    order = sorted(parts, key=lambda part: -parts[part])
    rows = [[part, _gb(parts[part])] for part in order[:_SHOWN]]
    rest = sum(parts[part] for part in order[_SHOWN:])
    return [*rows, ["the rest", _gb(rest)]] if rest else rows


def collective_rows(plan: Plan) -> Rows:
    """Collective, ranks, MB sent by link, ms, waited for or not."""
    return [
        [
            c.name,
            f"{c.ranks:,}",
            *(f"{c.bytes[link] / 1e6:,.1f}" if link in c.bytes else "" for link in LINKS),
            f"{c.seconds * 1e3:,.2f}",
            "waited for" if c.waited else "overlapped",
        ]
        for c in plan.collectives
    ]


def time_rows(plan: Plan) -> Rows:
    """Term, ms, how it counts."""
    longest = max(plan.time.beside, key=lambda name: plan.time.beside[name])
    rows = [
        [name, f"{seconds * 1e3:,.2f}", "the longest of these counts" if name == longest else "hidden by the longest"]
        for name, seconds in plan.time.beside.items()
    ]
    rows += [[name, f"{seconds * 1e3:,.2f}", "added"] for name, seconds in plan.time.alone.items()]
    return [*rows, ["step", f"{plan.time.step * 1e3:,.2f}", f"bound by: {plan.time.bound}"]]


def table_rows(plan: Plan) -> Rows:
    """Table, rows, dim, GB, place in its group."""
    size = plan.layout.table_shard
    rows = [
        [
            t.name.rsplit(".", 1)[-1],
            f"{t.rows:,}",
            f"{t.dim}",
            _gb(t.bytes),
            f"rows over {size:,} ranks" if t.rank is None else f"whole on rank {t.rank}",
        ]
        for t in plan.tables[:_SHOWN]
    ]
    rest = plan.tables[_SHOWN:]
    if rest:
        whole = sum(t.rank is not None for t in rest)
        rows.append(
            [f"{len(rest)} smaller ones", f"{sum(t.rows for t in rest):,}", "", _gb(sum(t.bytes for t in rest))]
        )
        rows[-1].append(f"{whole} whole, {len(rest) - whole} cut")
    return rows


def summary(plan: Plan) -> str:
    """One sentence."""
    numbers = sum(t.rows * t.dim for t in plan.tables)
    gpus = "1 GPU" if plan.layout.world == 1 else f"{plan.layout.world:,} GPUs"
    return (
        f"{gpus}, {plan.parameters / 1e6:,.1f} M dense parameters, {numbers / 1e9:,.3f} G numbers "
        f"in tables; {plan.memory.total / 1e9:,.1f} of {plan.capacity / 1e9:,.1f} GB a GPU; "
        f"{plan.time.step * 1e3:,.1f} ms a step, bound by {plan.time.bound}; "
        f"{plan.samples_per_second:,.0f} impressions/s, MFU {plan.mfu:.1%}"
    )


def imbalance(plan: Plan) -> str:
    """One sentence."""
    more = plan.memory.terms["activations"] * (plan.token_imbalance - 1)
    return (
        f"heaviest rank over mean: tables {plan.table_imbalance:.2f}, events of a step {plan.token_imbalance:.2f}, "
        f"with {(plan.memory.total + more) / 1e9:,.1f} GB"
        f"{'; computed again: ' + str(len(plan.again)) + ' modules' if plan.again else ''}"
    )


SECTIONS = (
    ("Memory of the fullest GPU, GB", "", ("term", "GB"), memory_rows),
    (
        "Activations at the end of the forward pass, GB",
        f"By the part of the model that makes them, summed over layers; {COPIES} are copies in bfloat16.",
        ("part", "GB"),
        kept_rows,
    ),
    (
        "Collectives of a step",
        "MB that a rank sends, by link.",
        ("what", "ranks", *(f"{link} MB" for link in LINKS), "ms", ""),
        collective_rows,
    ),
    ("Time of a step, ms", "", ("term", "ms", ""), time_rows),
    ("Tables", "", ("table", "rows", "dim", "GB", "place"), table_rows),
)


def to_text(plan: Plan) -> str:
    """Everything, as aligned text."""
    parts = [summary(plan), imbalance(plan), *plan.layout.describe().splitlines(), ""]
    for heading, _, head, make in SECTIONS:
        rows = make(plan)
        if rows:
            parts += [heading, *_aligned([list(head), *rows]), ""]
    return "\n".join(parts)


def to_page(plan: Plan, path: Path) -> None:
    """Writes the same as a page."""
    page = Page("Plan of a training step", summary(plan))
    page.section("Layout", imbalance(plan))
    page.code(plan.layout.describe())
    for heading, lead, head, make in SECTIONS:
        rows = make(plan)
        if rows:
            page.section(heading, lead)
            page.table(list(head), rows)
    page.write(path)


def _gb(count: float) -> str:
    return f"{count / 1e9:,.3f}"


def _aligned(rows: Rows) -> list[str]:
    width = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for first, *others in rows:
        cells = [cell.rjust(wide) for cell, wide in zip(others, width[1:], strict=True)]
        lines.append("  ".join(["", first.ljust(width[0]), *cells]).rstrip())
    return lines
