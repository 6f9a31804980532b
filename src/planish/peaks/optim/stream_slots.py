"""Chunks on their way: fetched into a fixed number of slots, worked on, written back, each lane beside the others."""

import time
from collections import deque
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from planish.memory.far import FarTier
from planish.memory.lanes import Event
from planish.memory.slab import ALIGNMENT, Region, padded_bytes
from planish.peaks.optim.stream_layout import Arrays, Chunk, Piece, views

Work = Callable[[Chunk, Arrays], None]


class _Slot:
    """Room for one chunk, and the transfers that still read it."""

    def __init__(self, buffer: Tensor) -> None:
        self.buffer = buffer
        self.tier: FarTier | None = None
        self.written: list[Event] = []

    def settle(self) -> None:
        """Let what comes next come after what was written back from here."""
        written, self.written = self.written, []
        for event in written:
            event.wait()


class Slots:
    """A list schedule over three lanes: with u, k, d the seconds to fetch, work on and write back one of G chunks,

        T = (u + k + d) + (G - 1) * max(u, k, d, (u + k + d) / num_slots)

    A chunk is fetched into the slot that was free first, once the last write-back from that slot is done; the caller
    never waits for a write-back, so the last ones overlap whatever it does next.

    Memory: num_slots x slot_bytes, allocated here.

    Attributes:
        work_s: Seconds spent at work, by the host's clock.
        staging: All slots, one allocation; None: there is none.

    Args:
        num_slots: Chunks that may be on their way at once.
        slot_bytes: Of the largest.
        device: Where they are worked on.
    """

    def __init__(self, num_slots: int, slot_bytes: int, device: torch.device) -> None:
        self.work_s = 0.0
        self.num_slots, self.slot_bytes = num_slots, slot_bytes
        self.staging = None
        if num_slots:
            self.staging = torch.empty((num_slots, slot_bytes), dtype=torch.uint8, device=device)
        self._free = deque(_Slot(self.staging[number]) for number in range(num_slots))
        self._coming: deque[tuple[Chunk, _Slot, list[Event]]] = deque()

    @property
    def has_room(self) -> bool:
        """Whether another chunk may be fetched."""
        return bool(self._free)

    @property
    def num_coming(self) -> int:
        """Chunks that were fetched and not worked on yet."""
        return len(self._coming)

    def walk(self, chunks: Iterable[Chunk], work: Work, *, keep: bool = True) -> None:
        """Call `work` with every chunk and its arrays, in order.

        Args:
            chunks: Each once.
            work: May change the arrays in place.
            keep: Write back what it changed.
        """
        chunks = list(chunks)
        ahead = deque(chunk for chunk in chunks if chunk.resident is None)
        for chunk in chunks:
            while ahead and self.has_room:
                self.fetch(ahead.popleft())
            if chunk.resident is not None:
                self._work(work, chunk, chunk.resident)
                chunk.fresh = chunk.fresh and not keep
            else:
                self.work_next(work, keep=keep)

    def fetch(self, chunk: Chunk) -> None:
        """Begin to bring a chunk into a free slot."""
        assert chunk.tier is not None
        slot = self._free.popleft()
        if slot.tier is not chunk.tier:
            slot.settle()  # lanes of two tiers cannot wait for each other
        slot.tier = chunk.tier
        events = []
        if not chunk.fresh:
            arrays = views(slot.buffer, chunk).values()
            events = [
                chunk.tier.read(region, array, after=slot.written)
                for region, array in zip(chunk.regions, arrays, strict=True)
            ]
            slot.written = []
        self._coming.append((chunk, slot, events))

    def work_next(self, work: Work, *, keep: bool = True) -> None:
        """Work on the chunk that was fetched first, and begin to write it back."""
        chunk, slot, events = self._coming.popleft()
        try:
            for event in events:
                event.wait()
            if chunk.fresh:
                slot.settle()
            arrays = views(slot.buffer, chunk)
            self._work(work, chunk, arrays)
            if keep:
                assert chunk.tier is not None
                slot.written = [
                    chunk.tier.write(region, array)
                    for region, array in zip(chunk.regions, arrays.values(), strict=True)
                ]
                chunk.fresh = False
        except BaseException:
            _outlast(chunk, events)
            raise
        finally:
            self._free.append(slot)

    def read(self, chunk: Chunk, name: str, piece: Piece) -> Tensor:
        """Return one array's numbers of a piece, until the next call: whole pages around them are fetched."""
        if chunk.resident is not None or chunk.fresh:
            return self._whole(chunk)[name][piece.inside]
        part, near, inside = self._part(chunk, name, piece)
        assert chunk.tier is not None
        chunk.tier.read(part, near).wait()
        return near[inside]

    def write(self, chunk: Chunk, name: str, piece: Piece, numbers: Tensor) -> None:
        """Change one array's numbers of a piece; the chunk must not be fresh."""
        if chunk.resident is not None:
            chunk.resident[name][piece.inside].copy_(numbers)
            return
        self.read(chunk, name, piece).copy_(numbers)
        part, near, _ = self._part(chunk, name, piece)
        assert chunk.tier is not None
        chunk.tier.write(part, near).wait()

    def settle(self) -> None:
        """Wait until everything is written back; raise what went wrong."""
        for slot in self._free:
            slot.settle()

    def abandon(self) -> None:
        """Wait for whatever is under way and forget it, errors of fetches included; nothing was changed by those."""
        while self._coming:
            chunk, slot, events = self._coming.popleft()
            _outlast(chunk, events)
            self._free.append(slot)
        for slot in self._free:
            slot.written, written = [], slot.written
            _wait_out(written)

    def _whole(self, chunk: Chunk) -> Arrays:
        """Return the arrays of a chunk that is here, or was never written."""
        arrays = chunk.resident
        if arrays is None:
            self._free[0].settle()
            arrays = views(self._free[0].buffer, chunk)
        if chunk.fresh:
            _begin(chunk, arrays)
        return arrays

    def _part(self, chunk: Chunk, name: str, piece: Piece) -> tuple[Region, Tensor, slice]:
        """Return the pages of one array that hold a piece, room for them in a slot, and where the piece is in it."""
        per_page = ALIGNMENT // chunk.dtype.itemsize
        start = piece.offset // per_page * per_page
        stop = min(chunk.numel, -(-piece.inside.stop // per_page) * per_page)
        whole = chunk.regions[chunk.kept.names.index(name)]
        part = Region(whole.offset + start * chunk.dtype.itemsize, padded_bytes((stop - start) * chunk.dtype.itemsize))
        part.last_write = whole.last_write
        slot = self._free[0]
        slot.settle()
        near = views(slot.buffer, chunk)[name][start:stop]
        return part, near, slice(piece.offset - start, piece.inside.stop - start)

    def _work(self, work: Work, chunk: Chunk, arrays: Arrays) -> None:
        started = time.perf_counter()
        if chunk.fresh:
            _begin(chunk, arrays)
        work(chunk, arrays)
        self.work_s += time.perf_counter() - started


def _begin(chunk: Chunk, arrays: Arrays) -> None:
    """Fill the arrays of a chunk that was never written."""
    for name, array in arrays.items():
        if name != "master":
            array.zero_()
            continue
        for piece in chunk.pieces:
            array[piece.inside].copy_(piece.flat.view()[piece.outside])


def _outlast(chunk: Chunk, fetched: Iterable[Event]) -> None:
    """Wait for fetches that nobody wants, and let none of them stand in the way of later transfers."""
    _wait_out(fetched)
    for region in chunk.regions:
        region.last_read = None


def _wait_out(events: Iterable[Event]) -> None:
    for event in events:
        try:
            event.wait()
        except Exception:
            continue
