"""The vocabulary's collectives, in the one order in which all ranks list them, and never more than two under way."""

from collections.abc import Callable
from functools import partial

import torch.distributed as dist
from torch import Tensor

from planish.pipeline.run.transfer import Ring, Transfer

_AHEAD = 2


class Channel:
    """A process group of its own for the vocabulary, so that its collectives do not wait for hidden states.

    Args:
        group: Its ranks hold the shards of the vocabulary in order.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._ring = Ring(_AHEAD)

    def broadcast(self, tensor: Tensor, root: int) -> Transfer | None:
        """Start to copy `tensor` from `root` to all ranks."""
        return self._start(partial(dist.broadcast, group_src=root), tensor.detach())

    def gather(self, out: Tensor, tensor: Tensor) -> Transfer | None:
        """Start to gather `tensor` of all ranks, [...], as `out`, [p, ...]."""
        return self._start(dist.all_gather_single, out.view(-1), tensor.reshape(-1))

    def reduce(self, tensor: Tensor, root: int) -> Transfer | None:
        """Start to sum `tensor` on `root`; on the other ranks it is used up."""
        return self._start(partial(dist.reduce, group_dst=root), tensor.detach())

    def exchange(self, out: Tensor, tensor: Tensor, receives: list[int], sends: list[int]) -> Transfer | None:
        """Start to send the rows of `tensor`, so many to each rank, and to receive those of `out`."""
        parts = {"output_split_sizes": receives, "input_split_sizes": sends}
        return self._start(partial(dist.all_to_all_single, **parts), out.detach(), tensor.detach(), always=True)

    def settle(self) -> None:
        """Wait for everything that is under way."""
        self._ring.settle()

    def _start(self, collective: Callable[..., dist.Work], *lent: Tensor, always: bool = False) -> Transfer | None:
        """Start a collective; None where there is nobody to talk to, or nothing to say, as all ranks know."""
        if self.size == 1 or not (always or lent[0].numel()):
            return None
        self._ring.make_room()
        return self._ring.add(Transfer(collective(*lent, group=self.group, async_op=True), *lent))
