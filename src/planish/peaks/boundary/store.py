"""Boundaries out of the way: each checkpointed layer's input leaves the device in forward and is back for backward."""

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.checkpoint import checkpoint

from planish.errors import UsageError
from planish.memory.far import FarTier
from planish.memory.lanes import Event
from planish.memory.slab import Pool, Region
from planish.price.boundary import Boundaries, slots_in

Label = Callable[[int, Tensor], None]
Run = Callable[..., Any]
PLAIN: Run = partial(checkpoint, use_reentrant=False)


class BoundaryStore:
    """Moves the inputs of checkpointed layers to far memory and back (SCO), around whichever `checkpoint` runs them.

    In forward the input of layer l is copied out while the layer runs, and dropped when the next layer begins. In
    backward the input of l-1 is fetched while l runs again. Boundaries beyond the slots, the last ones, those of an
    odd layout and those larger than a slot stay on the device, as without offloading.

    [Note: a boundary lives as long as its graph] What autograd saves for a layer is a `_Boundary` in place of the
    tensor. It owns a slot and gives it back when it dies, which is when the graph lets go: after its backward, or
    whenever a forward is abandoned. So microbatches may be in flight in any order, a retained graph may run again,
    and no step needs to be closed. Boundaries of one forward are chained backwards, for the fetch ahead.

    Memory:        on the device see `Boundaries`; far memory is cut into slots here and kept for the whole run (the
                   paper frees its pinned memory after each step), so no step allocates any.
    Exactness:     loss and gradients bitwise those of the same checkpointing without offloading.

    Args:
        boundaries: Which of them go.
        boundary_bytes: The largest one; shorter ones use a prefix of their slot.
        tiers: Far memories, filled in this order; closed with the store.
        label: Told of each restored boundary, by layer.

    References:
        arXiv 2609.14306, section 3.3: SCO.
    """

    def __init__(
        self,
        boundaries: Boundaries,
        *,
        boundary_bytes: int,
        tiers: Sequence[FarTier],
        label: Label = lambda *_: None,
    ) -> None:
        self.boundaries = boundaries
        self.tiers = tuple(tiers)
        self.num_offloaded = 0
        self.num_stayed = 0
        self._boundary_bytes = boundary_bytes
        self._pools = [
            (tier, tier.slab.cut(boundary_bytes, slots_in(tier.slab.capacity_bytes, boundary_bytes))) for tier in tiers
        ]
        self._label = label
        self._inside = 0
        self._leaving: _Boundary | None = None
        self._last: Callable[[], _Boundary | None] = lambda: None

    def checkpoint(self, index: int, run: Run = PLAIN) -> Run:
        """Return `run` for layer `index`, with its first positional tensor kept here between forward and backward.

        Args:
            index: Place of the layer in forward order.
            run: `torch.utils.checkpoint.checkpoint` of either kind; called as run(function, *args).
        """

        def call(function: Callable[..., Any], *args: Any) -> Any:
            if self._inside or not torch.is_grad_enabled():
                return run(function, *args)
            if not args or not isinstance(args[0], Tensor):
                raise UsageError(
                    f"layer {index} takes its hidden state by keyword, which checkpointing keeps on the device; "
                    "offloading needs it as the first positional argument."
                )
            boundary = self._put(index, args[0])
            with saved_tensors_hooks(boundary.pack, self._unpack):
                return run(partial(self._layer, function), *args)

        return call

    def settle(self) -> None:
        """Wait until the boundary that is being copied out has left, and free it on the device."""
        leaving, self._leaving = self._leaving, None
        if leaving is not None:
            leaving.leave()

    def close(self) -> None:
        """Give far memory back; graphs that still hold boundaries can no longer run backward."""
        self.settle()
        for tier in self.tiers:
            tier.close()

    def __enter__(self) -> "BoundaryStore":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _layer(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run a layer; checkpoints within it are its own business."""
        self._inside += 1
        try:
            return function(*args)
        finally:
            self._inside -= 1

    def _put(self, index: int, tensor: Tensor) -> "_Boundary":
        leaving, last = self._leaving, self._last()
        if leaving is not None and not 0 < index - leaving.index < self.boundaries.every:
            self.settle()
        boundary = _Boundary(index, tensor, last if last is not None and last.index < index else None)
        self._last = weakref.ref(boundary)
        if self.boundaries.goes(index) and self._can_go(tensor) and (slot := self._free_slot()) is not None:
            boundary.go(slot)
            self._leaving = boundary
            self.num_offloaded += 1
        else:
            self.num_stayed += 1
        return boundary

    def _can_go(self, tensor: Tensor) -> bool:
        """Return whether the tensor would come back bit for bit, layout included."""
        return (
            0 < tensor.nbytes <= self._boundary_bytes
            and tensor.is_contiguous()
            and not is_traceable_wrapper_subclass(tensor)
        )

    def _free_slot(self) -> "_Slot | None":
        for tier, pool in self._pools:
            if (region := pool.acquire()) is not None:
                return _Slot(tier, pool, region)
        return None

    def _unpack(self, packed: Any) -> Tensor:
        if not isinstance(packed, _Boundary):
            return packed
        self.settle()
        tensor = packed.tensor_again(self._label)
        ahead = packed.ahead(self.boundaries.every)
        if ahead is not None:
            ahead.fetch(self._label)
        return tensor


class _Slot:
    """A place in far memory and the transfers of the boundary that lies there."""

    __slots__ = ("fetched", "pool", "region", "tier", "written")

    def __init__(self, tier: FarTier, pool: Pool, region: Region) -> None:
        self.tier, self.pool, self.region = tier, pool, region
        self.written: Event | None = None
        self.fetched: tuple[Tensor, Event] | None = None


class _Boundary:
    """The input of one layer in one forward: on the device, in far memory, or on its way."""

    __slots__ = ("__weakref__", "_like", "_previous", "_slot", "_tensor", "_version", "index")

    def __init__(self, index: int, tensor: Tensor, previous: "_Boundary | None") -> None:
        self.index = index
        self._tensor: Tensor | None = tensor
        self._version = tensor._version
        self._like = (tensor.shape, tensor.dtype, tensor.device)
        self._previous: Callable[[], _Boundary | None] = weakref.ref(previous) if previous else lambda: None
        self._slot: _Slot | None = None

    def __del__(self) -> None:
        if self._slot is not None:
            self._slot.pool.release(self._slot.region)

    def pack(self, tensor: Tensor) -> Any:
        """Return itself for the layer's input; whatever else the layer is given stays as it is."""
        return self if tensor is self._tensor else tensor

    def go(self, slot: _Slot) -> None:
        """Begin to copy the tensor out."""
        assert self._tensor is not None
        self._slot = slot
        slot.written = slot.tier.write(slot.region, self._tensor.detach())

    def leave(self) -> None:
        """Drop the tensor once it is copied."""
        assert self._slot is not None
        assert self._slot.written is not None
        self._slot.written.wait()
        self._check_version()
        self._tensor = None

    def fetch(self, label: Label) -> None:
        """Begin to bring the tensor back."""
        slot = self._slot
        if slot is None or slot.fetched is not None:
            return
        shape, dtype, device = self._like
        target = torch.empty(shape, dtype=dtype, device=device)
        label(self.index, target)
        slot.fetched = (target, slot.tier.read(slot.region, target))

    def tensor_again(self, label: Label) -> Tensor:
        """Return the layer's input, waiting for it if it must come."""
        slot = self._slot
        if slot is None:
            self._check_version()
            assert self._tensor is not None
            return self._tensor
        self.fetch(label)
        assert slot.fetched is not None
        (tensor, event), slot.fetched = slot.fetched, None
        event.wait()
        return tensor

    def ahead(self, distance: int) -> "_Boundary | None":
        """Return the offloaded boundary next in backward, if it is at most `distance` layers away."""
        boundary = self._previous()
        while boundary is not None and self.index - boundary.index <= distance:
            if boundary._slot is not None:
                return boundary
            boundary = boundary._previous()
        return None

    def _check_version(self) -> None:
        if self._tensor is not None and self._tensor._version != self._version:
            raise RuntimeError(
                f"the input of layer {self.index} was changed in place after the layer took it, so the layer cannot "
                "run again from it; make that operation return a new tensor."
            )
