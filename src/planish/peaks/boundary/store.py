"""Boundaries out of the way: each checkpointed layer's input leaves the device in forward and is back for backward."""

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from planish.errors import UsageError
from planish.memory.far import FarTier
from planish.memory.recall import Recall, running
from planish.memory.slab import Pool, Region
from planish.peaks.boundary.parked import Label, Parked, check_version, fits
from planish.peaks.boundary.remembered import PLAIN, Recording, Replaying, Run
from planish.price.boundary import Boundaries, Depth


class BoundaryStore:
    """Moves the inputs of checkpointed layers to far memory and back (SCO), around whichever `checkpoint` runs them.

    In forward the input of layer l is copied out while the layer runs, and dropped when the next layer begins. In
    backward the input of l-1 is fetched while l runs again. Boundaries beyond the slots, the last ones, those of an
    odd layout and those larger than a slot stay on the device, as without offloading.

    With `depth.kept_bytes`, what a layer that goes offers to `memory.recall` (attention its output and lse) travels
    with its input, and is not computed again.

    [Note: a boundary lives as long as its graph] What autograd saves for a layer is a `_Boundary` in place of the
    tensor. It owns a slot and gives it back when it dies, which is when the graph lets go: after its backward, or
    whenever a forward is abandoned. So microbatches may be in flight in any order, a retained graph may run again,
    and no step needs to be closed. Boundaries of one forward are chained backwards, for the fetch ahead.

    Memory:        on the device see `Boundaries`; far memory is cut into slots here and kept for the whole run (the
                   paper frees its pinned memory after each step), so no step allocates any.
    Exactness:     loss and gradients bitwise those of the same checkpointing without offloading.

    Args:
        boundaries: Which of them go.
        depth: Their sizes, the largest; shorter ones use a prefix of their slot.
        tiers: Far memories, filled in this order; closed with the store.
        label: Told of each tensor that comes back, by layer.

    References:
        arXiv 2609.14306, section 3.3: SCO.
    """

    def __init__(
        self,
        boundaries: Boundaries,
        *,
        depth: Depth,
        tiers: Sequence[FarTier],
        label: Label = lambda *_: None,
    ) -> None:
        self.boundaries = boundaries
        self.tiers = tuple(tiers)
        self.num_offloaded = 0
        self.num_stayed = 0
        self._racks = [_Rack(tier, depth) for tier in tiers]
        self._label = label
        self._inside = 0
        self._leaving: _Boundary | None = None
        self._last: Callable[[], _Boundary | None] = lambda: None

    @property
    def slots_in_use(self) -> int:
        """Boundaries in far memory now."""
        return sum(rack.pools[0].in_use for rack in self._racks)

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
                return run(partial(self._layer, weakref.ref(boundary), function), *args)

        return call

    def settle(self) -> None:
        """Wait until the boundary that is being copied out has left, and free it on the device."""
        leaving, self._leaving = self._leaving, None
        if leaving is not None:
            leaving.leave()

    def end_tape(self) -> None:
        """Let the next layer begin a forward of its own, of which nothing so far is a part; see `settle`."""
        self.settle()
        self._last = lambda: None

    def close(self) -> None:
        """Give far memory back; graphs that still hold boundaries can no longer run backward."""
        self._leaving = None
        for tier in self.tiers:
            tier.close()

    def __enter__(self) -> "BoundaryStore":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _layer(self, boundary: "weakref.ref[_Boundary]", function: Callable[..., Any], *args: Any) -> Any:
        """Run a layer; checkpoints within it are its own business."""
        owner = boundary()  # autograd keeps this call for longer than the layer's input
        self._inside += 1
        try:
            with running(None if owner is None else owner.recall()):
                return function(*args)
        finally:
            self._inside -= 1

    def _put(self, index: int, tensor: Tensor) -> "_Boundary":
        leaving, last = self._leaving, self._last()
        if leaving is not None and not 0 < index - leaving.index < self.boundaries.every:
            self.settle()
        boundary = _Boundary(index, tensor, last if last is not None and last.index < index else None, self._label)
        self._last = weakref.ref(boundary)
        rack = self._rack_for(index, tensor)
        if rack is None:
            self.num_stayed += 1
        else:
            boundary.go(rack)
            self._leaving = boundary
            self.num_offloaded += 1
        return boundary

    def _rack_for(self, index: int, tensor: Tensor) -> "_Rack | None":
        if not self.boundaries.goes(index):
            return None
        return next((rack for rack in self._racks if rack.has_room and fits(tensor, rack.sizes[0])), None)

    def _unpack(self, packed: Any) -> Tensor:
        if not isinstance(packed, _Boundary):
            return packed
        self.settle()
        tensor = packed.tensor_again()
        ahead = packed.ahead(self.boundaries.every)
        if ahead is not None:
            ahead.fetch()
        return tensor


