"""What is alive at a moment, and who holds it."""

from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple, Self

from planish.price.table import Holder

Sizes = dict[Holder, int]


def joined(left: Sizes, right: Sizes) -> Sizes:
    """Return the bytes of both, by holder."""
    return left | {holder: left.get(holder, 0) + size for holder, size in right.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
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
        return Moment(phase=self.phase, layer=self.layer, doing=self.doing, alive=self.alive.plus(sizes))


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

    def plus(self, sizes: Sizes) -> "Alive":
        """Return these and others."""
        return Alive(self.total_bytes + sum(sizes.values()), (*self.parts, sizes))

    def with_last(self, sizes: Sizes) -> "Alive":
        """Return these, to whose last part others are added."""
        *parts, last = self.parts
        return Alive(self.total_bytes + sum(sizes.values()), (*parts, joined(last, sizes)))

    @property
    def sizes(self) -> Sizes:
        """Bytes by holder."""
        return reduce(joined, self.parts)
