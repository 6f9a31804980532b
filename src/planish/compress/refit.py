"""Output matrices re-fitted as far as tokens that were not fitted to say: how strongly, and from which start."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from planish.compress.normal import Normal

Part = Literal["fit", "choose", "held"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One way to begin.

    Attributes:
        made: What it is, in words.
        matrix: The output matrix before a re-fit [outputs, kept inputs].
        keep: Inputs that remain; None for all.
    """

    made: str
    matrix: Tensor
    keep: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The start and the strength that err least on tokens that choose.

    Attributes:
        start: Where to begin.
        ridge: How strongly the re-fit is drawn to it; None: it stays as it is.
        error: On the tokens that choose.
    """

    start: Start
    ridge: float | None
    error: float

    @property
    def made(self) -> str:
        """How the block was made, in words."""
        return self.start.made if self.ridge is None else f"{self.start.made}, refit {self.ridge:g}"


class Sums:
    """Normal equations of one output matrix over three parts of the text: to fit, to choose by, and to judge by.

    Memory:        as three `Normal`s.
    """

    def __init__(self, inputs: int, outputs: int | None, like: Tensor) -> None:
        self.parts: dict[Part, Normal] = {part: Normal(inputs, outputs, like) for part in ("fit", "choose", "held")}

    @property
    def held(self) -> Normal:
        """Of the tokens that judge."""
        return self.parts["held"]

    def close(self) -> None:
        """Complete them after the last token."""
        for each in self.parts.values():
            each.close()

    def derived(self, known: Tensor) -> "Sums":
        """Return them for outputs that are `known` times the inputs."""
        found = object.__new__(Sums)
        found.parts = {part: each.derived(known) for part, each in self.parts.items()}
        return found

    def choose(self, starts: Iterable[Start], ridges: Sequence[float]) -> Chosen:
        """Return what errs least on the tokens that choose; before `settle`.

        The start is the one that errs least with the middle ridge or none; then weaker and stronger ridges are tried
        for it, until one errs more than the one before.
        """
        strengths = sorted(ridges, reverse=True)
        middle = len(strengths) // 2
        starts = list(starts)
        tried = [self._try(start, ridge) for start in starts for ridge in (None, *strengths[middle : middle + 1])]
        best = min(tried, key=lambda each: each.error)
        for further in (strengths[middle + 1 :], reversed(strengths[:middle])):
            last = best
            for ridge in further:
                found = self._try(best.start, ridge)
                if found.error >= last.error:
                    break
                best = last = found
        return best

    def _try(self, start: Start, ridge: float | None) -> Chosen:
        matrix = start.matrix if ridge is None else self.parts["fit"].solve(start.matrix, ridge=ridge, keep=start.keep)
        return Chosen(start=start, ridge=ridge, error=self.parts["choose"].error(matrix, start.keep))

    def settle(self) -> None:
        """Let the tokens that chose be fitted to as well."""
        self.parts["fit"].take(self.parts["choose"])

    def solve(self, chosen: Chosen) -> Tensor:
        """Return the output matrix that was chosen; after `settle`."""
        if chosen.ridge is None:
            return chosen.start.matrix
        return self.parts["fit"].solve(chosen.start.matrix, ridge=chosen.ridge, keep=chosen.start.keep)
