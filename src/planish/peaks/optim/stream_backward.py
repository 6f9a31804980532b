"""Chunks updated while the backward pass still runs: each as soon as its last gradient is final."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from planish.peaks.optim.stream_layout import Arrays, Chunk, Piece
from planish.peaks.optim.stream_slots import Slots
from planish.peaks.optim.stream_update import Due


class Updates(Protocol):
    """What updates the pieces of a chunk whose parameters are due."""

    def __call__(self, chunk: Chunk, arrays: Arrays, *, due: Mapping[Tensor, Due]) -> None:
        """Do it in place."""
        ...


class InBackward:
    """One backward pass, whose gradients are final.

    A chunk is fetched once all of its gradients are there, and updated when another one needs its slot or at the end:
    in between, its transfer has the time of a layer's backward. A gradient is freed with the last chunk of its
    parameter.

    Args:
        slots: Where chunks are worked on.
        places: The chunks and pieces of each parameter.
        due: What a step needs of a parameter that has its gradient.
        work: Updates a chunk.
    """

    def __init__(
        self,
        slots: Slots,
        places: Mapping[Tensor, Sequence[tuple[Chunk, Piece]]],
        *,
        due: Callable[[Tensor], Due],
        work: Updates,
    ) -> None:
        self._slots, self._places, self._due_of, self._update = slots, places, due, work
        self._due: dict[Tensor, Due] = {}
        self._missing = Counter(chunk for each in places.values() for chunk, _ in each)
        self._open = {param: len(each) for param, each in places.items()}

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Watch the backward pass inside."""
        handles = [
            param.register_post_accumulate_grad_hook(self._arrived) for param in self._places if param.requires_grad
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def finish(self) -> None:
        """Update what is left: chunks on their way, and those with a parameter that got no gradient."""
        self._drain()
        left = [param for param in self._places if param.grad is not None and param not in self._due]
        for param in left:
            self._due[param] = self._due_of(param)
        chunks = [chunk for chunk, missing in self._missing.items() if missing]
        chunks = [chunk for chunk in chunks if any(piece.flat.param in self._due for piece in chunk.pieces)]
        self._slots.walk(chunks, self._work)
        for param in left:
            if not self._places[param]:
                self._done(param)

    @torch.no_grad()
    def _arrived(self, param: Tensor) -> None:
        self._due[param] = self._due_of(param)
        if not self._places[param]:
            self._done(param)
        for chunk, _ in self._places[param]:
            self._missing[chunk] -= 1
            if not self._missing[chunk]:
                self._begin(chunk)

    def _begin(self, chunk: Chunk) -> None:
        if chunk.resident is not None:
            self._slots.walk([chunk], self._work)
            return
        if not self._slots.has_room:
            self._slots.work_next(self._work)
        self._slots.fetch(chunk)

    def _drain(self) -> None:
        while self._slots.num_coming:
            self._slots.work_next(self._work)

    def _work(self, chunk: Chunk, arrays: Arrays) -> None:
        self._update(chunk, arrays, due=self._due)
        for piece in chunk.pieces:
            param = piece.flat.param
            self._open[param] -= 1
            if not self._open[param] and param in self._due:
                self._done(param)

    def _done(self, param: Tensor) -> None:
        """Count the update and let go of the gradient."""
        self._due.pop(param).step.add_(1)
        param.grad = None
