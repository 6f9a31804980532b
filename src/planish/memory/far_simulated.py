"""Far memory that is not quite there: a slower link, a clock of its own, or nothing but the accounts."""

import time
from collections.abc import Iterable

import torch
from torch import Tensor

from planish.memory.far import FarTier
from planish.memory.lanes import Event, InlineLane, Medium, Span, ThreadLane, Transfer, note


class Throttled:
    """A medium behind a link of a given speed: real bytes, and sleep for the rest of the time they would take.

    Args:
        medium: Where the bytes lie.
        bytes_per_s: Speed of the link.
        latency_s: Time of an empty transfer.
    """

    def __init__(self, medium: Medium, *, bytes_per_s: float, latency_s: float = 0.0) -> None:
        self.capacity_bytes = medium.capacity_bytes
        self._medium = medium
        self._bytes_per_s = bytes_per_s
        self._latency_s = latency_s

    def store(self, offset: int, source: Tensor) -> None:
        """Copy, no faster than the link."""
        started = time.perf_counter()
        self._medium.store(offset, source)
        self._rest(started, source.nbytes)

    def load(self, offset: int, target: Tensor) -> None:
        """Copy back, no faster than the link."""
        started = time.perf_counter()
        self._medium.load(offset, target)
        self._rest(started, target.nbytes)

    def close(self) -> None:
        """Close the medium."""
        self._medium.close()

    def _rest(self, started: float, nbytes: int) -> None:
        left_s = self._latency_s + nbytes / self._bytes_per_s - (time.perf_counter() - started)
        if left_s > 0:
            time.sleep(left_s)


def throttled_tier(medium: Medium, *, bytes_per_s: float, latency_s: float = 0.0) -> FarTier:
    """Return `medium` behind a slower link, with a thread for each direction."""
    slow = Throttled(medium, bytes_per_s=bytes_per_s, latency_s=latency_s)
    return FarTier("throttled", slow, outward=ThreadLane("planish-slow-out"), inward=ThreadLane("planish-slow-in"))


class Clock:
    """Time that passes when it is told to.

    Attributes:
        now_s: Seconds since it began.
    """

    def __init__(self) -> None:
        self.now_s = 0.0

    def compute(self, seconds: float) -> None:
        """Let the caller be busy."""
        self.now_s += seconds


class VirtualLane:
    """Moves bytes at once and says by a clock when that would have been done: a list schedule of what is submitted."""

    def __init__(self, clock: Clock, *, bytes_per_s: float) -> None:
        self.busy_s = self.waited_s = 0.0
        self.seen: list[Span] | None = None
        self.clock = clock
        self._bytes_per_s = bytes_per_s
        self._free_s = 0.0

    def submit(self, transfer: Transfer, *, after: Iterable[Event] = ()) -> Event:
        """Move the bytes now; the lane is busy for the time the link would need."""
        starts = [self.clock.now_s, self._free_s]
        for event in after:
            assert isinstance(event, _VirtualEvent)
            starts.append(event.end_s)
        transfer.run()
        seconds = transfer.nbytes / self._bytes_per_s
        self.busy_s += seconds
        self._free_s = max(starts) + seconds
        note(self, max(starts), self._free_s)
        return _VirtualEvent(self, self._free_s)

    def close(self) -> None:
        """Nothing is left to do."""


class _VirtualEvent:
    def __init__(self, lane: VirtualLane, end_s: float) -> None:
        self._lane = lane
        self.end_s = end_s

    def wait(self) -> None:
        wait_s = max(0.0, self.end_s - self._lane.clock.now_s)
        self._lane.waited_s += wait_s
        self._lane.clock.compute(wait_s)


def simulated_tier(medium: Medium, clock: Clock, *, bytes_per_s: float) -> FarTier:
    """Return `medium` with lanes of virtual time, one each way."""
    outward, inward = (VirtualLane(clock, bytes_per_s=bytes_per_s) for _ in range(2))
    return FarTier("simulated", medium, outward=outward, inward=inward)


class Accounts:
    """A medium for fake tensors: slots and staging as the real one has them, no bytes.

    Args:
        capacity_bytes: What the real one would hold.
        staging_bytes: What the real one would keep on the device's side.
    """

    def __init__(self, capacity_bytes: int, *, staging_bytes: int = 0) -> None:
        self.capacity_bytes = capacity_bytes
        self._staging = torch.empty(staging_bytes, dtype=torch.uint8, device="cpu")

    def store(self, offset: int, source: Tensor) -> None:
        """Nothing moves."""

    def load(self, offset: int, target: Tensor) -> None:
        """Nothing moves."""

    def close(self) -> None:
        """Free the staging."""
        del self._staging


def dry_tier(name: str, capacity_bytes: int, *, staging_bytes: int = 0) -> FarTier:
    """Return the tier of a dry run."""
    medium = Accounts(capacity_bytes, staging_bytes=staging_bytes)
    return FarTier(name, medium, outward=InlineLane(), inward=InlineLane())
