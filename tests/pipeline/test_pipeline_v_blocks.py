import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planish.errors import UsageError
from planish.pipeline.actions import Head, Kind
from planish.pipeline.costs import Costs
from planish.pipeline.memory import Buffer, in_flight, peak_counts
from planish.pipeline.simulate import simulate
from planish.pipeline.v_blocks import v_half, v_min
from planish.pipeline.validate import validate

BARRIERS = {Head.LAST_STAGE: 0, Head.VOCAB_2: 1, Head.VOCAB_1: 2, Head.NAIVE: 3}


def check_v_half(p, head, ratio, unit_costs):
    m = 4 * p
    costs = unit_costs(p, 2 * p, head, ratio)
    schedule = v_half(num_ranks=p, num_microbatches=m, head=head, costs=costs)
    validate(schedule)
    # Two half-stages make a stage: (p + 2) / 2 microbatches, and one more for each barrier, on every rank.
    assert in_flight(schedule) == (2 * ((p + 2) // 2 + BARRIERS[head]),) * p
    # A forward, an input half and a weight half on each of two half-stages; the block halves 1F1B's fill.
    fill, work = 0.5 * (p - 1) * 6, m * (6 + ratio * head.shared)
    assert simulate(schedule, costs).bubble <= fill / (work + fill) + 0.06


@pytest.mark.parametrize("ratio", [2.0])
@pytest.mark.parametrize("head", Head)
@pytest.mark.parametrize("p", [2, 3, 4, 5, 8])
def test_v_half_keeps_half_in_flight_on_every_rank(p, head, ratio, unit_costs):
    check_v_half(p, head, ratio, unit_costs)


@pytest.mark.slow
@pytest.mark.parametrize("ratio", [0.5, 1.0, 2.0, 4.0])
@pytest.mark.parametrize("head", Head)
@pytest.mark.parametrize("p", [*range(2, 17), 24, 31, 32])
def test_v_half_keeps_half_in_flight_on_every_rank_for_many_p(p, head, ratio, unit_costs):
    check_v_half(p, head, ratio, unit_costs)


@pytest.mark.parametrize("head", Head)
@pytest.mark.parametrize("p", [2, 3, 4, 6])
def test_v_min_keeps_a_third_in_flight(p, head, unit_costs):
    m = 4 * p
    costs = unit_costs(p, 2 * p, head, 1.0)
    schedule = v_min(num_ranks=p, num_microbatches=m, head=head, costs=costs)
    validate(schedule)
    assert max(in_flight(schedule)) == 2 * ((p + 4) // 3 + BARRIERS[head])
    fill, work = 2 / 3 * (p - 1) * 6, m * (6 + head.shared)
    assert simulate(schedule, costs).bubble <= fill / (work + fill) + 0.06


@pytest.mark.parametrize("generator", [v_half, v_min])
@pytest.mark.parametrize("head", [Head.VOCAB_1, Head.VOCAB_2])
def test_buffers_of_the_vocabulary_do_not_grow_with_microbatches(generator, head, unit_costs):
    costs = unit_costs(4, 8, head, 2.0, embedding=0.1)
    few, many = (peak_counts(generator(num_ranks=4, num_microbatches=m, head=head, costs=costs)) for m in (16, 32))
    assert all(more <= fewer for fewer, more in zip(few, many, strict=True))
    assert max(peak[Buffer.EMBEDDING] for peak in few) <= 2
    assert max(peak[Buffer.HIDDEN] for peak in few) <= 3


seconds = st.floats(0.01, 10, allow_nan=False)


@settings(deadline=None, max_examples=40)
@given(data=st.data(), p=st.integers(1, 5), head=st.sampled_from(list(Head)), m=st.integers(1, 12))
def test_in_flight_holds_whatever_each_stage_takes(data, p, head, m):
    stage = {kind: data.draw(st.lists(seconds, min_size=2 * p, max_size=2 * p)) for kind in (Kind.F, Kind.I, Kind.W)}
    vocabulary = {
        kind: data.draw(st.lists(seconds, min_size=p, max_size=p))
        for kind in (Kind.S, Kind.E, Kind.T, Kind.IF, Kind.IB)
    }
    costs = Costs(passes=stage | vocabulary, send=data.draw(seconds), collectives={Kind.C1: data.draw(seconds)})
    schedule = v_half(num_ranks=p, num_microbatches=m, head=head, costs=costs)
    validate(schedule)
    most = 2 * ((p + 2) // 2 + BARRIERS[head])
    assert max(in_flight(schedule)) <= min(2 * m, most)


@pytest.mark.parametrize("generator", [v_half, v_min])
def test_sizes_below_one_are_refused(generator, unit_costs):
    costs = unit_costs(2, 4, Head.VOCAB_1)
    for sizes in ({"num_ranks": 0, "num_microbatches": 1}, {"num_ranks": 1, "num_microbatches": 0}):
        with pytest.raises(UsageError, match=r"must be 1 or more, got 0"):
            generator(**sizes, head=Head.VOCAB_1, costs=costs)
