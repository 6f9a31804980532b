"""The elementwise half of a softmax over a tile of logits, compiled; see `softmax.cpp`.

On a CPU each pass of torch over a tile costs as much as a tenth of the products around it; these make one pass each.
Where they do not serve (another dtype or device, no compiler when planish was installed), `peaks.vocab` takes torch's
operations, whose results differ in the last bit.
"""

import ctypes
import functools

import torch
from torch import Tensor

from planish.kernels.native import LEVELS, library_path, load

_POINTER, _INT64, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
_WITHOUT = "the softmax of the head is torch's, a tenth slower in fp32 and half slower in bf16"


class SoftmaxKernels:
    """The library's functions on contiguous CPU tensors, in as many threads as torch uses.

    Args:
        library: The loaded library.
        level: Which of `LEVELS` to run; None: the best that the processor has.
    """

    def __init__(self, library: ctypes.CDLL, level: int | None = None) -> None:
        best = library.planish_softmax_level()
        self.level = best if level is None else min(level, best)
        self._fold, self._derive, self._add = (
            library.planish_softmax_fold,
            library.planish_softmax_derive,
            library.planish_softmax_add,
        )
        self._fold.restype = self._derive.restype = self._add.restype = None
        tile = [_POINTER, _INT, _INT64, _INT64, _INT64]
        self._fold.argtypes = [*tile, _POINTER, _POINTER, _INT64, _INT, _INT, _INT]
        self._derive.argtypes = [*tile, _POINTER, _POINTER, _INT64, *[_POINTER] * 4, _INT, _INT]
        self._add.argtypes = [_POINTER, _POINTER, _INT64, _INT, _INT]

    def fold(self, tile: Tensor, top: Tensor, total: Tensor, *, block: int, keep: bool) -> None:
        """Write the maximum and the sum of exp(z - maximum) of each block of each row of `tile`.

        Args:
            tile: Logits, float32 or bfloat16 [rows, columns]; with `keep` exp(z - maximum) takes their place.
            top: Written, float32 [rows, blocks], -1e38 for a block of nothing but -inf; columns contiguous.
            total: Written, in the layout of `top`.
            block: Columns of a block; the last one takes the remainder too.
            keep: See `tile`.
        """
        into = (top.data_ptr(), total.data_ptr(), top.stride(0), int(keep))
        self._fold(*_tile(tile, block), *into, torch.get_num_threads(), self.level)

    def derive(
        self,
        tile: Tensor,
        *,
        lse: Tensor | None,
        factor: Tensor | None,
        block: int,
        slope: Tensor | None,
        uniform: Tensor | None,
        hit: Tensor | None,
        column: Tensor,
    ) -> None:
        """Overwrite `tile` by slope p - uniform + hit [v == column], rounded once; all but `tile` is float32.

        Args:
            tile: Logits y, p = exp(y - lse); without `lse` what `fold` kept, p = kept x factor.
            lse: [rows], or None.
            factor: [rows, blocks], columns contiguous; with `lse` not looked at.
            block: Columns of a block.
            slope: [rows]; None is 1.
            uniform: [rows]; None is 0.
            hit: [rows]; None is nothing.
            column: int64 [rows], not negative.
        """
        pointers = [None if each is None else each.data_ptr() for each in (slope, uniform, hit, column)]
        first = (None, factor.data_ptr(), factor.stride(0)) if lse is None else (lse.data_ptr(), None, 0)
        self._derive(*_tile(tile, block), *first, *pointers, torch.get_num_threads(), self.level)

    def add(self, total: Tensor, part: Tensor) -> None:
        """Add bfloat16 `part` to float32 `total`, both contiguous and of one shape."""
        self._add(total.data_ptr(), part.data_ptr(), part.numel(), torch.get_num_threads(), self.level)


def _tile(tile: Tensor, block: int) -> tuple[int, ...]:
    return (tile.data_ptr(), int(tile.dtype == torch.bfloat16), *tile.shape, block)


def softmax_kernels(tile: Tensor) -> SoftmaxKernels | None:
    """Return the kernels for `tile`, or None where they do not serve: it must be real, on a CPU, fp32 or bf16."""
    real = type(tile) is Tensor and tile.device.type == "cpu"
    return _kernels() if real and tile.dtype in (torch.float32, torch.bfloat16) else None


@functools.cache
def _kernels() -> SoftmaxKernels | None:
    library = load("softmax", without=_WITHOUT)
    return None if library is None else SoftmaxKernels(library)


def describe() -> str:
    """Return which kernels serve this machine."""
    if library_path("softmax") is None:
        return "torch (no C++ compiler when planish was installed)"
    return LEVELS[_kernels().level]
