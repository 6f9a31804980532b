"""What the actions of one step share: its microbatches, and who watches."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from planish.pipeline.actions import Action


class Microbatch(Protocol):
    """Token ids and targets [B, S] of a microbatch; every rank holds those of the whole step.

    `num_valid` targets count; -100 says of the others that they do not.
    """

    @property
    def input_ids(self) -> Tensor:
        """Token ids."""
        ...

    @property
    def target(self) -> Tensor:
        """The class that each token predicts."""
        ...

    @property
    def num_valid(self) -> int:
        """Targets that count."""
        ...


StageForward = Callable[[Tensor, Any], Tensor]
"""A stage's layers: hidden states [B, S, D] and their microbatch in, hidden states out."""

Watch = Callable[[Action], AbstractContextManager[Any]]
"""Entered around each pass of this rank, without its waits."""


def unwatched(_: Action) -> AbstractContextManager[None]:
    """Watch nothing."""
    return nullcontext()


@dataclass(slots=True, kw_only=True)
class Flow:
    """One rank's view of the step that runs.

    Attributes:
        width: D of hidden states.
        dtype: Of hidden states, and of their gradients.
        device: Where they live.
        watch: Entered around each pass.
        batches: The microbatches.
        upstream: Derivative of the step's loss by the loss of each counted token.
        training: Whether there is a backward.
        labelled: Whether the head tells losses, or else the most likely next token.
        assumed: Tensors have no data and the other ranks are not there; what depends on data is the most it can be.
    """

    width: int
    dtype: torch.dtype
    device: torch.device
    watch: Watch = unwatched
    batches: Sequence[Microbatch] = ()
    upstream: float = 1.0
    training: bool = False
    labelled: bool = True
    assumed: bool = False

    def buffer(self, microbatch: int) -> Tensor:
        """Return memory for a hidden state of `microbatch`, [B, S, D]."""
        shape = *self.batches[microbatch].input_ids.shape, self.width
        return torch.empty(shape, dtype=self.dtype, device=self.device)


def grad_of(param: Tensor) -> Tensor:
    """Return the gradient of `param`, zeros where there was none yet."""
    if param.grad is None:
        param.grad = torch.zeros_like(param, requires_grad=False)
    return param.grad
