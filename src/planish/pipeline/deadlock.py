"""The sentence for ranks that wait for one another: each with its step, what stands there, and whom it waits for."""

from collections.abc import Mapping
from typing import NamedTuple

from planish.errors import UsageError
from planish.pipeline.actions import Action


class Wait(NamedTuple):
    """Where a rank stands still, and the rank it waits for (itself, if what it needs comes later in its list)."""

    step: int
    action: Action
    rank: int


def deadlock(waits: Mapping[int, Wait], how: str = "") -> UsageError:
    """Return the error for a set of waiting ranks, reduced to one cycle.

    Args:
        waits: Every rank that stands still.
        how: Under which circumstances, such as " under rendezvous sends".
    """
    rank, seen = min(waits), list[int]()
    while rank not in seen and rank in waits:
        seen.append(rank)
        rank = waits[rank].rank
    cycle = seen[seen.index(rank) :] if rank in seen else seen
    links = [
        f"rank {r} stands at step {waits[r].step} ({waits[r].action}) and waits for "
        + (f"rank {waits[r].rank}" if waits[r].rank != r else "a later step of its own")
        for r in cycle
    ]
    return UsageError(f"the schedule deadlocks{how}: {'; '.join(links)}. Put one of these actions earlier or later.")
