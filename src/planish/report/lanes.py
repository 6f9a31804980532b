"""Draws one step lane by lane: what was under way beside the computation, and when."""

from planish.report.axis import Axis
from planish.report.findings import COMPUTE, behind
from planish.report.frame import bottom_axis
from planish.report.record import LaneStep
from planish.report.svg import Markup, drawing, label, line, rect

_WIDTH, _LEFT, _RIGHT, _TOP = 900.0, 130.0, 770.0, 8.0
_HEIGHT, _GAP = 16.0, 10.0


def draw_lanes(step: LaneStep) -> Markup:
    """Return the figure: a row for each lane, computation first, its seconds at the right."""
    names = sorted(step.lanes, key=lambda name: (name != COMPUTE, name))
    bottom = _TOP + (_HEIGHT + _GAP) * len(names)
    end_s = max(end for spans in step.lanes.values() for _, end in spans)
    x = Axis.of_seconds(end_s, _LEFT, _RIGHT)
    parts = [line(x.at(value), _TOP, x.at(value), bottom, kind="grid") for value, _ in x.ticks]
    for index, name in enumerate(names):
        parts += _row(step, name, x, _TOP + (_HEIGHT + _GAP) * index)
    parts += bottom_axis(x, bottom)
    return drawing(_WIDTH, bottom + 40, f"When each lane was at work in step {step.step}.", *parts)


def _row(step: LaneStep, name: str, x: Axis, top: float) -> list[Markup]:
    spans, compute = step.lanes[name], step.lanes.get(COMPUTE, ())
    busy_s, hidden_s = behind(spans, compute)
    kind, said = "c0", f"{busy_s:.3f} s"
    if name != COMPUTE:
        kind, said = "c4", f"{said}, {hidden_s / busy_s if busy_s else 0:.0%} behind"
    bars = [
        rect(x.at(start), top, x.at(end) - x.at(start), _HEIGHT, kind=kind, hint=f"{name}: {start:.4f}-{end:.4f} s")
        for start, end in spans
    ]
    return [
        label(_LEFT - 10, top + 12, name, kind="phase", anchor="end"),
        *bars,
        label(x.end + 8, top + 12, said, kind="value"),
    ]
