import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import _Action, _ComputationType

from planish.errors import UsageError
from planish.pipeline.actions import COLLECTIVES, Action, Head, Kind
from planish.pipeline.schedule import Schedule

actions = st.builds(Action, st.integers(0, 400), st.sampled_from(list(Kind)), st.integers(0, 4000))


@given(actions)
def test_an_action_is_read_back_as_it_was_printed(action):
    assert Action.parse(str(action)) == action


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind in {each.value for each in _ComputationType}])
def test_what_torch_also_knows_is_written_as_torch_writes_it(kind):
    assert str(Action(12, kind, 7)) == str(_Action(12, _ComputationType(kind.value), 7))
    assert _Action.from_str(str(Action(12, kind, 7))) == _Action(12, _ComputationType(kind.value), 7)


@pytest.mark.parametrize("word", ["", "F0", "2F", "2Q5", "2f0", "2F0 ", "-1F0", "2F0x", "2C412", "2UNSHARD"])
def test_what_is_no_action_is_refused_with_the_form(word):
    with pytest.raises(ValueError, match=r"is not an action; write \[stage\]\[kind\]\[microbatch\]"):
        Action.parse(word)


@pytest.mark.parametrize(("head", "barriers"), [("last-stage", 0), ("vocab-2", 1), ("vocab-1", 2), ("naive", 3)])
def test_the_chain_of_a_head_alternates_passes_and_barriers(head, barriers):
    head = Head(head)
    assert len(head.barriers) == barriers
    assert all((kind in COLLECTIVES) == (n % 2 == 0) for n, kind in enumerate(head.chain))
    assert set(head.passes) >= set(head.chain) - COLLECTIVES


@given(
    lists=st.lists(st.lists(actions, max_size=5), min_size=1, max_size=4),
    head=st.sampled_from(list(Head)),
    microbatches=st.integers(0, 9),
    split=st.booleans(),
    chunks=st.integers(1, 3),
)
def test_a_schedule_is_read_back_as_it_was_printed(lists, head, microbatches, split, chunks):
    schedule = Schedule(
        name="by-hand",
        head=head,
        num_microbatches=microbatches,
        stage_ranks=tuple(range(len(lists))) * chunks,
        split_backward=split,
        ranks=tuple(map(tuple, lists)),
    )
    assert Schedule.from_text(schedule.to_text()) == schedule


GOOD = (
    "1f1b head=last-stage microbatches=1 backward=whole stages=0,1\n"
    "rank 0: 0F0 0SEND_F0 0RECV_B0 0B0\nrank 1: 1RECV_F0 1F0 1B0 1SEND_B0\n"
)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("1F0", "1Q0", r"rank 1, step 1: '1Q0' is not an action"),
        ("1F0", "1F0,1B0", r"rank 1, step 1: '1F0,1B0' is not an action"),
        ("rank 1: ", "", r"the line of rank 1 begins with `rank 1:`, got '1RECV_F0"),
        ("rank 1: ", "rank 2: ", r"the line of rank 1 begins with `rank 1:`, got 'rank 2: "),
        ("head=last-stage", "head=first-stage", "a schedule begins with"),
        ("microbatches=1", "microbatches=x", "a schedule begins with"),
        ("stages=0,1", "stages=0,1,2", r"`stages` names ranks \[0, 1, 2\], but 2 ranks have a line"),
        ("stages=0,1", "stages=0,0", r"`stages` names ranks \[0\], but 2 ranks have a line"),
    ],
)
def test_text_that_is_no_schedule_is_refused_with_its_place(old, new, message):
    assert Schedule.from_text(GOOD).to_text() == GOOD
    with pytest.raises(UsageError, match=message):
        Schedule.from_text(GOOD.replace(old, new))


def test_empty_text_is_refused():
    with pytest.raises(UsageError, match="a schedule begins with"):
        Schedule.from_text("  \n")
