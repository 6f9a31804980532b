"""Gradients of weights that add up over tiles: as they are with one tile, in float32 at least with several."""

import torch
from torch import Tensor


class WeightSum:
    """The gradient of one parameter.

    Memory: with one tile the gradient alone; with several a float32 sum, and of a narrower parameter one tile's product
        beside it, then the gradient.

    Args:
        like: The parameter.
        one: Whether one tile is all there is, whose product is the gradient, bit for bit.
    """

    def __init__(self, like: Tensor, *, one: bool) -> None:
        self._like, self._one = like, one
        wide = torch.promote_types(like.dtype, torch.float32)
        self._sum = None if one else torch.zeros_like(like, dtype=wide, memory_format=torch.contiguous_format)

    def add_product(self, left: Tensor, right: Tensor) -> None:
        """Add left^T right."""
        if self._one:
            self._sum = torch.mm(left.t(), right)
        elif self._sum.dtype == left.dtype:
            self._sum.addmm_(left.t(), right)
        else:
            self._sum.add_(torch.mm(left.t(), right))

    def add(self, part: Tensor) -> None:
        """Add one tile's part."""
        if self._one:
            self._sum = part
        else:
            self._sum.add_(part)

    def total(self) -> Tensor:
        """Return the gradient."""
        found, self._sum = self._sum, None
        return found.to(self._like.dtype)
