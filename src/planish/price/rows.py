"""Rows of layers that repeat a pattern: of such a row both ends say all."""

from collections.abc import Hashable
from functools import lru_cache
from typing import NamedTuple

_LONGEST_PATTERN = 8


class Row(NamedTuple):
    """Layers inside of a repeating pattern: what is alive grows evenly there, so no peak lies inside.

    Attributes:
        start: The first of them.
        period: Layers of the pattern.
        times: How often it is there.
    """

    start: int
    period: int
    times: int


def stands_for(kinds: tuple[Hashable, ...], *, lag: int) -> list[int]:
    """Return for how many layers each stands: those of a row's first pattern for all of it, its others for none.

    Args:
        kinds: Layers that are alike have the same.
        lag: How many layers behind far memory is.
    """
    times = [1] * len(kinds)
    for row in rows(kinds, lag=lag):
        length = row.period * row.times
        times[row.start : row.start + length] = [row.times] * row.period + [0] * (length - row.period)
    return times


@lru_cache(maxsize=256)
def rows(kinds: tuple[Hashable, ...], *, lag: int) -> tuple[Row, ...]:
    """Return the rows; a pattern and `lag` more layers at either end are walked, for far memory is so many behind."""
    found, start = [], 0
    while start < len(kinds):
        tried = [_row_at(kinds, start, period, lag) for period in range(1, _LONGEST_PATTERN + 1)]
        row, stop = max(tried, key=lambda each: each[0].period * each[0].times)
        if row.times > 1:
            found.append(row)
        start = stop if row.times > 1 else start + 1
    return tuple(found)


def _row_at(kinds: tuple[Hashable, ...], start: int, period: int, lag: int) -> tuple[Row, int]:
    """Return the row of a pattern that begins at `start`, and where the pattern ends."""
    stop = min(start + period, len(kinds))
    while stop < len(kinds) and kinds[stop] == kinds[stop - period]:
        stop += 1
    edge = period + lag
    return Row(start + edge, period, max(0, stop - start - 2 * edge) // period), stop
