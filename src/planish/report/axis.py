"""Axes: values to pixels, with ticks that people can read."""

import math
from dataclasses import dataclass
from typing import Self

from planish.report.record import Series

_BYTE_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """A linear scale.

    Attributes:
        low: The value at `start`.
        high: The value at `end`.
        start: Pixel of `low`; for a vertical axis it is the larger one.
        end: Pixel of `high`.
        ticks: (value, text) of each tick.
        unit: What the ticks count, such as "GiB".
    """

    low: float
    high: float
    start: float
    end: float
    ticks: tuple[tuple[float, str], ...]
    unit: str

    def at(self, value: float) -> float:
        """Return the pixel of `value`."""
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)

    @classmethod
    def of_bytes(cls, high_bytes: float, start: float, end: float, *, num_ticks: int = 5) -> Self:
        """Return an axis from zero to just above `high_bytes`, with ticks at powers of two and their multiples."""
        high = max(high_bytes * 1.04, 2.0**10)
        unit, scale = next((unit, scale) for unit, scale in _BYTE_UNITS if high >= scale)
        step = 2.0 ** math.ceil(math.log2(high / scale / num_ticks))
        ticks = tuple((index * step * scale, f"{index * step:g}") for index in range(int(high / scale / step) + 1))
        return cls(low=0.0, high=high, start=start, end=end, ticks=ticks, unit=unit)

    @classmethod
    def of_numbers(cls, low: float, high: float, start: float, end: float, *, unit: str, num_ticks: int = 5) -> Self:
        """Return an axis over low .. high with a little air above, and below unless `low` is zero."""
        air = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
        low, high = (low - air if low else 0.0), high + air
        return cls(low=low, high=high, start=start, end=end, ticks=_ticks(low, high, num_ticks), unit=unit)

    @classmethod
    def of_seconds(cls, high_s: float, start: float, end: float) -> Self:
        """Return an axis from zero to exactly `high_s`; a timeline is written to the microsecond."""
        high = max(high_s, 1e-6)
        return cls(low=0.0, high=high, start=start, end=end, ticks=_ticks(0.0, high, 6), unit="s")

    @classmethod
    def of_steps(cls, first: int, last: int, start: float, end: float, unit: str = "step") -> Self:
        """Return an axis over whole steps, or another unit."""
        low, high = (float(first), float(last)) if last > first else (first - 0.5, first + 0.5)
        ticks = _ticks(low, high, max(2, int((end - start) / 90)), least=1.0)
        return cls(low=low, high=high, start=start, end=end, ticks=ticks, unit=unit)


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """The points of a series that fall on one pixel column."""

    x: float
    low: float
    mean: float
    high: float


def columns(series: Series, x: Axis) -> list[Column]:
    """Return the series on the pixel grid of `x`: for each column the least, the mean and the largest value.

    Exactness: every extreme of the series is kept, however many points share a pixel.
    """
    found: dict[int, list[float]] = {}
    for step, value in series:
        found.setdefault(round(x.at(step)), []).append(value)
    return [
        Column(x=float(pixel), low=min(values), mean=math.fsum(values) / len(values), high=max(values))
        for pixel, values in sorted(found.items())
    ]


def _ticks(low: float, high: float, num_ticks: int, least: float = 0.0) -> tuple[tuple[float, str], ...]:
    """Return ticks at multiples of 1, 2 or 5 times a power of ten, no closer than `least`."""
    rough = max((high - low) / num_ticks, least)
    power = 10.0 ** math.floor(math.log10(rough))
    step = max(next(factor for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9)) * power, least)
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return tuple((index * step, f"{index * step:,.{decimals}f}") for index in range(first, last + 1))
