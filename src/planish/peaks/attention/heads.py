"""A span of the sequence for all heads in, the whole sequence for some heads out, and back (DeepSpeed-Ulysses).

References: Jacobs et al., DeepSpeed Ulysses, arXiv 2309.14509; for fewer key heads than ranks see [Note: shared heads].

[Note: shared heads] Where ranks outnumber key heads, the query heads of a rank all read one key head, and several ranks
read the same: it travels to each of them, and its gradients come back from each and are added up.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from planish.comm.ring import Circle
from planish.shapes import spans


def head_ranges(num_heads: int, num_kv_heads: int, num_ranks: int) -> tuple[list[slice], list[slice]] | None:
    """Return the query and key heads of each rank, or None where they cannot be dealt out evenly."""
    if num_heads % num_ranks or (num_kv_heads % num_ranks and num_ranks % num_kv_heads):
        return None
    each = max(1, num_kv_heads // num_ranks)
    firsts = [rank * num_kv_heads // num_ranks for rank in range(num_ranks)]
    return list(spans(num_heads, num_ranks)), [slice(first, first + each) for first in firsts]


class ToHeads(torch.autograd.Function):
    """Each `[B, heads, own tokens, d]` of all heads becomes `[B, own heads, tokens, d]` of the whole row.

    Memory:        the results, and while one is made what is sent of it; with several rows what arrives of it too.
    Communication: one all-to-all for each tensor and pass, of its bytes.
    Exactness:     bitwise; of shared heads the gradients are added up in the order of ranks.
    """

    @staticmethod
    def forward(
        ctx: Any, circle: Circle, width: int, heads: Sequence[Sequence[slice]], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        """Return each tensor with its own heads of `heads`."""
        ctx.circle, ctx.width, ctx.heads = circle, width, heads
        ctx.num_heads = [each.shape[1] for each in tensors]
        return tuple(
            _to_heads(circle, width, ranges, each.transpose(1, 2)).transpose(1, 2)
            for ranges, each in zip(heads, tensors, strict=True)
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """Return the gradients of this rank's tokens."""
        found = (
            _to_tokens(ctx.circle, ctx.width, ranges, num_heads, grad.transpose(1, 2)).transpose(1, 2)
            for ranges, num_heads, grad in zip(ctx.heads, ctx.num_heads, grads, strict=True)
        )
        return None, None, None, *found


class ToTokens(torch.autograd.Function):
    """`[B, tokens, own heads, d]` becomes `[B, own tokens, heads, d]`.

    Memory:        the result, what is sent and what arrives.
    Communication: one all-to-all in each pass, of the tensor's bytes.
    Exactness:     bitwise.
    """

    @staticmethod
    def forward(ctx: Any, circle: Circle, heads: Sequence[slice], tensor: Tensor) -> Tensor:
        """Return this rank's tokens of all heads."""
        ctx.circle, ctx.heads, ctx.width = circle, heads, tensor.shape[1]
        return _to_tokens(circle, ctx.width, heads, heads[-1].stop, tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """Return the gradient of this rank's heads."""
        return None, None, _to_heads(ctx.circle, ctx.width, ctx.heads, grad)


def _to_heads(circle: Circle, width: int, heads: Sequence[slice], tensor: Tensor) -> Tensor:
    """Return `[B, own tokens, heads, d]` as `[B, tokens, own heads, d]`."""
    rows, _, _, size = tensor.shape
    ranges = spans(width, circle.size)
    num_own = heads[circle.rank].stop - heads[circle.rank].start
    arrived = swap(
        circle,
        [tensor[:, :, each] for each in heads],
        [(rows, each.stop - each.start, num_own, size) for each in ranges],
    )
    if rows == 1:
        return arrived.view(1, width, num_own, size)
    whole = tensor.new_empty(rows, width, num_own, size)
    for each, part in zip(ranges, parts_of(arrived, [each.stop - each.start for each in ranges]), strict=True):
        whole[:, each] = part.view(rows, -1, num_own, size)
    return whole


def _to_tokens(circle: Circle, width: int, heads: Sequence[slice], num_heads: int, tensor: Tensor) -> Tensor:
    """Return `[B, tokens, own heads, d]` as `[B, own tokens, heads, d]`; heads that several ranks hold are added up."""
    rows, _, _, size = tensor.shape
    ranges = spans(width, circle.size)
    num_own = ranges[circle.rank].stop - ranges[circle.rank].start
    counts = [each.stop - each.start for each in heads]
    arrived = swap(circle, [tensor[:, each] for each in ranges], [(rows, num_own, each, size) for each in counts])
    whole = tensor.new_empty(rows, num_own, num_heads, size)
    done = 0
    for each, part in zip(heads, parts_of(arrived, counts), strict=True):
        place, came = whole[:, :, each], part.view(rows, num_own, -1, size)
        if each.start >= done:
            place.copy_(came)
        else:
            place.add_(came)
        done = each.stop
    return whole


def swap(circle: Circle, parts: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]) -> Tensor:
    """Send each rank its part; return what all ranks have sent, one after the other, of these shapes."""
    numels = [each.numel() for each in parts]
    sent = parts[0].new_empty(sum(numels))
    for place, part in zip(sent.split(numels), parts, strict=True):
        place.view(part.shape).copy_(part)
    counts = [torch.Size(each).numel() for each in shapes]
    arrived = sent.new_empty(sum(counts))
    circle.swap(arrived, sent, counts, numels)
    return arrived


def parts_of(arrived: Tensor, weights: Sequence[int]) -> Sequence[Tensor]:
    """Return the part of each rank, which are as long as `weights` to one another."""
    unit = arrived.numel() // max(1, sum(weights))
    return arrived.split([unit * each for each in weights])
