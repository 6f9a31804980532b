"""1F1B, plain or with the vocabulary layers shared by all ranks (modulo scheduling).

[Note: modulo scheduling] With a shared head every rank repeats one cycle, a microbatch later each time, of period
I = F + B + S + T + IF + IB, the largest over ranks (paper section 5.2). Backwards run down the ranks without a gap. On
each rank the forward directly follows a backward, so that a microbatch stays exactly one period longer on each rank
than on the one after it, and 1 + barriers periods on the last: p + 1 (Vocab-2), p + 2 (Vocab-1), p + 3 (naive) in
flight on the first, whatever S and T cost. The rest of the cycle belongs to S and T, apart from each other and in the
order that suits the rank: between the last forward and its backward the barriers leave windows as wide as a period, so
that each finds its place. IF rides behind S at least C_IF early, IB at least C_IB late (appendix C). Before its first
backward and after its last forward a rank runs whatever is ready, which changes no count.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import permutations

from planish.errors import UsageError
from planish.pipeline.actions import Action, Head, Kind
from planish.pipeline.costs import Costs
from planish.pipeline.periodic import Repeated, repeat
from planish.pipeline.schedule import Schedule, check_sizes
from planish.pipeline.simulate import simulate


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
    ranks = range(num_ranks)
    f, b, s, rows, rows_back = (costs.row(kind) for kind in (Kind.F, Kind.B, Kind.S, Kind.IF, Kind.IB))
    slots = {kind: list(costs.row(kind)) for kind in head.passes}
    slots[Kind.S] = [s[rank] + rows[rank] + rows_back[rank] for rank in ranks]
    period = max(f[rank] + b[rank] + sum(slot[rank] for slot in slots.values()) for rank in ranks)
    if period == 0:
        raise UsageError("`costs.passes` must not all be 0; give what the passes take.")

    last = num_ranks - 1
    backward = [0.0] * num_ranks
    for rank in reversed(range(last)):
        backward[rank] = backward[rank + 1] + b[rank + 1] + costs.send
    forward = [backward[rank] + b[rank] - (num_ranks - rank + len(head.barriers)) * period for rank in ranks]
    opens = _windows(forward[last] + f[last], backward[last], period, head, costs)
    starts = []
    for rank in ranks:
        own = {kind: slot[rank] for kind, slot in slots.items()}
        starts.append(_place(forward[rank] + f[rank], own, opens, period, head))

    # All ranks bring IF `early` periods before F of rank 0, and take IB `late` periods after its B.
    rows_end = [starts[rank][Kind.S] + s[rank] + rows[rank] for rank in ranks]
    early = _periods(max(rows_end) + costs.collective(Kind.CIF) - forward[0], period)
    late = _periods(backward[0] + b[0] + costs.collective(Kind.CIB) - min(rows_end), period)
    cycles = []
    for rank in ranks:
        passes = {Kind.IF: rows_end[rank] - rows[rank] - early * period, Kind.IB: rows_end[rank] + late * period}
        passes |= {**starts[rank], Kind.F: forward[rank], Kind.B: backward[rank]}
        cycles.append([Repeated(start, rank, kind) for kind, start in passes.items()])
    return cycles, period


def _windows(forward_end: float, backward: float, period: float, head: Head, costs: Costs) -> list[tuple[float, float]]:
    """Return when the window of each pass of the chain opens and closes, and Vocab-2's T its open end.

    A pass may start anywhere in a period, so a window is a period and the pass long; what the barriers between the last
    forward and its backward leave over, or lack, is divided evenly.
    """
    opens = forward_end + costs.collective(Kind.C0)
    chain = list(zip(head.passes, head.barriers, strict=False))
    lengths = [period + max(costs.row(kind)) for kind, _ in chain]
    spare = backward - opens - sum(lengths) - sum(costs.collective(barrier) for _, barrier in chain)
    windows = []
    for length, (_, barrier) in zip(lengths, chain, strict=True):
        closes = opens + length + spare / len(chain)
        windows.append((opens, closes))
        opens = closes + costs.collective(barrier)
    return [*windows, (opens, math.inf)]


def _place(
    free_at: float, slots: Mapping[Kind, float], windows: Sequence[tuple[float, float]], period: float, head: Head
) -> dict[Kind, float]:
    """Return the starts of one rank's vocabulary passes: of all orders the one that is least late, then earliest."""
    candidates = []
    for order in permutations(head.passes):
        phase, late, starts = free_at, 0.0, dict[Kind, float]()
        for kind in order:
            opens, closes = windows[head.passes.index(kind)]
            starts[kind] = phase + _periods(opens - phase, period) * period
            late += max(0.0, starts[kind] + slots[kind] - closes)
            phase += slots[kind]
        candidates.append((late, sum(starts.values()), starts))
    return min(candidates, key=lambda each: each[:2])[2]


def _periods(time: float, period: float) -> int:
    """Return the whole periods that cover `time`, forgiving the rounding of sums."""
    return math.ceil(time / period - 1e-9)
