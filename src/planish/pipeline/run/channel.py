"""The vocabulary's collectives, in the one order in which all ranks list them, and never more than two under way."""

from collections import deque
from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor

_AHEAD = 2


class Channel:
    """A process group of its own for the vocabulary, so that its collectives do not wait for hidden states.

    Args:
        group: Its ranks hold the shards of the vocabulary in order.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._under_way: deque[dist.Work] = deque()

    def broadcast(self, tensor: Tensor, root: int) -> dist.Work | None:
        """Start to copy `tensor` from `root` to all ranks."""
        return self._start(tensor, lambda: dist.broadcast(tensor, group=self.group, group_src=root, async_op=True))

    def gather(self, out: Tensor, tensor: Tensor) -> dist.Work | None:
        """Start to gather `tensor` of all ranks, [...], as `out`, [p, ...]."""
        flat = out.view(-1), tensor.reshape(-1)
        return self._start(tensor, lambda: dist.all_gather_single(*flat, group=self.group, async_op=True))

    def reduce(self, tensor: Tensor, root: int) -> dist.Work | None:
        """Start to sum `tensor` on `root`; on the other ranks it is used up."""
        return self._start(tensor, lambda: dist.reduce(tensor, group=self.group, group_dst=root, async_op=True))

    def exchange(self, out: Tensor, tensor: Tensor, receives: list[int], sends: list[int]) -> dist.Work | None:
        """Start to send the rows of `tensor`, so many to each rank, and to receive those of `out`."""

        def issue() -> dist.Work:
            return dist.all_to_all_single(out, tensor, receives, sends, group=self.group, async_op=True)

        return self._start(None, issue)

    def settle(self) -> None:
        """Wait for everything that is under way."""
        while self._under_way:
            self._under_way.popleft().wait()

    def _start(self, tensor: Tensor | None, issue: Callable[[], dist.Work]) -> dist.Work | None:
        """Start a collective; None where there is nobody to talk to, or nothing to say, as all ranks know."""
        if self.size == 1 or (tensor is not None and not tensor.numel()):
            return None
        while len(self._under_way) >= _AHEAD:
            self._under_way.popleft().wait()
        work = issue()
        self._under_way.append(work)
        return work


def wait(work: dist.Work | None) -> None:
    """Wait for a collective, if one was started."""
    if work is not None:
        work.wait()
