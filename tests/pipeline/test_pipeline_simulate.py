import random
from dataclasses import replace
from itertools import pairwise

import pytest

from planish.errors import UsageError
from planish.pipeline.actions import PASSES, Action, Head, Kind
from planish.pipeline.costs import Costs
from planish.pipeline.one_f_one_b import one_f_one_b
from planish.pipeline.schedule import Schedule, needs
from planish.pipeline.simulate import simulate
from planish.pipeline.v_blocks import v_half
from planish.pipeline.validate import validate


@pytest.mark.parametrize(("p", "m"), [(1, 1), (1, 5), (2, 1), (4, 4), (4, 3), (8, 32)])
def test_1f1b_takes_what_the_textbook_says(p, m):
    costs = Costs.uniform(num_ranks=p, num_stages=p, passes={Kind.F: 1.0, Kind.B: 2.0})
    timeline = simulate(one_f_one_b(num_ranks=p, num_microbatches=m, head=Head.LAST_STAGE, costs=costs), costs)
    assert timeline.makespan == 3 * (m + p - 1)
    assert timeline.bubble == pytest.approx((p - 1) / (m + p - 1))
    assert timeline.busy == (3 * m,) * p


def test_two_ranks_by_hand():
    costs = Costs.uniform(num_ranks=2, num_stages=2, passes={Kind.F: 1.0, Kind.B: 2.0}, send=0.5)
    schedule = one_f_one_b(num_ranks=2, num_microbatches=2, head=Head.LAST_STAGE, costs=costs)
    times = {str(span.actions[0]): (span.start, span.end) for span in simulate(schedule, costs).spans}
    assert times == {
        "0F0": (0, 1),
        "0SEND_F0": (1, 1.5),
        "0F1": (1, 2),
        "1F0": (1.5, 2.5),
        "0SEND_F1": (2, 2.5),
        "1B0": (2.5, 4.5),
        "1SEND_B0": (4.5, 5),
        "1F1": (4.5, 5.5),
        "0B0": (5, 7),
        "1B1": (5.5, 7.5),
        "1SEND_B1": (7.5, 8),
        "0B1": (8, 10),
    }


def test_a_shared_head_by_hand():
    """One microbatch on two ranks: IF, CIF, F, C0, S, C1, B with T beside it, CIB, IB."""
    passes = {Kind.F: 4.0, Kind.B: 8.0, Kind.S: 2.0, Kind.T: 1.0, Kind.IF: 0.5, Kind.IB: 0.25}
    transfers = {Kind.CIF: 0.1, Kind.C0: 0.2, Kind.C1: 0.3, Kind.CIB: 0.4}
    costs = Costs.uniform(num_ranks=2, num_stages=2, passes=passes, collectives=transfers)
    schedule = one_f_one_b(num_ranks=2, num_microbatches=1, head=Head.VOCAB_2, costs=costs)
    assert simulate(schedule, costs).makespan == pytest.approx(0.5 + 0.1 + 8 + 0.2 + 2 + 0.3 + 16 + 0.4 + 0.25)


def test_a_sender_that_waits_is_busy_for_its_transfers():
    costs = Costs.uniform(num_ranks=3, num_stages=3, passes={Kind.F: 1.0, Kind.B: 2.0}, send=0.5)
    waiting = costs.with_waiting_senders((0, 1, 2))
    assert (waiting.passes[Kind.F], waiting.passes[Kind.B]) == ((1.5, 1.5, 1.0), (2.0, 2.5, 2.5))
    schedule = one_f_one_b(num_ranks=3, num_microbatches=12, head=Head.LAST_STAGE, costs=waiting)
    assert simulate(schedule, waiting).busy == (12 * 3.5, 12 * 4.0, 12 * 3.5)


def test_stages_of_one_rank_send_nothing_to_each_other(unit_costs):
    costs = unit_costs(1, 2, Head.LAST_STAGE)
    schedule = v_half(num_ranks=1, num_microbatches=3, head=Head.LAST_STAGE, costs=costs)
    assert {action.kind for action in schedule.ranks[0]} == {Kind.F, Kind.I, Kind.W}
    assert costs.with_waiting_senders(schedule.stage_ranks).passes[Kind.F] == (1.0, 1.0)


@pytest.mark.parametrize("head", Head)
def test_every_pass_starts_after_what_it_needs_and_ranks_do_one_thing_at_a_time(head, unit_costs):
    costs = unit_costs(4, 8, head, 1.7, embedding=0.1)
    schedule = v_half(num_ranks=4, num_microbatches=9, head=head, costs=costs)
    timeline = simulate(schedule, costs)
    end = {action: span.end for span in timeline.spans for action in span.actions}
    start = {action: span.start for span in timeline.spans for action in span.actions}
    assert set(end) == {action for rank in schedule.ranks for action in rank}
    for action, begin in start.items():
        assert all(end[each] <= begin for each in needs(schedule, action)), action
    for rank in schedule.ranks:
        passes = [action for action in rank if action.kind in PASSES]
        assert all(end[one] <= start[other] for one, other in pairwise(passes))


