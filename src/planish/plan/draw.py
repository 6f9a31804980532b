"""What one device holds over a step, drawn: a band a category, a tint a phase, each phase's peak named."""

from collections.abc import Sequence
from html import escape
from itertools import groupby

from planish.plan.question import Candidate
from planish.price.step import Moment
from planish.units import format_bytes

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 1100, 460, 70, 880, 40, 410
_COLOURS = (
    "#4a6fa5",
    "#d1495b",
    "#3b1f7a",
    "#2bb3a0",
    "#f0a030",
    "#8c2f5e",
    "#2b6e1a",
    "#84b4f6",
    "#c6c0cf",
    "#59626d",
)
_TINTS = ("#f6f7f9", "#e9edf2")


def to_svg(candidate: Candidate) -> str:
    """Return the drawing as SVG text; time runs by moments, not by seconds."""
    found = candidate.moments
    totals = [_by_category(each) for each in found]
    names = sorted(
        {name for each in totals for name in each}, key=lambda name: -max(each.get(name, 0) for each in totals)
    )
    most = max(candidate.estimate.peak_bytes, candidate.question.hardware.memory)
    parts = [_style(), *_phases(found, most), *_bands(totals, names, most), *_legend(names)]
    limit = _y(candidate.question.hardware.memory, most)
    said = format_bytes(candidate.question.hardware.memory)
    parts.append(f'<line x1="{_LEFT}" x2="{_RIGHT}" y1="{limit:.1f}" y2="{limit:.1f}" class="limit"/>')
    parts.append(f'<text x="{_RIGHT + 6}" y="{limit + 4:.1f}" class="limit-text">{said}</text>')
    title = f"what one device holds over a step, peak {format_bytes(candidate.estimate.peak_bytes)}"
    parts.append(f'<text x="{_LEFT}" y="20" class="title">{escape(title)}</text>')
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="{escape(title)}">\n{body}\n</svg>\n'
    )


def _style() -> str:
    return (
        "<style>text{font:12px system-ui,sans-serif;fill:#1b1f24}.title{font-size:15px}.limit{stroke:#c2410c;"
        "stroke-dasharray:5 3}.limit-text{fill:#c2410c}.peak{stroke:#1b1f24;stroke-width:.8}</style>"
    )


def _by_category(moment: Moment) -> dict[str, int]:
    found: dict[str, int] = {}
    for holder, nbytes in moment.sizes.items():
        found[holder.category] = found.get(holder.category, 0) + max(0, nbytes)
    return found


def _x(index: int, count: int) -> float:
    return _LEFT + (_RIGHT - _LEFT) * index / max(1, count)


def _y(nbytes: float, most: int) -> float:
    return _BOTTOM - (_BOTTOM - _TOP - 20) * nbytes / most


def _phases(found: Sequence[Moment], most: int) -> list[str]:
    """Return a tinted area and a name for each phase, and a mark at its peak."""
    parts, begin = [f'<text x="{_LEFT - 6}" y="{_y(0, most):.1f}" text-anchor="end">0</text>'], 0
    parts.append(f'<text x="{_LEFT - 6}" y="{_y(most, most) + 4:.1f}" text-anchor="end">{format_bytes(most)}</text>')
    for number, (phase, each) in enumerate(groupby(found, key=lambda moment: moment.phase)):
        length = len(list(each))
        left, right = _x(begin, len(found)), _x(begin + length, len(found))
        parts.append(
            f'<rect x="{left:.1f}" y="{_TOP}" width="{right - left:.1f}" height="{_BOTTOM - _TOP}" '
            f'fill="{_TINTS[number % 2]}"/>'
        )
        inside = range(begin, begin + length)
        top = max(inside, key=lambda index: found[index].total_bytes)
        nbytes, where = found[top].total_bytes, found[top].doing
        hint = f"{phase}: {format_bytes(nbytes)}, {where}"
        x, y = _x(top, len(found)) + (right - left) / max(1, length) / 2, _y(nbytes, most)
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y:.1f}" y2="{y - 8:.1f}" class="peak"/>')
        if length > len(found) / 30:
            parts.append(f'<text x="{x:.1f}" y="{y - 11:.1f}" text-anchor="middle">{format_bytes(nbytes)}</text>')
            parts.append(f'<text x="{(left + right) / 2:.1f}" y="{_BOTTOM + 16}" text-anchor="middle">{phase}</text>')
        else:
            turned = f'transform="rotate(40 {left:.1f} {_BOTTOM + 12})"'
            parts.append(f'<text x="{left:.1f}" y="{_BOTTOM + 12}" {turned}>{phase}</text>')
        parts.append(f"<!-- {escape(hint)} -->")
        begin += length
    return parts


def _bands(totals: Sequence[dict[str, int]], names: Sequence[str], most: int) -> list[str]:
    """Return a stacked area for each category, steps at moments."""
    below = [0.0] * len(totals)
    parts = []
    for number, name in enumerate(names):
        above = [low + each.get(name, 0) for low, each in zip(below, totals, strict=True)]
        upper = [point for index, value in enumerate(above) for point in _step(index, value, len(totals), most)]
        lower = [point for index, value in enumerate(below) for point in _step(index, value, len(totals), most)]
        points = " ".join([*upper, *reversed(lower)])
        colour = _COLOURS[number % len(_COLOURS)]
        parts.append(f'<polygon points="{points}" fill="{colour}"><title>{escape(name)}</title></polygon>')
        below = above
    return parts


def _step(index: int, value: float, count: int, most: int) -> tuple[str, str]:
    y = _y(value, most)
    return f"{_x(index, count):.1f},{y:.1f}", f"{_x(index + 1, count):.1f},{y:.1f}"


def _legend(names: Sequence[str]) -> list[str]:
    parts = []
    for number, name in enumerate(names):
        y = _TOP + 60 + 20 * number
        parts.append(
            f'<rect x="{_RIGHT + 20}" y="{y}" width="12" height="12" fill="{_COLOURS[number % len(_COLOURS)]}"/>'
            f'<text x="{_RIGHT + 38}" y="{y + 10}">{escape(name)}</text>'
        )
    return parts
