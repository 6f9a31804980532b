"""The weights of a pipeline's ranks, brought to rank 0 a layer at a time."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from planish.comm.world import World
from planish.train.spread import reduced

_LAYER = re.compile(r"(.*?\.\d+)\.")


def layer_of(name: str) -> str:
    """Return the path of the layer that a weight is in; "" for one beside the layers."""
    found = _LAYER.match(name)
    return found.group(1) if found else ""


def outlines(tensors: Mapping[str, Tensor], world: World) -> dict[str, Tensor]:
    """Return the tensors of all ranks of a pipeline without their data, on every rank; elsewhere `tensors` themselves.

    Communication: one all-gather of names and shapes, in a pipeline.
    """
    if world.pipeline is None:
        return dict(tensors)
    mine = {name: (list(each.shape), str(each.dtype).removeprefix("torch.")) for name, each in tensors.items()}
    return {
        name: torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
        for rank in world.gather(mine)
        for name, (shape, dtype) in rank.items()
    }


class Collected:
    """Groups of weights, whole: those of a layer together, each other weight alone; on rank 0, and empty elsewhere.

    All ranks iterate together.

    Memory:        one group, on rank 0; of shards one whole weight, on the others.
    Communication: each weight goes once to rank 0; shards are gathered first.

    Args:
        weights: This rank's; shards, and rows of a shared one, as DTensors.
        world: The ranks of a pipeline.
        whole: All weights, where the other ranks are assumed: what is not here is taken to be the next one's.
    """

    def __init__(self, weights: Mapping[str, Tensor], world: World, whole: Mapping[str, Tensor] | None = None) -> None:
        self._weights, self._world = weights, world
        holders: dict[str, list[int]] = {}
        if whole is None:
            self._outlines = outlines(weights, world)
            for rank, names in enumerate(world.gather(list(weights))):
                for name in names:
                    holders.setdefault(name, []).append(rank)
        else:
            self._outlines = dict(whole)
            next_one = (world.rank + 1) % world.size
            holders = {name: [world.rank if name in weights else next_one] for name in whole}
        self._holders = holders
        self._groups: dict[str, list[str]] = {}
        for name in sorted(holders, key=_naturally):
            self._groups.setdefault(layer_of(name) or name, []).append(name)

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for names in self._groups.values():
            brought = {name: self._bring(name) for name in names}
            yield {name: each for name, each in brought.items() if each is not None}

    def _bring(self, name: str) -> Tensor | None:
        """Return a weight on rank 0; elsewhere do what that takes."""
        here, world = self._weights.get(name), self._world
        if isinstance(here, DTensor):
            whole = reduced(here)  # among those that share it
            if here.device_mesh == world.pipeline:
                return whole if world.leads else None
            here = whole
        owner = self._holders[name][0]
        if world.leads and here is None:
            here = torch.empty_like(self._outlines[name], device=world.mesh.device_type)
            dist.recv(here, owner)
        elif world.rank == owner and not world.leads:
            assert here is not None
            dist.send(here.detach().contiguous(), 0)
        return here if world.leads else None


def _naturally(name: str) -> list[Any]:
    """Return what sorts names with their numbers as numbers; those without any first."""
    return [(1, int(part), "") if part.isdigit() else (0, 0, part) for part in re.split(r"(\d+)", name)]
