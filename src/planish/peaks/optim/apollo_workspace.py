"""What APOLLO's step needs beside its state: projections, shared by all parameters, and buffers, used by one by one."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from planish.peaks.optim.apollo_random import ProjectionKey, make_projection
from planish.price.apollo import CPU_BLOCK

_ACCELERATOR_BLOCK = 2**24


@dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    """The working memory of one step; it goes with this object.

    Memory: 4 bytes an element of every distinct projection, and the largest shape asked of each buffer.
    """

    projections: dict[tuple[ProjectionKey, torch.device, torch.dtype], Tensor] = field(default_factory=dict)
    buffers: dict[tuple[str, torch.device, torch.dtype], Tensor | None] = field(default_factory=dict)

    def projection(self, key: ProjectionKey, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Return P [R, dim], made at its first use."""
        made = self.projections.get((key, device, dtype))
        if made is None:
            made = self.projections[key, device, dtype] = make_projection(key, device, dtype)
        return made

    def buffer(self, name: str, shape: Sequence[int], device: torch.device, dtype: torch.dtype) -> Tensor:
        """Return uninitialised memory that holds until `name` is asked for again."""
        key, numel = (name, device, dtype), prod(shape)
        buffer = self.buffers.get(key)
        if buffer is None or buffer.numel() < numel:
            buffer = self.buffers[key] = None  # the small one goes before the large one comes
            buffer = self.buffers[key] = torch.empty(numel, device=device, dtype=dtype)
        return buffer[:numel].view(shape)


def block_elements(device: torch.device) -> int:
    """Return how many elements are at work at a time: what stays in a core's cache, or fills an accelerator."""
    return CPU_BLOCK if device.type == "cpu" else _ACCELERATOR_BLOCK
