"""Reads a profiler's trace: how much of communication the computation does not hide, and what a step looks like.

    with torch.profiler.profile() as profiler:
        ...  # some steps
    profiler.export_chrome_trace("trace.json")
    print(exposure(Trace.load("trace.json")))

On CUDA the device tells: communication is exposed while a kernel of NCCL runs and no other kernel does, waiting for
slower ranks included. Everywhere the order of what the host did tells: an exchange is exposed if the host waits for it
before it has started any computation since the exchange began.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from foundation.parallel.ranges import BACKWARD, COMPUTE, OPTIMIZER, RANGES, SPARSE_DIST, SPARSE_WAIT

_BYTES: Final = {"Float": 4, "BFloat16": 2, "Half": 2, "Long": 8, "Int": 4, "Byte": 1, "Double": 8, "Bool": 1}


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took a while: its name, start and end in seconds, where it ran, and what else is known of it."""

    name: str
    start: float
    end: float
    lane: str
    details: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """What a profiler saw on one rank.

    Args:
        ranges: of `foundation.parallel.ranges`, by the host's clock.
        compute: kernels of the device other than NCCL's.
        communication: kernels of NCCL.
        collectives: operations that the host queued, with their sizes; empty where the backend tells nothing.
    """

    ranges: tuple[Span, ...]
    compute: tuple[Span, ...]
    communication: tuple[Span, ...]
    collectives: tuple[Span, ...]

    @staticmethod
    def load(path: Path | str) -> Trace:
        """Reads what `torch.profiler` exported, a .gz too."""
        raw = Path(path).read_bytes()
        return Trace.of(json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)["traceEvents"])

    @staticmethod
    def of(events: Iterable[dict[str, Any]]) -> Trace:
        """The same from events of Chrome's trace format; times in them are microseconds."""
        ranges: list[Span] = []
        compute: list[Span] = []
        communication: list[Span] = []
        collectives: list[Span] = []
        for event in events:
            if event.get("ph") != "X":
                continue
            name, details = event["name"], event.get("args", {})
            start = event["ts"] / 1e6
            span = Span(name, start, start + event["dur"] / 1e6, str(details.get("stream", event.get("tid"))), details)
            kind = event.get("cat")
            if kind == "user_annotation" and name in RANGES:
                ranges.append(span)
            elif kind == "kernel":
                (communication if name.startswith("nccl") else compute).append(span)
            elif name == "record_param_comms" and details.get("Collective name"):
                collectives.append(span)
        return Trace(
            ranges=_by_start(ranges),
            compute=_by_start(compute),
            communication=_by_start(communication),
            collectives=_by_start(collectives),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Exposure:
    """What a trace says of communication.

    Args:
        exchanges: of ids before lookups.
        exposed_exchanges: those that the host waited for without having started a computation since.
        seconds: of the device, from its first kernel to its last; 0 without a device, as are the next three.
        computing: of them, any kernel but NCCL's runs.
        communicating: of them, a kernel of NCCL runs.
        exposed: of them, a kernel of NCCL and no other runs.
        bytes: that this rank sent, by collective.
        host: seconds by name of range, without those inside of them.
    """

    exchanges: int
    exposed_exchanges: int
    seconds: float
    computing: float
    communicating: float
    exposed: float
    bytes: dict[str, int]
    host: dict[str, float]

    @property
    def share(self) -> float | None:
        """Exposed communication of all time; None without a device."""
        return self.exposed / self.seconds if self.seconds else None


def exposure(trace: Trace) -> Exposure:
    """Sums a trace up."""
    busy, talking = union(trace.compute), union(trace.communication)
    ends = [*busy, *talking]
    sent: Counter[str] = Counter()
    for span in trace.collectives:
        count = span.details.get("In msg nelems", 0)
        sent[span.details["Collective name"]] += count * _BYTES.get(span.details.get("dtype", ""), 4)
    exchanges = list(_exchanges(trace))
    return Exposure(
        exchanges=len(exchanges),
        exposed_exchanges=sum(not hidden for hidden in exchanges),
        seconds=max(end for _, end in ends) - min(start for start, _ in ends) if ends else 0.0,
        computing=length(busy),
        communicating=length(talking),
        exposed=length(talking) - length(overlap(busy, talking)),
        bytes=dict(sent),
        host=_own_seconds(trace.ranges),
    )


def union(spans: Iterable[Span]) -> list[tuple[float, float]]:
    """Times at which any of the spans, sorted by their start, goes on."""
    merged: list[tuple[float, float]] = []
    for span in spans:
        if merged and span.start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], span.end))
        else:
            merged.append((span.start, span.end))
    return merged


