"""V-Half and V-Min: two stages per rank in a V, a third to a half of 1F1B's activations, with or without vocabulary.

[Note: V blocks] Stage d and stage 2p - 1 - d live on rank d; first and last stage share rank 0. Forward, input half and
weight half of a stage take a slot each, six slots make a period, and a microbatch starts its four passes on rank d at
fixed slots (Controllable Memory, arXiv 2405.15362); weight halves take the two slots left free, and after the last
forward as late as the most that waited before allows.

[Note: slot insertion] All ranks run the vocabulary passes of a microbatch at the same border between two slots, which
shifts everything after it alike and so keeps the block whole (Vocabulary Parallelism, appendix D). Each barrier takes a
period more between the last forward and its backward: six slots, or one more microbatch in flight on each rank.
"""

import math
from dataclasses import replace

from planish.pipeline.actions import Action, Head, Kind
from planish.pipeline.costs import Costs
from planish.pipeline.periodic import Repeated, repeat
from planish.pipeline.schedule import Schedule, check_sizes
from planish.pipeline.simulate import simulate

PERIOD = 6


def v_half(*, num_ranks: int, num_microbatches: int, head: Head, costs: Costs) -> Schedule:
    """Return V-Half with its communication: half the activations of 1F1B, at equal costs of F, I and W.

    Memory: p + 2 half-stages (p + 1 for odd p) and 2 more per barrier on every rank.

    Args:
        num_ranks: Ranks p, two stages each.
        num_microbatches: Microbatches of a step.
        head: Where the vocabulary layers live.
        costs: They order what the block leaves open at both ends, and the communication.
    """
    check_sizes(num_ranks=num_ranks, num_microbatches=num_microbatches)
    p, gap = num_ranks, 3 if num_ranks % 2 == 0 else 0
    gap += PERIOD * len(head.barriers)
    slots = [(2 * d, 3 * p - d - 2, 3 * p + gap + 2 * d - 1, 6 * p + gap - d - 2) for d in range(p)]
    return _v_schedule("v-half", slots, num_microbatches, head, costs)


def v_min(*, num_ranks: int, num_microbatches: int, head: Head, costs: Costs) -> Schedule:
    """Return V-Min with its communication: a third of the activations of 1F1B, and larger bubbles than V-Half.

    See `v_half`.
    """
    check_sizes(num_ranks=num_ranks, num_microbatches=num_microbatches)
    p, gap = num_ranks, 2 if num_ranks % 3 == 0 else 0
    gap += PERIOD * len(head.barriers)
    slots = [(d, 2 * p - d - 1, 2 * p + gap + d, 4 * p + gap - d - 1) for d in range(p)]
    return _v_schedule("v-min", slots, num_microbatches, head, costs)


def _v_schedule(
    name: str, slots: list[tuple[int, int, int, int]], num_microbatches: int, head: Head, costs: Costs
) -> Schedule:
    num_ranks = len(slots)
    cycles = [[*_vocabulary(rank, slots[0], head), *_block(rank, num_ranks, own)] for rank, own in enumerate(slots)]
    order = Schedule(
        name=name,
        head=head,
        num_microbatches=num_microbatches,
        stage_ranks=(*range(num_ranks), *reversed(range(num_ranks))),
        split_backward=True,
        ranks=repeat(cycles, PERIOD, num_microbatches),
    )
    waiting = max(map(_most_waiting, order.ranks))
    order = replace(order, ranks=tuple(_weights_late(actions, waiting) for actions in order.ranks))
    return simulate(order, costs, flexible=True).lower()


def _block(rank: int, num_ranks: int, slots: tuple[int, int, int, int]) -> list[Repeated]:
    """Return the six passes of one microbatch on `rank`: four at their slots, the weight halves in the free ones."""
    near, far = rank, 2 * num_ranks - 1 - rank
    free = sorted(set(range(PERIOD)) - {slot % PERIOD for slot in slots})
    ways = [
        [_next_slot(backward + 1, phase) for backward, phase in zip(slots[2:], phases, strict=True)]
        for phases in (free, free[::-1])
    ]
    weights = min(ways, key=lambda way: (max(w - b for w, b in zip(way, slots[2:], strict=True)), sum(way)))
    passes = [(near, Kind.F), (far, Kind.F), (far, Kind.I), (near, Kind.I), (far, Kind.W), (near, Kind.W)]
    return [Repeated(slot, *each) for slot, each in zip((*slots, *weights), passes, strict=True)]


def _vocabulary(rank: int, first: tuple[int, int, int, int], head: Head) -> list[Repeated]:
    """Return the vocabulary passes of one microbatch, at the borders of slots that all ranks share.

    S comes one slot after the last forward on rank 0, each further pass a period later and before the next S; IF comes
    the fewest whole periods earlier that leave a slot before the first forward, IB likewise after the last backward.
    """
    if not head.shared:
        return []
    start, last_forward, _, last_backward = first
    border = last_forward + 2
    early = math.ceil((border + 1 - start) / PERIOD)
    late = math.ceil((last_backward + 2 - border) / PERIOD)
    later_first = reversed(list(enumerate(head.passes)))
    return [
        *(Repeated(border + n * PERIOD, rank, kind) for n, kind in later_first),
        Repeated(border - early * PERIOD, rank, Kind.IF),
        Repeated(border + late * PERIOD, rank, Kind.IB),
    ]


def _next_slot(slot: int, phase: int) -> int:
    return slot + (phase - slot) % PERIOD


def _last_forward(actions: tuple[Action, ...]) -> int:
    return max(step for step, each in enumerate(actions) if each.kind is Kind.F)


def _most_waiting(actions: tuple[Action, ...]) -> int:
    """Return the most weight halves that wait for their turn at once, up to the last forward."""
    waiting = most = 0
    for each in actions[: _last_forward(actions) + 1]:
        waiting += (each.kind is Kind.I) - (each.kind is Kind.W)
        most = max(most, waiting)
    return max(1, most)


def _weights_late(actions: tuple[Action, ...], most: int) -> tuple[Action, ...]:
    """Return the list with the weight halves after the last forward as late as they may be: nobody waits for them.

    What a checkpointed layer keeps for its weight half is many times its boundary, so that no more than `most` wait at
    once, on any rank, as while there are forwards.
    """
    stop = _last_forward(actions) + 1
    head, tail = actions[:stop], actions[stop:]
    weights = [each for each in tail if each.kind is Kind.W]
    waiting = sum((each.kind is Kind.I) - (each.kind is Kind.W) for each in head)
    late: list[Action] = []
    for each in tail:
        if each.kind is Kind.W:
            continue
        if each.kind is Kind.I and waiting == most:
            late.append(weights.pop(0))
            waiting -= 1
        waiting += each.kind is Kind.I
        late.append(each)
    return (*head, *late, *weights)
