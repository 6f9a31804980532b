"""One autograd node for attention, whichever kernel does the products; sinks are folded in through the log-sum-exp.

Shapes: query `[B, H, S, d]`, key `[B, Hkv, K, d]`, value `[B, Hkv, K, dv]`, output `[B, S, H, dv]`, lse `[B, S, H]`.
"""

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from planish.memory import recall

# What a kernel may hold at once beside tensors that grow with the number of tokens.
BLOCK_BYTES = 4 * 2**20


class Kernel(Protocol):
    """The products of attention, forward and backward, with documents, window and scale inside."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output and each query's lse in at least float32, both contiguous.

        The output may be as wide as the lse; it is rounded to the queries' dtype once sinks are in it.
        """
        ...

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of query, key and value: `P = exp(scores - lse)`, `dS = P * (dP - sum(grad * out))`."""
        ...


class Attention(torch.autograd.Function):
    """Attention by `kernel`, with one sink logit a head if `sinks` is given.

    A sink is a key without a value. With `lse' = log(exp(lse) + exp(sink))` the output is `out * exp(lse - lse')`, and
    the kernel's own backward is right once it is given `lse'` and that output; the sink itself receives
    `-sum(grad * out) * exp(sink - lse')`.

    In a layer that runs again and remembers (`memory.recall`), the output and its lse come back instead of being
    computed.

    Memory:        keeps query, key, value, the output and its lse, and what the kernel says.
    Exactness:     equal to dense attention up to the order of summation.
    """

    @staticmethod
    def forward(ctx: Any, kernel: Kernel, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
        """Return the output and keep it with its lse."""
        layer = recall.current()
        kept = None if layer is None else layer.again()
        out, lse = _compute(kernel, query, key, value, sinks) if kept is None else kept
        if layer is not None and kept is None:
            layer.keep(out, lse)
        ctx.kernel = kernel
        ctx.save_for_backward(query, key, value, sinks, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of query, key, value and sinks."""
        query, key, value, sinks, out, lse = ctx.saved_tensors
        with torch.autocast(query.device.type, enabled=False):
            grad_sinks = None if sinks is None else sink_gradient(grad, out, lse, sinks)
            return None, *ctx.kernel.backward(grad, query, key, value, out, lse), grad_sinks


def _compute(kernel: Kernel, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    with torch.autocast(query.device.type, enabled=False):
        out, lse = kernel.forward(query, key, value)
        lse = lse if sinks is None else fold_sinks(out, lse, sinks)
        return out.to(query.dtype), lse


def fold_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Scale `out` in place and return the lse that counts the sinks."""
    sinks = sinks.to(lse.dtype)
    for out_part, lse_part in token_parts(out, lse):
        out_part.mul_(torch.sigmoid(lse_part - sinks).unsqueeze(-1))
    return torch.logaddexp(lse, sinks)


def sink_gradient(grad: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Return the gradient of the sinks, in their dtype."""
    total = torch.zeros_like(sinks, dtype=lse.dtype)
    for grad_part, out_part, lse_part in token_parts(grad, out, lse):
        delta = (grad_part.to(lse.dtype) * out_part).sum(-1)
        total -= (delta * (sinks - lse_part).exp()).sum((0, 1))
    return total.to(sinks.dtype)


def token_parts(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Split `[B, S, ...]` tensors into runs of tokens whose float32 copy fits `BLOCK_BYTES`."""
    token_bytes = max(each[:, :1].numel() for each in tensors) * 4
    num_tokens = max(1, BLOCK_BYTES // max(1, token_bytes))
    return zip(*(each.split(num_tokens, dim=1) for each in tensors), strict=True)
