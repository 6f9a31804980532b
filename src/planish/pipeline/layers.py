"""Layers on stages: balanced, or redistributed away from a last stage that also holds the head."""

from collections.abc import Sequence
from functools import cache
from itertools import accumulate

from planish.errors import UsageError


def balance(shares: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """Return the layers of each stage such that the largest stage is smallest, earlier stages no larger than need be.

    Args:
        shares: What each layer takes.
        num_stages: Stages, each of one layer or more.

    Raises:
        UsageError: Fewer layers than stages.

    Example:
        >>> balance([1, 1, 1, 1, 4, 4], 3)
        (4, 1, 1)
    """
    _check(len(shares), num_stages)
    sums = [0.0, *accumulate(shares)]

    @cache
    def best(stop: int, stages: int) -> tuple[float, tuple[int, ...]]:
        """Return the largest of `stages` stages over the first `stop` layers, and their layers."""
        if stages == 1:
            return sums[stop], (stop,)
        found = []
        for start in range(stages - 1, stop):
            largest, before = best(start, stages - 1)
            found.append((max(largest, sums[stop] - sums[start]), (*before, stop - start)))
        return min(found, key=lambda each: each[0])

    return best(len(shares), num_stages)[1]


def redistribute(num_layers: int, num_stages: int, head_layers: float = 0.0) -> tuple[int, ...]:
    """Return the layers of each stage such that the longest stage is shortest, the head counted on the last.

    The last stage takes as many as that allows, the others share the rest, later ones first. It may take none: a head
    of more layers than a stage cannot be balanced this way, and its memory stays where it is.

    Args:
        num_layers: Layers of the model.
        num_stages: Stages of the pipeline.
        head_layers: Time of the head, in layers; 0 where all ranks share it.

    Raises:
        UsageError: Fewer layers than stages.

    Example:
        >>> redistribute(32, 8), redistribute(32, 8, head_layers=2.3)
        ((4, 4, 4, 4, 4, 4, 4, 4), (4, 4, 4, 4, 4, 5, 5, 2))
    """
    _check(num_layers, num_stages)
    if num_stages == 1:
        return (num_layers,)
    others = num_stages - 1
    on_last = min(range(num_layers, -1, -1), key=lambda k: max(-(-(num_layers - k) // others), k + head_layers))
    share, more = divmod(num_layers - on_last, others)
    return (*(share + (stage >= others - more) for stage in range(others)), on_last)


def _check(num_layers: int, num_stages: int) -> None:
    if num_layers < num_stages:
        raise UsageError(
            f"`layers` ({num_layers}) must be at least the number of stages ({num_stages}); try {num_layers} stages."
        )
