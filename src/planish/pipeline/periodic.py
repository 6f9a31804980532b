"""Repetition: the passes of one microbatch, shifted by a period for each further one, give the list of a rank."""

from collections.abc import Sequence
from typing import NamedTuple

from planish.pipeline.actions import Action, Kind


class Repeated(NamedTuple):
    """When microbatch 0 runs a pass; microbatch i runs it i periods later."""

    start: float
    stage: int
    kind: Kind


def repeat(
    cycles: Sequence[Sequence[Repeated]], period: float, num_microbatches: int
) -> tuple[tuple[Action, ...], ...]:
    """Return each rank's passes in order of their start; those that start together keep the order of the cycle."""
    ranks = []
    for cycle in cycles:
        timed = [
            (round(start / period + i, 9), Action(stage, kind, i))
            for start, stage, kind in cycle
            for i in range(num_microbatches)
        ]
        timed.sort(key=lambda each: each[0])
        ranks.append(tuple(action for _, action in timed))
    return tuple(ranks)
