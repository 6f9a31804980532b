"""What every chart has: grid, ticks, units, and one colour for each category."""

from collections.abc import Iterable

from planish.report.axis import Axis
from planish.report.record import CATEGORIES
from planish.report.svg import Markup, element, label, line


def grid(x: Axis, y: Axis) -> list[Markup]:
    """Return a line across for each tick of `y`, its text at the left, the unit above."""
    parts = []
    for value, text in y.ticks:
        parts.append(line(x.start, y.at(value), x.end, y.at(value), kind="grid"))
        parts.append(label(x.start - 8, y.at(value) + 4, text, kind="tick", anchor="end"))
    parts.append(label(x.start - 8, y.end - 10, y.unit, kind="unit", anchor="end"))
    return parts


def bottom_axis(axis: Axis, y: float) -> list[Markup]:
    """Return the ticks of a horizontal axis at height `y`, its unit after the last."""
    parts = [line(axis.start, y, axis.end, y, kind="axis")]
    for value, text in axis.ticks:
        parts.append(line(axis.at(value), y, axis.at(value), y + 4, kind="axis"))
        parts.append(label(axis.at(value), y + 18, text, kind="tick", anchor="middle"))
    parts.append(label(axis.end, y + 34, axis.unit, kind="unit", anchor="end"))
    return parts


def category_kind(category: str) -> str:
    """Return the class that colours `category`; one that this version does not know looks like "other"."""
    return f"c{CATEGORIES.index(category if category in CATEGORIES else 'other')}"


def legend(categories: Iterable[str]) -> Markup:
    """Return the colours of `categories` with their names, in their order."""
    items = [
        element("li", {}, element("span", {"class": f"swatch {category_kind(name)}"}), name) for name in categories
    ]
    return element("ul", {"class": "legend"}, *items)
