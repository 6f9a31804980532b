"""The page's tables and lists."""

from planish.report.findings import describe_tensors
from planish.report.frame import category_kind
from planish.report.record import PhasePeak, RunRecord, used_categories
from planish.report.svg import Markup, element
from planish.units import format_bytes

Row = tuple[str, str]


def tiles(numbers: list[tuple[str, str, str]]) -> Markup:
    """Return (name, number, remark) as large numbers side by side."""
    cards = [
        element("div", {}, element("dt", {}, name), element("dd", {}, number, element("small", {}, remark)))
        for name, number, remark in numbers
    ]
    return element("dl", {"class": "tiles"}, *cards)


def facts_list(title: str, rows: list[Row]) -> Markup:
    """Return (name, value) as a list of two columns under a small title."""
    pairs = [part for name, value in rows for part in (element("dt", {}, name), element("dd", {}, value))]
    return element("div", {}, element("h2", {}, title), element("dl", {}, *pairs))


def holders_table(peak: PhasePeak) -> Markup:
    """Return who held the bytes of a peak, largest first, the small ones together at the end."""
    head = element("tr", {}, *_heads(["owner", "category", "tensors"], ["bytes", "share"]), element("th", {}))
    rows = [
        _holder_row(
            element("code", {}, holder.owner) if holder.owner else "(no module)",
            holder.category,
            describe_tensors(holder),
            holder.total_bytes,
            peak.peak_bytes,
        )
        for holder in peak.holders
    ]
    rest_bytes = peak.peak_bytes - sum(holder.total_bytes for holder in peak.holders)
    if rest_bytes > 0:
        rows.append(_holder_row("all others", "", "", rest_bytes, peak.peak_bytes))
    return _table(head, rows)


def categories_table(record: RunRecord) -> Markup:
    """Return the bytes of each phase's peak by category, and what was predicted."""
    phases = list(record.phases.values())
    rows = []
    for name in used_categories(phases):
        sizes = [each.categories.get(name, 0) for each in phases]
        rows.append(_row(name, [format_bytes(size) if size else "" for size in sizes], swatch=name))
    rows.append(_row("measured", [format_bytes(each.peak_bytes) for each in phases], kind="total"))
    if record.predicted is not None:
        expected = [record.predicted.get(each.phase) for each in phases]
        rows.append(_row("predicted", [format_bytes(each.peak_bytes) if each else "" for each in expected]))
    rows.append(_row("in step", [f"{each.step:,}" for each in phases]))
    return _table(element("tr", {}, *_heads(["phase"], [each.phase for each in phases])), rows)


def _holder_row(owner: str, category: str, tensors: str, size_bytes: int, peak_bytes: int) -> Markup:
    share = f"{size_bytes / peak_bytes:.1%}"
    bar = element("i", {"class": category_kind(category), "style": f"width:{share}"})
    return element(
        "tr",
        {},
        element("td", {}, owner),
        element("td", {}, *([_swatch(category), category] if category else [])),
        element("td", {}, tensors),
        element("td", {"class": "n"}, format_bytes(size_bytes)),
        element("td", {"class": "n"}, share),
        element("td", {"class": "share"}, bar),
    )


def _row(name: str, cells: list[str], *, swatch: str = "", kind: str = "") -> Markup:
    first = element("td", {}, *([_swatch(swatch)] if swatch else []), name)
    return element(
        "tr", {"class": kind} if kind else {}, first, *(element("td", {"class": "n"}, cell) for cell in cells)
    )


def _heads(texts: list[str], numbers: list[str]) -> list[Markup]:
    return [element("th", {}, text) for text in texts] + [element("th", {"class": "n"}, text) for text in numbers]


def _swatch(category: str) -> Markup:
    return element("span", {"class": f"swatch {category_kind(category)}"})


def _table(head: Markup, rows: list[Markup]) -> Markup:
    return element(
        "div", {"class": "wide"}, element("table", {}, element("thead", {}, head), element("tbody", {}, *rows))
    )
