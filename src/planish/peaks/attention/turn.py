"""A span of each row out, the two parts in that a rank works on so that all have as much to do, and back.

See [Note: turned] in `price.sights`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from planish.comm.ring import Circle
from planish.peaks.attention.heads import parts_of, swap
from planish.price.sights import Two, position, turned
from planish.shapes import spans


class Turn(torch.autograd.Function):
    """Each `[B, own tokens, heads, d]` of a rank's span becomes that of its two parts, or back.

    Memory:        the results, and while one is made what is sent of it and, but for a single row's parts, what
                   arrives of it.
    Communication: one all-to-all for each tensor and pass, of its bytes.
    Exactness:     bitwise.
    """

    @staticmethod
    def forward(ctx: Any, circle: Circle, width: int, there: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the tokens of each tensor that this rank has after the turn: `there`, or back."""
        ctx.circle, ctx.width, ctx.there = circle, width, there
        return tuple(_turn(circle, width, each, there=there) for each in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """Return the gradients of the tokens that this rank had."""
        return None, None, None, *(_turn(ctx.circle, ctx.width, each, there=not ctx.there) for each in grads)


def _turn(circle: Circle, width: int, tensor: Tensor, *, there: bool) -> Tensor:
    straight, two = spans(width, circle.size), turned(width, circle.size)
    leaves = [_common(straight[circle.rank], each) for each in two]
    comes = [_common(each, two[circle.rank]) for each in straight]
    if there:
        return _move(circle, tensor, [span for span, _ in leaves], [parts for _, parts in comes])
    return _move(circle, tensor, [parts for _, parts in comes], [span for span, _ in leaves])


def _common(span: slice, two: Two) -> tuple[slice, slice]:
    """Return the tokens that are in a span and in two parts, as positions in either; what lies between is empty."""
    common = [(max(span.start, part.start), min(span.stop, part.stop)) for part in two]
    common = [(start, stop) for start, stop in common if start < stop]
    if not common:
        return slice(0, 0), slice(0, 0)
    start, stop = common[0][0], common[-1][1]
    return slice(start - span.start, stop - span.start), slice(position(two, start), position(two, stop))


def _move(circle: Circle, tensor: Tensor, leaves: Sequence[slice], comes: Sequence[slice]) -> Tensor:
    """Send each rank its tokens of `[B, T, heads, d]`, and return what comes, laid where it belongs."""
    rows, _, heads, size = tensor.shape
    counts = [each.stop - each.start for each in comes]
    arrived = swap(circle, [tensor[:, each] for each in leaves], [(rows, each, heads, size) for each in counts])
    order = [each.start for each in comes if each.start < each.stop]
    if rows == 1 and order == sorted(order):
        return arrived.view(1, sum(counts), heads, size)
    whole = tensor.new_empty(rows, sum(counts), heads, size)
    for each, part in zip(comes, parts_of(arrived, counts), strict=True):
        whole[:, each] = part.view(rows, -1, heads, size)
    return whole
