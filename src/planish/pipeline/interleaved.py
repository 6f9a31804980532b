"""Interleaved 1F1B: several stages per rank, in a loop over the ranks; head on the last stage."""

from planish.errors import UsageError
from planish.pipeline.actions import Action, Head, Kind
from planish.pipeline.costs import Costs
from planish.pipeline.schedule import Schedule, check_sizes
from planish.pipeline.simulate import simulate


def interleaved(*, num_ranks: int, num_microbatches: int, num_chunks: int, costs: Costs) -> Schedule:
    """Return interleaved 1F1B with its communication; stage s lives on rank s mod p.

    Microbatches go through in rounds of about p: a rank runs a round on its first stage, then on its next, and so on.
    The order is that of torch.distributed.pipelining's `ScheduleInterleaved1F1B`.

    Memory: on rank r, (chunks - 1) rounds and 2 (p - 1 - r) + 1 chunks in flight, each 1/chunks of a rank's layers.

    Args:
        num_ranks: Ranks p.
        num_microbatches: Microbatches of a step, a multiple of the rounds (num_microbatches // p, at least 1).
        num_chunks: Stages of each rank.
        costs: They order the communication.

    Raises:
        UsageError: Microbatches that do not divide into rounds.
    """
    check_sizes(num_ranks=num_ranks, num_microbatches=num_microbatches, num_chunks=num_chunks)
    rounds = max(1, num_microbatches // num_ranks)
    if num_microbatches % rounds:
        near = num_microbatches // rounds * rounds
        raise UsageError(
            f"`microbatches` ({num_microbatches}) must be a multiple of the rounds of interleaved 1F1B "
            f"(microbatches // ranks = {rounds}); try {near}."
        )
    per_round = num_microbatches // rounds
    ranks = []
    for rank in range(num_ranks):
        forward = [
            Action(chunk * num_ranks + rank, Kind.F, each * per_round + i)
            for each in range(rounds)
            for chunk in range(num_chunks)
            for i in range(per_round)
        ]
        backward = [
            Action((num_chunks - 1 - a.stage // num_ranks) * num_ranks + rank, Kind.B, a.microbatch) for a in forward
        ]
        warm = min(len(forward), (num_chunks - 1) * per_round + 2 * (num_ranks - 1 - rank))
        actions = forward[:warm]
        for i, action in enumerate(backward):
            actions += [*forward[warm + i : warm + i + 1], action]
        ranks.append(tuple(actions))
    order = Schedule(
        name="interleaved",
        head=Head.LAST_STAGE,
        num_microbatches=num_microbatches,
        stage_ranks=tuple(range(num_ranks)) * num_chunks,
        ranks=tuple(ranks),
    )
    return simulate(order, costs).lower()
