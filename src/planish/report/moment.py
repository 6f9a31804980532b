"""Draws memory over the recording that holds the run's peak, and the peak taken apart by category."""

from collections.abc import Iterator

from planish.report.axis import Axis
from planish.report.frame import bottom_axis, category_kind, grid
from planish.report.record import PhasePeak, Point, RunRecord, used_categories
from planish.report.svg import Markup, drawing, element, label, line, rect, spread, text_width
from planish.units import format_bytes

_WIDTH, _HEIGHT = 900.0, 400.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 52.0, 614.0, 58.0, 352.0
_COLUMN, _COLUMN_WIDTH = 640.0, 34.0
_HEADROOM = 1.15
_TINTS = {
    "forward": "tint1",
    "head": "tint2",
    "optimizer": "tint1",
    "eval": "tint1",
    "save": "tint2",
    "resume": "tint1",
}

Band = tuple[float, float, str]


def draw_moment(peak: PhasePeak, record: RunRecord) -> Markup:
    """Return the figure: live bytes over time, phases shaded and named, the budget, the peak and who holds it."""
    budget = record.budget_bytes if record.budget_bytes and record.budget_bytes < 2 * peak.peak_bytes else None
    x = Axis.of_seconds(max([peak.at_s, *(at_s for at_s, _, _ in record.timeline)]), _LEFT, _RIGHT)
    y = Axis.of_bytes(max(_HEADROOM * peak.peak_bytes, budget or 0), _BOTTOM, _TOP)
    bands = list(phase_bands(record.timeline))
    at_x, at_y = x.at(peak.at_s), y.at(peak.peak_bytes)
    parts = [
        *_shades(bands, x),
        *grid(x, y),
        *bottom_axis(x, _BOTTOM),
        *_area(record.timeline, x, y),
        *_phase_names(bands, x),
        line(at_x, at_y, _COLUMN + _COLUMN_WIDTH, at_y, kind="lead"),
        *_column(peak, y),
        *_budget(budget, y, left=at_x > (_LEFT + _RIGHT) / 2),
        element("circle", {"class": "peak", "cx": at_x, "cy": at_y, "r": 5}),
        *_peak_label(peak, record.timeline, x, y, above=budget is None or not 0 <= at_y - y.at(budget) <= 56),
    ]
    described = f"Live tensor bytes over time; the peak is {format_bytes(peak.peak_bytes)} in {peak.phase}."
    return drawing(_WIDTH, _HEIGHT, described, *parts)


def phase_bands(timeline: tuple[Point, ...]) -> Iterator[Band]:
    """Yield (start, end, phase) of each unbroken stretch of one phase; a point holds until the next."""
    if not timeline:
        return
    begin_s, _, phase = timeline[0]
    for at_s, _, now in timeline:
        if now != phase:
            yield begin_s, at_s, phase
            begin_s, phase = at_s, now
    yield begin_s, timeline[-1][0], phase


def _shades(bands: list[Band], x: Axis) -> Iterator[Markup]:
    for begin_s, end_s, phase in (band for band in bands if _is_seen(band, x)):
        if phase in _TINTS:
            width = x.at(end_s) - x.at(begin_s)
            yield rect(x.at(begin_s), _TOP, width, _BOTTOM - _TOP, kind=_TINTS[phase], hint=phase)


def _phase_names(bands: list[Band], x: Axis) -> Iterator[Markup]:
    """Yield the name of each band that is wide enough for it, and of each phase with none a raised one with a lead."""
    named: set[str] = set()
    for begin_s, end_s, phase in bands:
        if x.at(end_s) - x.at(begin_s) >= text_width(phase) + 4:
            named.add(phase)
            yield label((x.at(begin_s) + x.at(end_s)) / 2, _TOP - 8, phase, kind="phase", anchor="middle")
    unnamed = sorted((band for band in bands if band[2] not in named and _is_seen(band, x)), key=_length)
    raised = sorted({band[2]: band for band in unnamed}.values())  # of each phase the longest
    centres = [x.at((begin_s + end_s) / 2) for begin_s, end_s, _ in raised]
    places = spread(centres, 62.0, _LEFT + 20, _RIGHT - 20)
    for centre, place, (_, _, phase) in zip(centres, places, raised, strict=True):
        points = f"{place:.1f},24 {centre:.1f},44 {centre:.1f},{_TOP:.0f}"
        yield element("polyline", {"class": "leader", "points": points})
        yield label(place, 18, phase, kind="phase", anchor="middle")


