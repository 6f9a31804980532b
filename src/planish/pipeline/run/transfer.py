"""A transfer under way, with the memory that it uses: held until somebody has waited, and not a moment longer."""

import time
import weakref
from collections import deque

import torch.distributed as dist
from torch import Tensor

# How long gloo's thread may take to let go; five milliseconds were the most that was seen.
_RELEASED_S = 1.0


class Transfer:
    """A send, or a part in a collective. It holds its tensors itself, so that what is alive is up to us.

    A thread of gloo's wakes who waits for its collective before it lets go of the tensors, and is waited for as well.

    Args:
        work: What torch knows it as.
        lent: What is read or written meanwhile, as tensors of their own that only this transfer and `work` hold.
    """

    def __init__(self, work: dist.Work, *lent: Tensor) -> None:
        self._work: dist.Work | None = work
        self._lent = lent

    @property
    def waited(self) -> bool:
        """Whether somebody has waited for it."""
        return self._work is None

    def wait(self) -> None:
        """Wait for it, and let go of its tensors."""
        if self._work is None:
            return
        self._work.wait()
        held = [weakref.ref(each) for each in self._lent if each.device.type == "cpu"]
        self._work, self._lent = None, ()
        last_s = time.monotonic() + _RELEASED_S
        while any(each() is not None for each in held) and time.monotonic() < last_s:
            time.sleep(0)


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
