"""1F1B, plain or with the vocabulary layers shared by all ranks (modulo scheduling).

[Note: modulo scheduling] With a shared head every rank repeats one cycle, a microbatch later each time, of period
I = F + B + S + T + IF + IB, the largest over ranks (paper section 5.2). Backwards run down the ranks without a gap. On
each rank the forward directly follows a backward, so that a microbatch stays exactly one period longer on each rank
than on the one after it, and 1 + barriers periods on the last: p + 1 (Vocab-2), p + 2 (Vocab-1), p + 3 (naive) in
flight on the first, whatever S and T cost. The rest of the cycle belongs to S and T, apart from each other and in the
order that suits the rank: between the last forward and its backward the barriers leave windows as wide as a period, so
that each finds its place. IF rides behind S at least C_IF early, IB at least C_IB late (appendix C).
"""

import math
from collections.abc import Mapping, Sequence
from itertools import permutations

from planish.pipeline.actions import Action, Head, Kind
from planish.pipeline.costs import Costs
from planish.pipeline.periodic import Repeated, repeat
from planish.pipeline.schedule import Schedule, check_sizes
from planish.pipeline.simulate import simulate

Starts = Mapping[Kind, float]


def one_f_one_b(*, num_ranks: int, num_microbatches: int, head: Head, costs: Costs) -> Schedule:
    """Return 1F1B with its communication.

    Memory: microbatches in flight on rank r are p - r + barriers, at most `num_microbatches`.

    Args:
        num_ranks: Ranks p, one stage each.
        num_microbatches: Microbatches of a step.
        head: Where the vocabulary layers live; the barriers of `head` are 0, 1 (Vocab-2), 2 (Vocab-1) or 3 (naive).
        costs: They place S and T, and order the communication.

    References: Vocabulary Parallelism, arXiv 2411.05288, sections 4 and 5, appendix C.
    """
    check_sizes(num_ranks=num_ranks, num_microbatches=num_microbatches)
    if head.shared:
        cycles, period = _cycles(num_ranks, head, costs)
        ranks = repeat(cycles, period, num_microbatches)
    else:
        ranks = tuple(_plain(rank, num_ranks, num_microbatches) for rank in range(num_ranks))
    order = Schedule(
        name="1f1b", head=head, num_microbatches=num_microbatches, stage_ranks=tuple(range(num_ranks)), ranks=ranks
    )
    return simulate(order, costs, flexible=head.shared).lower()


def _plain(rank: int, num_ranks: int, num_microbatches: int) -> tuple[Action, ...]:
    """Return p - r forwards, then a backward and a forward in turn."""
    warm = min(num_microbatches, num_ranks - rank)
    actions = [Action(rank, Kind.F, i) for i in range(warm)]
    for i in range(num_microbatches):
        actions.append(Action(rank, Kind.B, i))
        if warm + i < num_microbatches:
            actions.append(Action(rank, Kind.F, warm + i))
    return tuple(actions)


def _cycles(num_ranks: int, head: Head, costs: Costs) -> tuple[list[list[Repeated]], float]:
    """Return the starts of microbatch 0's passes on each rank, and the period. See [Note: modulo scheduling]."""
    seconds = costs.passes
    slots = {kind: list(seconds[kind]) for kind in head.passes}
    slots[Kind.S] = [sum(slot) for slot in zip(seconds[Kind.S], seconds[Kind.IF], seconds[Kind.IB], strict=True)]
    period = max(map(sum, zip(seconds[Kind.F], seconds[Kind.B], *slots.values(), strict=True)))

    last = num_ranks - 1
    backward = [0.0] * num_ranks
    for rank in reversed(range(last)):
        backward[rank] = backward[rank + 1] + seconds[Kind.B][rank + 1] + costs.send
    in_flight = [num_ranks - rank + len(head.barriers) for rank in range(num_ranks)]
    forward = [backward[rank] + seconds[Kind.B][rank] - in_flight[rank] * period for rank in range(num_ranks)]

    opens = _windows(forward[last] + seconds[Kind.F][last], backward[last], period, head, costs)
    shared = []
    for rank in range(num_ranks):
        free_at = forward[rank] + seconds[Kind.F][rank]
        own = {kind: slots[kind][rank] for kind in head.passes}
        shared.append(_place(free_at, own, opens, period, head, costs))

    rows_end = [starts[Kind.S] + seconds[Kind.S][r] + seconds[Kind.IF][r] for r, starts in enumerate(shared)]
    early = _periods(max(rows_end) + costs.collectives.get(Kind.CIF, 0.0) - forward[0], period)
    backward_end = backward[0] + seconds[Kind.B][0] + costs.collectives.get(Kind.CIB, 0.0)
    late = _periods(backward_end - min(rows_end), period)
    cycles = []
    for rank, starts in enumerate(shared):
        passes = {Kind.IF: starts[Kind.S] + seconds[Kind.S][rank] - early * period}
        passes |= {Kind.IB: rows_end[rank] + late * period, **starts, Kind.F: forward[rank], Kind.B: backward[rank]}
        cycles.append([Repeated(start, rank, kind) for kind, start in passes.items()])
    return cycles, period


def _windows(forward_end: float, backward: float, period: float, head: Head, costs: Costs) -> list[float]:
    """Return when the window of each pass of the chain opens, and the backward as the end of the last one.

    A pass may start anywhere in a period, so a window is a period, the pass and the barrier long; what the chain leaves
    over, or lacks, is divided evenly.
    """
    transfer = [costs.collectives.get(kind, 0.0) for kind in (Kind.C0, *head.barriers)]
    lengths = [period + max(costs.passes[kind]) for kind in head.passes[: len(head.barriers)]]
    begin = forward_end + transfer[0]
    spare = (backward - begin - sum(lengths) - sum(transfer[1:])) / len(lengths)
    opens = [begin]
    for length, barrier in zip(lengths, transfer[1:], strict=True):
        opens.append(opens[-1] + length + barrier + spare)
    return opens


def _place(
    free_at: float, slots: Mapping[Kind, float], opens: Sequence[float], period: float, head: Head, costs: Costs
) -> Starts:
    """Return the starts of one rank's vocabulary passes: of all orders the one that is least late, then earliest."""
    candidates = []
    for order in permutations(head.passes):
        phase, late, starts = free_at, 0.0, dict[Kind, float]()
        for kind in order:
            window = head.passes.index(kind)
            starts[kind] = phase + _periods(opens[window] - phase, period) * period
            if window < len(head.barriers):
                barrier = costs.collectives.get(head.barriers[window], 0.0)
                late += max(0.0, starts[kind] + slots[kind] + barrier - opens[window + 1])
            phase += slots[kind]
        candidates.append((late, sum(starts.values()), starts))
    return min(candidates, key=lambda each: each[:2])[2]


def _periods(time: float, period: float) -> int:
    """Return the whole periods that cover `time`, forgiving the rounding of sums."""
    return math.ceil(time / period - 1e-9)
