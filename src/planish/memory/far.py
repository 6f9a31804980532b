"""Far memory: bytes beside the device's own, written and read along two lanes, ordered by the regions themselves."""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from planish.memory.lanes import Event, Lane, Medium, Transfer, mark
from planish.memory.slab import Region, Slab


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What one lane has carried since it was made.

    Attributes:
        nbytes: Bytes moved.
        busy_s: Seconds spent on them; 0 where a device keeps its own time.
        waited_s: Seconds that someone waited for them.
    """

    nbytes: int = 0
    busy_s: float = 0.0
    waited_s: float = 0.0


class FarTier:
    """A medium, the slab that divides it, and one lane each way.

    Hazards are this class's business: a write comes after the last read and write of its region, a read after its
    last write, on whatever lane. Callers see to the near side: a source must live until its write is done, a target
    is filled once its read is.

    Memory:        everything is allocated by the medium and the lanes when they are made; nothing afterwards.
    Exactness:     bytes come back as they went.

    Args:
        name: As the user calls it.
        medium: Where the bytes lie.
        outward: Lane of writes.
        inward: Lane of reads.
    """

    def __init__(self, name: str, medium: Medium, *, outward: Lane, inward: Lane) -> None:
        self.name = name
        self.medium = medium
        self.slab = Slab(medium.capacity_bytes)
        self.outward = outward
        self.inward = inward
        self.written_bytes = 0
        self.read_bytes = 0

    def write(self, region: Region, source: Tensor) -> Event:
        """Begin to copy a contiguous tensor into `region`."""
        after = [event for event in (region.last_write, region.last_read) if event is not None]
        transfer = Transfer(medium=self.medium, region=region, tensor=source, outward=True, ready=mark(source))
        region.last_write = self.outward.submit(transfer, after=after)
        self.written_bytes += source.nbytes
        return region.last_write

    def read(self, region: Region, target: Tensor, *, after: Iterable[Event] = ()) -> Event:
        """Begin to fill a contiguous tensor from `region`, after those transfers of this tier that `after` names."""
        after = [*after] if region.last_write is None else [*after, region.last_write]
        transfer = Transfer(medium=self.medium, region=region, tensor=target, outward=False, ready=mark(target))
        region.last_read = self.inward.submit(transfer, after=after)
        self.read_bytes += target.nbytes
        return region.last_read

    @property
    def lanes(self) -> dict[str, Lane]:
        """Both lanes, by name."""
        return {f"{self.name}-out": self.outward, f"{self.name}-in": self.inward}

    @property
    def traffic(self) -> dict[str, Traffic]:
        """What each lane did, by its name."""
        return {
            name: Traffic(nbytes=nbytes, busy_s=lane.busy_s, waited_s=lane.waited_s)
            for (name, lane), nbytes in zip(self.lanes.items(), (self.written_bytes, self.read_bytes), strict=True)
        }

    @property
    def hidden_fraction(self) -> float | None:
        """How much of the lanes' time nobody waited for; None before the first transfer and on device streams."""
        busy_s = self.outward.busy_s + self.inward.busy_s
        waited_s = self.outward.waited_s + self.inward.waited_s
        return max(0.0, 1.0 - waited_s / busy_s) if busy_s else None

    def close(self) -> None:
        """Finish what is under way and give everything back."""
        self.outward.close()
        self.inward.close()
        self.medium.close()