def _length(band: Band) -> float:
    return band[1] - band[0]


def _is_seen(band: Band, x: Axis) -> bool:
    return x.at(band[1]) - x.at(band[0]) >= 0.5


def _area(timeline: tuple[Point, ...], x: Axis, y: Axis) -> Iterator[Markup]:
    if not timeline:
        return
    steps = [f"M{x.at(timeline[0][0]):.1f},{y.at(timeline[0][1]):.1f}"]
    steps += [f"H{x.at(at_s):.1f}V{y.at(live):.1f}" for at_s, live, _ in timeline[1:]]
    outline = "".join(steps)
    closed = f"{outline}V{y.start:.1f}H{x.at(timeline[0][0]):.1f}Z"
    yield element("path", {"class": "fill", "d": closed})
    yield element("path", {"class": "live", "d": outline})


def _budget(budget_bytes: int | None, y: Axis, *, left: bool) -> Iterator[Markup]:
    """Yield the budget's line, its name on the side where the peak is not."""
    if budget_bytes is None:
        return
    height = y.at(budget_bytes)
    yield line(_LEFT, height, _RIGHT, height, kind="budget")
    where, anchor = (_LEFT + 6, "start") if left else (_RIGHT - 6, "end")
    yield label(where, height - 6, f"budget {format_bytes(budget_bytes)}", kind="budget-name halo", anchor=anchor)


def _peak_label(peak: PhasePeak, timeline: tuple[Point, ...], x: Axis, y: Axis, *, above: bool) -> Iterator[Markup]:
    """Yield what the peak is: above it, or under the line of live bytes as far as that runs close below the peak."""
    at_x, at_y = x.at(peak.at_s), y.at(peak.peak_bytes)
    text = f"peak {format_bytes(peak.peak_bytes)}, {peak.phase}"
    anchor, side = ("end", -1) if at_x > (_LEFT + _RIGHT) / 2 else ("start", 1)
    if above:
        height = at_y - 26
    else:
        reach = text_width(text, 13.0) + 10
        near = [y.at(live) for at_s, live, _ in timeline if 0 <= side * (x.at(at_s) - at_x) <= reach]
        height = max((each for each in near if each < at_y + 50), default=at_y) + 20
    yield label(at_x + side * 10, height, text, kind="peak-name halo", anchor=anchor)
    for holder in peak.holders[:1]:
        yield label(at_x + side * 10, height + 16, f"most: {holder.owner}", kind="peak-owner halo", anchor=anchor)


def _column(peak: PhasePeak, y: Axis) -> Iterator[Markup]:
    """Yield the peak's bytes as a column of categories on the same scale, each that can be seen named at its side."""
    seen_bytes = (y.high - y.low) / (y.start - y.end) / 2
    names = [name for name in used_categories([peak]) if peak.categories[name] >= seen_bytes]
    below, centres = 0, []
    for name in names:
        size = peak.categories[name]
        top, bottom = y.at(below + size), y.at(below)
        hint = f"{name}: {format_bytes(size)}"
        yield rect(_COLUMN, top, _COLUMN_WIDTH, bottom - top, kind=f"part {category_kind(name)}", hint=hint)
        centres.append((top + bottom) / 2)
        below += size
    places = spread(centres[::-1], 17.0, _TOP, _BOTTOM)[::-1]
    edge = _COLUMN + _COLUMN_WIDTH
    for name, centre, place in zip(names, centres, places, strict=True):
        points = f"{edge + 2:.1f},{centre:.1f} {edge + 14:.1f},{place:.1f} {edge + 18:.1f},{place:.1f}"
        yield element("polyline", {"class": "leader", "points": points})
        yield label(edge + 23, place + 4, name, kind="part-name")
        yield label(_WIDTH - 4, place + 4, format_bytes(peak.categories[name]), kind="value", anchor="end")
