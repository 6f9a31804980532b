"""What a layer computed once and need not compute again: kept when it runs forward, found when it runs for backward.

Whoever runs layers again says so with `running`; whoever computes something dear asks `current`. Neither knows the
other. A computation that draws random numbers must not take part: those after it would draw others.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

from torch import Tensor


class Recall(Protocol):
    """The memory of one run of one layer, asked in the order of its computations."""

    def again(self) -> tuple[Tensor, ...] | None:
        """Return what the computation that comes now kept in the layer's forward, or None: compute it."""
        ...

    def keep(self, *tensors: Tensor) -> None:
        """Offer the result of the computation that was just asked for; nobody may change it in place any more."""
        ...


_RUNNING: ContextVar[Recall | None] = ContextVar("planish_recall", default=None)


def current() -> Recall | None:
    """Return the memory of the layer that runs now, if it has one."""
    return _RUNNING.get()


@contextmanager
def running(recall: Recall | None) -> Iterator[None]:
    """Let a layer that runs inside use `recall`."""
    token = _RUNNING.set(recall)
    try:
        yield
    finally:
        _RUNNING.reset(token)
