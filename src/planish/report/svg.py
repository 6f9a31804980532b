"""Markup as text: elements whose attributes and plain text are escaped, for SVG and HTML alike."""

from collections.abc import Mapping
from html import escape

_CHARACTER_EM = 0.6


class Markup(str):
    """Text that is markup already; any other text is escaped where an element takes it in."""

    __slots__ = ()


def element(name: str, attributes: Mapping[str, str | float], *children: str) -> Markup:
    """Return `<name ...>children</name>`; numbers are written to a tenth, which is finer than a pixel."""
    words = "".join(f' {key}="{_attribute(value)}"' for key, value in attributes.items())
    inside = "".join(child if isinstance(child, Markup) else escape(child, quote=False) for child in children)
    return Markup(f"<{name}{words}>{inside}</{name}>")


def label(x: float, y: float, text: str, *, kind: str = "", anchor: str = "start") -> Markup:
    """Return a line of text at (x, y); `kind` is its class, `anchor` "start", "middle" or "end"."""
    attributes: dict[str, str | float] = {"x": x, "y": y}
    if kind:
        attributes["class"] = kind
    if anchor != "start":
        attributes["text-anchor"] = anchor
    return element("text", attributes, text)


def line(x1: float, y1: float, x2: float, y2: float, *, kind: str) -> Markup:
    """Return a straight line of class `kind`."""
    return element("line", {"class": kind, "x1": x1, "y1": y1, "x2": x2, "y2": y2})


def rect(x: float, y: float, width: float, height: float, *, kind: str, hint: str = "") -> Markup:
    """Return a rectangle of class `kind`; `hint` is shown to a pointer that rests on it."""
    attributes = {"class": kind, "x": x, "y": y, "width": max(width, 0.0), "height": max(height, 0.0)}
    return element("rect", attributes, *([element("title", {}, hint)] if hint else []))


def drawing(width: float, height: float, description: str, *parts: Markup) -> Markup:
    """Return an SVG drawing that scales with the page; `description` says to those who cannot see it what it shows."""
    attributes: dict[str, str | float] = {
        "viewBox": f"0 0 {width:g} {height:g}",
        "role": "img",
        "aria-label": description,
    }
    return element("div", {"class": "wide"}, element("svg", attributes, *parts))


def text_width(text: str, size_px: float = 12.0) -> float:
    """Return about how wide `text` is."""
    return _CHARACTER_EM * size_px * len(text)


def spread(centres: list[float], gap: float, low: float, high: float) -> list[float]:
    """Return `centres` (ascending) moved as little as it takes to stay `gap` apart and inside low .. high."""
    placed: list[float] = []
    for centre in centres:
        placed.append(max(centre, placed[-1] + gap if placed else low))
    limit = high
    for index in range(len(placed) - 1, -1, -1):
        placed[index] = min(placed[index], limit)
        limit = placed[index] - gap
    return placed


def _attribute(value: str | float) -> str:
    return escape(value) if isinstance(value, str) else f"{value:.1f}".removesuffix(".0")
