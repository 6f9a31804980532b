"""Draws each phase's peak by category, measured beside predicted."""

from collections.abc import Iterator

from planish.report.axis import Axis
from planish.report.frame import bottom_axis, category_kind, in_category_order
from planish.report.record import PHASES, RunRecord
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
        yield from _bar(measured.categories, measured.peak_bytes, x, top, _MEASURED, kind="part", what="measured")
    else:
        yield label(_LEFT + 6, top + 15, "not measured", kind="tick")
    if predicted is not None:
        below = top + _MEASURED + 2
        kind = "part predicted"
        yield from _bar(predicted.categories, predicted.peak_bytes, x, below, _PREDICTED, kind=kind, what="predicted")


def _bar(
    categories: dict[str, int], total_bytes: int, x: Axis, top: float, height: float, *, kind: str, what: str
) -> Iterator[Markup]:
    """Yield one bar, its bytes at its end; bytes that no category claims are drawn as "other"."""
    sizes = dict(categories)
    sizes["other"] = sizes.get("other", 0) + max(0, total_bytes - sum(categories.values()))
    so_far = 0
    for name in in_category_order(sizes):
        start, end = x.at(so_far), x.at(so_far + sizes[name])
        if end > start:
            hint = f"{what}, {name}: {format_bytes(sizes[name])}"
            yield rect(start, top, end - start, height, kind=f"{kind} {category_kind(name)}", hint=hint)
        so_far += sizes[name]
    text = format_bytes(total_bytes) if what == "measured" else f"{what} {format_bytes(total_bytes)}"
    yield label(x.at(total_bytes) + 8, top + height / 2 + 4, text, kind="value" if what == "measured" else "tick")
