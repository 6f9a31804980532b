"""What a layer computed and keeps, for when it runs again: on the device here, in far memory by the store."""

from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from planish.memory.recall import Recall, running
from planish.peaks.boundary.parked import Label, check_version

Run = Callable[..., Any]
PLAIN: Run = partial(checkpoint, use_reentrant=False)


class Results(Protocol):
    """The results of one layer's dear computations in one forward, numbered in their order."""

    def computes(self) -> None:
        """Take note of a computation that may keep its result."""
        ...

    def keep(self, tensors: tuple[Tensor, ...]) -> None:
        """Keep the result of the last computation, if there is room."""
        ...

    def kept(self, number: int) -> tuple[Tensor, ...] | None:
        """Return what computation `number` kept, or None."""
        ...


class Recording:
    """A layer's forward: nothing is known yet, results may be kept."""

    def __init__(self, results: Results) -> None:
        self._results = results

    def again(self) -> None:
        """Nothing is known."""
        self._results.computes()

    def keep(self, *tensors: Tensor) -> None:
        """Offer the result of the last computation."""
        self._results.keep(tensors)


class Replaying:
    """A layer that runs again: results come back in order."""

    def __init__(self, results: Results) -> None:
        self._results = results
        self._numbers = count()

    def again(self) -> tuple[Tensor, ...] | None:
        """Return the next result, if it was kept."""
        return self._results.kept(next(self._numbers))

    def keep(self, *tensors: Tensor) -> None:
        """It is kept already, or could not be."""


def remembering(index: int, run: Run = PLAIN, *, label: Label = lambda *_: None) -> Run:
    """Return `run` for layer `index`, which keeps on the device what it offers to `memory.recall`.

    Memory:        what every layer offers, from its forward to its recomputation, where it is handed out once; a
                   retained graph computes it again.
    Exactness:     loss and gradients bitwise those of `run`.

    Args:
        index: Place of the layer in forward order.
        run: `torch.utils.checkpoint.checkpoint` of either kind; called as run(function, *args).
        label: Told of each tensor that is kept, by layer.
    """

    def call(function: Callable[..., Any], *args: Any) -> Any:
        if not torch.is_grad_enabled():
            return run(function, *args)
        return run(partial(_layer, _OnDevice(index, label), function), *args)

    return call


def _layer(results: "_OnDevice", function: Callable[..., Any], *args: Any) -> Any:
    with running(results.recall()):
        return function(*args)


class _OnDevice:
    """Results that stay where they are until they are asked for."""

    def __init__(self, index: int, label: Label) -> None:
        self._index, self._label = index, label
        self._results: list[list[tuple[Tensor, int]]] = []
        self._ran = False

    def recall(self) -> Recall:
        """Return what the layer may remember in the run that begins: its first keeps, later ones find."""
        first, self._ran = not self._ran, True
        return Recording(self) if first else Replaying(self)

    def computes(self) -> None:
        self._results.append([])

    def keep(self, tensors: tuple[Tensor, ...]) -> None:
        for each in tensors:
            self._label(self._index, each)
        self._results[-1] = [(each.detach(), each._version) for each in tensors]  # without their graph: it holds this

    def kept(self, number: int) -> tuple[Tensor, ...] | None:
        kept, self._results[number] = self._results[number], []
        for tensor, version in kept:
            check_version(self._index, tensor, version)
        return tuple(tensor for tensor, _ in kept) or None
