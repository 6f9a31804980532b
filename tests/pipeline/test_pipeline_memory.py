"""Memory by counting: by hand, against what every schedule must give back, and against plans edited to hide it."""

from collections import Counter
from dataclasses import replace

import pytest

from planish.pipeline.actions import Head, Kind
from planish.pipeline.interlaced import interlaced
from planish.pipeline.interleaved import interleaved
from planish.pipeline.memory import Buffer, Footprint, _changes, in_flight, peak_bytes, peak_counts
from planish.pipeline.one_f_one_b import one_f_one_b
from planish.pipeline.schedule import Schedule
from planish.pipeline.v_blocks import v_half, v_min
from planish.pipeline.validate import validate


def test_peak_bytes_of_two_ranks_by_hand(unit_costs):
    costs = unit_costs(2, 2, Head.LAST_STAGE)
    schedule = one_f_one_b(num_ranks=2, num_microbatches=3, head=Head.LAST_STAGE, costs=costs)
    assert [str(a) for a in schedule.ranks[1]][:6] == ["1RECV_F0", "1F0", "1RECV_F1", "1B0", "1SEND_B0", "1F1"]
    footprint = Footprint(static=[1000, 2000], activation=[100, 70], hidden=7)
    # Rank 0: two microbatches, the output of the second and a gradient just received. Rank 1: one, the gradient that it
    # makes, and the next one's hidden state.
    assert peak_bytes(schedule, footprint) == (1000 + 2 * 100 + 2 * 7, 2000 + 70 + 2 * 7)


@pytest.mark.parametrize("head", Head)
@pytest.mark.parametrize("p", [1, 2, 3])
def test_what_comes_to_life_ends_and_ends_once(p, head, unit_costs):
    m, costs = 2 * p + 2, unit_costs(p, 2 * p, head, embedding=0.1)
    sizes = {"num_ranks": p, "num_microbatches": m, "head": head, "costs": costs}
    schedules = [one_f_one_b(**sizes | {"costs": unit_costs(p, p, head)}), v_half(**sizes), v_min(**sizes)]
    if head is Head.VOCAB_1:
        schedules.append(interlaced(num_ranks=p, num_microbatches=m, costs=unit_costs(p, p, head)))
    if head is Head.LAST_STAGE:
        schedules.append(interleaved(num_ranks=p, num_microbatches=m // p * p, num_chunks=2, costs=costs))
    for schedule in schedules:
        for rank in range(p):
            live = Counter()
            for buffer, stage, change in _changes(schedule, rank):
                live[buffer, stage] += change
            # What is handed from stage to stage of one rank begins as one stage's and ends as the other's.
            totals = Counter()
            for (buffer, _), count in live.items():
                totals[buffer] += count
            assert not any(totals.values()), (schedule.name, rank, totals)


BY_HAND = """by-hand head=last-stage microbatches=3 backward=whole stages=0,1
rank 0: 0F0 0SEND_F0 0F1 0SEND_F1 0F2 0SEND_F2 0RECV_B0 0B0 0RECV_B1 0B1 0RECV_B2 0B2
rank 1: """


@pytest.mark.parametrize(
    ("rank_1", "activation", "result", "received"),
    [
        ("1RECV_F0 1F0 1RECV_F1 1F1 1RECV_F2 1F2 1B0 1SEND_B0 1B1 1SEND_B1 1B2 1SEND_B2", 3, 1, 1),
        ("1RECV_F0 1F0 1B0 1RECV_F1 1F1 1B1 1RECV_F2 1F2 1B2 1SEND_B0 1SEND_B1 1SEND_B2", 1, 3, 1),
        ("1RECV_F0 1RECV_F1 1RECV_F2 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1 1F2 1B2 1SEND_B2", 1, 1, 3),
    ],
    ids=["forwards run ahead", "gradients kept back", "hidden states fetched early"],
)
def test_whatever_an_edit_keeps_alive_is_counted(rank_1, activation, result, received):
    schedule = Schedule.from_text(BY_HAND + rank_1)
    validate(schedule)
    wanted = {Buffer.ACTIVATION: activation, Buffer.RESULT: result, Buffer.RECEIVED: received}
    assert peak_counts(schedule)[1] == wanted


@pytest.mark.parametrize(
    ("kind", "buffer"), [(Kind.T, Buffer.SOFTMAX), (Kind.T, Buffer.HIDDEN), (Kind.IB, Buffer.EMBEDDING_GRAD)]
)
def test_vocabulary_passes_put_off_to_the_end_are_counted(kind, buffer, unit_costs):
    """Vocab-2's T and every IB may wait: nobody waits for them, but their buffers grow with the microbatches."""
    m, costs = 9, unit_costs(3, 3, Head.VOCAB_2)
    schedule = one_f_one_b(num_ranks=3, num_microbatches=m, head=Head.VOCAB_2, costs=costs)
    assert peak_counts(schedule)[1][buffer] <= 3
    late = tuple(sorted(schedule.ranks[1], key=lambda action: action.kind is kind))
    edited = replace(schedule, ranks=(schedule.ranks[0], late, schedule.ranks[2]))
    validate(edited)
    assert peak_counts(edited)[1][buffer] == m


def test_stages_of_one_rank_hand_over_without_a_transfer(unit_costs):
    schedule = v_half(num_ranks=1, num_microbatches=1, head=Head.LAST_STAGE, costs=unit_costs(1, 2, Head.LAST_STAGE))
    assert [str(action) for action in schedule.ranks[0]] == ["0F0", "1F0", "1I0", "1W0", "0I0", "0W0"]
    assert peak_counts(schedule)[0] == {Buffer.ACTIVATION: 2, Buffer.RESULT: 1}
    assert in_flight(schedule) == (2,)
