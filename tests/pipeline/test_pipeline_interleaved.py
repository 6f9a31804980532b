import pytest
from torch.distributed.pipelining.schedules import _get_1f1b_rank_ops

from planish.errors import UsageError
from planish.pipeline.actions import Head
from planish.pipeline.interleaved import interleaved
from planish.pipeline.memory import in_flight
from planish.pipeline.one_f_one_b import one_f_one_b
from planish.pipeline.simulate import simulate


def order_of_torch(rank, p, m, chunks):
    """The passes of one rank as ScheduleInterleaved1F1B orders them, from torch's own generator."""
    per_round = m // max(1, m // p)
    warm = min((chunks - 1) * per_round + 2 * (p - 1 - rank), m * chunks)
    steady = m * chunks - warm

    def forward(step):
        return (step // per_round) % chunks * p + rank

    def backward(step):
        return (chunks - 1 - (step - warm) // per_round % chunks) * p + rank

    ops = _get_1f1b_rank_ops(chunks, p, warm, steady, m * chunks - steady, rank, forward, backward)
    return [str(each) for each in ops if each is not None]


@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 4), (3, 6), (4, 4), (4, 16), (4, 2)])
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_the_order_is_that_of_torch(p, m, chunks, unit_costs):
    costs = unit_costs(p, p * chunks, Head.LAST_STAGE)
    schedule = interleaved(num_ranks=p, num_microbatches=m, num_chunks=chunks, costs=costs)
    for rank, passes in enumerate(schedule.passes().ranks):
        assert [str(action) for action in passes] == order_of_torch(rank, p, m, chunks)


@pytest.mark.parametrize("p", [2, 4, 8])
def test_more_chunks_shrink_the_bubble_and_keep_more_in_flight(p, unit_costs):
    m = 4 * p
    bubbles = []
    for chunks in (1, 2, 4):
        costs = unit_costs(p, p * chunks, Head.LAST_STAGE, transfer=0.0)
        schedule = interleaved(num_ranks=p, num_microbatches=m, num_chunks=chunks, costs=costs)
        bubbles.append(simulate(schedule, costs).bubble)
        assert in_flight(schedule)[0] == min(m * chunks, (chunks - 1) * p + 2 * (p - 1) + 1)
        # Narayanan et al. 2021: 1F1B's bubble divided by the chunks.
        assert bubbles[-1] == pytest.approx((p - 1) / (chunks * m + p - 1))
    plain = one_f_one_b(num_ranks=p, num_microbatches=m, head=Head.LAST_STAGE, costs=unit_costs(p, p, Head.LAST_STAGE))
    assert in_flight(plain)[0] == p


def test_microbatches_that_make_no_rounds_are_refused(unit_costs):
    with pytest.raises(UsageError, match=r"`microbatches` \(9\) must be a multiple of the rounds .* = 2\); try 8"):
        interleaved(num_ranks=4, num_microbatches=9, num_chunks=2, costs=unit_costs(4, 8, Head.LAST_STAGE))
    with pytest.raises(UsageError, match="`num_chunks` must be 1 or more, got 0"):
        interleaved(num_ranks=4, num_microbatches=8, num_chunks=0, costs=unit_costs(4, 8, Head.LAST_STAGE))
