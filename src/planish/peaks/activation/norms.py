"""Root-mean-square norms in tiles through fixed buffers: the input alone waits for backward, nothing float32 is whole.

With r = 1 / sqrt(mean(x^2) + eps) and n = x r in float32, and w the weight, or one more than it ("shifted", as in
Gemma), in float32; or in x's dtype, to which n is rounded before the product ("rounded", as in Llama):

    y = n w                dw = sum_tokens(dy n)
    g = dy w               dx = r (g - n mean(g n))
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from planish.peaks.activation.tiled import tiles

Form = Literal["rounded", "wide", "shifted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    """How a norm computes.

    Attributes:
        form: Where it rounds, and what its weight means.
        eps: Added to the mean square.
        tile_bytes: Of one float32 array of a tile; two are held, whatever the number of tokens.
    """

    form: Form
    eps: float
    tile_bytes: int


def tiled_norm(x: Tensor, weight: Tensor, norm: Norm) -> Tensor:
    """Return `x` normed over its last dimension.

    Memory:        x from forward to backward; forward: the result and two buffers; backward: the gradients and three.
    Exactness:     forward bitwise what transformers' modules compute; gradients equal up to the order of summation, in
                   float32 as theirs.

    Args:
        x: [..., D].
        weight: [D].
        norm: How it computes.
    """
    return _TiledNorm.apply(norm, x.reshape(-1, x.shape[-1]), weight).view(x.shape)


class _Room:
    """Buffers of a fixed number of tokens, and the steps that are made in them."""

    def __init__(self, x: Tensor, norm: Norm, count: int) -> None:
        self.tokens = max(1, norm.tile_bytes // (4 * x.shape[-1]))
        self._norm = norm
        self._wide = [x.new_empty(self.tokens, x.shape[-1], dtype=torch.float32) for _ in range(count)]
        self._narrow = [x.new_empty(self.tokens, 1, dtype=torch.float32) for _ in range(2)]

    def first(self, num: int) -> tuple[Tensor, ...]:
        """Return the first `num` rows of every buffer, the narrow ones last."""
        return tuple(each[:num] for each in (*self._wide, *self._narrow))

    def normed(self, x: Tensor, into: Tensor, scratch: Tensor, scale: Tensor) -> None:
        """Fill `into` with n and `scale` with r."""
        into.copy_(x)
        torch.mul(into, into, out=scratch)
        torch.mean(scratch, -1, keepdim=True, out=scale)
        scale.add_(self._norm.eps).rsqrt_()
        into.mul_(scale)


class _TiledNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, norm: Norm, x: Tensor, weight: Tensor) -> Tensor:
        ctx.norm = norm
        ctx.save_for_backward(x, weight)
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        room = _Room(x, norm, 2)
        factor = weight if norm.form == "rounded" else _factor(weight, norm)
        for at in tiles(x.shape[0], room.tokens):
            unit, scratch, scale, _ = room.first(at.stop - at.start)
            room.normed(x[at], unit, scratch, scale)
            if norm.form == "rounded":
                y[at] = unit
                y[at].mul_(factor)
            else:
                y[at] = unit.mul_(factor)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        norm, width = ctx.norm, x.shape[-1]
        by_x = torch.empty_like(x, memory_format=torch.contiguous_format)
        by_weight, part = (x.new_zeros(width, dtype=torch.float32) for _ in range(2))
        room = _Room(x, norm, 3)
        factor = _factor(weight, norm)
        for at in tiles(x.shape[0], room.tokens):
            unit, scratch, slope, scale, mean = room.first(at.stop - at.start)
            room.normed(x[at], unit, scratch, scale)
            slope.copy_(grad[at])
            torch.mul(slope, unit, out=scratch)
            by_weight.add_(torch.sum(scratch, 0, out=part))
            slope.mul_(factor)
            torch.mul(slope, unit, out=scratch)
            torch.mean(scratch, -1, keepdim=True, out=mean)
            by_x[at] = slope.sub_(unit.mul_(mean)).mul_(scale)
        return None, by_x, by_weight.to(weight.dtype)


def _factor(weight: Tensor, norm: Norm) -> Tensor:
    return weight.float().add(1.0) if norm.form == "shifted" else weight.float()
