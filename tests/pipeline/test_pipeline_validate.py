import random
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

import pytest
from torch.distributed.pipelining.schedules import _Action, _simulate_comms_compute, _validate_schedule

from planish.errors import UsageError
from planish.pipeline.actions import COLLECTIVES, Action, Head, Kind
from planish.pipeline.interlaced import interlaced
from planish.pipeline.interleaved import interleaved
from planish.pipeline.one_f_one_b import one_f_one_b
from planish.pipeline.schedule import Schedule, peer
from planish.pipeline.v_blocks import v_half, v_min
from planish.pipeline.validate import validate


def all_schedules(p, m, unit_costs, ratio=1.0):
    for head in Head:
        yield one_f_one_b(num_ranks=p, num_microbatches=m, head=head, costs=unit_costs(p, p, head, ratio))
        yield v_half(num_ranks=p, num_microbatches=m, head=head, costs=unit_costs(p, 2 * p, head, ratio))
        yield v_min(num_ranks=p, num_microbatches=m, head=head, costs=unit_costs(p, 2 * p, head, ratio))
    yield interlaced(num_ranks=p, num_microbatches=m, costs=unit_costs(p, p, Head.VOCAB_1, ratio))
    if m % max(1, m // p) == 0:
        costs = unit_costs(p, 3 * p, Head.LAST_STAGE)
        yield interleaved(num_ranks=p, num_microbatches=m, num_chunks=3, costs=costs)


@pytest.mark.parametrize("p", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("m", [1, 7, 16])
def test_every_generator_makes_schedules_that_run(p, m, unit_costs):
    for schedule in all_schedules(p, m, unit_costs):
        validate(schedule)


@pytest.mark.slow
@pytest.mark.parametrize("p", range(1, 9))
@pytest.mark.parametrize("ratio", [0.25, 1.0, 2.0])
def test_every_generator_makes_schedules_that_run_for_all_microbatches(p, ratio, unit_costs):
    for m in range(1, 17):
        for schedule in all_schedules(p, m, unit_costs, ratio):
            validate(schedule)


@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_torch_accepts_the_lists_that_it_can_read(p, unit_costs):
    """Its own validator and deadlock simulator, on all schedules without vocabulary passes."""
    m = 2 * p
    plain = [schedule for schedule in all_schedules(p, m, unit_costs) if not schedule.head.shared]
    assert len(plain) == 4
    for schedule in plain:
        lists = {rank: [_Action.from_str(str(a)) for a in actions] for rank, actions in enumerate(schedule.ranks)}
        passes = {
            rank: [_Action.from_str(str(a)) for a in actions] for rank, actions in enumerate(schedule.passes().ranks)
        }
        _validate_schedule(passes, p, schedule.num_stages, m)
        _simulate_comms_compute(lists, lambda stage, of=schedule.stage_ranks: of[stage], schedule.num_stages)


@pytest.fixture(scope="module")
def good(unit_costs):
    schedule = one_f_one_b(num_ranks=3, num_microbatches=5, head=Head.VOCAB_1, costs=unit_costs(3, 3, Head.VOCAB_1))
    validate(schedule)
    return schedule


def edited(schedule, rank, change):
    actions = list(schedule.ranks[rank])
    change(actions)
    return replace(schedule, ranks=(*schedule.ranks[:rank], tuple(actions), *schedule.ranks[rank + 1 :]))


def at(word, actions):
    return actions.index(Action.parse(word))


def test_a_missing_action_is_named(good):
    bad = edited(good, 1, lambda actions: actions.remove(Action.parse("1T3")))
    with pytest.raises(UsageError, match="rank 1: 1T3 is missing, and 0 more; add it"):
        validate(bad)


def test_a_doubled_action_is_named_with_both_steps(good):
    bad = edited(good, 1, lambda actions: actions.insert(20, Action.parse("1IF0")))
    with pytest.raises(UsageError, match="rank 1, step 20: 1IF0 is there already, at step 0"):
        validate(bad)


@pytest.mark.parametrize("word", ["1E0", "1C30", "1I0", "1W0", "1F5", "3F0", "0RECV_F0", "2SEND_F0"])
def test_an_action_without_a_place_is_named(good, word):
    bad = edited(good, 1, lambda actions: actions.append(Action.parse(word)))
    with pytest.raises(UsageError, match=rf"rank 1, step \d+: {word} has no place in 3 stages, 5 microbatches"):
        validate(bad)


def test_an_action_on_a_foreign_rank_is_named(good):
    bad = edited(good, 1, lambda actions: actions.append(Action.parse("2F4")))
    with pytest.raises(UsageError, match=r"rank 1, step \d+: 2F4 belongs to rank 2; move it there"):
        validate(bad)


@pytest.mark.parametrize(
    ("early", "late"), [("1S2", "1C02"), ("1T2", "1C12"), ("1F1", "1RECV_F1"), ("1SEND_B0", "1B0")]
)
def test_an_action_before_what_it_needs_is_named(good, early, late):
    def swap(actions):
        i, j = at(early, actions), at(late, actions)
        actions[i], actions[j] = actions[j], actions[i]

    with pytest.raises(UsageError, match=rf"rank 1, step \d+: {early} needs {late}, which comes at step \d+; move it"):
        validate(edited(good, 1, swap))


def test_collectives_in_another_order_are_named_with_steps_and_ranks(good):
    def delay(actions):
        """Nothing on rank 2 waits for the last embedding, so only the order tells."""
        start = at("2CIF4", actions)
        following = next(n for n in range(start + 1, len(actions)) if actions[n].kind in COLLECTIVES)
        actions.insert(following, actions.pop(start))

    bad = edited(good, 2, delay)
    with pytest.raises(
        UsageError, match=r"in one order, but rank 2 has \w+ at step \d+ where rank 0 has 0CIF4 at step"
    ):
        validate(bad)


RENDEZVOUS = """by-hand head=last-stage microbatches=2 backward=whole stages=0,1
rank 0: 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1
rank 1: 1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1
"""
EAGER = """by-hand head=last-stage microbatches=2 backward=whole stages=0,1
rank 0: 0F0 0SEND_F0 0RECV_B0 0B0 0F1 0SEND_F1 0RECV_B1 0B1
rank 1: 1RECV_F0 1F0 1RECV_F1 1F1 1B0 1SEND_B0 1B1 1SEND_B1
"""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            RENDEZVOUS,
            "the schedule deadlocks under rendezvous sends: rank 0 stands at step 3 (0SEND_F1) and waits for rank 1; "
            "rank 1 stands at step 3 (1SEND_B0) and waits for rank 0. Put one of these actions earlier or later.",
        ),
        (
            EAGER,
            "the schedule deadlocks under eager sends: rank 0 stands at step 2 (0RECV_B0) and waits for rank 1; "
            "rank 1 stands at step 2 (1RECV_F1) and waits for rank 0. Put one of these actions earlier or later.",
        ),
    ],
)
def test_a_plan_edited_into_a_deadlock_is_refused_with_steps_and_ranks(text, message):
    with pytest.raises(UsageError) as caught:
        validate(Schedule.from_text(text))
    assert str(caught.value) == message


