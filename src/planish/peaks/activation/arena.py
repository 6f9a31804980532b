"""One slab of fixed size for what waits for backward: what does not fit is refused, and nothing ever grows."""

import weakref
from math import prod

import torch
from torch import Tensor

_ALIGN_BYTES = 64


class Arena:
    """Hands out views of a slab, each behind the last one that is still alive.

    A view is free as soon as nobody holds it: autograd lets go of it after backward, or at once where a checkpointed
    layer keeps nothing. Backward goes through layers in reverse, so the slab fills and empties like a stack.

    Memory: `nbytes`, for as long as the arena lives.

    Args:
        nbytes: Size of the slab.
        device: Where it lies.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        if nbytes < 0:
            raise ValueError(f"`arena_bytes` must be 0 or more, got {nbytes}.")
        self._slab = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._taken: list[tuple[weakref.ref[Tensor], int]] = []

    def room(self, dtype: torch.dtype) -> Tensor:
        """Return all the room behind the last view that is alive, to be written before it is taken."""
        begin = self._begin()
        whole = (self._slab.numel() - begin) // dtype.itemsize * dtype.itemsize
        return self._slab[begin : begin + max(0, whole)].view(dtype)

    def take(self, dtype: torch.dtype, *shape: int) -> Tensor | None:
        """Return the beginning of the room with this shape, None where it is too small; it is taken while it lives."""
        room, numel = self.room(dtype), prod(shape)
        if numel > room.numel():
            return None
        taken = room[:numel].view(shape)
        if numel:
            self._taken.append((weakref.ref(taken), self._begin() + taken.nbytes))
        return taken

    @property
    def taken_bytes(self) -> int:
        """Bytes in use, the gaps between views included."""
        return self._begin()

    def _begin(self) -> int:
        while self._taken and self._taken[-1][0]() is None:
            self._taken.pop()
        end = self._taken[-1][1] if self._taken else 0
        return min(self._slab.numel(), -(-end // _ALIGN_BYTES) * _ALIGN_BYTES)
