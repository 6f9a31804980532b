"""Rows of several matrices go round together past every rank's tokens, and their gradients come home."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from planish.comm.ring import Circle, ComeHome, Slot, go_round
from planish.peaks.vocab.blocked import TileSweep
from planish.price.vocab import STRIP, Buffers
from planish.price.vocab_ring import RingPass, starts


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """This rank's part in one pass.

    Attributes:
        circle: The ranks.
        plan: The pieces.
        rows: Rows of the vocabulary on each rank.
        own: This rank's rows of each matrix, by name, as `plan` lists them.
    """

    circle: Circle
    plan: RingPass
    rows: Sequence[int]
    own: Mapping[str, Tensor]

    def pieces(self) -> Iterator[tuple[int, int, dict[str, Tensor], int]]:
        """Yield (owner, round, rows by name, first class) of every piece of the vocabulary."""
        begin, firsts = starts(self.rows), [starts(each) for each in self.plan.lengths]

        def load(number: int, slot: Slot) -> None:
            start = firsts[self.circle.rank][number]
            for name, place in zip(self.plan.travelling, slot, strict=True):
                place.copy_(self.own[name][start : start + len(place)])

        one, two = self._slots(self.plan.travelling, 2)
        for owner, number, piece in go_round(self.circle, (one, two), self.plan.lengths, load):
            named = dict(zip(self.plan.travelling, piece, strict=True))
            yield owner, number, named, begin[owner] + firsts[owner][number]

    def gradients(self, visit: Callable[[dict[str, Tensor], int, dict[str, Tensor]], None]) -> dict[str, Tensor]:
        """Return the gradients of this rank's rows by name, summed over the ranks.

        Args:
            visit: Given rows, first class, and room for this rank's share of their gradients, which it fills.
        """
        names, firsts = list(self.plan.summed), starts(self.plan.lengths[self.circle.rank])
        found = {name: torch.empty_like(self.own[name]) for name in names}

        def land(number: int, sums: Slot) -> None:
            for name, total in zip(names, sums, strict=True):
                found[name][firsts[number] : firsts[number] + len(total)].copy_(total)

        one, two, three = self._slots(self.plan.summed, 3)
        home = ComeHome(self.circle, (one, two, three), self.plan.lengths, land)
        for owner, number, piece, first in self.pieces():
            visit(piece, first, dict(zip(names, home.share(owner, number), strict=True)))
            home.send(owner, number)
        home.finish()
        return found

    def _slots(self, buffers: Buffers, count: int) -> list[Slot]:
        device = next(iter(self.own.values())).device
        return [
            [torch.empty(shape, dtype=getattr(torch, dtype), device=device) for shape, dtype in buffers.values()]
            for _ in range(count)
        ]


def to_tokens(total: Tensor, index: Tensor | None, like: Tensor) -> Tensor:
    """Return what there is of each valid token as that of all, in the dtype of `like` [T, D], 0 where ignored."""
    if index is None:
        return total.to(like.dtype)
    found, step = torch.zeros_like(like), max(1, STRIP // like.shape[1])
    for some, rows in zip(index.split(step), total.split(step), strict=True):
        found.index_copy_(0, some, rows.to(like.dtype))
    return found


def grow(sweep: TileSweep, hidden: Tensor | None, weight: Tensor | None, bias: Tensor | None) -> None:
    """Add to gradients that hold something already: of the valid tokens, [N, D], and of rows and bias, all wide."""
    tiles, task = sweep.tiles, sweep.tiles.task
    for _, columns in task.column_groups():
        for group in task.row_groups():
            derived = sweep.derive(group, columns, bias)
            if weight is not None:
                tiles.add_weight_grad(weight[columns], derived.tile, derived.rows, fresh=False)
            if hidden is not None:
                tiles.add_hidden_grad(hidden[group], derived.tile, columns, fresh=False)
