"""Finds races between lanes without any race having to happen: every access is held to the order that events give."""

import weakref
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from planish.memory.far import FarTier
from planish.memory.lanes import Event, Lane, Span, Transfer

_CALLER = "caller"
_NEAR = "near memory"


@dataclass(frozen=True, slots=True)
class _Access:
    lane: str
    tick: int
    start: int
    stop: int
    writes: bool


class Journal:
    """Watches the lanes of a tier and lists every pair of conflicting accesses that nothing orders.

    [Note: happens before] Each lane, and the caller, counts its own accesses; each access carries, for every lane,
    how much of that lane surely came before it: what its own lane did, what the caller had done when it submitted
    the transfer, and what the transfers did that it was told to come after. Waiting for an event gives the caller
    the event's knowledge. Two accesses to overlapping bytes, one of them a write, are ordered if the later one knows
    of the earlier. That depends on the program alone, never on which thread was faster.

    The death of a tensor's storage counts as a write by the caller, since the allocator may then give its bytes to
    the next operation.

    Attributes:
        races: One sentence each.
    """

    def __init__(self) -> None:
        self.races: list[str] = []
        self._known: dict[str, dict[str, int]] = {_CALLER: {}}
        self._accesses: dict[str, list[_Access]] = {}
        self._watched: dict[int, weakref.finalize] = {}

    def watch(self, tier: FarTier) -> None:
        """Record what the lanes of `tier` do from now on."""
        tier.outward = _WatchedLane(self, tier.outward, f"{tier.name} out")
        tier.inward = _WatchedLane(self, tier.inward, f"{tier.name} in")

    def touch(self, tensor: Tensor, *, writes: bool) -> None:
        """Record an access by the caller."""
        self._access(_CALLER, _NEAR, tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, writes=writes)

    def submitted(self, lane: str, transfer: Transfer, after: Iterable["_WatchedEvent"]) -> dict[str, int]:
        """Record a transfer on `lane` and return what is known at its end."""
        known = self._known.setdefault(lane, {})
        for other in (self._known[_CALLER], *(event.known for event in after)):
            _learn(known, other)
        tensor, region = transfer.tensor, transfer.region
        start = tensor.data_ptr()
        self._access(lane, _NEAR, start, start + tensor.nbytes, writes=not transfer.outward)
        space = f"slab {id(transfer.medium)}"
        self._access(lane, space, region.offset, region.offset + tensor.nbytes, writes=transfer.outward)
        self._watch_death(tensor)
        return dict(known)

    def waited(self, known: dict[str, int]) -> None:
        """Record that the caller waited for an event."""
        _learn(self._known[_CALLER], known)

    def _watch_death(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, start = storage._cdata, storage.data_ptr()
        if key not in self._watched:
            self._watched[key] = weakref.finalize(storage, self._died, key, start, start + storage.nbytes())

    def _died(self, key: int, start: int, stop: int) -> None:
        del self._watched[key]
        self._access(_CALLER, _NEAR, start, stop, writes=True)

    def _access(self, lane: str, space: str, start: int, stop: int, *, writes: bool) -> None:
        known = self._known[lane]
        known[lane] = known.get(lane, 0) + 1
        now = _Access(lane, known[lane], start, stop, writes)
        accesses = self._accesses.setdefault(space, [])
        for before in accesses:
            overlap = before.start < stop and start < before.stop and (before.writes or writes)
            if overlap and known.get(before.lane, 0) < before.tick:
                self.races.append(f"{space} [{start}, {stop}): {_say(now)} is not ordered after {_say(before)}")
        accesses.append(now)


class _WatchedLane:
    def __init__(self, journal: Journal, lane: Lane, name: str) -> None:
        self._journal, self._lane, self._name = journal, lane, name
        self.seen: list[Span] | None = None

    @property
    def busy_s(self) -> float:
        return self._lane.busy_s

    @property
    def waited_s(self) -> float:
        return self._lane.waited_s

    def submit(self, transfer: Transfer, *, after: Iterable[Event] = ()) -> Event:
        events = [event for event in after if isinstance(event, _WatchedEvent)]
        known = self._journal.submitted(self._name, transfer, events)
        event = self._lane.submit(transfer, after=[each.event for each in events])
        return _WatchedEvent(self._journal, event, known)

    def close(self) -> None:
        self._lane.close()


class _WatchedEvent:
    def __init__(self, journal: Journal, event: Event, known: dict[str, int]) -> None:
        self.event, self.known = event, known
        self._journal = journal

    def wait(self) -> None:
        self.event.wait()
        self._journal.waited(self.known)


def _learn(known: dict[str, int], other: dict[str, int]) -> None:
    for lane, tick in other.items():
        known[lane] = max(known.get(lane, 0), tick)


def _say(access: _Access) -> str:
    return f"a {'write' if access.writes else 'read'} by {access.lane}"
