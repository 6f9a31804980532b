"""Packs what is not zero of a tensor, bit for bit: one bit an element, the values in a stream, and where blocks begin.

packed bytes = density * numel * itemsize + numel / 8 + numel / 512. An element is zero if all its bits are: -0.0, NaN
and denormals are values. `bits` holds eight elements a byte, the first in the lowest bit; `base[i]` is the place in the
stream of the first value of elements 4,096 i to 4,096 (i + 1), in whichever order blocks lie there.
"""

from importlib.util import find_spec
from math import ceil
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

BLOCK = 4096
# Elements that the NumPy twin takes at a time: its temporaries are a few MiB whatever it is given.
_PIECE = 256 * BLOCK


class Codec(Protocol):
    """Where elements are 2, 4 or 8 bytes, every tensor is contiguous, and all are on one device."""

    def count(self, x: Tensor) -> int:
        """Return how many elements of `x` are not zero."""
        ...

    def pack(self, x: Tensor, bits: Tensor, base: Tensor, values: Tensor) -> int:
        """Write `x` packed, as far as `values` has room, and return how many values there are."""
        ...

    def compact(self, x: Tensor, bits: Tensor, base: Tensor, values: Tensor) -> None:
        """Write those elements of `x` that `bits` marks into `values`, as `pack` did with another tensor."""
        ...

    def unpack(self, values: Tensor, bits: Tensor, base: Tensor, out: Tensor) -> None:
        """Write what `pack` or `compact` was given, zeros where `bits` marks nothing, into `out`."""
        ...


def num_bits_bytes(numel: int) -> int:
    """Return the size of `bits` for `numel` elements."""
    return ceil(numel / 8)


def num_blocks(numel: int) -> int:
    """Return the length of `base` for `numel` elements."""
    return ceil(numel / BLOCK)


def codec(device: torch.device) -> Codec:
    """Return the kernels of a device: compiled or NumPy's on a CPU, Triton's or torch's own operations elsewhere."""
    if device.type == "cuda" and find_spec("triton") is not None:
        from planish.kernels.bitmap_triton import TritonCodec

        return TritonCodec()
    if device.type != "cpu":
        return TorchCodec()
    from planish.kernels.bitmap_native import native_codec

    return native_codec() or TwinCodec()


class TwinCodec:
    """The same in NumPy: what the compiled kernels are compared with, and what serves a CPU without them."""

    def count(self, x: Tensor) -> int:
        """See `Codec`."""
        return int(np.count_nonzero(_patterns(x)))

    def pack(self, x: Tensor, bits: Tensor, base: Tensor, values: Tensor) -> int:
        """See `Codec`; blocks lie in the stream in their order."""
        patterns, marks, begins, stream = _patterns(x), bits.numpy(), base.numpy(), _patterns(values)
        total = 0
        for at in range(0, patterns.size, _PIECE):
            piece = patterns[at : at + _PIECE]
            there = piece != 0
            packed = np.packbits(there, bitorder="little")
            marks[at // 8 : at // 8 + packed.size] = packed
            first = at // BLOCK
            counts = np.add.reduceat(there, np.arange(0, piece.size, BLOCK), dtype=np.int64)
            begins[first : first + counts.size] = total + np.cumsum(counts) - counts
            found = piece[there]
            if total + found.size <= stream.size:
                stream[total : total + found.size] = found
            total += found.size
        return total

    def compact(self, x: Tensor, bits: Tensor, base: Tensor, values: Tensor) -> None:
        """See `Codec`; blocks lie in the stream in their order."""
        patterns, marks, stream = _patterns(x), bits.numpy(), _patterns(values)
        for at in range(0, patterns.size, _PIECE):
            piece = patterns[at : at + _PIECE]
            found = piece[_marked(marks, at, piece.size)]
            begin = int(base[at // BLOCK])
            stream[begin : begin + found.size] = found

    def unpack(self, values: Tensor, bits: Tensor, base: Tensor, out: Tensor) -> None:
        """See `Codec`; blocks may lie in any order."""
        stream, marks, result = _patterns(values), bits.numpy(), _patterns(out)
        for block, begin in enumerate(base.tolist()):
            piece = result[block * BLOCK : (block + 1) * BLOCK]
            there = _marked(marks, block * BLOCK, piece.size)
            piece[...] = 0
            piece[there] = stream[begin : begin + np.count_nonzero(there)]


class TorchCodec:
    """The same in torch's operations, for devices that have no kernels of ours; blocks lie in their order.

    Memory: about ten bytes an element while it packs or unpacks.
    """

    def count(self, x: Tensor) -> int:
        """See `Codec`."""
        return int(torch.count_nonzero(as_integers(x)))

    def pack(self, x: Tensor, bits: Tensor, base: Tensor, values: Tensor) -> int:
        """See `Codec`."""
        whole = as_integers(x)
        there = whole != 0
        padded = torch.nn.functional.pad(there, (0, -whole.numel() % BLOCK)).view(-1, BLOCK)
        bits.copy_((padded.view(-1, 8) * _weights(x.device)).sum(1, dtype=torch.uint8)[: bits.numel()])
        counts = padded.sum(1)
        base.copy_(counts.cumsum(0) - counts)
        total = int(counts.sum())
        if total <= values.numel():
            as_integers(values)[:total] = whole[there]
        return total

    def compact(self, x: Tensor, bits: Tensor, base: Tensor, values: Tensor) -> None:  # noqa: ARG002
        """See `Codec`."""
        found = as_integers(x)[_set_bits(bits, x.numel())]
        as_integers(values)[: found.numel()] = found

    def unpack(self, values: Tensor, bits: Tensor, base: Tensor, out: Tensor) -> None:  # noqa: ARG002
        """See `Codec`; for what this class packed."""
        as_integers(out).zero_().masked_scatter_(_set_bits(bits, out.numel()), as_integers(values))


def as_integers(tensor: Tensor) -> Tensor:
    """Return a view of the elements as whole numbers."""
    size = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.view(-1).view(size)


def _weights(device: torch.device) -> Tensor:
    return 1 << torch.arange(8, dtype=torch.uint8, device=device)


def _set_bits(bits: Tensor, count: int) -> Tensor:
    return (bits.unsqueeze(1) & _weights(bits.device)).ne(0).view(-1)[:count]


def _patterns(tensor: Tensor) -> np.ndarray:
    return as_integers(tensor).numpy()


def _marked(marks: np.ndarray, at: int, count: int) -> np.ndarray:
    packed = marks[at // 8 : ceil((at + count) / 8)]
    return np.unpackbits(packed, count=count, bitorder="little").view(bool)
