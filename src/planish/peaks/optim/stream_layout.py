"""Parameters laid out end to end and cut into chunks; where the state of each chunk lies."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from planish.errors import UsageError
from planish.memory.far import FarTier
from planish.memory.far_disk import RING_BYTES, disk_tier
from planish.memory.far_host import host_tier, identity_tier
from planish.memory.far_simulated import dry_tier
from planish.memory.slab import Region, padded_bytes
from planish.peaks.optim.apollo_shard import to_local
from planish.price.stream import Kept, Placement, grains, place

Arrays = dict[str, Tensor]
Engine = Literal["auto", "cpu", "device", "hybrid"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Flat:
    """A parameter as one range of numbers in the order in which its memory has them.

    Attributes:
        param: The parameter; distributed ones stand for what is here of them.
        order: Its dimensions, outermost in memory first.
        numel: Numbers that are here.
    """

    param: Tensor
    order: tuple[int, ...]
    numel: int

    @classmethod
    def of(cls, param: Tensor, name: str) -> "Flat":
        """Return `param` as a range.

        Raises:
            ValueError: Its numbers are complex, no floating-point numbers, or do not lie side by side.
        """
        local = to_local(param)
        if not local.is_floating_point():
            raise ValueError(f"{name} has numbers of {local.dtype}; StreamAdamW takes real floating-point ones.")
        order = tuple(sorted(range(local.ndim), key=lambda dim: (-local.stride(dim), dim)))
        if not local.permute(order).is_contiguous():
            raise ValueError(f"the numbers of {name} do not lie side by side in memory; make it contiguous first.")
        return cls(param=param, order=order, numel=local.numel())

    def view(self) -> Tensor:
        """Return the parameter's own memory."""
        return to_local(self.param.detach()).permute(self.order).view(-1)

    def like(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the parameter's shape in the same order, its own memory where that has the order too."""
        return to_local(tensor.detach()).permute(self.order).reshape(-1)

    def unflatten(self, flat: Tensor) -> Tensor:
        """Return numbers in this order as a tensor of the shape of what is here."""
        shape = to_local(self.param).shape
        back = sorted(range(len(self.order)), key=lambda dim: self.order[dim])
        return flat.view([shape[dim] for dim in self.order]).permute(back)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Consecutive numbers of one parameter: `start` to `stop` of it, from `offset` of the chunk on."""

    flat: Flat
    start: int
    stop: int
    offset: int

    @property
    def inside(self) -> slice:
        """Where the piece lies in its chunk."""
        return slice(self.offset, self.offset + self.stop - self.start)

    @property
    def outside(self) -> slice:
        """Where it lies in its parameter."""
        return slice(self.start, self.stop)


@dataclass(slots=True, kw_only=True, eq=False)
class Chunk:
    """A slice of optimizer state.

    Attributes:
        pieces: The parameters it belongs to, in order.
        numel: Its numbers, gaps between pieces included.
        kept: What is kept for each number.
        dtype: Of all arrays.
        resident: The arrays where they can be worked on as they lie; None: they come through a slot.
        tier: Where they lie otherwise.
        regions: One for each array.
        fresh: Nothing was ever written: moments are zero, masters are the parameters.
    """

    pieces: tuple[Piece, ...]
    numel: int
    kept: Kept
    dtype: torch.dtype
    resident: Arrays | None = None
    tier: FarTier | None = None
    regions: tuple[Region, ...] = ()
    fresh: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class FarOptions:
    """Far memory for state, and how it is cut.

    Attributes:
        host: Bytes of host memory.
        disk: Bytes of disk.
        folder: Where on the disk.
        cached: Whether the system may keep the file's pages in free memory.
        chunk_bytes: Largest chunk.
        slots: Chunks on their way at once.
        engine: Where chunks on the host are updated.
    """

    host: int | None
    disk: int | None
    folder: Path | None
    cached: bool
    chunk_bytes: int
    slots: int
    engine: Engine

    def less(self, shelves: Iterable["Shelf"]) -> "FarOptions":
        """Return what is left beside the shelves that are there."""
        placements = [shelf.placement for shelf in shelves]
        host = None if self.host is None else self.host - sum(each.host_bytes for each in placements)
        disk = None if self.disk is None else self.disk - sum(each.disk_bytes for each in placements)
        return replace(self, host=host, disk=disk)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shelf:
    """The state of the parameters that came together: its chunks, and the memory that was taken for them.

    Attributes:
        chunks: In the order of the parameters.
        placement: The arithmetic it was made by.
        tiers: Far memory, to be closed.
        block: State that is updated where it lies, one allocation; None: there is none.
    """

    chunks: tuple[Chunk, ...]
    placement: Placement
    tiers: tuple[FarTier, ...]
    block: Tensor | None


def build_shelf(kinds: dict[tuple[Kept, torch.dtype], list[Flat]], device: torch.device, options: FarOptions) -> Shelf:
    """Return room for the state of `kinds`, taken now.

    Raises:
        UsageError: Budgets that do not hold it, or a disk or host that cannot give them.
    """
    totals = tuple((kept, sum(grains(flat.numel) for flat in flats)) for (kept, _), flats in kinds.items())
    in_place = options.engine == "cpu" or (options.engine == "auto" and device.type == "cpu")
    placement = place(
        totals,
        chunk_bytes=options.chunk_bytes,
        slots=options.slots,
        host=options.host,
        disk=options.disk,
        in_place=in_place,
    )
    dry = any(isinstance(to_local(flat.param), FakeTensor) for flats in kinds.values() for flat in flats)
    block, host, disk = None, None, None
    if placement.host_bytes and in_place:
        block = torch.empty(placement.host_bytes, dtype=torch.uint8, device="cpu")
    elif placement.host_bytes:
        host = _host(placement.host_bytes, device, dry=dry)
    if placement.disk_bytes:
        disk = _disk(placement.disk_bytes, options, dry=dry)
    chunks: list[Chunk] = []
    taken = 0
    for share, ((kept, dtype), flats) in zip(placement.shares, kinds.items(), strict=True):
        for number, (pieces, numel) in enumerate(_cut(flats, share.chunk_numel)):
            chunk = Chunk(pieces=pieces, numel=numel, kept=kept, dtype=dtype)
            if number >= share.on_host or block is None:
                chunk.tier = host if number < share.on_host else disk
                assert chunk.tier is not None
                chunk.regions = _regions(chunk, chunk.tier)
            else:
                chunk.resident = views(block[taken:], chunk)
                taken += kept.nbytes(numel)
            chunks.append(chunk)
    tiers = tuple(tier for tier in (host, disk) if tier is not None)
    return Shelf(chunks=tuple(chunks), placement=placement, tiers=tiers, block=block)


def views(block: Tensor, chunk: Chunk) -> Arrays:
    """Return the arrays of `chunk` in a block of bytes, each on whole pages from its beginning."""
    nbytes = chunk.numel * chunk.dtype.itemsize
    starts = [number * padded_bytes(nbytes) for number in range(len(chunk.kept.names))]
    arrays = [block[start : start + nbytes].view(chunk.dtype) for start in starts]
    return dict(zip(chunk.kept.names, arrays, strict=True))


def interleave(chunks: Sequence[Chunk]) -> list[Chunk]:
    """Return the chunks so that those that must come are spread evenly among those that are here."""
    here = [chunk for chunk in chunks if chunk.resident is not None]
    away = [chunk for chunk in chunks if chunk.resident is None]
    places = [((number + 0.5) / len(group), chunk) for group in (away, here) for number, chunk in enumerate(group)]
    return [chunk for _, chunk in sorted(places, key=lambda each: each[0])]


def _cut(flats: Iterable[Flat], chunk_numel: int) -> list[tuple[tuple[Piece, ...], int]]:
    """Return the pieces of each chunk, and its numbers."""
    chunks: list[tuple[tuple[Piece, ...], int]] = []
    pieces: list[Piece] = []
    filled = 0
    for flat in flats:
        start = 0
        while start < flat.numel:
            if filled == chunk_numel:
                chunks.append((tuple(pieces), filled))
                pieces, filled = [], 0
            stop = min(flat.numel, start + chunk_numel - filled)
            pieces.append(Piece(flat=flat, start=start, stop=stop, offset=filled))
            filled += grains(stop - start)
            start = stop
    if pieces:
        chunks.append((tuple(pieces), filled))
    return chunks


def _regions(chunk: Chunk, tier: FarTier) -> tuple[Region, ...]:
    num_arrays = len(chunk.kept.names)
    pool = tier.slab.cut(chunk.numel * chunk.dtype.itemsize, num_arrays)
    found = [pool.acquire() for _ in range(num_arrays)]
    return tuple(region for region in found if region is not None)


def _host(nbytes: int, device: torch.device, *, dry: bool) -> FarTier:
    if dry:
        return dry_tier("optim-host", nbytes)
    tier = identity_tier(nbytes) if device.type == "cpu" else host_tier(nbytes, device)
    tier.name = "optim-host"
    return tier


def _disk(nbytes: int, options: FarOptions, *, dry: bool) -> FarTier:
    if dry:
        return dry_tier("optim-disk", nbytes, staging_bytes=RING_BYTES)
    if options.folder is None:
        raise UsageError("`disk` needs `folder`, the folder of its file.")
    tier = disk_tier(options.folder, nbytes, cached=options.cached)
    tier.name = "optim-disk"
    return tier


def require_one_device(params: Iterable[Any]) -> torch.device:
    """Return the device of all parameters.

    Raises:
        ValueError: They are on several.
    """
    devices = {to_local(param).device for param in params}
    if len(devices) != 1:
        names = ", ".join(sorted(map(str, devices)))
        raise ValueError(f"parameters must be on one device, got {names}; make an optimizer for each device.")
    return devices.pop()
