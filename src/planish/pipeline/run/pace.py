"""The schedules of a run: made for what passes are thought to take, and made anew once that was measured."""

from planish.errors import UsageError
from planish.methods import Pipeline
from planish.pipeline.actions import STAGE_PASSES, Head, Kind
from planish.pipeline.choices import check_layers, generate
from planish.pipeline.costs import Costs
from planish.pipeline.memory import Footprint, holds_no_more
from planish.pipeline.observed import Pass, medians
from planish.pipeline.schedule import Schedule
from planish.pipeline.workload import Workload

SPARE = 2
"""Hidden states that a schedule made anew may hold beyond the first one, for which room is left."""


class Pace:
    """What passes take, and the schedule that follows.

    Attributes:
        work: As it was given.
        layers: Of each stage.
        costs: What the next schedule is made for.

    Args:
        pipeline: The choice.
        work: What the parts of the model are thought to take.
        num_ranks: Ranks of the pipeline.

    Raises:
        UsageError: Fewer layers than stages, or a head that is not shared.
    """

    def __init__(self, pipeline: Pipeline, work: Workload, num_ranks: int) -> None:
        head = Head(pipeline.place)
        if head not in (Head.VOCAB_1, Head.VOCAB_2):
            raise UsageError(
                f'a pipeline that runs shares its head: `plan.pipeline.head` must be "vocab-1" or "vocab-2", got '
                f'"{head}"; leave it out{"" if pipeline.head else ", and choose another `plan.pipeline.method`"}.'
            )
        check_layers(pipeline, num_ranks=num_ranks, num_layers=work.layers)
        self._pipeline, self._num_ranks, self.work = pipeline, num_ranks, work
        self.layers = work.spread(num_ranks * pipeline.stages_per_rank, head)
        self.costs = work.costs(self.layers, head, num_ranks)

    def schedule(self, num_microbatches: int) -> Schedule:
        """Return the schedule of a step."""
        return generate(self._pipeline, num_ranks=self._num_ranks, num_microbatches=num_microbatches, costs=self.costs)

    def measured(self, passes: list[list[Pass]], num_microbatches: int) -> bool:
        """Take what passes took from what the ranks saw, and return whether it was taken.

        It is not where, by count, some rank would hold more of its layers than with the schedule before, or more of all
        by `SPARE` hidden states.
        Transfers keep their share of a forward.

        Args:
            passes: Of each rank, the same list on all ranks, so that all make the same schedules.
            num_microbatches: Of a step.
        """
        before, planned = self.costs, self.schedule(num_microbatches)
        self.costs = self._as_measured(passes)
        anew, static = self.schedule(num_microbatches), [0] * self._num_ranks
        layers, all_ = (Footprint(static=static, activation=self.layers, hidden=hidden) for hidden in (0, 1))
        if holds_no_more(anew, planned, layers) and holds_no_more(anew, planned, all_, spare=SPARE):
            return True
        self.costs = before
        return False

    def _as_measured(self, passes: list[list[Pass]]) -> Costs:
        seconds = medians(found for each in passes for found in each)
        rows = {
            kind: tuple(seconds.get((i, kind), old) for i, old in enumerate(row))
            for kind, row in self.costs.passes.items()
        }
        if not {kind for _, kind in seconds} & STAGE_PASSES:
            return self.costs
        unit = sum(rows[Kind.F]) / sum(self.costs.passes[Kind.F])
        unmeasured = {Kind.B, Kind.I, Kind.W} - {kind for _, kind in seconds}
        rows |= {kind: tuple(unit * each for each in self.costs.passes[kind]) for kind in unmeasured}
        return Costs(
            passes=rows,
            send=unit * self.costs.send,
            collectives={kind: unit * each for kind, each in self.costs.collectives.items()},
        )
