"""The C allocator's thresholds: whether freed tensors go back to the system, so that VmHWM follows the ledger.

glibc serves blocks under a threshold from a heap that shrinks from its top only, and raises that threshold to 32 MiB
as large blocks are freed: the heap then keeps most of what a training step frees. Fixed at 64 KiB, every tensor that
matters has pages of its own, which go back when it dies; the price is page faults when the next one comes, a
seventh to a third of a step's CPU time. `planish train` pays it where a budget was set.

Large pages make most of it up: torch's allocator asks for them for tensors of 2 MiB and more where the environment
says so when its first tensor is made.
"""

import ctypes
import os
import sys
from dataclasses import dataclass

from planish.units import format_bytes

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_DEFAULT_BYTES = 64 * 2**10
_TORCH_LARGE_PAGES = "THP_MEM_ALLOC_ENABLE"


@dataclass(frozen=True, slots=True, kw_only=True)
class MallocSetting:
    """What became of a request to fix malloc's thresholds.

    Attributes:
        applied: Whether blocks of `threshold_bytes` and more go back to the system when they are freed.
        threshold_bytes: The threshold asked for.
        reason: Why not, or how it is known.
    """

    applied: bool
    threshold_bytes: int
    reason: str


class _MallInfo(ctypes.Structure):
    """glibc's `struct mallinfo`: `uordblks` bytes in use in the heap, `hblkhd` in blocks with pages of their own."""

    _fields_ = [
        (name, ctypes.c_uint)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usm", "fsm", "uordblks", "fordblks", "keepcost")
    ]


def fix_malloc_thresholds(threshold_bytes: int = _DEFAULT_BYTES) -> MallocSetting:
    """Make malloc give blocks of `threshold_bytes` and more back to the system as soon as they are freed.

    For the whole process and for good; what is free in the heap by then goes back too, but its addresses still serve
    large blocks, so call it before the first tensor. Another malloc may have been loaded in front of glibc's: that is
    found out by a trial block.

    Args:
        threshold_bytes: Smallest block with pages of its own.
    """
    libc, reason = _glibc()
    if libc is not None:
        libc.malloc_trim(0)
        accepted = [libc.mallopt(name, threshold_bytes) for name in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD)]
        if accepted != [1, 1]:
            reason = f"glibc refused a threshold of {format_bytes(threshold_bytes)}"
        elif not _serves(libc, threshold_bytes):
            reason = "another malloc serves this process"
        else:
            return MallocSetting(applied=True, threshold_bytes=threshold_bytes, reason=reason)
    return MallocSetting(applied=False, threshold_bytes=threshold_bytes, reason=reason)


def ask_for_large_pages() -> None:
    """Make torch ask for large pages, unless the user's environment already says whether it should.

    For the whole process, and only before its first tensor. Memory: none, since a page is large only inside a block.
    """
    os.environ.setdefault(_TORCH_LARGE_PAGES, "1")  # noqa: TID251 - where torch looks, and nowhere else


def describe() -> str:
    """Return what `planish train` can do about malloc here, for `planish doctor`."""
    libc, reason = _glibc()
    if libc is None:
        return f"{reason}: freed blocks may stay resident"
    return (
        f"{reason}: under a budget `planish train` fixes the mmap and trim thresholds at {format_bytes(_DEFAULT_BYTES)}"
    )


def _glibc() -> tuple[ctypes.CDLL | None, str]:
    """Return the C library and its name, or None and why it is not glibc."""
    if sys.platform != "linux":
        return None, f"{sys.platform} has no glibc"
    libc = ctypes.CDLL(None)
    try:
        version = libc.gnu_get_libc_version
        libc.mallinfo.restype = _MallInfo
    except AttributeError:
        return None, "the C library is not glibc"
    version.restype = ctypes.c_char_p
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    libc.malloc_trim.argtypes = [ctypes.c_size_t]
    return libc, f"glibc {version().decode()}"


def _serves(libc: ctypes.CDLL, nbytes: int) -> bool:
    """Return whether it is glibc that answers `malloc`: whether its own books grow by a block."""
    before = libc.mallinfo()
    block = libc.malloc(nbytes)
    after = libc.mallinfo()
    libc.free(block)
    grown_bytes = after.uordblks + after.hblkhd - before.uordblks - before.hblkhd
    return grown_bytes % 2**32 >= nbytes
