"""Reads a run folder, however its run ended: what is torn or foreign is left out and noted."""

import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from planish.errors import UsageError
from planish.report.record import PHASES, Holder, LaneStep, PhasePeak, PipelineStep, Point, Predicted, RunRecord
from planish.units import parse_bytes

_MALFORMED = (AttributeError, KeyError, OverflowError, TypeError, ValueError)


def read_run(path: Path) -> RunRecord:
    """Return what the run folder `path` holds.

    Memory: the lines of `metrics.jsonl`; of `memory.jsonl` one line at a time.

    Raises:
        UsageError: It is no run folder, or a file in it cannot be read.
    """
    notes: list[str] = []
    try:
        if not (path / "run.toml").is_file():
            raise UsageError(f"{path} is no run folder, it holds no run.toml; name the `save.dir` of a run.")
        settings = _read_toml(path / "run.toml")
        plan_toml = path / "plan.toml"
        plan = (_read_toml(plan_toml) if plan_toml.is_file() else settings).get("plan")
        phases, peak, timeline = _read_memory(path / "memory.jsonl", notes)
        metrics = [line for line in _read_lines(path / "metrics.jsonl", notes) if isinstance(line.get("step"), int)]
        exceeded = path / "budget-exceeded.txt"
        return RunRecord(
            path=path,
            settings=settings,
            budget_bytes=_budget_bytes(path / "run.toml", settings),
            plan=plan if isinstance(plan, Mapping) else {},
            metrics=tuple(metrics),
            phases={phase: phases[phase] for phase in PHASES if phase in phases},
            peak=peak,
            timeline=timeline,
            predicted=_read_predicted(path / "plan.json", notes),
            exceeded=exceeded.read_text(encoding="utf-8", errors="replace").strip() if exceeded.is_file() else None,
            pipeline=_read_pipeline(path, notes),
            lanes=_read_lanes(path / "lanes.json", notes),
            notes=tuple(notes),
        )
    except OSError as error:
        raise UsageError(f"{error.filename} cannot be read: {error.strerror}; check who may read it.") from error


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UsageError(f"{path} is not the TOML that a run writes: {error}") from error


def _budget_bytes(path: Path, settings: Mapping[str, Any]) -> int | None:
    table = settings.get("memory")
    budget = table.get("budget") if isinstance(table, Mapping) else None
    try:
        return None if budget is None else parse_bytes(str(budget), name="memory.budget")
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from error


def _read_lines(path: Path, notes: list[str]) -> Iterator[dict[str, Any]]:
    if not path.is_file():
        notes.append(f"{path.name} is missing; the run ended before its first line.")
        return
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                record = json.loads(line)
            except ValueError:
                record = None
            if isinstance(record, dict):
                yield record
            elif line.endswith(b"\n"):
                notes.append(f"{path.name}: line {number} is no JSON object and was left out.")
            else:
                notes.append(f"{path.name}: the last line is torn and was left out; the run was killed or is at work.")


def _read_memory(path: Path, notes: list[str]) -> tuple[dict[str, PhasePeak], PhasePeak | None, tuple[Point, ...]]:
    """Return the worst moment of each phase, the worst of all, and the timeline of its line."""
    phases: dict[str, PhasePeak] = {}
    worst: PhasePeak | None = None
    timeline: tuple[Point, ...] = ()
    for line in _read_lines(path, notes):
        try:
            larger = _peaks_above(phases, line)
            top = max(larger.values(), key=lambda peak: peak.peak_bytes, default=None)
            if top is not None and top.peak_bytes > (worst.peak_bytes if worst else 0):
                worst, timeline = _from_the_first_event(top, line.get("timeline", ()))
            phases |= larger
        except _MALFORMED:
            notes.append(f"{path.name}: a line of step {line.get('step')} is not the ledger's and was left out.")
    return phases, worst, timeline


def _from_the_first_event(peak: PhasePeak, points: Iterable[Any]) -> tuple[PhasePeak, tuple[Point, ...]]:
    """Return a peak and its line's timeline in seconds since its first event; a recording waits for its step."""
    timeline = [(float(at_s), int(live), str(phase)) for at_s, live, phase in points]
    first_s = min([peak.at_s, *(at_s for at_s, _, _ in timeline)]) if timeline else 0.0
    shifted = tuple((at_s - first_s, live, phase) for at_s, live, phase in timeline)
    return replace(peak, at_s=peak.at_s - first_s), shifted


def _peaks_above(phases: Mapping[str, PhasePeak], line: Mapping[str, Any]) -> dict[str, PhasePeak]:
    """Return the peaks of `line` that are larger than those of `phases`; the others are not even read."""
    found = {}
    for phase in PHASES:
        tree = line["phases"].get(phase)
        if tree is not None and (phase not in phases or tree["peak_bytes"] > phases[phase].peak_bytes):
            found[phase] = PhasePeak(
                phase=phase,
                step=int(line["step"] or 0),
                peak_bytes=int(tree["peak_bytes"]),
                at_s=float(tree["at_s"]),
                categories=_sizes(tree["categories"]),
                holders=tuple(_holder(*row[:6]) for row in tree["owners"]),
            )
    return found


def _holder(owner: str, category: str, shape: list[int], dtype: str, count: int, total_bytes: int) -> Holder:
    return Holder(
        owner=str(owner),
        category=str(category),
        shape=tuple(int(size) for size in shape),
        dtype=str(dtype),
        count=int(count),
        total_bytes=int(total_bytes),
    )


def _sizes(tree: Mapping[str, int]) -> dict[str, int]:
    return {str(category): int(size) for category, size in tree.items()}


def _read_pipeline(path: Path, notes: list[str]) -> PipelineStep | None:
    file = path / "pipeline.json"
    if not file.is_file():
        return None
    try:
        tree = json.loads(file.read_bytes())
        planned, measured = (
            (path / f"pipeline-{name}.svg").read_text(encoding="utf-8") for name in ("planned", "measured")
        )
        return PipelineStep(
            step=int(tree["step"]),
            planned_bubble=float(tree["planned"]["bubble"]),
            measured_bubble=float(tree["measured"]["bubble"]),
            planned=planned,
            measured=measured,
        )
    except (*_MALFORMED, FileNotFoundError):
        notes.append(f"{file.name} and its pictures are not what this version reads and were left out.")
        return None


def _read_lanes(path: Path, notes: list[str]) -> LaneStep | None:
    if not path.is_file():
        return None
    try:
        tree = json.loads(path.read_bytes())
        lanes = {
            str(name): tuple((float(start), float(end)) for start, end in spans)
            for name, spans in tree["lanes"].items()
            if spans
        }
        return LaneStep(step=int(tree["step"]), lanes=lanes) if lanes else None
    except _MALFORMED:
        notes.append(f"{path.name} is not what this version reads and was left out.")
        return None


def _read_predicted(path: Path, notes: list[str]) -> dict[str, Predicted] | None:
    if not path.is_file():
        return None
    try:
        tree = json.loads(path.read_bytes())["phases"]
        return {
            phase: Predicted(
                peak_bytes=int(tree[phase]["peak_bytes"]), categories=_sizes(tree[phase].get("categories", {}))
            )
            for phase in PHASES
            if phase in tree
        }
    except _MALFORMED:
        notes.append(f"{path.name} holds no prediction that this version reads and was left out.")
        return None
