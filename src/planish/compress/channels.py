"""Fewer channels in a gated network: what enters its last matrix, which stay, and what it is with those."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from planish.compress.initialise import Order, order_by_contribution, order_by_refit, order_iteratively
from planish.compress.refit import Part, Start, Sums


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A network with fewer channels.

    Attributes:
        keep: Those that stay, in their order.
        matrix: Its last matrix [D, kept].
        made: How, in words.
        error: Squared error on tokens that judge, over the whole network's square.
        published: Channels that the published order keeps.
        plain_error: The error with those and the matrix as it was.
    """

    keep: Tensor
    matrix: Tensor
    made: str
    error: float
    published: Tensor
    plain_error: float


class Channels:
    """Statistics of one network's channels.

    Memory:        three F x F matrices, as `Sums`.

    Args:
        down: The last matrix [D, F].
    """

    def __init__(self, down: Tensor) -> None:
        self._down = down.detach()
        self._sums = Sums(down.shape[1], None, down)
        self._mean_abs = torch.zeros(down.shape[1], dtype=torch.float64, device=down.device)

    def see(self, entered: Tensor, weight: Tensor | None, which: Part) -> None:
        """Count what enters the last matrix [T, F], each token by its weight [T]."""
        self._sums.parts[which].add(entered, None, weight)
        if which != "held":
            self._mean_abs += entered.abs().sum(0, dtype=torch.float64)

    def cuts(self, widths: Sequence[int], orders: Sequence[Order], ridges: Sequence[float]) -> Iterator[Cut]:
        """Yield the network with each number of channels, the matrix re-fitted as far as it helps; once.

        Channels that no token has met are ranked by their weights alone.
        """
        down = self._down
        self._sums.close()
        sums = self._sums.derived(down)
        met = self._mean_abs if self._mean_abs.any() else torch.ones_like(self._mean_abs)
        published, gram = order_by_contribution(met, down), sums.parts["fit"].gram
        able: Sequence[Order] = orders if gram.any() else ("contribution",)
        ranked = {name: self._order(name, gram, published) for name in able}
        best = [
            sums.choose([_start(name, order, each, down) for name, order in ranked.items()], ridges) for each in widths
        ]
        sums.settle()
        for width, chosen in zip(widths, best, strict=True):
            keep, first = chosen.start.keep, published[:width]
            if keep is None:
                raise AssertionError("a cut keeps some channels")
            matrix = sums.solve(chosen)
            yield Cut(
                keep=keep,
                matrix=matrix,
                made=chosen.made,
                error=sums.held.error(matrix, keep),
                published=first,
                plain_error=sums.held.error(down[:, first], first),
            )

    def _order(self, name: Order, gram: Tensor, published: Tensor) -> Tensor:
        match name:
            case "contribution":
                return published
            case "iterative":
                return order_iteratively(gram, self._down)
            case "refit":
                return order_by_refit(gram, self._down, ridge=1e-2)


def _start(name: str, order: Tensor, width: int, down: Tensor) -> Start:
    keep = order[:width]
    return Start(made=name, matrix=down[:, keep], keep=keep)