def runs_by_graph(schedule, sends):
    """Whether the lists can run, as a graph without cycles: an independent form of the same question."""

    def node(action):
        if action.kind in COLLECTIVES:
            return action.kind, action.microbatch
        other = peer(action)
        return frozenset((action, other)) if other is not None and sends == "rendezvous" else action

    graph = TopologicalSorter()
    for actions in schedule.ranks:
        for action in actions:
            graph.add(node(action))
            if sends == "eager" and action.kind in (Kind.RECV_F, Kind.RECV_B):
                graph.add(action, peer(action))
        for before, after in pairwise(actions):
            graph.add(node(after), node(before))
    try:
        graph.prepare()
    except CycleError:
        return False
    return True


def test_the_validator_agrees_with_the_graph_on_shuffled_lists(unit_costs):
    draw = random.Random(0)
    verdicts = {True: 0, False: 0}
    for _ in range(300):
        head = draw.choice([Head.LAST_STAGE, Head.VOCAB_2])
        schedule = one_f_one_b(num_ranks=3, num_microbatches=4, head=head, costs=unit_costs(3, 3, head))
        for _ in range(draw.randint(1, 4)):
            rank = draw.randrange(3)
            actions = list(schedule.ranks[rank])
            place, shift = draw.randrange(len(actions)), draw.randint(-4, 4)
            actions.insert(max(0, place + shift), actions.pop(place))
            schedule = replace(schedule, ranks=(*schedule.ranks[:rank], tuple(actions), *schedule.ranks[rank + 1 :]))
        try:
            validate(schedule)
        except UsageError as error:
            if "deadlocks" not in str(error):
                continue
            verdict = False
        else:
            verdict = True
        assert verdict == (runs_by_graph(schedule, "eager") and runs_by_graph(schedule, "rendezvous"))
        verdicts[verdict] += 1
    assert min(verdicts.values()) > 20


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_microbatches": 0}, "`microbatches` must be 1 or more, got 0"),
        ({"stage_ranks": (1, 0, 2)}, r"`stages` must begin with ranks 0, 1, 2, ... in order, got \(1, 0, 2\)"),
    ],
)
def test_a_header_that_fits_no_schedule_is_refused(good, change, message):
    with pytest.raises(UsageError, match=message):
        validate(replace(good, **change))


def test_an_edit_that_keeps_the_schedule_running_is_accepted(unit_costs):
    """Vocab-2's T may wait as long as one likes."""
    head = Head.VOCAB_2
    schedule = one_f_one_b(num_ranks=3, num_microbatches=5, head=head, costs=unit_costs(3, 3, head))
    validate(edited(schedule, 1, lambda actions: actions.append(actions.pop(at("1T0", actions)))))
