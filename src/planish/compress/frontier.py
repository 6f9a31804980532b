"""Hidden states of all rows at one depth, in memory or on disk: what a layer's blocks are trained on, row by row."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from planish.memory.far import FarTier
from planish.memory.far_disk import RING_BYTES, disk_tier
from planish.memory.slab import Region, padded_bytes


class Frontier(Protocol):
    """Hidden states [N, S, D] that are read and written by rows; a tensor is one.

    Attributes:
        dtype: Of the numbers.
    """

    dtype: torch.dtype

    def __len__(self) -> int:
        """Rows."""
        ...

    def __getitem__(self, rows: Tensor | slice) -> Tensor:
        """Return some rows [B, S, D]."""
        ...

    def __setitem__(self, rows: slice, states: Tensor) -> None:
        """Keep some rows."""
        ...


class FarFrontier:
    """Rows in far memory.

    Memory:        the rows that are asked for.
    Exactness:     bytes come back as they went.

    Args:
        tier: Where they are.
        shape: (rows, tokens, hidden size).
        dtype: Of the numbers.
        device: Where rows go.
    """

    def __init__(self, tier: FarTier, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> None:
        self._tier, self._shape, self.dtype, self._device = tier, shape[1:], dtype, device
        pool = tier.slab.cut(_row_bytes(shape, dtype), shape[0])
        self._regions = [_taken(pool.acquire()) for _ in range(shape[0])]

    def __len__(self) -> int:
        """Rows."""
        return len(self._regions)

    def __getitem__(self, rows: Tensor | slice) -> Tensor:
        """Return some rows [B, S, D]."""
        chosen = self._regions[rows] if isinstance(rows, slice) else [self._regions[row] for row in rows.tolist()]
        states = torch.empty(len(chosen), *self._shape, dtype=self.dtype, device=self._device)
        for event in [self._tier.read(region, state) for region, state in zip(chosen, states, strict=True)]:
            event.wait()
        return states

    def __setitem__(self, rows: slice, states: Tensor) -> None:
        """Keep some rows."""
        pairs = zip(self._regions[rows], states.contiguous(), strict=True)
        for event in [self._tier.write(region, state) for region, state in pairs]:
            event.wait()


@contextmanager
def frontiers(
    shape: tuple[int, int, int], dtype: torch.dtype, folder: Path | None, device: torch.device
) -> Iterator[list[Frontier]]:
    """Give three frontiers: before a layer, between its sub-blocks, after it.

    Args:
        shape: (rows, tokens, hidden size).
        dtype: Of the numbers.
        folder: Where a file without a name holds them; None keeps them on the device.
        device: Where rows go.

    Raises:
        UsageError: A folder that cannot hold them.
    """
    if folder is None:
        yield [torch.empty(shape, dtype=dtype, device=device) for _ in range(3)]
        return
    tier = disk_tier(folder, 3 * shape[0] * padded_bytes(_row_bytes(shape, dtype)))
    try:
        yield [FarFrontier(tier, shape, dtype, device) for _ in range(3)]
    finally:
        tier.close()


def staging_bytes() -> int:
    """Return what frontiers on disk hold in memory beside the rows that are asked for."""
    return RING_BYTES


def _row_bytes(shape: tuple[int, int, int], dtype: torch.dtype) -> int:
    return shape[1] * shape[2] * dtype.itemsize


def _taken(region: Region | None) -> Region:
    assert region is not None  # the pool has a slot for each row
    return region
