"""A transfer under way, with the memory that it uses: held until somebody has waited, and not a moment longer."""

from collections import deque

import torch.distributed as dist
from torch import Tensor


class Transfer:
    """A send, or a part in a collective. It holds its tensors itself, so that what is alive is up to us.

    Args:
        work: What torch knows it as.
        tensors: What is read or written meanwhile.
    """

    def __init__(self, work: dist.Work, *tensors: Tensor) -> None:
        self._work: dist.Work | None = work
        self._tensors = tensors

    @property
    def waited(self) -> bool:
        """Whether somebody has waited for it."""
        return self._work is None

    def wait(self) -> None:
        """Wait for it, and let go of its tensors."""
        if self._work is not None:
            self._work.wait()
            self._work, self._tensors = None, ()


class Ring:
    """Transfers under way, so many at most: one more waits for the first of them.

    Args:
        size: How many.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._under_way: deque[Transfer] = deque()

    def make_room(self) -> None:
        """Wait until one more may start."""
        while self._under_way and (self._under_way[0].waited or len(self._under_way) >= self._size):
            self._under_way.popleft().wait()

    def add(self, transfer: Transfer) -> Transfer:
        """Take note of a transfer that has started, and return it."""
        self._under_way.append(transfer)
        return transfer

    def settle(self) -> None:
        """Wait for everything that is under way."""
        while self._under_way:
            self._under_way.popleft().wait()


def wait(transfer: Transfer | None) -> None:
    """Wait for a transfer, if one was started."""
    if transfer is not None:
        transfer.wait()
