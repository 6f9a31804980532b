"""The textbook APOLLO step of one matrix, and structured AdamW, out of place in float64; the oracle of the tests."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Textbook:
    """A weight [A, B] with its state before a step; rows are projected (give W^T and G^T for columns).

    Attributes:
        weight: W.
        exp_avg: First moment of the projected gradient [proj_rank, B].
        exp_avg_sq: Second moment.
        num_updates: Steps taken.
        norm: What the limiter remembers.
    """

    weight: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    num_updates: int = 0
    norm: Tensor | None = None


def start(weight: Tensor, proj_rank: int) -> Textbook:
    """Return the state before the first step."""
    zeros = torch.zeros(proj_rank, weight.shape[1], dtype=torch.float64)
    return Textbook(weight=weight.double(), exp_avg=zeros, exp_avg_sq=zeros)


def step(  # noqa: PLR0913  the symbols of the algorithm
    state: Textbook,
    grad: Tensor,
    projection: Tensor,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    alpha: float,
    by_channel: bool,
    limiter: str,
    growth: float = 1.01,
) -> Textbook:
    """Return the state after one step with gradient G [A, B] and projection P [proj_rank, A], scaled as it is used.

    "paper" is algorithm 1 with the norm-growth limiter of Fira as published: eps outside the bias correction, which
    multiplies the limited update; "safe" and "off" take AdamW's own bias-corrected direction.
    """
    beta1, beta2 = betas
    t = state.num_updates + 1
    G = grad.double()
    R = projection.double() @ G
    M = beta1 * state.exp_avg + (1 - beta1) * R
    V = beta2 * state.exp_avg_sq + (1 - beta2) * R**2
    if limiter == "paper":
        D, after = M / (V.sqrt() + eps), (1 - beta2**t) ** 0.5 / (1 - beta1**t)
    else:
        D, after = (M / (1 - beta1**t)) / ((V / (1 - beta2**t)).sqrt() + eps), 1.0
    s = D.norm(dim=0) / R.norm(dim=0) if by_channel else D.norm() / R.norm()
    U = G * torch.nan_to_num(s)
    norm = state.norm
    if limiter != "off":
        if norm is not None and U.norm() > growth * norm:
            U = U / U.norm() * growth * norm
        norm = U.norm() if norm is None or limiter == "paper" else torch.maximum(U.norm(), norm / growth)
    W = state.weight - lr * alpha * after * U - lr * weight_decay * state.weight
    return replace(state, weight=W, exp_avg=M, exp_avg_sq=V, num_updates=t, norm=norm)


def structured_adamw(exp_avg: Tensor, exp_avg_sq: Tensor, grad: Tensor, *, eps: float, by_channel: bool) -> Tensor:
    """Return what structured AdamW adds: G scaled to the norm that AdamW's update has (section 3.2 of the paper).

    Args:
        exp_avg: Full moments with their bias corrected.
        exp_avg_sq: Likewise.
        grad: G [A, B].
        eps: AdamW's.
        by_channel: One factor a column, or one for the matrix.
    """
    update = exp_avg.double() / (exp_avg_sq.double().sqrt() + eps)
    if by_channel:
        return grad.double() * (update.norm(dim=0) / grad.double().norm(dim=0))
    return grad.double() * (update.norm() / grad.double().norm())
