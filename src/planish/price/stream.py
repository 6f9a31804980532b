"""Where streamed AdamW state lies, how it is cut, and what it takes: every byte as arithmetic."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Self

from planish.errors import UsageError
from planish.price.boundary import PAGE_BYTES
from planish.units import format_bytes

GRAIN = 64
"""Chunks are cut at multiples of this many numbers of a parameter, where torch's fused kernel divides its own work."""

CHUNK_BYTES, SLOTS = 16 * 2**20, 3
"""What a step takes unless told otherwise: enough for a disk or a link to be fast, and three lanes to be busy."""

_WIDE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What is kept for each number of some parameters.

    Attributes:
        names: The arrays, as torch's state dict calls them; "master" is ours.
        itemsize: Bytes of one number in each.
    """

    names: tuple[str, ...]
    itemsize: int

    @classmethod
    def of(cls, itemsize: int, *, master: bool, amsgrad: bool = False) -> Self:
        """Return what is kept for parameters whose numbers have `itemsize` bytes."""
        wide = max(itemsize, _WIDE) if master else itemsize
        names = ["exp_avg", "exp_avg_sq"] + ["max_exp_avg_sq"] * amsgrad + ["master"] * (wide != itemsize)
        return cls(names=tuple(names), itemsize=wide)

    @property
    def widened(self) -> bool:
        """Whether parameters are narrower than their state, so that gradients are cast."""
        return "master" in self.names

    def nbytes(self, numel: int) -> int:
        """Return the bytes of `numel` numbers: each array on whole pages."""
        return len(self.names) * math.ceil(numel * self.itemsize / PAGE_BYTES) * PAGE_BYTES

    def chunk_numel(self, chunk_bytes: int) -> int:
        """Return how many numbers a chunk of at most `chunk_bytes` holds: whole pages of each array.

        Raises:
            UsageError: It does not hold one page of each.
        """
        pages = chunk_bytes // (len(self.names) * PAGE_BYTES)
        if not pages:
            raise UsageError(
                f"`chunk_bytes` ({chunk_bytes}) must hold a page of each of the {len(self.names)} arrays of the state; "
                f"{len(self.names) * PAGE_BYTES} is the least."
            )
        return pages * PAGE_BYTES // self.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The state of parameters alike: one flat range of numbers, cut into chunks, of which the first lie on the host.

    Attributes:
        kept: What is kept for each number.
        numel: Numbers of all those parameters, each padded to whole grains.
        chunk_numel: Numbers of a chunk; the last may have fewer.
        on_host: Chunks on the host.
    """

    kept: Kept
    numel: int
    chunk_numel: int
    on_host: int

    @property
    def num_chunks(self) -> int:
        """Chunks, wherever they lie."""
        return math.ceil(self.numel / self.chunk_numel)

    @property
    def host_bytes(self) -> int:
        """Bytes of the chunks on the host."""
        return self._bytes_of_first(self.on_host)

    @property
    def disk_bytes(self) -> int:
        """Bytes of the others."""
        return self._bytes_of_first(self.num_chunks) - self.host_bytes

    @property
    def largest_bytes(self) -> int:
        """Bytes of the largest chunk."""
        return self.kept.nbytes(min(self.chunk_numel, self.numel))

    @property
    def scratch_bytes(self) -> int:
        """Bytes of the wide gradient of one chunk, where gradients are narrower than their state."""
        return min(self.chunk_numel, self.numel) * self.kept.itemsize if self.kept.widened else 0

    def _bytes_of_first(self, count: int) -> int:
        full = min(count, self.numel // self.chunk_numel)
        rest = self.numel - full * self.chunk_numel if count > full else 0
        return full * self.kept.nbytes(self.chunk_numel) + self.kept.nbytes(rest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where the state of all parameters lies, and the staging that streaming it takes.

    Attributes:
        shares: One for each sort of state.
        slots: Chunks that may be on their way at once.
        in_place: Chunks on the host are updated where they lie; only the others are staged.
    """

    shares: tuple[Share, ...]
    slots: int
    in_place: bool

    @property
    def host_bytes(self) -> int:
        """State on the host."""
        return sum(share.host_bytes for share in self.shares)

    @property
    def disk_bytes(self) -> int:
        """State on the disk."""
        return sum(share.disk_bytes for share in self.shares)

    @property
    def num_slots(self) -> int:
        """Slots of the staging: as many as were asked for, or as there are chunks to stage."""
        return min(self.slots, sum(self._num_staged(share) for share in self.shares))

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot: the largest chunk that is staged."""
        return max((share.largest_bytes for share in self.shares if self._num_staged(share)), default=0)

    @property
    def scratch_bytes(self) -> int:
        """The wide gradient of one chunk, where gradients are narrower than their state."""
        return max((share.scratch_bytes for share in self.shares), default=0)

    @property
    def staging_bytes(self) -> int:
        """Slots x chunk, and the scratch."""
        return self.num_slots * self.slot_bytes + self.scratch_bytes

    def _num_staged(self, share: Share) -> int:
        return share.num_chunks - share.on_host * self.in_place


def grains(numel: int) -> int:
    """Return `numel` padded to whole grains."""
    return math.ceil(numel / GRAIN) * GRAIN


@lru_cache(maxsize=64)
def place(
    kinds: tuple[tuple[Kept, int], ...],
    *,
    chunk_bytes: int,
    slots: int,
    host: int | None,
    disk: int | None,
    in_place: bool = True,
) -> Placement:
    """Return where state lies: on the host while its bytes last, then on the disk.

    Args:
        kinds: What is kept, and for how many numbers (each parameter padded to whole grains).
        chunk_bytes: Largest chunk.
        slots: Chunks on their way at once.
        host: Bytes of host memory; None: all that it takes, where there is no disk either.
        disk: Bytes of disk; None: none.
        in_place: Chunks on the host need no staging.

    Raises:
        UsageError: Both together do not hold it; the message says what would.
    """
    left = math.inf if host is None and disk is None else host or 0
    shares = []
    for kept, numel in kinds:
        chunk_numel = kept.chunk_numel(chunk_bytes)
        share = Share(kept=kept, numel=numel, chunk_numel=chunk_numel, on_host=math.ceil(numel / chunk_numel))
        if share.host_bytes > left:
            on_host = int(left) // kept.nbytes(chunk_numel)
            share = Share(kept=kept, numel=numel, chunk_numel=chunk_numel, on_host=on_host)
        left -= share.host_bytes
        shares.append(share)
    found = Placement(shares=tuple(shares), slots=slots, in_place=in_place)
    _require_room(found, disk or 0)
    return found


def _require_room(found: Placement, disk: int) -> None:
    if found.disk_bytes > disk:
        total, short = found.host_bytes + found.disk_bytes, found.disk_bytes - disk
        raise UsageError(
            f"AdamW's state takes {format_bytes(total)}, {format_bytes(short)} more than `host` and `disk` hold; "
            f'disk = "{math.ceil(found.disk_bytes / 2**10)}KiB" would do.'
        )


def kinds_of(parameters: Sequence[tuple[int, int]], *, master: bool) -> tuple[tuple[Kept, int], ...]:
    """Return what is kept and for how many numbers.

    Args:
        parameters: (numbers, bytes of one number) of each.
        master: Whether narrower ones have an fp32 master.
    """
    totals: dict[Kept, int] = {}
    for numel, itemsize in parameters:
        kept = Kept.of(itemsize, master=master)
        totals[kept] = totals.get(kept, 0) + grains(numel)
    return tuple(totals.items())
