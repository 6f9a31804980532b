"""One tensor in far memory: on its way out, away, or on its way back."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from planish.memory.far import FarTier
from planish.memory.lanes import Event
from planish.memory.slab import Region

Label = Callable[[int, Tensor], None]


class Parked:
    """A tensor that is copied out at once, dropped by `leave`, and brought back bit for bit as often as one asks.

    Args:
        index: The layer that it belongs to.
        tensor: Contiguous; nobody may change it until it has left.
        tier: Where it goes.
        region: Its place there.
    """

    __slots__ = ("_fetched", "_like", "_region", "_tensor", "_tier", "_version", "_written", "index")

    def __init__(self, index: int, tensor: Tensor, tier: FarTier, region: Region) -> None:
        self.index = index
        self._tensor: Tensor | None = tensor.detach()  # of the same version, and without its graph
        self._version = tensor._version
        self._like = (tensor.shape, tensor.dtype, tensor.device)
        self._tier = tier
        self._region = region
        self._written: Event = tier.write(region, self._tensor)
        self._fetched: tuple[Tensor, Event] | None = None

    def leave(self) -> None:
        """Drop the tensor once it is copied."""
        if self._tensor is not None:
            self._written.wait()
            check_version(self.index, self._tensor, self._version)
            self._tensor = None

    def fetch(self, label: Label) -> None:
        """Begin to bring the tensor back."""
        if self._fetched is None:
            shape, dtype, device = self._like
            target = torch.empty(shape, dtype=dtype, device=device)
            label(self.index, target)
            self._fetched = (target, self._tier.read(self._region, target))

    def again(self, label: Label) -> Tensor:
        """Return the tensor, waiting for what has not come yet."""
        self.fetch(label)
        assert self._fetched is not None
        (tensor, event), self._fetched = self._fetched, None
        event.wait()
        return tensor


def fits(tensor: Tensor, slot_bytes: int) -> bool:
    """Return whether the tensor would come back from a slot bit for bit, layout included."""
    return 0 < tensor.nbytes <= slot_bytes and tensor.is_contiguous() and not is_traceable_wrapper_subclass(tensor)


def check_version(index: int, tensor: Tensor, version: int) -> None:
    """Refuse a tensor that was changed since it had `version`."""
    if tensor._version != version:
        raise RuntimeError(
            f"the input of layer {index}, or what it keeps, was changed in place after the layer took it, so the layer "
            "cannot run again from it; make that operation return a new tensor."
        )
