"""What `planish plan --pipeline` says: a schedule's step, bubble and memory by rank, its rivals, and its picture."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from planish.errors import UsageError
from planish.pipeline.actions import COLLECTIVES, Head, Kind
from planish.pipeline.choices import Pipeline
from planish.pipeline.costs import Costs
from planish.pipeline.draw import to_text
from planish.pipeline.layers import redistribute
from planish.pipeline.memory import Footprint, peak_bytes
from planish.pipeline.simulate import Timeline, simulate


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A model in units of one layer's forward, whose backward takes two.

    Attributes:
        layers: Layers of the model.
        head_layers: The head, in layers: V / (12 D + 2 S).
        embedding: IF, and as much IB.
        transfer: A send, and as much a collective. The published 8-GPU runs measured 0.13 (0.35 of 2.65 ms).
    """

    layers: int
    head_layers: float = 1.0
    embedding: float = 0.15
    transfer: float = 0.13

    def __post_init__(self) -> None:
        for name in ("head_layers", "embedding", "transfer"):
            if getattr(self, name) < 0:
                raise UsageError(f"`{name}` must be 0 or more, got {getattr(self, name)}.")

    def costs(self, pipeline: Pipeline, layers: Sequence[int]) -> Costs:
        """Return what the passes of `pipeline` take with `layers` on its stages."""
        shared = Head(pipeline.head).shared
        on_last = 0.0 if shared else self.head_layers
        forward = [*layers[:-1], layers[-1] + on_last]
        passes: dict[Kind, Sequence[float]] = {Kind.F: forward, Kind.I: forward, Kind.W: forward}
        passes[Kind.B] = [2 * each for each in forward]
        if shared:
            for kind, share in _head_shares(Head(pipeline.head)).items():
                passes[kind] = [3 * self.head_layers * share / pipeline.ranks] * pipeline.ranks
            passes[Kind.IF] = passes[Kind.IB] = [self.embedding] * pipeline.ranks
        return Costs(passes=passes, send=self.transfer, collectives=dict.fromkeys(COLLECTIVES, self.transfer))


def _head_shares(head: Head) -> dict[Kind, float]:
    """Return the share of the head's three products (logits, their gradient, the weight's) that each pass computes."""
    if head is Head.VOCAB_2:
        return {Kind.S: 2 / 3, Kind.T: 1 / 3}
    return {Kind.S: 1 / 3, Kind.E: 0.0, Kind.T: 2 / 3}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a pipeline does with a workload: its timeline, and the layers' activations alive at each rank's peak."""

    pipeline: Pipeline
    layers: tuple[int, ...]
    timeline: Timeline
    activations: tuple[int, ...]


def outcome(pipeline: Pipeline, workload: Workload) -> Outcome:
    """Return what `pipeline` does with `workload`; a head on the last stage pushes layers off it.

    Raises:
        UsageError: Fewer layers than stages, or a schedule that refuses its microbatches.
    """
    on_last = 0.0 if Head(pipeline.head).shared else workload.head_layers
    layers = redistribute(workload.layers, pipeline.num_stages, on_last)
    costs = workload.costs(pipeline, layers)
    schedule = pipeline.generate(costs)
    activations = peak_bytes(schedule, Footprint(static=[0] * pipeline.ranks, activation=layers))
    return Outcome(pipeline=pipeline, layers=layers, timeline=simulate(schedule, costs), activations=activations)


def outline(pipeline: Pipeline, workload: Workload, *, width: int = 120) -> str:
    """Return `pipeline` in words, numbers and a picture, beside what its rivals would do with the same work.

    Raises:
        UsageError: See `outcome`.
    """
    chosen = outcome(pipeline, workload)
    lines = [
        f"{pipeline.schedule}, head {pipeline.head}: {pipeline.ranks} ranks, {workload.layers} layers, "
        f"{pipeline.microbatches} microbatches; time in forwards of a layer",
        "",
        "rank  layers  activations alive   busy",
    ]
    owners, makespan = chosen.timeline.schedule.stage_ranks, chosen.timeline.makespan
    for rank, (alive, busy) in enumerate(zip(chosen.activations, chosen.timeline.busy, strict=True)):
        own = "+".join(str(n) for n, owner in zip(chosen.layers, owners, strict=True) if owner == rank)
        lines.append(f"{rank:>4}  {own:>6}  {alive:>17}  {busy / makespan:>4.0%}")
    lines += ["", "schedule     head            step  bubble  activations alive, most and least"]
    lines += [_row(each) for each in (chosen, *_rivals(pipeline, workload))]
    return "\n".join([*lines, "", to_text(chosen.timeline, width=width), ""])


def _row(each: Outcome) -> str:
    peaks = f"{max(each.activations)} {min(each.activations)}"
    return (
        f"{each.pipeline.schedule:<11}  {each.pipeline.head:<10}  {each.timeline.makespan:>8.1f}  "
        f"{each.timeline.bubble:>6.1%}  {peaks}"
    )


def _rivals(pipeline: Pipeline, workload: Workload) -> list[Outcome]:
    """Return the other schedules that can run the same work on the same ranks."""
    pairs = [
        ("1f1b", "last-stage"),
        ("interlaced", "vocab-1"),
        ("1f1b", "vocab-1"),
        ("1f1b", "vocab-2"),
        ("v-half", "vocab-1"),
        ("v-half", "vocab-2"),
        ("v-min", "vocab-2"),
    ]
    others = [replace(pipeline, schedule=name, head=head) for name, head in pairs]
    return [outcome(each, workload) for each in others if each != pipeline and each.num_stages <= workload.layers]
