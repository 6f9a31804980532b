"""The policy of offloading: the published budget sweep, and what is on the device at each moment."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planish.price.boundary import Boundaries, Depth, least_every

GIB = 2**30
# gpt-oss-20b on 8 GPUs: 557,056 tokens / 8 ranks x 2,880 x bfloat16, 47 boundaries (arXiv 2609.14306, section 3.3).
PAPER_BYTES = 557_056 // 8 * 2880 * 2


def in_forward(plan):
    """Return how many boundaries are on the device while each layer runs forward."""
    return [index + 1 - len(plan.away_in_forward(index)) for index in range(plan.num_boundaries)]


def in_backward(plan):
    return [index + 1 - len(plan.away_in_backward(index)) for index in range(plan.num_boundaries)]


@pytest.mark.parametrize(("budget", "expected"), [(0, 0), (8 * GIB, 21), (16 * GIB, 42), (2**50, 47)])
def test_the_published_budget_sweep(budget, expected):
    depth = Depth(num_boundaries=47, boundary_bytes=PAPER_BYTES)
    plan = Boundaries(num_boundaries=47, num_slots=budget // depth.slot_bytes, keep_last=0)
    assert plan.offloaded == tuple(range(expected))


def test_the_last_boundary_stays_unless_it_is_asked_to_go():
    assert Boundaries(num_boundaries=30, num_slots=100).offloaded == tuple(range(29))
    assert Boundaries(num_boundaries=1, num_slots=100).offloaded == ()


def test_with_room_for_all_the_device_holds_one_in_forward_and_two_in_backward():
    plan = Boundaries(num_boundaries=30, num_slots=30)
    assert in_forward(plan) == [1] * 30
    assert in_backward(plan) == [1] + [2] * 29


def test_without_room_it_is_plain_checkpointing():
    plan = Boundaries(num_boundaries=5, num_slots=0)
    assert in_forward(plan) == in_backward(plan) == [1, 2, 3, 4, 5]


def test_a_slow_link_takes_every_third():
    plan = Boundaries(num_boundaries=8, num_slots=9, every=3)
    assert plan.offloaded == (0, 3)  # 6 would have no third layer to hide behind
    assert in_forward(plan) == [1, 2, 3, 3, 4, 5, 5, 6]
    assert in_backward(plan) == [1, 2, 3, 4, 4, 5, 6, 6]


@given(st.integers(1, 12), st.integers(0, 12), st.integers(1, 4), st.integers(0, 3))
def test_offloading_holds_at_most_two_beyond_those_that_stay(num, slots, every, keep):
    plan = Boundaries(num_boundaries=num, num_slots=slots, every=every, keep_last=keep)
    kept = num - len(plan.offloaded)
    assert len(plan.offloaded) <= slots
    assert all(each <= kept + 1 for each in in_forward(plan))
    assert all(each <= min(index + 1, kept + 2) for index, each in enumerate(in_backward(plan)))


def test_how_far_apart_copies_must_be_to_hide():
    assert least_every(write_s=0.9, read_s=2.0, forward_s=1.0, backward_s=3.0) == 1
    assert least_every(write_s=2.1, read_s=2.0, forward_s=1.0, backward_s=3.0) == 3
    assert least_every(write_s=0.1, read_s=6.5, forward_s=1.0, backward_s=3.0) == 3
