"""One page of figures: self-contained HTML with inline SVG, complete without scripts and without a network."""

import base64
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from planish.errors import WorldFailed
from planish.report import findings
from planish.report.curves import Curve, Level, draw_curves
from planish.report.frame import legend
from planish.report.lanes import draw_lanes
from planish.report.moment import draw_moment
from planish.report.phases import draw_phases
from planish.report.record import LaneStep, PhasePeak, PipelineStep, RunRecord, used_categories
from planish.report.style import STYLE
from planish.report.svg import Markup, element
from planish.report.tables import categories_table, facts_list, holders_table, tiles

_FULL, _HALF = 900.0, 432.0


def write_page(record: RunRecord, path: Path) -> None:
    """Write the page to `path`; a reader finds the old one or the new one, never a part.

    Raises:
        WorldFailed: The disk refuses.
    """
    new = path.with_name(f".{path.name}.new")
    try:
        new.write_text(draw_page(record), encoding="utf-8")
        new.replace(path)
    except OSError as error:
        with suppress(OSError):
            new.unlink()
        raise WorldFailed(
            f"writing the report {path} failed: {error.strerror}; `--out` takes a file in another folder."
        ) from error


def draw_page(record: RunRecord) -> str:
    """Return the page as HTML."""
    body = element("main", {}, *_header(record), *_sections(record), *_footer(record))
    title = element("title", {}, f"{record.path.name}: {findings.outcome(record)}")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"{title}\n<style>{STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _header(record: RunRecord) -> Iterator[Markup]:
    yield element("p", {"class": "over"}, f"planish report of {record.path}")
    yield element("h1", {}, findings.outcome(record))
    if record.exceeded is not None:
        sentence, _, table = record.exceeded.partition("\n")
        parts = [element("p", {}, *_with_code(sentence))]
        if table.strip():
            parts.append(element("pre", {}, table.strip("\n")))
        yield element("div", {"class": "alarm", "role": "alert"}, *parts)
    yield tiles(findings.main_numbers(record))
    lists = [("Settings", findings.main_settings(record)), ("Plan: a method for each peak", findings.plan_rows(record))]
    lists.append((findings.far_finding(record), findings.lane_rows(record)))
    lists.append((findings.optim_finding(record), findings.lane_rows(record, of_optimizer=True)))
    yield element("div", {"class": "lists"}, *(facts_list(title, rows) for title, rows in lists if rows))


def _sections(record: RunRecord) -> Iterator[Markup]:
    if record.peak is None:
        yield _section("No memory was recorded", "memory.jsonl holds no line of the ledger.")
    else:
        yield _moment(record, record.peak)
    if record.phases or record.predicted:
        yield _phases(record)
    if record.pipeline is not None:
        yield _pipeline(record.pipeline)
    if record.lanes is not None:
        yield _lanes(record.lanes)
    yield from _loss(record)
    yield element("div", {"class": "pair"}, *_speed(record), *_step_peaks(record), *_bits_per_byte(record))


def _moment(record: RunRecord, peak: PhasePeak) -> Markup:
    over = f"over the recording of {'what came before step 1' if peak.step == 0 else f'step {peak.step:,}'}"
    said = f"Bytes that tensors held {over}, phases shaded; at the right the peak by category, below by owner."
    if not record.timeline:
        said = "The line of the peak has no timeline; at the right the peak by category, below by owner."
    return _section(findings.peak_finding(record, peak), said, draw_moment(peak, record), holders_table(peak))


def _phases(record: RunRecord) -> Markup:
    used = used_categories([*record.phases.values(), *(record.predicted or {}).values()])
    title, said = findings.prediction_finding(record), "The thin bar below each is what the plan predicted."
    if record.predicted is None and record.peak is not None:
        title, said = findings.holder_finding(record.peak), f"{title}."
    said = f"The worst moment of each phase over the whole run, by category. {said}"
    return _section(title, said, legend(used), draw_phases(record), categories_table(record))