class _Rack:
    """A tier cut into equal sets of slots: one for a boundary and one for each tensor that may travel with it."""

    def __init__(self, tier: FarTier, depth: Depth) -> None:
        self.tier = tier
        self.sizes = (depth.boundary_bytes, *depth.kept_bytes)
        num_slots = tier.slab.capacity_bytes // depth.slot_bytes
        self.pools: list[Pool] = [tier.slab.cut(nbytes, num_slots) for nbytes in self.sizes]

    @property
    def has_room(self) -> bool:
        return self.pools[0].in_use < self.pools[0].num_slots

    def take(self) -> list[Region]:
        regions = [pool.acquire() for pool in self.pools]
        return [region for region in regions if region is not None]

    def give_back(self, regions: list[Region]) -> None:
        for pool, region in zip(self.pools, regions, strict=True):
            pool.release(region)


class _Boundary:
    """The input of one layer in one forward, wherever it is, and what the layer keeps with it."""

    __slots__ = (
        "__weakref__",
        "_kept",
        "_label",
        "_parked",
        "_previous",
        "_rack",
        "_ran",
        "_regions",
        "_tensor",
        "_version",
        "index",
    )

    def __init__(self, index: int, tensor: Tensor, previous: "_Boundary | None", label: Label) -> None:
        self.index = index
        self._label = label
        self._tensor: Tensor | None = tensor
        self._version = tensor._version
        self._previous: Callable[[], _Boundary | None] = weakref.ref(previous) if previous else lambda: None
        self._rack: _Rack | None = None
        self._regions: list[Region] = []
        self._parked: list[Parked] = []
        self._kept: list[range] = []
        self._ran = False

    def __del__(self) -> None:
        if self._rack is not None:
            self._rack.give_back(self._regions)

    def pack(self, tensor: Tensor) -> Any:
        """Return itself for the layer's input; whatever else the layer is given stays as it is."""
        return self if tensor is self._tensor else tensor

    def go(self, rack: _Rack) -> None:
        """Begin to copy the tensor out."""
        assert self._tensor is not None
        self._rack, self._regions = rack, rack.take()
        self._parked.append(Parked(self.index, self._tensor, rack.tier, self._regions[0]))

    def leave(self) -> None:
        """Drop what is copied out."""
        for parked in self._parked:
            parked.leave()
        self._tensor = None

    def fetch(self) -> None:
        """Begin to bring everything back."""
        for parked in self._parked:
            parked.fetch(self._label)

    def tensor_again(self) -> Tensor:
        """Return the layer's input, waiting for it if it must come."""
        if self._parked:
            self.fetch()
            return self._parked[0].again(self._label)
        assert self._tensor is not None
        check_version(self.index, self._tensor, self._version)
        return self._tensor

    def ahead(self, distance: int) -> "_Boundary | None":
        """Return the offloaded boundary next in backward, if it is at most `distance` layers away."""
        boundary = self._previous()
        while boundary is not None and self.index - boundary.index <= distance:
            if boundary._parked:
                return boundary
            boundary = boundary._previous()
        return None

    def recall(self) -> Recall | None:
        """Return what the layer may remember in the run that begins: its first keeps, later ones find."""
        first, self._ran = not self._ran, True
        if len(self._regions) < 2:
            return None
        return Recording(self) if first else Replaying(self)

    def computes(self) -> None:
        """Take note of a computation that may keep its result."""
        self._kept.append(range(0))

    def keep(self, tensors: tuple[Tensor, ...]) -> None:
        """Begin to copy out the result of the last computation, if the next slots hold all of it."""
        assert self._rack is not None
        places = range(len(self._parked), len(self._parked) + len(tensors))
        sizes = self._rack.sizes[places.start : places.stop]
        if len(sizes) == len(tensors) and all(map(fits, tensors, sizes)):
            self._kept[-1] = places
            for place, tensor in zip(places, tensors, strict=True):
                self._label(self.index, tensor)
                self._parked.append(Parked(self.index, tensor, self._rack.tier, self._regions[place]))

    def kept(self, number: int) -> tuple[Tensor, ...] | None:
        """Return what computation `number` kept, or None."""
        return tuple(self._parked[place].again(self._label) for place in self._kept[number]) or None
