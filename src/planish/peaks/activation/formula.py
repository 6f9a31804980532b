"""The ReLU family on one tile, in place: forward, what to keep of it, and the gradients from what was kept.

With r = relu(inner), h is the input of the last projection:

    ReLU       h = r            d inner = dh                  where r > 0
    ReLU^2     h = r^2          d inner = dh 2 r              where r > 0
    ReGLU      h = r u          d inner = dh u                where r > 0    d u = dh r
    ReLU^2-GLU h = r^2 u        d inner = dh u 2 r            where r > 0    d u = dh r^2
    dReLU      h = r relu(u)    d inner = dh relu(u)          where r > 0    d u = dh r    where u > 0

Everything but dh vanishes where r is zero (dReLU: where either is), so r, and u there, are all that must be kept. r and
not r^2: squares of small values are zero, of large ones infinite, and no root brings them back.

[Note: the same bits] Products are rounded in the order in which autograd rounds them for `relu(z).square() * u`:
r^2 first, then times u; dh u first, then times 2 r, which is exact.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Formula:
    """One of the five.

    Attributes:
        squared: relu(z)^2 in place of relu(z).
        gated: Whether a second projection multiplies it.
        both: Whether that one passes a ReLU too (dReLU).
    """

    squared: bool = False
    gated: bool = False
    both: bool = False

    def __post_init__(self) -> None:
        if self.both and (self.squared or not self.gated):
            raise ValueError("`both` is dReLU: `gated` must be true and `squared` false.")

    @property
    def num_streams(self) -> int:
        """Arrays to keep: r, and u beside it."""
        return 1 + self.gated


def activate(formula: Formula, inner: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return r and u of a tile, in place."""
    r = inner.relu_()
    if formula.both:
        up.relu_()
    return r, up


def hidden(formula: Formula, r: Tensor, up: Tensor | None, out: Tensor) -> Tensor:
    """Return h in `out`, which may be `r`."""
    if formula.squared:
        r = torch.square(r, out=out)
    if up is not None:
        return torch.mul(r, up, out=out)
    return r


def mark(formula: Formula, r: Tensor, up: Tensor | None) -> None:
    """Make r zero, in place, wherever nothing need be kept; then `r * grad` needs no mask of its own."""
    if formula.both:
        r.masked_fill_(up == 0, 0.0)


def gradients(formula: Formula, r: Tensor, up: Tensor | None, grad: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of inner and up from `grad`, that of h, in place of the arguments."""
    if not formula.gated:
        if formula.squared:
            grad.mul_(r.mul_(2))
        return _where_positive(grad, r), None
    by_inner = up.mul_(grad)
    if formula.squared:
        by_inner.mul_(r.mul_(2))
        _where_positive(by_inner, r)
        return by_inner, r.mul_(0.5).square_().mul_(grad)
    return _where_positive(by_inner, r), r.mul_(grad)


def _where_positive(grad: Tensor, r: Tensor) -> Tensor:
    """Return `grad`, in place, zero where r <= 0; a NaN lets it pass, as ReLU's own backward does."""
    return torch.ops.aten.threshold_backward.grad_input(grad, r, 0, grad_input=grad)
