"""One slab of far memory, cut at launch into slots that are taken and given back: nothing grows afterwards."""

from planish.memory.lanes import Event
from planish.units import format_bytes

ALIGNMENT = 4096
"""Slots start and end on whole pages, as direct file access asks."""


class Region:
    """A range of a slab, with the last transfers on it, after which the next ones must come.

    Attributes:
        offset: Its first byte in the slab.
        nbytes: Its length, whole pages.
        last_write: The last transfer into it.
        last_read: The last transfer out of it.
    """

    __slots__ = ("last_read", "last_write", "nbytes", "offset")

    def __init__(self, offset: int, nbytes: int) -> None:
        self.offset = offset
        self.nbytes = nbytes
        self.last_write: Event | None = None
        self.last_read: Event | None = None


class Pool:
    """Equal slots of a slab; taking one and giving it back allocates nothing."""

    def __init__(self, regions: list[Region], slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self.num_slots = len(regions)
        self.most_in_use = 0
        self._free = regions[::-1]

    @property
    def in_use(self) -> int:
        """Slots taken now."""
        return self.num_slots - len(self._free)

    def acquire(self) -> Region | None:
        """Return a free slot, the one given back last first, or None."""
        if not self._free:
            return None
        region = self._free.pop()
        self.most_in_use = max(self.most_in_use, self.in_use)
        return region

    def release(self, region: Region) -> None:
        """Give a slot back; transfers still under way on it delay its next user, not the caller."""
        self._free.append(region)


class Slab:
    """Hands out the bytes of one far memory, once each."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0

    def cut(self, slot_bytes: int, num_slots: int) -> Pool:
        """Return a pool of `num_slots` slots that hold `slot_bytes` each.

        Raises:
            ValueError: More than is left.
        """
        padded = padded_bytes(slot_bytes)
        left = self.capacity_bytes - self.used_bytes
        if num_slots * padded > left:
            raise ValueError(
                f"`num_slots` = {num_slots} slots of {format_bytes(padded)} must fit in what is left of the slab, "
                f"{format_bytes(left)}."
            )
        start, self.used_bytes = self.used_bytes, self.used_bytes + num_slots * padded
        return Pool([Region(start + slot * padded, padded) for slot in range(num_slots)], slot_bytes)


def padded_bytes(nbytes: int) -> int:
    """Return the bytes of the whole pages that hold `nbytes`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
