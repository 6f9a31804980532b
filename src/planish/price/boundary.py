"""What boundaries weigh: which of them go to far memory, how many are on the device when, and whether copies hide."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil
from typing import Self

from planish.shapes import AttentionShape

PAGE_BYTES = 4096
"""Slots of far memory are whole pages."""


def slot_bytes(boundary_bytes: int) -> int:
    """Return what one boundary takes in far memory."""
    return ceil(boundary_bytes / PAGE_BYTES) * PAGE_BYTES


def kept_bytes(attention: AttentionShape, tokens: int, itemsize: int) -> tuple[int, int]:
    """Return the bytes of attention's output and of its lse, which a layer keeps so as not to compute them again."""
    rows = tokens * attention.num_heads
    return rows * attention.v_width * itemsize, rows * max(4, itemsize)


@dataclass(frozen=True, slots=True, kw_only=True)
class Depth:
    """What a checkpointed model carries from forward to backward.

    Attributes:
        num_boundaries: Checkpointed layers.
        boundary_bytes: The largest input of one: rows x tokens x width x item size.
        kept_bytes: What a layer may keep besides, so as not to compute it again: attention's output, then its lse.
        in_flight: Microbatches between their forward and their backward at once.
    """

    num_boundaries: int
    boundary_bytes: int
    kept_bytes: tuple[int, ...] = ()
    in_flight: int = 1

    @classmethod
    def of(
        cls, *, num_boundaries: int, tokens: int, width: int, itemsize: int, kept: Iterable[AttentionShape] = ()
    ) -> Self:
        """Return what a model carries for `tokens` tokens `width` numbers wide, with what `kept` attention leaves."""
        largest = tuple(map(max, zip(*(kept_bytes(each, tokens, itemsize) for each in kept), strict=True)))
        return cls(num_boundaries=num_boundaries, boundary_bytes=tokens * width * itemsize, kept_bytes=largest)

    @property
    def slot_bytes(self) -> int:
        """What one layer takes in far memory."""
        return sum(map(slot_bytes, (self.boundary_bytes, *self.kept_bytes)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundaries:
    """The boundaries of one microbatch, numbered in forward order, and which of them are offloaded.

    The first ones go, since they live longest, until the slots are taken. The last ones stay: they are needed first.

    [Note: when a boundary is on the device] One that stays: from its layer's forward to the end of its backward. One
    that goes: from its layer's forward until `every` layers later, the time to copy it; and again from `every` layers
    ahead of its own recomputation to the end of its backward. So besides those that stay, the device holds one in
    forward and at most two in backward.

    Attributes:
        num_boundaries: How many, one for each checkpointed layer.
        num_slots: How many far memory holds.
        every: Every how many-th goes, for a link that needs so many layers' time for one copy.
        keep_last: How many of the last stay, times `every`.
    """

    num_boundaries: int
    num_slots: int
    every: int = 1
    keep_last: int = 1

    def goes(self, index: int) -> bool:
        """Return whether boundary `index` is offloaded."""
        return index < self._end and index % self.every == 0

    @property
    def offloaded(self) -> tuple[int, ...]:
        """The boundaries that are offloaded."""
        return tuple(range(0, self._end, self.every))

    @property
    def _end(self) -> int:
        """Number of the first boundary of which, and of all after it, none is offloaded."""
        return max(0, min(self.num_slots * self.every, self.num_boundaries - self.keep_last * self.every))

    def away_in_forward(self, index: int) -> list[int]:
        """Return which are in far memory alone while layer `index` runs forward; after the last, the head runs so."""
        return self._away(index, self.every - 1)

    def away_in_backward(self, index: int) -> list[int]:
        """Return which are in far memory alone while layer `index` runs again and backward."""
        return self._away(index, self.every)

    def _away(self, index: int, distance: int) -> list[int]:
        """Return those that go before `index`, but for one that is at most `distance` layers before it."""
        gone = list(range(0, min(index, self._end), self.every))
        return gone[:-1] if gone and index - gone[-1] <= distance else gone


def least_every(*, write_s: float, read_s: float, forward_s: float, backward_s: float) -> int:
    """Return every how many-th boundary may go for its copies to hide behind the layers.

    Args:
        write_s: Time to copy one boundary out.
        read_s: Time to fetch it.
        forward_s: Time of one layer's forward.
        backward_s: Time of one layer's recomputation and backward.
    """
    return max(1, ceil(write_s / forward_s), ceil(read_s / backward_s))
