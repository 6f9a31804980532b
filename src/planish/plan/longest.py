"""The longest context that does: doubled until it does not, then halved in between."""

from collections.abc import Callable
from functools import cache


def longest(
    does: Callable[[int], bool], *, unit: int = 1, most: int, share: int | None = None, near: int = 1
) -> int | None:
    """Return the longest context for which `does`, as it does for every shorter one; None where it does for none.

    Args:
        does: A context in, whether it is short enough out.
        unit: It is a multiple of this.
        most: No longer one is tried, but for what doubling the unit makes of it.
        share: One that is within so small a part of itself (64: 1/64) of the longest is long enough; None: none other.
        near: The search begins here; it tells the same whatever this is.

    Example:
        >>> longest(lambda context: context <= 1000, most=2**20), longest(lambda context: False, most=2**20)
        (1000, None)
    """
    does = cache(does)
    high = unit << max(0, (min(near, most - 1) // unit).bit_length() - 1)
    while high > unit and not does(high):
        high //= 2
    low = 0
    while high < most and does(high):
        low, high = high, 2 * high
    while high - low > max(unit, low // share if share else 0):
        middle = (low + high) // (2 * unit) * unit
        low, high = (middle, high) if does(middle) else (low, middle)
    return low or None
