"""Draws values over steps: a line for few, a line in the band of its extremes for many."""

from collections.abc import Iterator
from dataclasses import dataclass

from planish.report.axis import Axis, Column, columns
from planish.report.frame import bottom_axis, grid
from planish.report.record import Series
from planish.report.svg import Markup, drawing, element, label, line, spread, text_width

_HEIGHT, _LEFT, _TOP, _BOTTOM = 250.0, 56.0, 30.0, 206.0
_FEW = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One series.

    Attributes:
        name: Written at its end; may be empty.
        series: (step, value) in order; not empty.
        kind: The class that colours it.
        dots: Whether its points are marked however many there are.
    """

    name: str
    series: Series
    kind: str
    dots: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """A horizontal line at `value`, named."""

    name: str
    value: float
    kind: str


def draw_curves(
    curves: list[Curve],
    description: str,
    *,
    width: float,
    unit: str,
    across: str = "step",
    zero: bool = True,
    level: Level | None = None,
) -> Markup:
    """Return the figure of `curves` over steps.

    Args:
        curves: At least one.
        description: What it shows, for those who cannot see it.
        width: Of the drawing, in pixels.
        unit: Of the values; "bytes" for an axis in GiB.
        across: What they go over.
        zero: Whether the values' axis begins at zero.
        level: A line across.
    """
    steps = [step for curve in curves for step, _ in curve.series]
    values = [value for curve in curves for _, value in curve.series]
    values += [level.value] if level else []
    names = [curve.name for curve in curves] + ([level.name] if level else [])
    right = width - 14 - max(text_width(name) for name in names)
    x = Axis.of_steps(min(steps), max(steps), _LEFT, right, across)
    if unit == "bytes":
        y = Axis.of_bytes(max(values), _BOTTOM, _TOP)
    else:
        y = Axis.of_numbers(0.0 if zero else min(values), max(values), _BOTTOM, _TOP, unit=unit)
    parts = [*grid(x, y), *bottom_axis(x, _BOTTOM)]
    ends = []
    if level is not None:
        parts.append(line(x.start, y.at(level.value), x.end, y.at(level.value), kind=level.kind))
        ends.append((y.at(level.value), level.name, f"{level.kind}-name"))
    for curve in curves:
        parts += _curve(curve, x, y)
        ends.append((y.at(curve.series[-1][1]), curve.name, f"{curve.kind}-name"))
    ends.sort()
    places = spread([height for height, _, _ in ends], 15.0, _TOP, _BOTTOM)
    parts += [
        label(x.end + 9, place + 4, name, kind=kind)
        for place, (_, name, kind) in zip(places, ends, strict=True)
        if name
    ]
    return drawing(width, _HEIGHT, description, *parts)


def _curve(curve: Curve, x: Axis, y: Axis) -> Iterator[Markup]:
    points = columns(curve.series, x)
    if any(point.low < point.high for point in points):
        outline = [(point.x, point.high) for point in points] + [(point.x, point.low) for point in reversed(points)]
        yield element("polygon", {"class": f"{curve.kind} band", "points": _pairs(outline, y)})
    if len(points) > 1:
        yield element("polyline", {"class": curve.kind, "points": _pairs([(each.x, each.mean) for each in points], y)})
    if curve.dots or len(points) <= _FEW:
        yield from (_dot(point, curve.kind, y) for point in points)


def _dot(point: Column, kind: str, y: Axis) -> Markup:
    return element("circle", {"class": f"{kind} dot", "cx": point.x, "cy": y.at(point.mean), "r": 2.5})


def _pairs(points: list[tuple[float, float]], y: Axis) -> str:
    return " ".join(f"{across:g},{y.at(value):.1f}" for across, value in points)
