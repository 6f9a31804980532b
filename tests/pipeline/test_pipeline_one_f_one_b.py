import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planish.errors import UsageError
from planish.pipeline.actions import Head, Kind
from planish.pipeline.costs import Costs
from planish.pipeline.interlaced import interlaced
from planish.pipeline.memory import Buffer, in_flight, peak_counts
from planish.pipeline.one_f_one_b import one_f_one_b
from planish.pipeline.simulate import simulate
from planish.pipeline.validate import validate

SHARED = [Head.VOCAB_2, Head.VOCAB_1, Head.NAIVE]
RATIOS = [0.25, 0.5, 1.0, 2.0, 6.0]  # S + T over F; the last one is twice F + B


def check_counts_and_bubble(p, head, ratio, unit_costs):
    """In flight exactly p + barriers on rank 0 and one less on each further rank; bubble near the fill bound."""
    m = 4 * p
    costs = unit_costs(p, p, head, ratio)
    schedule = one_f_one_b(num_ranks=p, num_microbatches=m, head=head, costs=costs)
    validate(schedule)
    assert in_flight(schedule) == tuple(p - rank + len(head.barriers) for rank in range(p))
    fill, work = 3.0 * (p - 1), m * (3.0 + ratio)
    assert simulate(schedule, costs).bubble <= fill / (work + fill) + 0.06


@pytest.mark.parametrize("ratio", [0.25, 2.0])
@pytest.mark.parametrize("head", SHARED)
@pytest.mark.parametrize("p", [2, 3, 4, 7, 8])
def test_in_flight_is_exact_and_the_bubble_near_the_fill_bound(p, head, ratio, unit_costs):
    check_counts_and_bubble(p, head, ratio, unit_costs)


@pytest.mark.slow
@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("head", SHARED)
@pytest.mark.parametrize("p", [*range(2, 17), 24, 31, 32])
def test_in_flight_is_exact_and_the_bubble_near_the_fill_bound_for_many_p(p, head, ratio, unit_costs):
    check_counts_and_bubble(p, head, ratio, unit_costs)


@pytest.mark.parametrize("p", [1, 2, 4, 8])
def test_plain_1f1b_keeps_p_minus_r_in_flight(p, unit_costs):
    costs = unit_costs(p, p, Head.LAST_STAGE)
    for m in (1, 3, 2 * p):
        schedule = one_f_one_b(num_ranks=p, num_microbatches=m, head=Head.LAST_STAGE, costs=costs)
        assert in_flight(schedule) == tuple(min(m, p - rank) for rank in range(p))


seconds = st.floats(0.01, 10, allow_nan=False)


@settings(deadline=None, max_examples=60)
@given(data=st.data(), p=st.integers(1, 6), head=st.sampled_from(SHARED), m=st.integers(1, 14))
def test_in_flight_holds_whatever_each_rank_takes(data, p, head, m):
    kinds = (Kind.F, Kind.B, Kind.S, Kind.E, Kind.T, Kind.IF, Kind.IB)
    passes = {kind: data.draw(st.lists(seconds, min_size=p, max_size=p)) for kind in kinds}
    transfers = {kind: data.draw(seconds) for kind in (Kind.C0, Kind.C1, Kind.C2, Kind.C3, Kind.CIF, Kind.CIB)}
    costs = Costs(passes=passes, send=data.draw(seconds), collectives=transfers)
    schedule = one_f_one_b(num_ranks=p, num_microbatches=m, head=head, costs=costs)
    validate(schedule)
    assert in_flight(schedule) == tuple(min(m, p - rank + len(head.barriers)) for rank in range(p))


@pytest.mark.parametrize("head", SHARED)
@pytest.mark.parametrize("p", [1, 2, 4, 8])
@pytest.mark.parametrize("ratio", [0.25, 2.0])
def test_buffers_of_the_vocabulary_do_not_grow_with_ranks_or_microbatches(p, head, ratio, unit_costs):
    costs = unit_costs(p, p, head, ratio, embedding=0.1)
    few, many = (
        peak_counts(one_f_one_b(num_ranks=p, num_microbatches=m, head=head, costs=costs))
        for m in (3 * p + 6, 6 * p + 12)
    )
    assert all(more <= fewer for fewer, more in zip(few, many, strict=True))
    assert max(peak[Buffer.EMBEDDING] for peak in few) <= 2
    # A window of a period for each pass between C0 and the end of T, and one microbatch that is just coming.
    assert max(peak[Buffer.SOFTMAX] for peak in few) <= len(head.passes)
    assert max(peak[Buffer.HIDDEN] for peak in few) <= 1 + len(head.passes)


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8, 16])
def test_interlaced_keeps_half_as_many_again_in_flight(p, unit_costs):
    costs = unit_costs(p, p, Head.VOCAB_1)
    schedule = interlaced(num_ranks=p, num_microbatches=4 * p, costs=costs)
    validate(schedule)
    assert in_flight(schedule)[0] == p + (p - 1) // 2 + 1
    if p % 2 == 0:
        assert in_flight(schedule)[0] == 3 * p // 2


@pytest.mark.parametrize(("name", "value"), [("num_ranks", 0), ("num_microbatches", 0), ("num_ranks", -3)])
def test_sizes_below_one_are_refused(name, value, unit_costs):
    sizes = {"num_ranks": 2, "num_microbatches": 4} | {name: value}
    costs = unit_costs(2, 2, Head.VOCAB_1)
    for head in (Head.LAST_STAGE, Head.VOCAB_1):
        with pytest.raises(UsageError, match=f"`{name}` must be 1 or more, got {value}"):
            one_f_one_b(**sizes, head=head, costs=costs)
    with pytest.raises(UsageError, match=f"`{name}` must be 1 or more, got {value}"):
        interlaced(**sizes, costs=costs)
