"""What `planish plan --pipeline` says: a schedule's step, bubble and memory by rank, its rivals, and its picture."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from planish.methods import Pipeline
from planish.pipeline.actions import Head
from planish.pipeline.choices import check_layers, generate
from planish.pipeline.draw import to_text
from planish.pipeline.memory import Footprint, in_flight, peak_bytes
from planish.pipeline.schedule import Schedule
from planish.pipeline.simulate import Timeline, simulate
from planish.pipeline.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a schedule does with a workload.

    Attributes:
        schedule: With its communication.
        timeline: When everything runs.
        layers: Of each stage.
        activations: Layers' activations alive at each rank's peak, a microbatch each.
    """

    schedule: Schedule
    timeline: Timeline
    layers: tuple[int, ...]
    activations: tuple[int, ...]

    @property
    def layers_by_rank(self) -> list[list[int]]:
        """The layers of each rank's stages."""
        owned: list[list[int]] = [[] for _ in range(self.schedule.num_ranks)]
        for layers, rank in zip(self.layers, self.schedule.stage_ranks, strict=True):
            owned[rank].append(layers)
        return owned

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers as plain data."""
        return {
            "schedule": self.schedule.name,
            "head": str(self.schedule.head),
            "step": self.timeline.makespan,
            "bubble": self.timeline.bubble,
            "layers": self.layers_by_rank,
            "busy": [busy / self.timeline.makespan for busy in self.timeline.busy],
            "in_flight": list(in_flight(self.schedule)),
            "activations": list(self.activations),
        }


def outcome(pipeline: Pipeline, workload: Workload, num_ranks: int) -> Outcome:
    """Return what `pipeline` does with `workload`.

    Raises:
        UsageError: Fewer layers than stages, or a schedule that refuses its microbatches.
    """
    check_layers(pipeline, num_ranks=num_ranks, num_layers=workload.layers)
    head = Head(pipeline.place)
    layers = workload.spread(num_ranks * pipeline.stages_per_rank, head)
    costs = workload.costs(layers, head, num_ranks)
    made = generate(pipeline, num_ranks=num_ranks, num_microbatches=workload.microbatches, costs=costs)
    return outcome_of(made, workload)


def outcome_of(schedule: Schedule, workload: Workload) -> Outcome:
    """Return what `schedule`, whoever made it, does with `workload`.

    Raises:
        UsageError: Fewer layers than stages.
    """
    layers = workload.spread(schedule.num_stages, schedule.head)
    timeline = simulate(schedule, workload.costs(layers, schedule.head, schedule.num_ranks))
    activations = peak_bytes(schedule, Footprint(static=[0] * schedule.num_ranks, activation=layers))
    return Outcome(schedule=schedule, timeline=timeline, layers=layers, activations=activations)


def rivals(chosen: Outcome, workload: Workload) -> list[Outcome]:
    """Return what the other schedules do with the same work on the same ranks, as far as there are layers for them."""
    num_ranks = chosen.schedule.num_ranks
    others = [
        Pipeline(method="1f1b", head="last-stage"),
        Pipeline(method="interlaced"),
        Pipeline(method="1f1b", head="vocab-1"),
        Pipeline(method="1f1b", head="vocab-2"),
        Pipeline(method="v-half", head="vocab-1"),
        Pipeline(method="v-half", head="vocab-2"),
        Pipeline(method="v-min", head="vocab-2"),
    ]
    own = chosen.schedule.name, chosen.schedule.head
    return [
        outcome(each, workload, num_ranks)
        for each in others
        if (each.method, each.place) != own and num_ranks * each.stages_per_rank <= workload.layers
    ]


def outline(chosen: Outcome, others: Sequence[Outcome], workload: Workload, *, width: int = 110) -> str:
    """Return `chosen` in words, numbers and a picture, beside its rivals."""
    schedule, makespan = chosen.schedule, chosen.timeline.makespan
    lines = [
        f"{schedule.name}, head {schedule.head}: {schedule.num_ranks} ranks, {workload.layers} layers, "
        f"{workload.microbatches} microbatch{'es' * (workload.microbatches > 1)}; times in {workload.unit}",
        "",
        "rank  layers  in flight  activations alive   busy",
    ]
    columns = chosen.layers_by_rank, in_flight(schedule), chosen.activations, chosen.timeline.busy
    for rank, (layers, flying, alive, busy) in enumerate(zip(*columns, strict=True)):
        own = "+".join(map(str, layers))
        lines.append(f"{rank:>4}  {own:>6}  {flying:>9}  {alive:>17}  {busy / makespan:>5.0%}")
    lines += ["", "schedule     head            step  bubble  activations alive, most and least"]
    lines += [_row(each) for each in (chosen, *others)]
    return "\n".join([*lines, "", to_text(chosen.timeline, width=width), ""])


def _row(each: Outcome) -> str:
    return (
        f"{each.schedule.name:<11}  {each.schedule.head:<10}  {each.timeline.makespan:>8.4g}  "
        f"{each.timeline.bubble:>6.1%}  {max(each.activations)} {min(each.activations)}"
    )
