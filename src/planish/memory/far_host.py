"""Host memory as far memory: one slab of exact size, page-locked for a CUDA device; and the device's own memory."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from planish.memory.far import FarTier
from planish.memory.lanes import InlineLane, StreamLane
from planish.memory.slab import ALIGNMENT
from planish.units import format_bytes


class HostSlab:
    """One block of host memory, whole pages, allocated once.

    PyTorch's own pinned allocator rounds a block up to a power of two; a block that is page-locked where it lies
    keeps its size.

    Args:
        capacity_bytes: Its size.
        lock: Whether copies to and from a device should run beside both.
    """

    def __init__(self, capacity_bytes: int, *, lock: bool) -> None:
        self.capacity_bytes = capacity_bytes
        self._bytes = aligned(torch.empty(capacity_bytes + ALIGNMENT, dtype=torch.uint8, device="cpu"))
        self._locked = lock and _lock(self._bytes)

    def view(self, offset: int, like: Tensor) -> Tensor:
        """Return the bytes from `offset` on as a tensor of `like`'s shape and dtype."""
        return self._bytes[offset : offset + like.nbytes].view(like.dtype).view(like.shape)

    def store(self, offset: int, source: Tensor) -> None:
        """Copy `source` to the bytes from `offset` on."""
        self.view(offset, source).copy_(source.detach(), non_blocking=True)

    def load(self, offset: int, target: Tensor) -> None:
        """Fill `target` from the bytes from `offset` on."""
        target.detach().copy_(self.view(offset, target), non_blocking=True)

    def close(self) -> None:
        """Unlock and free the block."""
        if self._locked:
            _unlock(self._bytes)
        del self._bytes


def host_tier(capacity_bytes: int, device: torch.device) -> FarTier:
    """Return host memory for tensors on `device`, which is not a CPU.

    Raises:
        ValueError: On a CPU, whose memory is the host's.
    """
    if device.type == "cpu":
        raise ValueError("`host` memory is the device's own on a CPU and lowers no peak there; use `disk` instead.")
    slab = HostSlab(capacity_bytes, lock=True)
    return FarTier("host", slab, outward=StreamLane(device), inward=StreamLane(device))


def identity_tier(capacity_bytes: int) -> FarTier:
    """Return a tier in the CPU's own memory, copied at once: it lowers no peak, its bytes can be worked on in place."""
    return FarTier("identity", HostSlab(capacity_bytes, lock=False), outward=InlineLane(), inward=InlineLane())


def aligned(block: Tensor) -> Tensor:
    """Return `block` without its last page, from its first whole page on."""
    start = -block.data_ptr() % ALIGNMENT
    return block[start : start + block.nbytes - ALIGNMENT]


@contextmanager
def page_locked(block: Tensor) -> Iterator[None]:
    """Keep host memory page-locked for CUDA meanwhile; where that fails say so, copies are slower then."""
    locked = _lock(block)
    try:
        yield
    finally:
        if locked:
            _unlock(block)


def _unlock(block: Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(block.data_ptr())


def _lock(block: Tensor) -> bool:
    """Page-lock `block` for CUDA; where that fails say so once, copies then wait for each other."""
    reason = "no CUDA device is there"
    if torch.cuda.is_available():
        error = int(torch.cuda.cudart().cudaHostRegister(block.data_ptr(), block.nbytes, 0))
        if not error:
            return True
        reason = f"cudaHostRegister returned error {error}"
    warnings.warn(
        f"{format_bytes(block.nbytes)} of host memory could not be page-locked ({reason}); copies are slower.",
        stacklevel=2,
    )
    return False
