"""Feed-forward networks as the textbooks write them, in autograd's own operations: what the room is held to.

hidden = act(x W^T) for one input projection, act(x G^T) * (x W^T) for two, and y = hidden D^T.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from planish.peaks.activation.formula import Formula


def feed_forward(
    x: Tensor, formula: Formula, inner: Tensor, down: Tensor, up: Tensor | None = None, biases: tuple = (None,) * 3
) -> Tensor:
    """Return y [..., D] with every activation kept.

    Args:
        x: [..., D].
        formula: Which activation.
        inner: What goes through the activation, [F, D]: the gate where there are two projections.
        down: [D, F].
        up: What the activation is multiplied by, [F, D].
        biases: Of inner, down and up.
    """
    of_inner, of_down, of_up = biases
    hidden = torch.relu(F.linear(x, inner, of_inner))
    if formula.squared:
        hidden = torch.square(hidden)
    if up is not None:
        other = F.linear(x, up, of_up)
        hidden = hidden * (torch.relu(other) if formula.both else other)
    return F.linear(hidden, down, of_down)


def swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Return silu(x G^T) * (x U^T) D^T."""
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)
