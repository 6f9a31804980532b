"""One step of autograd in two halves: the first holds the operands and makes their gradients, the second runs.

[Note: before it runs] A checkpointed layer that runs again for backward is stopped by torch as soon as all that its
first run saved is saved again. Operands are therefore saved before the step runs: where nothing behind it saves
anything, as where its result is but added to the residual, it does not run again; where something does, it does.
"""

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class Step(Protocol):
    """What runs once, and whose gradients are made once.

    Attributes:
        grad: The gradient of its result, from one half to the other.
    """

    grad: Tensor | None

    def run(self, ids: Tensor, *operands: Tensor | None) -> Tensor:
        """Return the result, without a graph."""

    def gradients(
        self, grad: Tensor, needed: tuple[bool, ...], ids: Tensor, *operands: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of the operands; `needed` says which are."""


def held(step: Step, ids: Tensor, *operands: Tensor | None) -> Tensor:
    """Return what `step` makes of the operands, differentiable once.

    Memory: what `step` takes, and the operands from forward to backward.
    """
    token = _Hold.apply(step, ids, *operands)
    return _Run.apply(token, step, (ids, *operands))


class _Hold(torch.autograd.Function):
    """Saves the operands; in backward it makes their gradients."""

    @staticmethod
    def forward(ctx: Any, step: Step, ids: Tensor, *operands: Tensor | None) -> Tensor:
        ctx.step = step
        ctx.save_for_backward(ids, *operands)
        return next(each for each in operands if each is not None).new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        step = ctx.step
        grad, step.grad = step.grad, None
        saved = ctx.saved_tensors
        return None, None, *step.gradients(grad, ctx.needs_input_grad[2:], *saved)


class _Run(torch.autograd.Function):
    """Runs the step; in backward it hands the gradient on."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, step: Step, given: tuple[Tensor | None, ...]) -> Tensor:  # noqa: ARG004
        ctx.step = step
        return step.run(*given)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ctx.step.grad = grad
        return grad.new_empty(0), None, None
