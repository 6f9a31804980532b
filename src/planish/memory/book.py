"""The book of bytes: one record per life of a storage, from which any past peak can be read back."""

import time
import weakref
from collections.abc import Iterator
from typing import Literal, get_args

import torch

Category = Literal[
    "parameters",
    "gradients",
    "optimizer state",
    "boundaries",
    "layer working set",
    "head tiles",
    "dispatch blocks",
    "staging",
    "other",
]
Phase = Literal["init", "forward", "head", "backward", "optimizer", "eval", "save", "resume"]

CATEGORIES: tuple[Category, ...] = get_args(Category)
PHASES: tuple[Phase, ...] = get_args(Phase)

_ALIVE = 2**63
_PRUNE_AT = 4096


class Record:
    """A storage of one size, from its birth (or resize) to its death (or next resize).

    `born` and `died` are readings of the book's clock, so the record was alive at clock `t` if `born <= t < died`.
    """

    __slots__ = ("born", "category", "died", "dtype", "nbytes", "owner", "shape")

    def __init__(
        self, nbytes: int, category: Category, owner: str, shape: torch.Size, dtype: torch.dtype, born: int
    ) -> None:
        self.nbytes = nbytes
        self.category = category
        self.owner = owner
        self.shape = shape
        self.dtype = dtype
        self.born = born
        self.died = _ALIVE


class Peak:
    """The largest number of bytes alive so far in one phase, and when that was."""

    __slots__ = ("at_s", "clock", "live_bytes")

    def __init__(self) -> None:
        self.live_bytes = -1
        self.clock = -1
        self.at_s = 0.0


class _Entry(weakref.ref):  # type: ignore[type-arg]
    """A weak reference to a storage that knows the storage's key and its current record."""

    __slots__ = ("key", "record")

    key: int
    record: Record


class Book:
    """Counts live bytes by category and remembers just enough of the dead to list the owners of every peak.

    [Note: a peak is a moment] When a phase reaches a new peak, only the clock is written down. A record that dies
    afterwards is kept while it was alive at some phase's peak, so the tensors of that moment can be listed later,
    with the labels they had by then, and a new peak costs nothing however many tensors are alive.

    PyTorch keeps a storage's Python object for as long as the storage itself lives, wherever it is held, so that a
    weak reference to it dies exactly with the bytes.
    """

    def __init__(self) -> None:
        self.live_bytes = 0
        self.by_category: dict[Category, int] = dict.fromkeys(CATEGORIES, 0)
        self.entries: dict[int, _Entry] = {}
        self.peaks: dict[Phase, Peak] = {}
        self._clock = 0
        self._last_peak = -1
        self._dead: list[Record] = []
        self._kept = 0
        self._opened_s = time.perf_counter()

    def add(self, storage: torch.UntypedStorage, tensor: torch.Tensor, category: Category, owner: str) -> Record:
        """Open a record for a storage that the book does not hold yet; `tensor` says its shape and dtype."""
        entry = _Entry(storage, self._close)
        entry.key = storage._cdata
        entry.record = self._open(storage.nbytes(), category, owner, tensor.shape, tensor.dtype)
        self.entries[entry.key] = entry
        return entry.record

    def resize(self, entry: _Entry, nbytes: int) -> Record:
        """Give a storage its new size: the record of the old one dies, another is born under the same labels."""
        old = entry.record
        self._bury(old)
        entry.record = self._open(nbytes, old.category, old.owner, old.shape, old.dtype)
        return entry.record

    def relabel(self, record: Record, category: Category, owner: str | None) -> None:
        """Move a record to `category`, and to `owner` if one is named."""
        self.by_category[record.category] -= record.nbytes
        self.by_category[category] += record.nbytes
        record.category = category
        if owner is not None:
            record.owner = owner

    def mark(self, phase: Phase) -> float:
        """Take the bytes alive now as the peak of `phase` if they are its most; return the seconds elapsed."""
        seconds = time.perf_counter() - self._opened_s
        peak = self.peaks.get(phase)
        if peak is None:
            peak = self.peaks[phase] = Peak()
        if self.live_bytes > peak.live_bytes:
            peak.live_bytes = self.live_bytes
            peak.clock = self._last_peak = self._clock
            peak.at_s = seconds
        return seconds

    def alive(self) -> list[Record]:
        """Return the records alive now."""
        entries = list(self.entries.values())  # at once: a storage may die at any bytecode
        return [entry.record for entry in entries]

    def alive_at(self, peak: Peak) -> Iterator[Record]:
        """Yield the records that were alive at the moment of `peak`."""
        for record in [*self._dead, *self.alive()]:
            if record.born <= peak.clock < record.died:
                yield record

    def forget_peaks(self) -> None:
        """Start afresh: no peaks, no dead; what is alive stays."""
        self.peaks.clear()
        self._dead.clear()
        self._kept = 0
        self._last_peak = -1
        self._opened_s = time.perf_counter()

    def _open(self, nbytes: int, category: Category, owner: str, shape: torch.Size, dtype: torch.dtype) -> Record:
        self._clock += 1
        self.live_bytes += nbytes
        self.by_category[category] += nbytes
        return Record(nbytes, category, owner, shape, dtype, self._clock)

    def _close(self, entry: _Entry) -> None:
        del self.entries[entry.key]
        self._bury(entry.record)

    def _bury(self, record: Record) -> None:
        self._clock += 1
        record.died = self._clock
        self.live_bytes -= record.nbytes
        self.by_category[record.category] -= record.nbytes
        if record.born <= self._last_peak and record.nbytes:
            self._dead.append(record)
            if len(self._dead) > _PRUNE_AT + 2 * self._kept:
                self._prune()

    def _prune(self) -> None:
        clocks = [peak.clock for peak in self.peaks.values()]
        self._dead = [each for each in self._dead if any(each.born <= clock < each.died for clock in clocks)]
        self._kept = len(self._dead)
