"""Lanes along which bytes move beside the computation, and events that say when: inline, threads, device streams."""

import queue
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

if TYPE_CHECKING:
    from planish.memory.slab import Region


Span = tuple[float, float]
"""When something began and when it was over, in seconds of `time.perf_counter`."""


class Medium(Protocol):
    """Where far bytes lie; `store` and `load` move one contiguous tensor, in the lane that calls them."""

    capacity_bytes: int

    def store(self, offset: int, source: Tensor) -> None:
        """Copy `source` to the bytes from `offset` on."""
        ...

    def load(self, offset: int, target: Tensor) -> None:
        """Fill `target` from the bytes from `offset` on."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One copy between a tensor and a region of a medium.

    Attributes:
        medium: The far side.
        region: Its bytes.
        tensor: The near side.
        outward: From the tensor into the region; otherwise back.
        ready: What the device had been asked to do before; None where that is done.
    """

    medium: Medium
    region: "Region"
    tensor: Tensor
    outward: bool
    ready: torch.Event | None

    @property
    def nbytes(self) -> int:
        """Bytes that move."""
        return self.tensor.nbytes

    def run(self) -> None:
        """Copy."""
        move = self.medium.store if self.outward else self.medium.load
        move(self.region.offset, self.tensor)


class Event(Protocol):
    """A transfer's end."""

    def wait(self) -> None:
        """Let what the caller does next come after the transfer; raise what the transfer raised."""
        ...


class Lane(Protocol):
    """Does transfers one after another, beside the caller.

    Attributes:
        busy_s: Seconds spent on transfers; 0 where a device keeps its own time.
        waited_s: Seconds that callers spent waiting for them.
        seen: When each transfer ran, while someone wants to know; else None. A device's streams do not say.
    """

    busy_s: float
    waited_s: float
    seen: list[Span] | None

    def submit(self, transfer: Transfer, *, after: Iterable[Event] = ()) -> Event:
        """Begin `transfer` once those before it and `after` are done, and after what the caller did so far."""
        ...

    def close(self) -> None:
        """Finish what was submitted and end."""
        ...


class InlineLane:
    """Does each transfer at once, in the caller."""

    def __init__(self) -> None:
        self.busy_s = self.waited_s = 0.0
        self.seen: list[Span] | None = None

    def submit(self, transfer: Transfer, *, after: Iterable[Event] = ()) -> Event:
        """Do it now."""
        for event in after:
            event.wait()
        started = time.perf_counter()
        transfer.run()
        seconds = time.perf_counter() - started
        self.busy_s += seconds
        self.waited_s += seconds
        note(self, started, started + seconds)
        return _DONE

    def close(self) -> None:
        """Nothing is left to do."""


class _Done:
    def wait(self) -> None:
        """It is done."""


_DONE = _Done()


class ThreadLane:
    """Does transfers in a thread of its own, in order; the caller goes on.

    [Note: who holds the tensor] A pending transfer holds its tensor and lets go before its event is set. So whoever
    waits and then drops the tensor frees it in that very thread, and nobody can free it too early.
    """

    def __init__(self, name: str) -> None:
        self.busy_s = self.waited_s = 0.0
        self.seen: list[Span] | None = None
        self._queue: queue.SimpleQueue[_ThreadEvent | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, transfer: Transfer, *, after: Iterable[Event] = ()) -> Event:
        """Queue it."""
        event = _ThreadEvent(self, transfer, tuple(after))
        self._queue.put(event)
        return event

    def close(self) -> None:
        """Finish the queue and end the thread."""
        self._queue.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (event := self._queue.get()) is not None:
            event.run()
            del event


class _ThreadEvent:
    def __init__(self, lane: ThreadLane, transfer: Transfer, after: tuple[Event, ...]) -> None:
        self._lane = lane
        self._work: tuple[Transfer, tuple[Event, ...]] | None = (transfer, after)
        self._error: Exception | None = None
        self._done = threading.Event()

    def run(self) -> None:
        assert self._work is not None
        transfer, after = self._work
        try:
            for event in after:
                assert isinstance(event, _ThreadEvent)
                event.result()
            if transfer.ready is not None:
                transfer.ready.synchronize()
            started = time.perf_counter()
            transfer.run()
            ended = time.perf_counter()
            self._lane.busy_s += ended - started
            note(self._lane, started, ended)
        except Exception as error:
            self._error = error  # raised where someone waits
        self._work = None
        del transfer, after
        self._done.set()

    def wait(self) -> None:
        started = time.perf_counter()
        try:
            self.result()
        finally:
            self._lane.waited_s += time.perf_counter() - started

    def result(self) -> None:
        self._done.wait()
        if self._error is not None:
            raise self._error


class StreamLane:
    """Does transfers on a device stream of its own; waiting orders the device's work, the host goes on.

    [Note: no record_stream] A tensor that a stream still reads or writes must not be freed for others. Whoever waits
    may drop it, since the allocator then reuses it in the waiting stream's order; an event that nobody waits for
    holds its tensor until the device is past it.
    """

    def __init__(self, device: torch.device) -> None:
        self.busy_s = self.waited_s = 0.0
        self.seen: list[Span] | None = None
        self._stream = torch.Stream(device)
        self._pending: deque[_StreamEvent] = deque()

    def submit(self, transfer: Transfer, *, after: Iterable[Event] = ()) -> Event:
        """Enqueue it."""
        while self._pending and (self._pending[0].transfer is None or self._pending[0].raw.query()):
            self._pending.popleft().transfer = None
        if transfer.ready is not None:
            self._stream.wait_event(transfer.ready)
        for event in after:
            assert isinstance(event, _StreamEvent)
            self._stream.wait_event(event.raw)
        with self._stream:
            transfer.run()
        event = _StreamEvent(self._stream.record_event(), transfer)
        self._pending.append(event)
        return event

    def close(self) -> None:
        """Wait for the stream."""
        self._stream.synchronize()
        self._pending.clear()


class _StreamEvent:
    def __init__(self, raw: torch.Event, transfer: Transfer) -> None:
        self.raw = raw
        self.transfer: Transfer | None = transfer

    def wait(self) -> None:
        if self.transfer is not None:
            torch.accelerator.current_stream(self.transfer.tensor.device).wait_event(self.raw)
            self.transfer = None


def note(lane: Lane, start_s: float, end_s: float) -> None:
    """Say that `lane` was at work from `start_s` to `end_s`, where someone wants to know."""
    seen = lane.seen
    if seen is not None:
        seen.append((start_s, end_s))


def mark(tensor: Tensor) -> torch.Event | None:
    """Return an event after everything asked so far of the device that holds `tensor`; None where nothing is asked."""
    if tensor.device.type == "cpu" or isinstance(tensor, FakeTensor):
        return None
    return torch.accelerator.current_stream(tensor.device).record_event()
