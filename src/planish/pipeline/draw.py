"""Drawings of a timeline: text for a terminal, SVG for a page."""

import math
from statistics import median

from planish.pipeline.actions import Kind
from planish.pipeline.memory import in_flight
from planish.pipeline.simulate import Span, Timeline
from planish.report.axis import Axis
from planish.report.svg import Markup, element, label, line, rect, text_width

# Kind, colour in light and dark mode, colour of what is written on it, meaning.
_LOOKS = (
    (Kind.F, "#4a7ab8", "#6f9fe0", "forward"),
    (Kind.B, "#3d9a8b", "#45b8a6", "backward"),
    (Kind.I, "#3d9a8b", "#45b8a6", "backward, inputs"),
    (Kind.W, "#a3d4ca", "#2c6f65", "backward, weights"),
    (Kind.S, "#e9973f", "#e9a655", "head: S"),
    (Kind.E, "#f6cf96", "#8a6a35", "head: E"),
    (Kind.T, "#d1495b", "#e8707f", "head: T"),
    (Kind.IF, "#6b4fa0", "#a98ae0", "embedding"),
    (Kind.IB, "#b7a5d8", "#6f5a9c", "embedding, gradient"),
)
_STYLE = (
    """
text { font: 12px system-ui, -apple-system, "Segoe UI", "Liberation Sans", Arial, sans-serif;
  font-variant-numeric: tabular-nums; fill: #1b1f24; }
.page { fill: #fff; } .track { fill: #f0f2f5; } .grid { stroke: #e0e4e9; } .axis { stroke: #59626d; }
.soft { fill: #59626d; } .title { font-size: 15px; font-weight: 600; }
.no { font-size: 11px; fill: #fff; text-anchor: middle; pointer-events: none; }
.W.no, .E.no, .IB.no { fill: #1b1f24; }
.later { fill-opacity: 0.62; }
"""
    + "".join(f"rect.{kind} {{ fill: {light}; }}\n" for kind, light, _, _ in _LOOKS)
    + """@media (prefers-color-scheme: dark) {
text { fill: #e6e9ed; } .page { fill: #14171c; } .track { fill: #1f252d; } .grid { stroke: #2a3038; }
.axis { stroke: #9aa4b0; } .soft { fill: #9aa4b0; } .no { fill: #14171c; }
.W.no, .E.no, .IB.no { fill: #e6e9ed; }
"""
    + "".join(f"rect.{kind} {{ fill: {dark}; }}\n" for kind, _, dark, _ in _LOOKS)
    + "}\n"
)
_LEFT, _RIGHT, _TOP, _ROW, _BAR = 64.0, 150.0, 78.0, 30.0, 24.0
_NARROWEST, _WIDEST = 1100.0, 24_000.0
_FORWARD_WIDTH = 18.0  # so that a number of two digits has room
_FORWARD_CELLS = 3


def to_text(timeline: Timeline, *, width: int = 110) -> str:
    """Return a line per rank: each pass its kind and microbatch, idle time as dots, at least three cells for a forward.

    Kinds are written small on a rank's further stages. Where the number has no room it is left out, where the kind has
    none either stands `=`. What is wider than `width` shows how it begins and how it ends, around `~`.
    """
    prefix = len(f"rank {timeline.schedule.num_ranks - 1} ")
    width = max(width - prefix, 20)
    scale = max(width / timeline.makespan, _FORWARD_CELLS / _forward_time(timeline))
    rows = [["."] * math.ceil(timeline.makespan * scale) for _ in range(timeline.schedule.num_ranks)]
    for span in _passes(timeline):
        action = span.actions[0]
        begin, end = round(span.start * scale), round(span.end * scale)
        kind = action.kind if action.stage < len(rows) else action.kind.lower()
        names = (f"{kind}{action.microbatch}", kind, "=" * (end - begin))
        cells = next(name for name in names if len(name) <= end - begin).ljust(end - begin, "-")
        rows[timeline.schedule.rank_of(action)][begin:end] = cells
    lines = [f"rank {rank}".ljust(prefix) + _fold("".join(row), width) for rank, row in enumerate(rows)]
    return "\n".join(lines)


def _fold(cells: str, width: int) -> str:
    if len(cells) <= width:
        return cells
    begin = (width - 3) * 3 // 5
    return f"{cells[:begin]} ~ {cells[begin + 3 - width :]}"


