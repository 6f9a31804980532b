"""A compressed child as one page: what its layers became, what it costs and keeps, and what else could be had."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from planish.errors import WorldFailed
from planish.report.curves import Curve, draw_curves
from planish.report.style import STYLE
from planish.report.svg import Markup, drawing, element, label, rect
from planish.report.tables import tiles
from planish.units import format_bytes

_WIDTH, _LEFT, _ROW = 900.0, 84.0, 40.0


def write_child_page(outcome: Mapping[str, Any], path: Path) -> None:
    """Write the page of what `planish compress` found.

    Args:
        outcome: Its outcome.json.
        path: The file.

    Raises:
        WorldFailed: The disk refuses.
    """
    try:
        path.write_text(draw_child_page(outcome), encoding="utf-8")
    except OSError as error:
        raise WorldFailed(f"writing the report {path} failed: {error.strerror}.") from error


def draw_child_page(outcome: Mapping[str, Any]) -> str:
    """Return the page as HTML."""
    title = headline(outcome)
    body = element(
        "main",
        {},
        element("p", {"class": "over"}, f"planish compress of {outcome['model']}, measured on {outcome['machine']}"),
        element("h1", {}, title),
        tiles(_numbers(outcome)),
        *_sections(outcome),
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"{element('title', {}, title)}\n<style>{STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def headline(outcome: Mapping[str, Any]) -> str:
    """Return what was found as one sentence."""
    child, parent = outcome["child"], outcome["parent"]
    shares = [f"{_share(child, parent, scenario):.0%} of its time in {scenario}" for scenario in child["measured_s"]]
    gap = child["loss"] - parent["loss"]
    return (
        f"A child with {child['parameters'] / parent['parameters']:.0%} of its parent's parameters takes "
        f"{' and '.join(shares)}, and {'gains' if gap < 0 else 'loses'} {abs(gap):.3f} nats"
    )


def _share(child: Mapping[str, Any], parent: Mapping[str, Any], scenario: str) -> float:
    return child["measured_s"][scenario] / parent["measured_s"][scenario]


def _numbers(outcome: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    child, parent = outcome["child"], outcome["parent"]
    found = [
        (
            scenario,
            f"{seconds * 1e3:.2f} ms",
            f"{_share(child, parent, scenario):.1%} of parent, {child['predicted_s'][scenario] * 1e3:.2f} predicted",
        )
        for scenario, seconds in child["measured_s"].items()
    ]
    most = max(child["memory_bytes"], key=lambda each: child["memory_bytes"][each])
    found += [
        ("memory", format_bytes(int(child["memory_bytes"][most])), f"serving {most}"),
        ("loss", f"{child['loss']:.4f}", f"parent {parent['loss']:.4f}, +- {child['loss_error']:.4f}"),
        ("KL to the parent", f"{child['kl']:.4f}", f"+- {child['kl_error']:.4f}"),
        ("same first choice", f"{child['agreement']:.1%}", "of held-out tokens"),
    ]
    return found


def _sections(outcome: Mapping[str, Any]) -> Iterator[Markup]:
    said = "Height is the part of the parent that is left; green is one matrix, a grey cell nothing."
    yield _section("What became of each layer", said, _map(outcome))
    curve = [(round(100 * share), harm) for share, harm in outcome["curve"]]
    if len(curve) > 1:
        drawn = draw_curves(
            [Curve(name="", series=sorted(curve), kind="train", dots=True)],
            "Sum of harm at shares of the parent",
            width=_WIDTH,
            unit=outcome["metric"],
            across="% of the parent",
        )
        yield _section("What less costs", "Harm of the best child at each per cent of the parent.", drawn)
    yield _section("Beside the baselines", _said_of_baselines(outcome), _baselines(outcome))
    if outcome["tournament"]:
        said = "Divergence from the parent before and after the lessons that each candidate had; dropped ones are last."
        yield _section("The tournament", said, _tournament(outcome["tournament"]))
    tried = outcome["additivity"]
    if tried["tried"] >= 3:
        said = (
            f"Of {tried['tried']} layers with both sub-blocks replaced, sums of single harms rank them with "
            f"{tried['rank_correlation']:.3f} (Spearman); joint over sum is {tried['ratio']:.3f} in the median."
        )
        yield _section("Whether harms add up", said)


def _map(outcome: Mapping[str, Any]) -> Markup:
    return draw_layers(outcome["child"]["layers"], outcome["parent"]["layers"], outcome["harm"])


def draw_layers(layers: Sequence[str], parent: Sequence[str], harm: Sequence[float]) -> Markup:
    """Return the map of a child: attention and network of each layer, and what each layer's change is worth.

    Args:
        layers: Labels such as "kv1+width512", first to last.
        parent: The parent's.
        harm: Of each layer.
    """
    choices, whole = ([each.split("+") for each in labels] for labels in (layers, parent))
    step = (_WIDTH - _LEFT - 8) / len(choices)
    parts: list[Markup] = []
    for row, name in enumerate(("attention", "network")):
        top = 10 + row * (_ROW + 12)
        labels = [choice[row] for choice in choices]
        parts.append(label(_LEFT - 8, top + _ROW / 2 + 4, name, anchor="end"))
        for index, text in enumerate(labels):
            part = _size(text) / max(1.0, _size(whole[index][row]))
            parts.append(_cell(_LEFT + index * step, top, step - 2, text, part, index))
    top, worst = 10 + 2 * (_ROW + 12), max((*harm, 1e-12))
    parts.append(label(_LEFT - 8, top + _ROW / 2 + 4, "harm", anchor="end"))
    for index, value in enumerate(harm):
        height, x = _ROW * max(value, 0.0) / worst, _LEFT + index * step
        hint = f"layer {index}: {value:.4f}"
        parts += [rect(x, top + _ROW - height, step - 2, height, kind="c4", hint=hint)]
    parts += [
        label(_LEFT + (index + 0.5) * step, top + _ROW + 16, str(index), kind="tick", anchor="middle")
        for index in range(0, len(choices), 5)
    ]
    return drawing(_WIDTH, top + _ROW + 22, "Options of each layer", *parts)


def _cell(x: float, top: float, width: float, text: str, part: float, index: int) -> Markup:
    hint = f"layer {index}: {text}"
    if text == "none":
        return rect(x, top, width, _ROW, kind="tint2", hint=hint)
    if text == "linear":
        return rect(x, top + _ROW * 0.75, width, _ROW * 0.25, kind="c6", hint=hint)
    kind = "c7" if "window" in text else "c0"
    return rect(x, top + _ROW * (1 - part), width, _ROW * part, kind=kind, hint=hint)


def _size(text: str) -> float:
    """Return what a label counts: heads, channels, or experts times their channels."""
    return float(math.prod(map(int, re.findall(r"\d+", text.split("-")[0]))) if text not in ("none", "linear") else 0)


def _said_of_baselines(outcome: Mapping[str, Any]) -> str:
    if not outcome["baselines"]:
        return "None was assembled; `--baselines` measures and judges what else the same library gives."
    return (
        "Each keeps to the same targets; latency as measured, parameters and memory as shares of the parent's, gap is "
        "the loss above the parent's."
    )


def _tournament(entrants: Sequence[Mapping[str, Any]]) -> Markup:
    names = ("name", "steps", "before", "rank_before", "after", "rank_after")
    titles = ["candidate", "steps", "KL before", "place", "KL after", "place"]
    rows = [
        element(
            "tr",
            {},
            element("td", {}, each["name"]),
            *(
                element("td", {"class": "n"}, f"{each[name]:.4f}" if name in ("before", "after") else f"{each[name]}")
                for name in names[1:]
            ),
        )
        for each in entrants
    ]
    return _table(titles, rows)


def _baselines(outcome: Mapping[str, Any]) -> Markup:
    parent = outcome["parent"]
    names = ["child", *parent["measured_s"], "parameters", "memory", "loss", "gap", "KL", "same first choice"]
    child = outcome["child"]
    rows = [_row(parent, parent), *(_row(each, parent) for each in filter(None, [outcome["searched"]]))]
    rows += [_row(child, parent, kind="total"), *(_row(each, parent) for each in outcome["baselines"])]
    return _table(names, rows)


def _table(names: Sequence[str], rows: Sequence[Markup]) -> Markup:
    head = element(
        "tr", {}, *(element("th", {"class": "n"} if place else {}, name) for place, name in enumerate(names))
    )
    table = element("table", {}, element("thead", {}, head), element("tbody", {}, *rows))
    return element("div", {"class": "wide"}, table)


def _row(child: Mapping[str, Any], parent: Mapping[str, Any], kind: str = "") -> Markup:
    cells = [f"{_share(child, parent, scenario):.1%}" for scenario in parent["measured_s"]]
    cells.append(f"{child['parameters'] / parent['parameters']:.1%}")
    cells.append(f"{max(child['memory_bytes'].values()) / max(parent['memory_bytes'].values()):.1%}")
    cells += [f"{child['loss']:.4f}", f"{child['loss'] - parent['loss']:+.4f}", f"{child['kl']:.4f}"]
    cells.append(f"{child['agreement']:.1%}")
    return element(
        "tr",
        {"class": kind} if kind else {},
        element("td", {}, child["name"]),
        *(element("td", {"class": "n"}, cell) for cell in cells),
    )


def _section(title: str, said: str, *parts: Markup) -> Markup:
    return element("section", {}, element("h2", {}, title), element("p", {"class": "sub"}, said), *parts)
