"""Any block that takes each token by itself, in tiles of tokens, forward and backward: no [T, F] tensor even inside."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from planish.peaks.activation.sums import WeightSum


def tiles(num_tokens: int, tokens: int) -> Iterator[slice]:
    """Yield the tokens of each tile; even nobody's tokens are a tile."""
    for begin in range(0, max(1, num_tokens), tokens):
        yield slice(begin, min(num_tokens, begin + tokens))


def tiled(block: Callable[[Tensor], Tensor], x: Tensor, params: Sequence[Tensor], *, tokens: int) -> Tensor:
    """Return `block(x)`, run on `tokens` tokens at a time, and again in backward.

    Memory:        x from forward to backward; at work what `block` takes for one tile; in backward, with several
                   tiles, a float32 sum of each parameter's gradient and one tile's gradients beside them.
    Exactness:     bitwise equal to autograd with one tile; with several, gradients of parameters add up in another
                   order, in float32 at least.

    Args:
        block: [1, tokens, D] -> [1, tokens, D'], each token by itself, without random numbers.
        x: [..., D].
        params: What `block` reads and gradients are wanted for.
        tokens: Tokens of a tile at most.
    """
    flat = x.reshape(-1, x.shape[-1])
    y = _Tiled.apply(block, tokens, flat, *params)
    return y.view(*x.shape[:-1], y.shape[-1])


class _Tiled(torch.autograd.Function):
    """See `tiled`."""

    @staticmethod
    def forward(ctx: Any, block: Callable[[Tensor], Tensor], tokens: int, x: Tensor, *params: Tensor) -> Tensor:
        """Return y [T, D']; keep x alone."""
        ctx.block, ctx.tokens = block, tokens
        ctx.save_for_backward(x, *params)
        y = None
        for at in tiles(x.shape[0], tokens):
            part = block(x[at].unsqueeze(0)).squeeze(0)
            y = part.new_empty(x.shape[0], part.shape[-1]) if y is None else y
            y[at] = part
            del part
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x and the parameters."""
        x, *params = ctx.saved_tensors
        for_x, *for_params = ctx.needs_input_grad[2:]
        wanted = [each for each, want in zip(params, for_params, strict=True) if want]
        sums = [WeightSum(each, one=x.shape[0] <= ctx.tokens) for each in wanted]
        x_grad = torch.empty_like(x) if for_x else None
        for at in tiles(x.shape[0], ctx.tokens):
            leaf = x[at].detach().requires_grad_(for_x)
            with torch.enable_grad():
                part = ctx.block(leaf.unsqueeze(0)).squeeze(0)
            of = ([leaf] if for_x else []) + wanted
            found = list(torch.autograd.grad(part, of, grad[at], allow_unused=True))
            del part
            if for_x:
                x_grad[at] = found.pop(0)
            for total in reversed(sums):
                each = found.pop()
                if each is not None:
                    total.add(each)
                del each
        totals = iter([each.total() for each in sums])
        return None, None, x_grad, *(next(totals) if want else None for want in for_params)
