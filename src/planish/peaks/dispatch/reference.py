"""The textbook mixture of experts, one token and one expert at a time in float64: what every other way is held to."""

import torch
from torch import Tensor
from torch.nn import functional as F

from planish.peaks.dispatch.experts import Weights
from planish.peaks.dispatch.gates import Activation, ClampedGlu, Gate, Glu, Single


def experts_reference(hidden: Tensor, ids: Tensor, scores: Tensor, weights: Weights, gate: Gate) -> Tensor:
    """Return sum_j scores[t, j] * expert_{ids[t, j]}(hidden[t]) for every token t, in float64 and under autograd.

    Args:
        hidden: [T, D].
        ids: [T, K], experts of each token.
        scores: [T, K].
        weights: Of all experts, as the model holds them.
        gate: What an expert does between its two products.
    """
    up, down = (each.double() for each in (weights.up, weights.down))
    if not weights.transposed:
        up, down = up.transpose(1, 2), down.transpose(1, 2)
    up_bias, down_bias = (None if each is None else each.double() for each in (weights.up_bias, weights.down_bias))
    rows = []
    for token, experts, shares in zip(hidden.double(), ids.tolist(), scores.double(), strict=True):
        total = torch.zeros_like(token)
        for expert, share in zip(experts, shares, strict=True):
            inner = token @ up[expert] + (0 if up_bias is None else up_bias[expert])
            outer = gate_reference(inner, gate) @ down[expert] + (0 if down_bias is None else down_bias[expert])
            total = total + share * outer
        rows.append(total)
    return torch.stack(rows) if rows else hidden.double()


def gate_reference(inner: Tensor, gate: Gate) -> Tensor:
    """Return what `gate` makes of the first product, as its definition reads."""
    match gate:
        case Glu(activation=activation):
            left, right = inner.chunk(2, -1)
            return _activate(left, activation) * right
        case ClampedGlu(alpha=alpha, limit=limit):
            left, right = inner[..., ::2].clamp(max=limit), inner[..., 1::2].clamp(-limit, limit)
            return (right + 1) * left * torch.sigmoid(alpha * left)
        case Single(activation=activation):
            return _activate(inner, activation)


def _activate(inner: Tensor, activation: Activation) -> Tensor:
    match activation:
        case "silu":
            return F.silu(inner)
        case "gelu":
            return F.gelu(inner)
        case "gelu_tanh":
            return F.gelu(inner, approximate="tanh")
        case "relu":
            return F.relu(inner)
        case "relu2":
            return F.relu(inner).square()
