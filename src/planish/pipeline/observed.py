"""What the ranks of a pipeline did, as a timeline beside the one that was planned, and as what its parts take."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import median

from planish.pipeline.actions import Action, Kind
from planish.pipeline.costs import Costs
from planish.pipeline.schedule import Schedule
from planish.pipeline.simulate import Span, Timeline, simulate
from planish.pipeline.workload import Times

Pass = tuple[str, float, float]
"""An action as text, when it began and when it ended, in seconds."""


def observed(schedule: Schedule, passes: Sequence[Sequence[Pass]]) -> Timeline:
    """Return the passes that ran as a timeline, without the transfers between them.

    Args:
        schedule: What was run.
        passes: Of each rank, in seconds of one clock.
    """
    found = [Span(start=start, end=end, actions=(Action.parse(word),)) for each in passes for word, start, end in each]
    return Timeline(schedule=schedule.passes(), spans=tuple(sorted(found, key=lambda span: span.start)))


def planned(schedule: Schedule, costs: Costs, like: Timeline) -> Timeline:
    """Return what `costs` say of a schedule, in the unit in which its passes take as long in all as those of `like`."""
    timeline = simulate(schedule, costs)
    factor = sum(like.busy) / sum(timeline.busy)
    spans = (replace(span, start=factor * span.start, end=factor * span.end) for span in timeline.spans)
    return replace(timeline, spans=tuple(spans))


def medians(passes: Iterable[Pass]) -> dict[tuple[int, Kind], float]:
    """Return the median time of each pass, by stage (F, B, I, W) or rank, and kind."""
    seconds: dict[tuple[int, Kind], list[float]] = {}
    for word, start, end in passes:
        stage, kind, _ = Action.parse(word)
        seconds.setdefault((stage, kind), []).append(end - start)
    return {key: median(each) for key, each in seconds.items()}


def times_of(passes: Iterable[Pass], *, num_layers: int) -> Times | None:
    """Return what the parts of a model took, from a step's passes on all ranks; None where there are none.

    Transfers are not among passes. A layer is the mean of all.
    """
    found = medians(passes)
    ranks = {rank for rank, kind in found if kind is Kind.S}

    def total(*kinds: Kind) -> float:
        return sum(seconds for (_, kind), seconds in found.items() if kind in kinds)

    forward, backward = total(Kind.F), total(Kind.B, Kind.I, Kind.W)
    if not forward:
        return None
    return Times(
        layer_s=forward / num_layers,
        layer_backward_s=max(forward, backward) / num_layers,
        head_s=total(Kind.S, Kind.T) / 3 or None,
        embedding_s=total(Kind.IF, Kind.IB) / (2 * len(ranks)) if ranks else None,
    )
