"""The compiled bitmap kernels, built with the package where a C++ compiler was there; see `bitmap.cpp`."""

import ctypes
import functools

import torch
from torch import Tensor

from planish.kernels.native import LEVELS, library_path, load

_POINTER, _INT64, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int


class NativeCodec:
    """The library's functions on CPU tensors, in as many threads as torch uses.

    Args:
        library: The loaded library.
        level: Which of `LEVELS` to run; None: the best that the processor has.
    """

    def __init__(self, library: ctypes.CDLL, level: int | None = None) -> None:
        best = library.planish_bitmap_level()
        self.level = best if level is None else min(level, best)
        self._count, self._pack = library.planish_bitmap_count, library.planish_bitmap_pack
        self._compact, self._unpack = library.planish_bitmap_compact, library.planish_bitmap_unpack
        self._count.restype = self._pack.restype = _INT64
        self._compact.restype = self._unpack.restype = None
        self._count.argtypes = [_POINTER, _INT64, _INT, _INT, _INT]
        self._pack.argtypes = [_POINTER, _INT64, _INT, _POINTER, _POINTER, _POINTER, _INT64, _INT, _INT]
        self._compact.argtypes = [_POINTER, _INT64, _INT, _POINTER, _POINTER, _POINTER, _INT64, _INT, _INT]
        self._unpack.argtypes = [_POINTER, _INT64, _POINTER, _POINTER, _INT64, _INT, _POINTER, _INT, _INT]

    def count(self, x: Tensor) -> int:
        """Return how many elements are not zero."""
        return self._count(x.data_ptr(), x.numel(), x.element_size(), torch.get_num_threads(), self.level)

    def pack(self, x: Tensor, bits: Tensor, base: Tensor, values: Tensor) -> int:
        """See `planish.kernels.bitmap.pack`."""
        size, threads = x.element_size(), torch.get_num_threads()
        into = (bits.data_ptr(), base.data_ptr(), values.data_ptr(), values.numel())
        return self._pack(x.data_ptr(), x.numel(), size, *into, threads, self.level)

    def compact(self, x: Tensor, bits: Tensor, base: Tensor, values: Tensor) -> None:
        """See `planish.kernels.bitmap.compact`."""
        size, threads = x.element_size(), torch.get_num_threads()
        into = (bits.data_ptr(), base.data_ptr(), values.data_ptr(), values.numel())
        self._compact(x.data_ptr(), x.numel(), size, *into, threads, self.level)

    def unpack(self, values: Tensor, bits: Tensor, base: Tensor, out: Tensor) -> None:
        """See `planish.kernels.bitmap.unpack`."""
        packed = (values.data_ptr(), values.numel(), bits.data_ptr(), base.data_ptr())
        size, threads = out.element_size(), torch.get_num_threads()
        self._unpack(*packed, out.numel(), size, out.data_ptr(), threads, self.level)


@functools.cache
def native_codec() -> NativeCodec | None:
    """Return the compiled kernels, or None where they were not built, which is said once."""
    library = load("bitmap", without="activations are packed by NumPy, several times slower than memory")
    return None if library is None else NativeCodec(library)


def describe() -> str:
    """Return which kernels serve this machine."""
    if library_path("bitmap") is None:
        return "NumPy (no C++ compiler when planish was installed)"
    return LEVELS[native_codec().level]
