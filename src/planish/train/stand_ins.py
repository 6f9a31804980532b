"""What stands in for parts of a step whose bytes are arithmetic: the same results and saved tensors, nothing else."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class AttentionStandIn(torch.autograd.Function):
    """Stands in for `peaks.attention.kernel.Attention`: the same results and saved tensors, nothing else."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, note: Callable[[str], None]
    ) -> Tensor:
        """Return an empty output; keep what the real one keeps."""
        note("attention")
        rows, heads, num_queries, _ = query.shape
        out = query.new_empty(rows, num_queries, heads, value.shape[-1])
        lse = query.new_empty(rows, num_queries, heads, dtype=torch.promote_types(query.dtype, torch.float32))
        ctx.note = note
        ctx.save_for_backward(query, key, value, sinks, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, _grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return empty gradients, as wide as the kernel's operands, of which they are views."""
        saved = ctx.saved_tensors  # all of them live on until the return, as in the kernels
        query, key, value, sinks, *_ = saved
        ctx.note("attention backward")
        width = max(query.shape[-1], value.shape[-1])
        grads = (each.new_empty(*each.shape[:-1], width)[..., : each.shape[-1]] for each in (query, key, value))
        return *grads, None if sinks is None else torch.empty_like(sinks), None


class ExpertsStandIn(torch.autograd.Function):
    """Stands in for `peaks.dispatch.pipelined`: the same result and saved tensors, nothing else.

    Its marker comes before its tensors are saved, so that a layer that runs again is priced with its experts, although
    they then run only where something behind them is needed: they hold more in backward.
    """

    @staticmethod
    def forward(ctx: Any, ids: Tensor, note: Callable[[str], None], *operands: Tensor | None) -> Tensor:
        """Return an empty output; keep what the real one keeps."""
        note("experts")
        ctx.note = note
        ctx.save_for_backward(ids, *operands)
        return torch.empty_like(operands[0])

    @staticmethod
    def backward(ctx: Any, _grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return empty gradients."""
        _ids, *saved = ctx.saved_tensors
        ctx.note("experts backward")
        return None, None, *(None if each is None else torch.empty_like(each) for each in saved)


class FeedForwardStandIn(torch.autograd.Function):
    """Stands in for `peaks.activation.tiled` and `peaks.activation.bitmap`: what the latter packs is not kept."""

    @staticmethod
    def forward(ctx: Any, note: Callable[[str], None], x: Tensor, *params: Tensor) -> Tensor:
        """Return an empty output; keep what the real one keeps."""
        note("feed forward")
        ctx.note = note
        ctx.save_for_backward(x, *params)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, _grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return empty gradients."""
        saved = ctx.saved_tensors
        ctx.note("feed forward backward")
        return None, *(torch.empty_like(each) for each in saved)


class HeadStandIn(torch.autograd.Function):
    """Stands in for the head: a loss, and gradients of what it was given."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, note: Callable[[str], None]) -> Tensor:
        """Return a loss; keep nothing."""
        note("head")
        ctx.note = note
        ctx.like = [None if each is None else (each.shape, each.dtype, each.device) for each in (hidden, weight, bias)]
        return torch.zeros((), device=hidden.device)

    @staticmethod
    def backward(ctx: Any, _grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return empty gradients."""
        ctx.note("head backward")
        grads = [None if like is None else torch.empty(like[0], dtype=like[1], device=like[2]) for like in ctx.like]
        return *grads, None
