"""Gradients of linear layers that wait: backward in two halves, I for the stage before and W for the weights.

[Note: two forwards] torch splits a backward by walking its graph twice, and a checkpointed layer then runs once more
for each of its linear layers. Here a linear layer hands on its input's gradient and keeps what its own needs, x and
dy, until W: a checkpointed layer runs twice in all, as it does with a whole backward.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn


class Deferred:
    """The weight gradients that backward has left for later.

    Memory:    from I to W the input and the output's gradient of each linear layer of a chunk.
    Exactness: each gradient is the product that autograd would have formed, added in the order of W.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[nn.Parameter | None, nn.Parameter | None, Tensor, Tensor]] = []

    def add(self, weight: nn.Parameter | None, bias: nn.Parameter | None, x: Tensor, dy: Tensor) -> None:
        """Keep what the gradients of a linear layer need; None stands for what is frozen or not there."""
        if weight is not None or bias is not None:
            self._waiting.append((weight, bias, x, dy))

    def take(self) -> Callable[[], None]:
        """Return what adds the gradients that have been left since the last call."""
        waiting, self._waiting = self._waiting, []

        @torch.no_grad()
        def run() -> None:
            while waiting:
                weight, bias, x, dy = waiting.pop()
                dy = dy.reshape(-1, dy.shape[-1])
                if weight is not None:
                    _add(weight, dy.t() @ x.reshape(-1, x.shape[-1]))
                if bias is not None:
                    _add(bias, dy.sum(0))

        return run


def defer_linears(modules: Iterable[nn.Module], later: Deferred) -> None:
    """Let the linear layers in `modules` leave the gradients of their weights to `later`."""
    for module in modules:
        for each in module.modules():
            if type(each) is nn.Linear and each.weight.requires_grad:
                each.forward = _forward(each, later)


def _forward(linear: nn.Linear, later: Deferred) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        return _Linear.apply(x, linear.weight, linear.bias, later)

    return forward


class _Linear(torch.autograd.Function):
    """y = x W^T + b. Parameters stay off the saved tensors: checkpointing hands those back as other tensors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter, bias: nn.Parameter | None, later: Deferred) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.bias, ctx.later = weight, bias, later
        return nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, None, None, None]:
        (x,) = ctx.saved_tensors
        of_weight, of_bias = ctx.needs_input_grad[1:3]
        ctx.later.add(ctx.weight if of_weight else None, ctx.bias if of_bias else None, x, dy)
        return dy @ ctx.weight if ctx.needs_input_grad[0] else None, None, None, None


def _add(param: nn.Parameter, grad: Tensor) -> None:
    if param.grad is None:
        param.grad = grad
    else:
        param.grad.add_(grad)
