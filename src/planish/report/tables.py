"""The page's tables and lists."""

from planish.report.frame import category_kind, in_category_order
from planish.report.record import Holder, PhasePeak, RunRecord
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
    rows = [_holder_row(holder, peak.peak_bytes) for holder in peak.holders]
    rest = peak.peak_bytes - sum(holder.total_bytes for holder in peak.holders)
    if rest > 0:
        others = Holder(owner="", category="other", shape=(), dtype="", count=0, total_bytes=rest)
        rows.append(_holder_row(others, peak.peak_bytes))
    return _table(head, rows)


def describe_tensors(holder: Holder) -> str:
    """Return how many tensors of which shape and dtype a holder has."""
    times = f"{holder.count} × " if holder.count > 1 else ""
    shape = " × ".join(f"{size:,}" for size in holder.shape) or "scalar"
    return f"{times}[{shape}] {holder.dtype}"


def categories_table(record: RunRecord) -> Markup:
    """Return the bytes of each phase's peak by category, and what was predicted."""
    phases = list(record.phases.values())
    names = in_category_order({name for each in phases for name, size in each.categories.items() if size})
    rows = [
        _row(
            name,
            [format_bytes(each.categories[name]) if each.categories.get(name) else "" for each in phases],
            swatch=name,
        )
        for name in names
    ]
    rows.append(_row("measured", [format_bytes(each.peak_bytes) for each in phases], kind="total"))
    if record.predicted is not None:
        expected = [record.predicted.get(each.phase) for each in phases]
        rows.append(_row("predicted", [format_bytes(each.peak_bytes) if each else "" for each in expected]))
    rows.append(_row("in step", [f"{each.step:,}" for each in phases]))
    return _table(element("tr", {}, *_heads(["phase"], [each.phase for each in phases])), rows)


def _holder_row(holder: Holder, peak_bytes: int) -> Markup:
    share, kind = holder.total_bytes / peak_bytes, category_kind(holder.category)
    bar = element("i", {"class": kind, "style": f"width:{share:.1%}"})
    named = element("code", {}, holder.owner) if holder.owner else "all others" if not holder.count else "(no module)"
    about = [_swatch(holder.category), holder.category] if holder.count else []
    return element(
        "tr",
        {},
        element("td", {}, named),
        element("td", {}, *about),
        element("td", {}, describe_tensors(holder) if holder.count else ""),
        element("td", {"class": "n"}, format_bytes(holder.total_bytes)),
        element("td", {"class": "n"}, f"{share:.1%}"),
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