def test_the_order_of_a_generator_is_what_its_simulation_ran(unit_costs):
    costs = unit_costs(4, 4, Head.VOCAB_1)
    schedule = one_f_one_b(num_ranks=4, num_microbatches=9, head=Head.VOCAB_1, costs=costs)
    assert simulate(schedule, costs).lower() == schedule


def test_communication_placed_for_other_costs_still_runs(unit_costs):
    """The place of communication may depend on costs, whether it runs may not."""
    schedule = one_f_one_b(num_ranks=4, num_microbatches=6, head=Head.VOCAB_1, costs=unit_costs(4, 4, Head.VOCAB_1))
    draw = random.Random(0)
    for _ in range(20):
        passes = {kind: [draw.expovariate(1) for _ in range(4)] for kind in PASSES}
        costs = Costs(passes=passes, send=draw.random(), collectives={Kind.C0: draw.random(), Kind.C2: draw.random()})
        validate(simulate(schedule, costs).lower())


def test_passes_in_a_circle_are_refused_with_steps_and_ranks(unit_costs):
    costs = unit_costs(2, 2, Head.LAST_STAGE)
    schedule = one_f_one_b(num_ranks=2, num_microbatches=2, head=Head.LAST_STAGE, costs=costs).passes()
    late = tuple(Action.parse(word) for word in ("0F0", "0B0", "0F1", "0B1"))
    early = tuple(Action.parse(word) for word in ("1F0", "1F1", "1B0", "1B1"))
    with pytest.raises(UsageError) as caught:
        simulate(replace(schedule, ranks=(late, early)), costs)
    assert str(caught.value) == (
        "the schedule deadlocks: rank 0 stands at step 1 (0B0) and waits for rank 1; "
        "rank 1 stands at step 1 (1F1) and waits for rank 0. Put one of these actions earlier or later."
    )


def test_a_rank_that_waits_for_its_own_later_step_is_refused():
    schedule = Schedule(
        name="by-hand",
        head=Head.LAST_STAGE,
        num_microbatches=1,
        stage_ranks=(0,),
        ranks=((Action(0, Kind.B, 0), Action(0, Kind.F, 0)),),
    )
    costs = Costs.uniform(num_ranks=1, num_stages=1, passes={Kind.F: 1.0, Kind.B: 1.0})
    with pytest.raises(UsageError, match=r"rank 0 stands at step 0 \(0B0\) and waits for a later step of its own"):
        simulate(schedule, costs)


def test_a_pass_without_a_cost_is_refused():
    costs = Costs.uniform(num_ranks=2, num_stages=2, passes={Kind.F: 1.0})
    with pytest.raises(UsageError, match=r"`costs.passes` has nothing for B; give what it takes on each stage or rank"):
        one_f_one_b(num_ranks=2, num_microbatches=1, head=Head.LAST_STAGE, costs=costs)
    with pytest.raises(UsageError, match=r"`costs.passes` has nothing for B"):
        one_f_one_b(num_ranks=2, num_microbatches=1, head=Head.VOCAB_1, costs=costs)
    short = Costs(passes={Kind.F: [1.0, 1.0], Kind.B: [2.0]})
    with pytest.raises(UsageError, match=r"`costs.passes` has 1 numbers for B, but the schedule has 1B0"):
        one_f_one_b(num_ranks=2, num_microbatches=1, head=Head.LAST_STAGE, costs=short)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"passes": {Kind.F: [1.0, -0.5]}}, r"`costs.passes\[F\]` must be 0 or more, got -0.5"),
        ({"send": float("nan")}, "`costs.send` must be 0 or more, got nan"),
        ({"collectives": {Kind.C1: float("inf")}}, r"`costs.collectives\[C1\]` must be 0 or more, got inf"),
    ],
)
def test_costs_that_are_no_time_are_refused(change, message):
    with pytest.raises(UsageError, match=message):
        Costs(**{"passes": {}} | change)


def test_passes_that_all_take_nothing_are_refused(unit_costs):
    free = Costs.uniform(num_ranks=2, num_stages=2, passes=dict.fromkeys(PASSES, 0.0))
    with pytest.raises(UsageError, match=r"`costs.passes` must not all be 0"):
        one_f_one_b(num_ranks=2, num_microbatches=1, head=Head.VOCAB_2, costs=free)
