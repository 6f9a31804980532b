"""What is alive at a moment, and who holds it."""

from functools import reduce
from typing import NamedTuple, Self

from planish.price.table import Holder

Sizes = dict[Holder, int]


def joined(left: Sizes, right: Sizes) -> Sizes:
    """Return the bytes of both, by holder."""
    return left | {holder: left.get(holder, 0) + size for holder, size in right.items()}


class Moment(NamedTuple):
    """A moment that may be the peak of its phase.

    Attributes:
        phase: Named as the ledger names it.
        layer: Number of the layer at work; None outside of the layers.
        doing: What has just been allocated for, in words.
        alive: Bytes alive, by holder.
    """

    phase: str
    layer: int | None
    doing: str
    alive: "Alive"

    @property
    def sizes(self) -> Sizes:
        """Bytes alive, by holder."""
        return self.alive.sizes

    @property
    def total_bytes(self) -> int:
        """Bytes alive together."""
        return self.alive.total_bytes

    def beside(self, sizes: Sizes) -> "Moment":
        """Return the moment with other bytes alive too."""
        return self._replace(alive=self.alive.plus(Alive.of(sizes)))


class Alive(NamedTuple):
    """Bytes alive: their sum is asked for at each of thousands of moments, who holds them at few.

    Attributes:
        total_bytes: All of them.
        parts: By holder, in parts that add up.
    """

    total_bytes: int
    parts: tuple[Sizes, ...]

    @classmethod
    def of(cls, sizes: Sizes) -> Self:
        """Return what `sizes` say."""
        return cls(sum(sizes.values()), (sizes,))

    @classmethod
    def one(cls, holder: Holder, nbytes: int) -> Self:
        """Return what one holds."""
        return cls(nbytes, ({holder: nbytes},))

    def plus(self, other: "Alive") -> "Alive":
        """Return these and others."""
        return Alive(self.total_bytes + other.total_bytes, self.parts + other.parts)

    def since(self, before: "Alive") -> Sizes:
        """Return what has been added to `before`, of which these are made."""
        return reduce(joined, self.parts[len(before.parts) :], {})

    @property
    def sizes(self) -> Sizes:
        """Bytes by holder."""
        return reduce(joined, self.parts, {})
