"""Rotary positions in tiles of tokens: the result alone is as long as the sequence.

With R(x) = (-x2, x1) of x = (x1, x2), two halves of a head:

    y = x cos + R(x) sin               dx = dy cos - R(dy sin), since R is its own negative's transpose
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from planish.peaks.activation.tiled import tiles


def rotated(x: Tensor, cos: Tensor, sin: Tensor, *, tile_bytes: int) -> Tensor:
    """Return `x` turned by its tokens' angles.

    Memory:        the tables from forward to backward; the result and one tile, however few the tokens.
    Exactness:     bitwise what transformers' modules compute, gradients too.

    Args:
        x: [B, H, S, d].
        cos: [B or 1, S, d], in x's dtype.
        sin: As `cos`.
        tile_bytes: Of one array of a tile.
    """
    return _Rotated.apply(x, cos.unsqueeze(1), sin.unsqueeze(1), tile_bytes)


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, tile_bytes: int) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.tile_bytes = tile_bytes
        return _turn(x, cos, sin, tile_bytes, back=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _turn(grad, cos, sin, ctx.tile_bytes, back=True), None, None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor, tile_bytes: int, *, back: bool) -> Tensor:
    y, half = torch.empty_like(x), x.shape[-1] // 2
    rows, heads, num_tokens, width = x.shape
    each = max(1, rows * heads * width)
    room = x.new_empty(max(each, tile_bytes // x.itemsize))  # whatever the sizes, so that prices are linear in them
    tokens = len(room) // each
    for at in tiles(num_tokens, tokens):
        part, into, by_cos, by_sin = (each[:, :, at] for each in (x, y, cos, sin))
        scratch = room[: part.numel()].view(part.shape)
        torch.mul(part, by_cos, out=into)
        if back:
            torch.mul(part, by_sin, out=scratch)
            into[..., :half].add_(scratch[..., half:])
            into[..., half:].sub_(scratch[..., :half])
        else:
            torch.neg(part[..., half:], out=scratch[..., :half])
            scratch[..., half:].copy_(part[..., :half])
            into.add_(scratch.mul_(by_sin))
    return y
