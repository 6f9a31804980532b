"""The vocabulary's collectives, in the one order in which all ranks list them, and never more than two under way."""

from collections.abc import Callable

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
        return self._start(lambda: dist.broadcast(tensor, group=self.group, group_src=root, async_op=True), tensor)

    def gather(self, out: Tensor, tensor: Tensor) -> Transfer | None:
        """Start to gather `tensor` of all ranks, [...], as `out`, [p, ...]."""
        flat = out.view(-1), tensor.reshape(-1)
        return self._start(lambda: dist.all_gather_single(*flat, group=self.group, async_op=True), tensor, out)

    def reduce(self, tensor: Tensor, root: int) -> Transfer | None:
        """Start to sum `tensor` on `root`; on the other ranks it is used up."""
        return self._start(lambda: dist.reduce(tensor, group=self.group, group_dst=root, async_op=True), tensor)

    def exchange(self, out: Tensor, tensor: Tensor, receives: list[int], sends: list[int]) -> Transfer | None:
        """Start to send the rows of `tensor`, so many to each rank, and to receive those of `out`."""

        def issue() -> dist.Work:
            return dist.all_to_all_single(out, tensor, receives, sends, group=self.group, async_op=True)

        return self._start(issue, tensor, out, always=True)

    def settle(self) -> None:
        """Wait for everything that is under way."""
        self._ring.settle()

    def _start(self, issue: Callable[[], dist.Work], *tensors: Tensor, always: bool = False) -> Transfer | None:
        """Start a collective; None where there is nobody to talk to, or nothing to say, as all ranks know."""
        if self.size == 1 or not (always or tensors[0].numel()):
            return None
        self._ring.make_room()
        return self._ring.add(Transfer(issue(), *tensors))
