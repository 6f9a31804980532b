"""Routing that is chosen once: a layer that runs again for backward takes the experts that it chose in forward.

Rounding may differ from one run to the next, and a router's near ties with it; then counts, and so all shapes behind
them, would be others, and gradients would be those of another function. So the indices of every top-k inside a
checkpointed layer are kept, and where the layer runs again the values are gathered at them.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

Checkpoint = Callable[..., Any]
"""Takes a function and its arguments, calls it now, and again for backward."""


def replayed(checkpoint: Checkpoint) -> Checkpoint:
    """Return `checkpoint` for layers with a router, of torch's reentrant kind or the other, or anybody's own.

    Memory:        the indices of each top-k, 8 bytes each, until the layer runs again.
    Exactness:     gradients are those of the routing in forward, whatever the router says when it is asked again; a
                   second backward through a retained graph routes anew.
    """

    def call(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        return checkpoint(_Replayed(function), *args, **options)

    return call


class _Replayed:
    """A function whose every top-k finds in the second call what it found in the first."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._chosen: list[Tensor] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._chosen is None:
            self._chosen = []
            choices = _Choices(keep=self._chosen, again=[])
        else:
            choices = _Choices(keep=[], again=self._chosen)
            self._chosen = None
        with choices:
            return self._function(*args, **kwargs)


class _Choices(TorchFunctionMode):
    def __init__(self, *, keep: list[Tensor], again: list[Tensor]) -> None:
        super().__init__()
        self._keep, self._again = keep, again

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not torch.topk and func is not Tensor.topk:
            return func(*args, **kwargs)
        return self._topk(func, *args, **kwargs)

    def _topk(self, func: Any, input: Tensor, k: int, dim: int = -1, **how: bool) -> Any:
        if self._again:
            indices = self._again.pop(0)
        else:
            with torch.no_grad():
                indices = func(input, k, dim, **how).indices
            self._keep.append(indices)
        return torch.return_types.topk((_Pick.apply(input, indices, dim), indices))


class _Pick(torch.autograd.Function):
    """gather, which keeps its indices alone."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, indices: Tensor, dim: int) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.shape, ctx.dim = values.shape, dim
        return values.gather(dim, indices)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (indices,) = ctx.saved_tensors
        return grad.new_zeros(ctx.shape).scatter_(ctx.dim, indices, grad), None, None
