"""What the ranks of a pipeline did, as a timeline beside the one that was planned."""

from collections.abc import Sequence
from dataclasses import replace

from planish.pipeline.actions import Action
from planish.pipeline.costs import Costs
from planish.pipeline.schedule import Schedule
from planish.pipeline.simulate import Span, Timeline, simulate


def observed(schedule: Schedule, passes: Sequence[Sequence[tuple[str, float, float]]]) -> Timeline:
    """Return the passes that ran as a timeline, without the transfers between them.

    Args:
        schedule: What was run.
        passes: Of each rank: an action as text, when it began and when it ended, in seconds of one clock.
    """
    found = [Span(start=start, end=end, actions=(Action.parse(word),)) for each in passes for word, start, end in each]
    return Timeline(schedule=schedule.passes(), spans=tuple(sorted(found, key=lambda span: span.start)))


def planned(schedule: Schedule, costs: Costs, like: Timeline) -> Timeline:
    """Return what `costs` say of a schedule, in the unit in which its passes take as long in all as those of `like`."""
    timeline = simulate(schedule, costs)
    factor = sum(like.busy) / sum(timeline.busy)
    spans = (replace(span, start=factor * span.start, end=factor * span.end) for span in timeline.spans)
    return replace(timeline, spans=tuple(spans))