def overlap(one: list[tuple[float, float]], other: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Times in both of two unions."""
    both, i, j = [], 0, 0
    while i < len(one) and j < len(other):
        start, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if start < end:
            both.append((start, end))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return both


def length(times: Iterable[tuple[float, float]]) -> float:
    """Seconds of a union."""
    return sum(end - start for start, end in times)


def _exchanges(trace: Trace) -> Iterable[bool]:
    """For each wait for ids in the trace, whether a computation began between their departure and the wait.

    Departures and waits come in pairs, in the same order; waits for what departed before the trace began are left out.
    """
    departed: list[float] = []
    waited = 0
    began = sorted(span.start for span in trace.ranges if span.name in (BACKWARD, OPTIMIZER))
    for span in trace.ranges:
        if span.name == SPARSE_DIST:
            departed.append(span.end)
        elif span.name == SPARSE_WAIT and waited < len(departed):
            yield any(departed[waited] <= start < span.start for start in began)
            waited += 1


def _own_seconds(ranges: tuple[Span, ...]) -> dict[str, float]:
    """Seconds by name, those of ranges inside left out."""
    own = dict.fromkeys(RANGES, 0.0)
    open_: list[Span] = []
    for span in ranges:
        while open_ and open_[-1].end <= span.start:
            open_.pop()
        if open_:
            own[open_[-1].name] -= span.end - span.start
        own[span.name] += span.end - span.start
        open_.append(span)
    return {name: seconds for name, seconds in own.items() if seconds}


def _by_start(spans: list[Span]) -> tuple[Span, ...]:
    return tuple(sorted(spans, key=lambda span: (span.start, -span.end)))


def picture(trace: Trace, start: float, end: float, width: int = 960) -> str:
    """A stretch of a trace as SVG: ranges of the host, then the device's kernels and those of NCCL by stream.

    Args:
        start, end: seconds, by the trace's clock.
        width: pixels.
    """
    left, scale, bar = 150, (width - 160) / (end - start), 18
    lanes: list[tuple[str, list[tuple[float, float, str, str]]]] = []
    for title, names in (("host", COMPUTE), ("host, tables", [name for name in RANGES if name not in COMPUTE])):
        lanes.append((title, [(s.start, s.end, _COLOURS[s.name], s.name) for s in trace.ranges if s.name in names]))
    lanes.append(("kernels", [(a, b, "#4c78a8", "kernels") for a, b in _coarse(trace.compute, 1 / scale)]))
    for lane in sorted({span.lane for span in trace.communication}):
        own = [span for span in trace.communication if span.lane == lane]
        lanes.append((f"NCCL, stream {lane}", [(a, b, "#e45756", "NCCL") for a, b in _coarse(own, 1 / scale)]))
    lanes = [(title, bars) for title, bars in lanes if bars]
    shown = [name for name in RANGES if any(s.name == name for s in trace.ranges)]
    height = 26 + len(lanes) * (bar + 6) + 22 * (1 + len(shown) // 5)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
        f'font-size="11"><rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{left}" y="14">{(end - start) * 1e3:.1f} ms</text>',
    ]
    for row, (title, bars) in enumerate(lanes):
        y = 22 + row * (bar + 6)
        lines.append(f'<text x="4" y="{y + 13}">{title}</text>')
        for a, b, colour, name in bars:
            a, b = max(a, start), min(b, end)
            if b > a:
                lines.append(
                    f'<rect x="{left + (a - start) * scale:.1f}" y="{y}" width="{max(0.4, (b - a) * scale):.1f}" '
                    f'height="{bar}" fill="{colour}"><title>{name} {(b - a) * 1e3:.2f} ms</title></rect>'
                )
    for place, name in enumerate(shown):
        x, y = left + place % 5 * 160, 22 + len(lanes) * (bar + 6) + 8 + place // 5 * 20
        lines.append(f'<rect x="{x}" y="{y}" width="12" height="12" fill="{_COLOURS[name]}"/>')
        lines.append(f'<text x="{x + 16}" y="{y + 10}">{name}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def _coarse(spans: Iterable[Span], gap: float) -> list[tuple[float, float]]:
    """A union whose gaps below `gap` are closed, so that a picture has few parts."""
    merged: list[tuple[float, float]] = []
    for start, end in union(spans):
        if merged and start - merged[-1][1] < gap:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return merged


_COLOURS: Final = dict(
    zip(
        RANGES,
        ("#bab0ac", "#54a24b", "#b6d7a8", "#eeca3b", "#e377c2", "#f58518", "#72b7b2", "#4c78a8", "#9d755d", "#b279a2"),
        strict=True,
    )
)
