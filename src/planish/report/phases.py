"""Draws each phase's peak by category, measured beside predicted."""

from collections.abc import Iterator

from planish.report.axis import Axis
from planish.report.frame import bottom_axis, category_kind
from planish.report.record import PHASES, PhasePeak, Predicted, RunRecord, used_categories
from planish.report.svg import Markup, drawing, label, line, rect
from planish.units import format_bytes

_WIDTH, _LEFT, _RIGHT, _TOP = 900.0, 84.0, 770.0, 26.0
_MEASURED, _PREDICTED, _GAP = 20.0, 10.0, 16.0


def draw_phases(record: RunRecord) -> Markup:
    """Return the figure: a bar of categories for each phase, the prediction as a thinner one below it."""
    predicted = record.predicted or {}
    phases = [phase for phase in PHASES if phase in record.phases or phase in predicted]
    pitch = _MEASURED + (_PREDICTED + 2 if predicted else 0) + _GAP
    bottom = _TOP + pitch * len(phases)
    sizes = [each.peak_bytes for each in (*record.phases.values(), *predicted.values())]
    x = Axis.of_bytes(max(sizes), _LEFT, _RIGHT, num_ticks=7)
    parts = [line(x.at(value), _TOP - 6, x.at(value), bottom, kind="grid") for value, _ in x.ticks]
    for index, phase in enumerate(phases):
        parts += _rows(record, phase, x, _TOP + pitch * index)
    parts += bottom_axis(x, bottom)
    if record.budget_bytes and record.budget_bytes <= x.high:
        at = x.at(record.budget_bytes)
        parts.append(line(at, _TOP - 8, at, bottom, kind="budget"))
        name = f"budget {format_bytes(record.budget_bytes)}"
        parts.append(label(at, _TOP - 13, name, kind="budget-name", anchor="middle"))
    said = "Peak of each phase by category, measured" + (" beside predicted." if predicted else ".")
    return drawing(_WIDTH, bottom + 40, said, *parts)


def _rows(record: RunRecord, phase: str, x: Axis, top: float) -> Iterator[Markup]:
    measured, predicted = record.phases.get(phase), (record.predicted or {}).get(phase)
    yield label(_LEFT - 10, top + 15, phase, kind="phase", anchor="end")
    if measured is not None:
        yield from _bar(measured, x, top, _MEASURED)
        yield label(x.at(measured.peak_bytes) + 8, top + 14, format_bytes(measured.peak_bytes), kind="value")
    else:
        yield label(_LEFT + 6, top + 15, "not measured", kind="tick")
    if predicted is not None:
        below = top + _MEASURED + 2
        yield from _bar(predicted, x, below, _PREDICTED)
        said = f"predicted {format_bytes(predicted.peak_bytes)}"
        yield label(x.at(predicted.peak_bytes) + 8, below + 9, said, kind="tick")


def _bar(moment: PhasePeak | Predicted, x: Axis, top: float, height: float) -> Iterator[Markup]:
    """Yield one bar of categories; bytes that none of them claims are left blank."""
    what, kind = ("predicted", "part predicted") if isinstance(moment, Predicted) else ("measured", "part")
    start = x.at(0)
    for name in used_categories([moment]):
        size = moment.categories[name]
        width = x.at(size) - x.at(0)
        hint = f"{what}, {name}: {format_bytes(size)}"
        yield rect(start, top, width, height, kind=f"{kind} {category_kind(name)}", hint=hint)
        start += width
    if moment.peak_bytes > sum(moment.categories.values()):
        yield rect(start, top, x.at(moment.peak_bytes) - start, height, kind="unclaimed", hint=what)
