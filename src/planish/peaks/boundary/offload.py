"""A boundary store of the sizes that a run needs, on host memory, disk or both."""

from dataclasses import dataclass
from pathlib import Path

import torch

from planish.errors import UsageError
from planish.memory.far import FarTier
from planish.memory.far_disk import RING_BYTES, disk_tier
from planish.memory.far_host import host_tier
from planish.memory.far_simulated import dry_tier
from planish.peaks.boundary.parked import Label
from planish.peaks.boundary.store import BoundaryStore
from planish.price.boundary import Boundaries, Depth
from planish.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class FarBudget:
    """Far memory that boundaries may take.

    Attributes:
        host_bytes: Of the host's memory, for a model on another device.
        disk_bytes: Of the disk.
        folder: Where on the disk.
        cached: Whether the system may keep the file's pages in free memory.
    """

    host_bytes: int = 0
    disk_bytes: int = 0
    folder: Path | None = None
    cached: bool = False


def open_store(
    depth: Depth,
    budget: FarBudget,
    *,
    device: torch.device,
    every: int = 1,
    dry: bool = False,
    label: Label = lambda *_: None,
) -> BoundaryStore:
    """Return a store whose far memory is taken now: as much of the budget as boundaries can use.

    Memory:        `RING_BYTES` of staging with a disk; a host slab of exact size is not the device's.

    Args:
        depth: What there is to carry.
        budget: Far memory.
        device: Where the model lives.
        every: Every how many-th boundary goes.
        dry: For fake tensors: the same accounts, and nothing is taken or moved.
        label: Told of each tensor that comes back, by layer.

    Raises:
        UsageError: No budget, one below a single boundary, or a disk or host that cannot give it.
    """
    if not budget.host_bytes and not budget.disk_bytes:
        raise UsageError('offloading boundaries needs `host` or `disk`; write for instance disk = "20GiB".')
    if budget.host_bytes and device.type == "cpu":
        raise UsageError("`host` memory is the device's own on a CPU and lowers no peak there; use `disk` instead.")
    all_go = Boundaries(num_boundaries=depth.num_boundaries, num_slots=depth.num_boundaries, every=every)
    wanted = len(all_go.offloaded) * depth.in_flight
    on_host = min(wanted, _slots("host", budget.host_bytes, depth))
    on_disk = min(wanted - on_host, _slots("disk", budget.disk_bytes, depth))
    tiers: list[FarTier] = []
    if on_host:
        nbytes = on_host * depth.slot_bytes
        tiers.append(dry_tier("host", nbytes) if dry else host_tier(nbytes, device))
    if on_disk:
        tiers.append(_disk(on_disk * depth.slot_bytes, budget, dry=dry))
    boundaries = Boundaries(num_boundaries=depth.num_boundaries, num_slots=on_host + on_disk, every=every)
    return BoundaryStore(boundaries, depth=depth, tiers=tiers, label=label)


def _slots(name: str, budget_bytes: int, depth: Depth) -> int:
    slots = budget_bytes // depth.slot_bytes
    if budget_bytes and not slots:
        raise UsageError(
            f"`{name}` = {format_bytes(budget_bytes)} holds no boundary, each takes {format_bytes(depth.slot_bytes)}; "
            "give it a multiple of that or leave it out."
        )
    return slots


def _disk(nbytes: int, budget: FarBudget, *, dry: bool) -> FarTier:
    if dry:
        return dry_tier("disk", nbytes, staging_bytes=RING_BYTES)
    if budget.folder is None:
        raise UsageError("`disk` needs `folder`, the folder of its file.")
    return disk_tier(budget.folder, nbytes, cached=budget.cached)
