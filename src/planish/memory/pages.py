"""Large pages for large tensors: a fresh block costs a page fault for each page that is first written.

Pages of 4 KiB cost 0.2 to 0.35 ms a MiB, several per cent of a step that makes its buffers anew; pages of 2 MiB a fifth
of that. Where the system leaves the choice to programs ("madvise", the usual setting), asking for them once a tensor is
there is enough. It changes no byte that is held: only whole large pages inside the block become one.
"""

import ctypes
import functools
import sys
from collections.abc import Callable

import torch
from torch import Tensor

ALWAYS_MAPPED_BYTES = 32 * 2**20
"""From this size on glibc gives a block pages of its own however large its heap is: every one comes without pages."""

_PAGE_BYTES = 4096
_MADV_HUGEPAGE = 14


def in_large_pages(tensor: Tensor) -> Tensor:
    """Return `tensor`, just allocated and not yet written, on large pages where it is large and the system has them.

    Tensors on other devices, small ones and those without data are returned as they are.
    """
    advise = _madvise()
    plain = type(tensor) is Tensor and tensor.device.type == "cpu" and not torch.compiler.is_compiling()
    if advise is not None and plain and tensor.nbytes >= ALWAYS_MAPPED_BYTES:
        start = -(-tensor.data_ptr() // _PAGE_BYTES) * _PAGE_BYTES
        stop = (tensor.data_ptr() + tensor.nbytes) // _PAGE_BYTES * _PAGE_BYTES
        advise(start, stop - start, _MADV_HUGEPAGE)
    return tensor


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    """Return the system's call, None where there is none."""
    if sys.platform != "linux":
        return None
    call = ctypes.CDLL(None).madvise
    call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return call
