"""The bitmap kernels in Triton, for CUDA devices: one pass over the tensor, or two where the stream's order matters."""

# ruff: noqa: ANN001, ANN202, PLR0913  (what a kernel is given has no Python type)

import torch
import triton
import triton.language as tl
from torch import Tensor

from planish.kernels.bitmap import BLOCK, as_integers


@triton.jit
def _pack(
    x_ptr, bits_ptr, base_ptr, values_ptr, counter_ptr, numel, capacity, BLOCK: tl.constexpr, IN_ORDER: tl.constexpr
):
    block = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    at = block * BLOCK + lanes
    x = tl.load(x_ptr + at, mask=at < numel, other=0)
    there = tl.where(x != 0, 1, 0)
    marks = tl.sum(tl.reshape(there, (BLOCK // 8, 8)) << tl.arange(0, 8)[None, :], axis=1)
    byte = block * (BLOCK // 8) + tl.arange(0, BLOCK // 8)
    tl.store(bits_ptr + byte, marks.to(tl.uint8), mask=byte < (numel + 7) // 8)
    count = tl.sum(there, axis=0).to(tl.int64)
    if IN_ORDER:
        base = tl.load(base_ptr + block)
    else:
        base = tl.atomic_add(counter_ptr, count)
        tl.store(base_ptr + block, base)
    rank = tl.cumsum(there, axis=0) - there
    kept = tl.where(base + count <= capacity, there, 0)
    tl.store(values_ptr + base + rank, x, mask=kept != 0)


@triton.jit
def _count(x_ptr, counts_ptr, numel, BLOCK: tl.constexpr):
    block = tl.program_id(0).to(tl.int64)
    at = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < numel, other=0)
    tl.store(counts_ptr + block, tl.sum(tl.where(x != 0, 1, 0), axis=0).to(tl.int64))


@triton.jit
def _move(dense_ptr, bits_ptr, base_ptr, values_ptr, numel, BLOCK: tl.constexpr, UNPACK: tl.constexpr):
    block = tl.program_id(0).to(tl.int64)
    at = block * BLOCK + tl.arange(0, BLOCK)
    marks = tl.load(bits_ptr + at // 8, mask=at < numel, other=0).to(tl.int32)
    there = (marks >> (at % 8).to(tl.int32)) & 1
    place = tl.load(base_ptr + block) + tl.cumsum(there, axis=0) - there
    if UNPACK:
        values = tl.load(values_ptr + place, mask=there != 0, other=0)
        tl.store(dense_ptr + at, values, mask=at < numel)
    else:
        values = tl.load(dense_ptr + at, mask=at < numel, other=0)
        tl.store(values_ptr + place, values, mask=there != 0)


class TritonCodec:
    """See `planish.kernels.bitmap.Codec`.

    Args:
        in_order: Blocks lie in the stream in their order, at the cost of a second pass; else in that of their arrival,
            which each block's base undoes.
    """

    def __init__(self, *, in_order: bool = False) -> None:
        self.in_order = in_order

    def count(self, x: Tensor) -> int:
        """Return how many elements are not zero."""
        return int(self._counts(x).sum())

    def pack(self, x: Tensor, bits: Tensor, base: Tensor, values: Tensor) -> int:
        """See `Codec`."""
        counter = torch.zeros(1, dtype=torch.int64, device=x.device)
        if self.in_order:
            counts = self._counts(x)
            base.copy_(counts.cumsum(0) - counts)
            counter += counts.sum()
        given = (as_integers(x), bits, base, as_integers(values), counter, x.numel(), values.numel())
        if base.numel():
            _pack[(base.numel(),)](*given, BLOCK=BLOCK, IN_ORDER=self.in_order)
        return int(counter)

    def compact(self, x: Tensor, bits: Tensor, base: Tensor, values: Tensor) -> None:
        """See `Codec`."""
        if base.numel():
            _move[(base.numel(),)](
                as_integers(x), bits, base, as_integers(values), x.numel(), BLOCK=BLOCK, UNPACK=False
            )

    def unpack(self, values: Tensor, bits: Tensor, base: Tensor, out: Tensor) -> None:
        """See `Codec`."""
        if base.numel():
            given = (as_integers(out), bits, base, as_integers(values), out.numel())
            _move[(base.numel(),)](*given, BLOCK=BLOCK, UNPACK=True)

    def _counts(self, x: Tensor) -> Tensor:
        counts = torch.empty(-(-x.numel() // BLOCK), dtype=torch.int64, device=x.device)
        if counts.numel():
            _count[(counts.numel(),)](as_integers(x), counts, x.numel(), BLOCK=BLOCK)
        return counts
