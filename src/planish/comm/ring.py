"""Ranks in a circle: what each has loaded goes round past all of them, and sums of what they make of it come home.

[Note: behind the computation] While a rank works on a piece it sends it on and receives the next one, so two pieces
are here at a time. A sum can leave only once the rank has added its share: the share is computed in a place of its own
while the sum of the ranks before arrives in another, and the sum of the piece before leaves from a third.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Self

import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Circle:
    """The ranks of a group, each with a next one; without a group nothing is sent, which is for tensors without data.

    Attributes:
        rank: This process, from 0.
        size: How many there are.
        group: Who they are.
    """

    rank: int
    size: int
    group: dist.ProcessGroup | None

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> Self:
        """Return the ranks of `group`."""
        return cls(rank=dist.get_rank(group), size=dist.get_world_size(group), group=group)

    def beside(self, tensor: Tensor) -> Self:
        """Return the ranks that take part in what is done with `tensor`: no other where it has no data."""
        return replace(self, group=None) if isinstance(tensor, FakeTensor) else self

    def owner(self, step: int) -> int:
        """Return whose piece is here after `step` hops."""
        return (self.rank - step) % self.size

    def hop(self, out: Sequence[Tensor], into: Sequence[Tensor]) -> list[dist.Work]:
        """Begin to send `out` to the next rank and to receive `into` from the one before; neither may be touched."""
        if self.group is None:
            return []
        ways = ((dist.isend, out, self.rank + 1), (dist.irecv, into, self.rank - 1))
        hops = [
            dist.P2POp(do, each, group=self.group, group_peer=peer % self.size)
            for do, tensors, peer in ways
            for each in tensors
            if each.numel()
        ]
        with _told():
            return dist.batch_isend_irecv(hops) if hops else []

    def swap(self, into: Tensor, out: Tensor, received: Sequence[int], sent: Sequence[int]) -> None:
        """Send `sent[r]` numbers of flat `out` to each rank r, and take `received[r]` of its into `into`."""
        wait(self.begin_swap(into, out, received, sent))

    def begin_swap(self, into: Tensor, out: Tensor, received: Sequence[int], sent: Sequence[int]) -> list[dist.Work]:
        """Begin a `swap`, for `wait`; neither tensor may be touched meanwhile."""
        if self.group is None:
            return []
        with _told():
            work = dist.all_to_all_single(into, out, list(received), list(sent), group=self.group, async_op=True)
        return [] if work is None else [work]

    def gather(self, into: Tensor, own: Tensor) -> None:
        """Fill `into`, [size, ...], with what each rank has as `own`."""
        if self.group is not None:
            dist.all_gather_single(into.flatten(0, 1), own, group=self.group)

    def scatter_sums(self, own: Tensor, parts: Tensor) -> None:
        """Fill `own` with the sum over the ranks of their `parts[rank]`."""
        if self.group is not None:
            dist.reduce_scatter_single(own, parts.flatten(0, 1), group=self.group)

    def add(self, tensor: Tensor) -> Tensor:
        """Return `tensor`, summed over the ranks in place."""
        if self.group is not None:
            dist.all_reduce(tensor, group=self.group)
        return tensor


ALONE = Circle(rank=0, size=1, group=None)
"""The one rank that nobody shares with."""

Slot = Sequence[Tensor]
"""Room for one piece: each of its tensors at its longest, cut along the first dimension."""

Lengths = Sequence[Sequence[int]]
"""Rows of each rank's piece of each round, which all ranks know; none where a rank has no more pieces."""


def go_round(
    circle: Circle, slots: tuple[Slot, Slot], lengths: Lengths, load: Callable[[int, Slot], None]
) -> Iterator[tuple[int, int, list[Tensor]]]:
    """Yield (owner, round, its piece) for every piece of every rank: round by round, this rank's own first.

    Communication: each rank sends every piece but those of the rank after it, behind what the caller computes.

    Args:
        circle: The ranks.
        slots: Where pieces lie, in turn.
        lengths: Rows of each rank's piece of each round.
        load: Fills a slot, cut to length, with this rank's piece of a round.
    """
    turn = 0
    for number in range(len(lengths[circle.rank])):
        load(number, [each[: lengths[circle.rank][number]] for each in slots[turn]])
        for step in range(circle.size):
            owner, following = circle.owner(step), circle.owner(step + 1)
            here = [each[: lengths[owner][number]] for each in slots[turn]]
            hop: list[dist.Work] = []
            if step + 1 < circle.size:
                hop = circle.hop(here, [each[: lengths[following][number]] for each in slots[1 - turn]])
            yield owner, number, here
            wait(hop)
            turn = 1 - turn


class ComeHome:
    """Sums over the ranks of what each makes of a piece; they follow the pieces of `go_round` and end at their owners.

    Communication: each rank sends one sum for every piece of every rank, behind what the caller computes.
    Exactness:     the owner's share, then those of the ranks after it in their order: the same bits from run to run.

    Args:
        circle: The ranks.
        slots: Where shares and sums lie.
        lengths: As of `go_round`.
        land: Takes this rank's sums of a round; they are overwritten later.
    """

    def __init__(
        self, circle: Circle, slots: tuple[Slot, Slot, Slot], lengths: Lengths, land: Callable[[int, Slot], None]
    ) -> None:
        self._circle, self._lengths, self._land = circle, lengths, land
        *self._shares, self._arriving = slots
        self._coming: tuple[int, int, Slot, list[dist.Work]] | None = None
        self._turn = 0

    def share(self, owner: int, number: int) -> list[Tensor]:
        """Return the place for this rank's share of a piece, not filled."""
        return [each[: self._lengths[owner][number]] for each in self._shares[self._turn]]

    def send(self, owner: int, number: int) -> None:
        """Add to the share what the ranks before have summed, and send it on; at last to the owner."""
        total = self.share(owner, number)
        arrived = self._arrived()
        if arrived is not None:
            for each, before in zip(total, arrived, strict=True):
                each.add_(before)
        before = (owner - 1) % self._circle.size
        into = [each[: self._lengths[before][number]] for each in self._arriving]
        self._coming = before, number, into, self._circle.hop(total, into)
        self._turn = 1 - self._turn

    def finish(self) -> None:
        """Wait for the last sum."""
        self._arrived()

    def _arrived(self) -> Slot | None:
        """Return what has arrived to be sent on; land what has come home."""
        if self._coming is None:
            return None
        owner, number, sums, hop = self._coming
        self._coming = None
        wait(hop)
        if owner != self._circle.rank:
            return sums
        self._land(number, sums)
        return None


def wait(hop: Sequence[dist.Work]) -> None:
    """Wait for a hop.

    Raises:
        RuntimeError: A neighbour has not sent or taken its piece within the group's time-out, or is gone.
    """
    with _told():
        for each in hop:
            each.wait()


@contextmanager
def _told() -> Iterator[None]:
    """Say what it means that an exchange fails."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"an exchange between ranks failed: one raised, is gone, or was late by the group's time-out: {error}"
        ) from error
