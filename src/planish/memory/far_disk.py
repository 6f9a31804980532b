"""A file as far memory: preallocated, without a name, read and written past the page cache through a fixed ring."""

import contextlib
import ctypes
import fcntl
import os
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np
import torch
from torch import Tensor

from planish.errors import UsageError, WorldFailed
from planish.memory.far import FarTier
from planish.memory.far_host import aligned
from planish.memory.lanes import ThreadLane
from planish.memory.slab import ALIGNMENT, padded_bytes
from planish.units import format_bytes

CHUNK_BYTES = 2**20
RING_BYTES = 2 * CHUNK_BYTES + ALIGNMENT
"""Staging of one disk tier: a slot for each direction, on whole pages."""

_IN_MEMORY = ("tmpfs", "ramfs")
_MOUNTS = Path("/proc/self/mountinfo")


class FileSlab:
    """One file of fixed size whose blocks are taken on the disk at once; it has no name and dies with the process.

    Memory:        `RING_BYTES`; with `cached=False` nothing stays in the page cache.

    Args:
        folder: Where the file lies.
        capacity_bytes: Its size.
        cached: Let the system keep its pages in memory that nobody else wants: faster, and counted by whoever counts
            page cache.

    Raises:
        UsageError: A folder that cannot hold it.
    """

    def __init__(self, folder: Path, capacity_bytes: int, *, cached: bool = False) -> None:
        self.capacity_bytes = capacity_bytes
        self._folder = folder
        self._file = _open(folder, padded_bytes(capacity_bytes))
        self._fd = self._file.fileno()
        self._drop = not cached and not _go_direct(self._fd)
        if self._drop:
            warnings.warn(
                f"{folder} has no direct file access; each transfer is flushed instead, slower.", stacklevel=2
            )
        ring = aligned(torch.empty(RING_BYTES, dtype=torch.uint8, device="cpu")).numpy()
        self._slots: tuple[np.ndarray, np.ndarray] = (ring[:CHUNK_BYTES], ring[CHUNK_BYTES:])

    def store(self, offset: int, source: Tensor) -> None:
        """Write `source` from `offset` on."""
        slot = self._slots[0]
        with self._failing("writing", source.nbytes):
            for start in range(0, source.nbytes, CHUNK_BYTES):
                length = min(CHUNK_BYTES, source.nbytes - start)
                _copy_out(source, start, slot[:length])
                self._write(memoryview(slot)[: padded_bytes(length)], offset + start)
            if self._drop:
                os.fdatasync(self._fd)
                os.posix_fadvise(self._fd, offset, source.nbytes, os.POSIX_FADV_DONTNEED)

    def load(self, offset: int, target: Tensor) -> None:
        """Read `target` from `offset` on."""
        slot = self._slots[1]
        with self._failing("reading", target.nbytes):
            for start in range(0, target.nbytes, CHUNK_BYTES):
                length = min(CHUNK_BYTES, target.nbytes - start)
                self._read(memoryview(slot)[: padded_bytes(length)], offset + start)
                _copy_in(slot[:length], target, start)
            if self._drop:
                os.posix_fadvise(self._fd, offset, target.nbytes, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Free the disk."""
        self._file.close()

    def _write(self, view: memoryview, offset: int) -> None:
        while view:
            done = os.pwrite(self._fd, view, offset)
            view, offset = view[done:], offset + done

    def _read(self, view: memoryview, offset: int) -> None:
        while view:
            done = os.preadv(self._fd, [view], offset)
            if not done:
                raise OSError("the file is shorter than it was made")
            view, offset = view[done:], offset + done

    @contextlib.contextmanager
    def _failing(self, doing: str, nbytes: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise WorldFailed(
                f"{doing} {format_bytes(nbytes)} of far memory in {self._folder} failed: "
                f"{error.strerror or error}; the last checkpoint is intact."
            ) from error


def disk_tier(folder: Path, capacity_bytes: int, *, cached: bool = False) -> FarTier:
    """Return a file in `folder` as far memory, with a thread for each direction.

    Raises:
        UsageError: A folder that is missing, read-only, in memory (tmpfs) or on a disk without the space.
    """
    slab = FileSlab(folder, capacity_bytes, cached=cached)
    return FarTier("disk", slab, outward=ThreadLane("planish-disk-out"), inward=ThreadLane("planish-disk-in"))


def _open(folder: Path, nbytes: int) -> IO[bytes]:
    """Return a file without a name whose `nbytes` are there."""
    if not folder.is_dir():
        raise UsageError(f"`disk` memory needs an existing folder, got {folder}; make it or name another.")
    filesystem = _filesystem(folder)
    if filesystem in _IN_MEMORY:
        raise UsageError(f"`disk` memory in {folder} would lie in memory ({filesystem}); name a folder on a disk.")
    free = os.statvfs(folder)
    free_bytes = free.f_bavail * free.f_frsize
    if nbytes > free_bytes:
        raise UsageError(
            f"`disk` memory of {format_bytes(nbytes)} does not fit in {folder}, which has {format_bytes(free_bytes)} "
            "free; free some or ask for less."
        )
    try:
        file = tempfile.TemporaryFile(dir=folder, prefix="planish-", buffering=0)  # noqa: SIM115 - FileSlab closes it
    except OSError as error:
        raise UsageError(f"`disk` memory needs a folder it can write, {folder}: {error.strerror}.") from error
    try:
        os.posix_fallocate(file.fileno(), 0, nbytes)
    except OSError as error:
        file.close()
        raise UsageError(
            f"`disk` memory of {format_bytes(nbytes)} could not be taken in {folder}: {error.strerror}; free some or "
            "ask for less."
        ) from error
    return file


def _filesystem(folder: Path) -> str:
    """Return the type of the filesystem of `folder`, "" where the system does not say."""
    try:
        mounts = _MOUNTS.read_text().splitlines()
    except FileNotFoundError:
        return ""
    device = folder.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in mounts:
        before, _, after = line.partition(" - ")
        if before.split()[2] == number:
            return after.split()[0]
    return ""


def _go_direct(fd: int) -> bool:
    """Switch `fd` past the page cache; return whether the filesystem can."""
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
    except (AttributeError, OSError):
        return False
    return True


def _copy_out(source: Tensor, start: int, slot: np.ndarray) -> None:
    """Copy bytes of `source` to a staging slot, without other threads' help and without the interpreter's lock."""
    if source.device.type == "cpu":
        ctypes.memmove(slot.ctypes.data, source.data_ptr() + start, slot.nbytes)
    else:
        torch.from_numpy(slot).copy_(_bytes(source)[start : start + slot.nbytes])


def _copy_in(slot: np.ndarray, target: Tensor, start: int) -> None:
    if target.device.type == "cpu":
        ctypes.memmove(target.data_ptr() + start, slot.ctypes.data, slot.nbytes)
    else:
        _bytes(target)[start : start + slot.nbytes].copy_(torch.from_numpy(slot))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1).view(torch.uint8)
