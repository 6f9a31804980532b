"""Candidates that are each taught a little, the worse half dropped, and so on: lessons change ranks.

Every round gives the same part of the tokens to those that are left, so each survivor learns on for twice as long.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from planish.compress.space import Architecture

MOST = 8
Teach = Callable[[Architecture, int], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entrant:
    """A candidate and how it fared.

    Attributes:
        name: How it was found.
        architecture: Its layers.
        before: Its divergence from the parent before any lesson.
        after: The same after its last one.
        steps: Lessons that it had.
        rank_before: Among all, the best is 1.
        rank_after: The order in which candidates were dropped, those of one round by their divergence.
    """

    name: str
    architecture: Architecture
    before: float
    after: float
    steps: int
    rank_before: int
    rank_after: int


def rounds_of(count: int, steps: int) -> list[tuple[int, int]]:
    """Return (candidates, steps that each has had at its end) of every round of a tournament of `count`.

    Args:
        count: Candidates.
        steps: Of all of them together.
    """
    rounds, alive, each = max(1, math.ceil(math.log2(count))), count, 0
    found = []
    for _ in range(rounds):
        each += steps // rounds // alive
        found.append((alive, each))
        alive = math.ceil(alive / 2)
    return found


def least_steps(count: int) -> int:
    """Return the steps with which every candidate has at least one lesson in the first round."""
    return count * max(1, math.ceil(math.log2(count)))


def compete(candidates: Mapping[str, Architecture], teach: Teach, steps: int) -> list[Entrant]:
    """Return the candidates, the winner first.

    Args:
        candidates: By how they were found, at least one, none twice.
        teach: Has a candidate learn until it has had so many steps, and returns its divergence from the parent then.
        steps: Of all candidates together.
    """
    before = {name: teach(each, 0) for name, each in candidates.items()}
    after, had, alive = dict(before), dict.fromkeys(before, 0), sorted(before, key=before.__getitem__)
    first, dropped = list(alive), []
    for count, done in rounds_of(len(alive), steps):
        alive = alive[:count]
        for name in alive:
            after[name], had[name] = teach(candidates[name], done), done
        alive.sort(key=after.__getitem__)
        kept = math.ceil(len(alive) / 2)
        alive, dropped = alive[:kept], alive[kept:] + dropped
    ranked = alive + dropped
    return [
        Entrant(
            name=name,
            architecture=candidates[name],
            before=before[name],
            after=after[name],
            steps=had[name],
            rank_before=first.index(name) + 1,
            rank_after=place + 1,
        )
        for place, name in enumerate(ranked)
    ]
