"""What compression found, as values, as JSON, and as what a child's folder says of it."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from planish.compress.order import Order
from planish.compress.search import Ceiling
from planish.compress.settle import Quality
from planish.compress.space import Architecture
from planish.compress.text import rows_of
from planish.compress.tournament import Entrant
from planish.data.encode import Tokenizer

RECORD = "compress.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A child with what was predicted and measured of it.

    Attributes:
        name: How it was found.
        architecture: Its layers.
        predicted: Seconds by scenario's label before it was measured.
        measured: Seconds by scenario's label.
        memory_bytes: Priced, or of the child that was written measured, by scenario's label.
        parameters: Numbers in it.
        quality: On text that nothing else has read.
    """

    name: str
    architecture: Architecture
    predicted: Mapping[str, float]
    measured: Mapping[str, float]
    memory_bytes: Mapping[str, float]
    parameters: int
    quality: Quality


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a job found.

    Attributes:
        order: What was asked.
        ceilings: The targets in numbers.
        parent: The parent as its own child.
        child: What was made.
        searched: The same before it learned from its parent; None where it did not.
        entrants: How candidates fared in a tournament, the winner first; empty without one.
        baselines: What else was assembled and judged; empty unless asked for.
        curve: (share, sum of harm) of the best child at shares of the parent.
        harm: Of the child's layers, attention and network each.
        additivity: (pairs tried, rank correlation, median of joint over sum).
        worth: By ceiling's name, how much less harm one per cent more of it would do, by the relaxation.
        machine: Where it was measured.
    """

    order: Order
    ceilings: tuple[Ceiling, ...]
    parent: Judged
    child: Judged
    searched: Judged | None
    entrants: tuple[Entrant, ...]
    baselines: tuple[Judged, ...]
    curve: tuple[tuple[float, float], ...]
    harm: tuple[float, ...]
    additivity: tuple[int, float, float]
    worth: Mapping[str, float]
    machine: str


def told(outcome: Outcome) -> dict[str, Any]:
    """Return an outcome as JSON holds it."""

    def judged(each: Judged) -> dict[str, Any]:
        return {
            "name": each.name,
            "predicted_s": dict(each.predicted),
            "measured_s": dict(each.measured),
            "memory_bytes": dict(each.memory_bytes),
            "parameters": each.parameters,
            **asdict(each.quality),
            "layers": [choice.label for choice in each.architecture.layers],
        }

    return {
        "model": outcome.order.model,
        "metric": outcome.order.metric,
        "machine": outcome.machine,
        "targets": [{"name": each.name, "kind": each.kind, "at_most": each.at_most} for each in outcome.ceilings],
        "parent": judged(outcome.parent),
        "child": judged(outcome.child),
        "searched": None if outcome.searched is None else judged(outcome.searched),
        "tournament": [
            {name: getattr(each, name) for name in ("name", "before", "after", "steps", "rank_before", "rank_after")}
            | {"layers": [choice.label for choice in each.architecture.layers]}
            for each in outcome.entrants
        ],
        "baselines": [judged(each) for each in outcome.baselines],
        "curve": [list(point) for point in outcome.curve],
        "harm": list(outcome.harm),
        "harm_of_one_per_cent": dict(outcome.worth),
        "additivity": dict(zip(("tried", "rank_correlation", "ratio"), outcome.additivity, strict=True)),
    }


def record_of(
    child: Judged, order: Order, parent: Path, ceilings: Sequence[Ceiling], parent_s: Mapping[str, float]
) -> dict[str, Any]:
    """Return what a child's folder says of it."""
    return {
        "parent": str(parent.resolve()),
        "parent_model": order.model,
        "text": list(order.text),
        "context": order.context,
        "rows": list(order.rows),
        "seed": order.seed,
        "ceilings": [asdict(each) for each in ceilings],
        "scenarios": [asdict(each) for each in order.scenarios],
        "parent_seconds": dict(parent_s),
        "seconds": dict(child.measured),
        "memory_bytes": dict(child.memory_bytes),
        "parameters": child.parameters,
        "quality": asdict(child.quality),
        "layers": [choice.label for choice in child.architecture.layers],
    }


def held_out(record: Mapping[str, Any], tokenizer: Tokenizer) -> Tensor:
    """Return the rows that a child was judged on, by what its folder says."""
    rows = rows_of(record["text"], tokenizer, context=record["context"], count=sum(record["rows"]))
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(record["seed"]))
    return rows[order].split(record["rows"])[2]


def exceeded(outcome: Outcome, *, tolerance: float) -> list[str]:
    """Return a sentence for each ceiling that the measured child is above by more than `tolerance`."""
    told = []
    for ceiling in outcome.ceilings:
        value = (
            outcome.child.measured[ceiling.scenario]
            if ceiling.kind == "latency"
            else outcome.child.memory_bytes[ceiling.scenario]
            if ceiling.kind == "memory"
            else outcome.child.parameters
        )
        if value > ceiling.at_most * (1 + tolerance):
            told.append(f"{ceiling.name} is {ceiling.told(value)}, {ceiling.told(ceiling.at_most)} was asked for")
    return told