def to_svg(timeline: Timeline, *, unit: str = "") -> str:
    """Return the timeline as an SVG picture: a bar per pass, its microbatch in it, its name and times on hover.

    Bars of a rank's further stages are paler. Beside each rank stand the share of time in which it computes and the
    microbatches in flight, summed over its stages. It is as wide as numbers need, within 24,000 pixels.
    """
    schedule = timeline.schedule
    span_width = _FORWARD_WIDTH * timeline.makespan / _forward_time(timeline)
    width = min(max(span_width + _LEFT + _RIGHT, _NARROWEST), _WIDEST)
    bottom = _TOP + _ROW * schedule.num_ranks
    x = Axis.of_seconds(timeline.makespan, _LEFT, width - _RIGHT)
    parts = [element("style", {}, Markup(_STYLE)), rect(0, 0, width, bottom + 44, kind="page")]
    parts += _heading(timeline)
    parts += _ticks(x, bottom, unit)
    parts += _tracks(timeline, x, width)
    for span in _passes(timeline):
        parts += _bar(timeline, span, x)
    attributes = {"xmlns": "http://www.w3.org/2000/svg", "viewBox": f"0 0 {width:g} {bottom + 44:g}", "width": width}
    return element("svg", {**attributes, "height": bottom + 44, "role": "img"}, *parts) + "\n"


def _heading(timeline: Timeline) -> list[Markup]:
    schedule = timeline.schedule
    title = f"{schedule.name}, head {schedule.head}"
    said = f"{schedule.num_ranks} ranks, {schedule.num_microbatches} microbatches, bubble {timeline.bubble:.1%}"
    said += "; paler: a rank's later stages" if schedule.num_stages > schedule.num_ranks else ""
    parts = [label(_LEFT, 26, title, kind="title"), label(_LEFT + text_width(title, 15) + 12, 26, said, kind="soft")]
    used, at = {span.actions[0].kind for span in _passes(timeline)}, _LEFT
    for kind, _, _, meaning in _LOOKS:
        if kind in used:
            parts += [rect(at, 44, 12, 12, kind=kind), label(at + 18, 54, meaning, kind="soft")]
            at += text_width(meaning) + 36
    return parts


def _ticks(x: Axis, bottom: float, unit: str) -> list[Markup]:
    parts = [line(x.at(value), _TOP - 4, x.at(value), bottom + 2, kind="grid") for value, _ in x.ticks]
    parts.append(line(x.start, bottom + 2, x.end, bottom + 2, kind="axis"))
    parts += [label(x.at(value), bottom + 18, text, kind="soft", anchor="middle") for value, text in x.ticks]
    return [*parts, label(x.end, bottom + 36, unit, kind="soft", anchor="end")]


def _tracks(timeline: Timeline, x: Axis, width: float) -> list[Markup]:
    parts = [
        label(width - _RIGHT + 56, _TOP - 8, "busy", kind="soft", anchor="end"),
        label(width - 12, _TOP - 8, "in flight", kind="soft", anchor="end"),
    ]
    columns = zip(timeline.busy, in_flight(timeline.lower()), strict=True)
    for rank, (busy, flying) in enumerate(columns):
        y = _TOP + rank * _ROW
        middle = y + _BAR / 2 + 4
        parts.append(label(_LEFT - 10, middle, f"rank {rank}", kind="soft", anchor="end"))
        parts.append(rect(x.start, y, x.end - x.start, _BAR, kind="track"))
        parts.append(label(width - _RIGHT + 56, middle, f"{busy / timeline.makespan:.0%}", anchor="end"))
        parts.append(label(width - 12, middle, str(flying), anchor="end"))
    return parts


def _bar(timeline: Timeline, span: Span, x: Axis) -> list[Markup]:
    action, schedule = span.actions[0], timeline.schedule
    start, end = x.at(span.start), x.at(span.end)
    y = _TOP + schedule.rank_of(action) * _ROW
    kind = f"{action.kind} later" if action.stage >= schedule.num_ranks else str(action.kind)
    gap = min(1.0, (end - start) / 4)
    parts = [rect(start, y, end - start - gap, _BAR, kind=kind, hint=f"{action}: {span.start:g} to {span.end:g}")]
    if end - start >= 7 * len(str(action.microbatch)) + 2:
        parts.append(label((start + end - gap) / 2, y + 16, str(action.microbatch), kind=f"{action.kind} no"))
    return parts


def _forward_time(timeline: Timeline) -> float:
    """Return what a forward takes, the median over stages, or as good as nothing if forwards take nothing."""
    forwards = [span.end - span.start for span in timeline.spans if span.actions[0].kind is Kind.F]
    return median(forwards) or timeline.makespan


def _passes(timeline: Timeline) -> list[Span]:
    return [span for span in timeline.spans if span.is_pass]