def _pipeline(pipeline: PipelineStep) -> Markup:
    """Return the section of a pipeline's step; pictures have a style of their own, which an image keeps to itself."""
    pictures = []
    for what, picture in (("As planned", pipeline.planned), ("As it ran", pipeline.measured)):
        data = base64.b64encode(picture.encode()).decode()
        image = element("img", {"alt": f"{what}: passes by rank", "src": f"data:image/svg+xml;base64,{data}"})
        pictures += [element("p", {"class": "sub"}, what), element("div", {"class": "wide"}, image)]
    said = "Passes of each rank, numbered by microbatch; planned times are scaled to the measured passes' sum."
    return _section(findings.pipeline_finding(pipeline), said, *pictures)


def _lanes(step: LaneStep) -> Markup:
    said = (
        "When the first rank computed, and when its collectives and copies were under way; beside each, how long, and "
        "how much of it behind the computation."
    )
    return _section(findings.lanes_finding(step), said, draw_lanes(step))


def _loss(record: RunRecord) -> Iterator[Markup]:
    curves = [
        Curve(name="training", series=record.series("loss"), kind="train"),
        Curve(name="held out", series=record.series("eval/loss"), kind="held-out", dots=True),
    ]
    said = "Mean nats per token; a band spans the steps that share a pixel, the line is their mean."
    yield from _figure(curves, findings.loss_finding(record), said, width=_FULL, unit="nats", zero=False)


def _speed(record: RunRecord) -> Iterator[Markup]:
    speed = record.series("tokens_per_s")
    if speed:
        middle = findings.middle(speed)
        level = Level(name=f"median {middle:,.0f}", value=middle, kind="process")
        curves, said = [Curve(name="", series=speed, kind="train")], "Tokens per second of each step."
        yield from _figure(curves, findings.speed_finding(speed), said, unit="tokens/s", level=level)


def _step_peaks(record: RunRecord) -> Iterator[Markup]:
    peaks, budget_bytes = record.series("memory/peak_bytes"), record.budget_bytes
    if peaks:
        curves = [
            Curve(name="tensors", series=peaks, kind="train"),
            Curve(name="process", series=record.series("memory/vm_hwm_bytes"), kind="process"),
        ]
        near = budget_bytes is not None and budget_bytes < 2 * max(value for _, value in peaks)
        level = Level(name="budget", value=budget_bytes, kind="budget") if near else None
        said = "Tensors at the worst moment of each step; the resident peak of the process so far (VmHWM)."
        yield from _figure(curves, findings.step_peaks_finding(peaks), said, unit="bytes", level=level)


def _bits_per_byte(record: RunRecord) -> Iterator[Markup]:
    bits = record.series("eval/bits_per_byte")
    if len(bits) > 1:
        title = f"Held-out text went from {bits[0][1]:.3f} to {bits[-1][1]:.3f} bits per byte"
        curves = [Curve(name="held out", series=bits, kind="held-out", dots=True)]
        yield from _figure(curves, title, "Comparable across tokenizers.", unit="bits", zero=False)


def _figure(
    curves: list[Curve],
    title: str,
    said: str,
    *,
    unit: str,
    width: float = _HALF,
    zero: bool = True,
    level: Level | None = None,
) -> Iterator[Markup]:
    drawn = [curve for curve in curves if curve.series]
    if drawn:
        yield _section(title, said, draw_curves(drawn, title, width=width, unit=unit, zero=zero, level=level))


def _footer(record: RunRecord) -> Iterator[Markup]:
    notes = [element("li", {}, note) for note in record.notes]
    sources = (
        "Every number comes from the run folder: run.toml, plan.toml, metrics.jsonl, memory.jsonl, plan.json, "
        "lanes.json. 1 GiB = 2^30 bytes."
    )
    yield element("footer", {}, *([element("ul", {}, *notes)] if notes else []), sources)


def _with_code(sentence: str) -> Iterator[str]:
    """Yield the parts of a sentence, those between backticks as code."""
    for index, part in enumerate(sentence.split("`")):
        yield element("code", {}, part) if index % 2 else part


def _section(title: str, said: str, *parts: Markup) -> Markup:
    return element("section", {}, element("h2", {}, title), element("p", {"class": "sub"}, said), *parts)
