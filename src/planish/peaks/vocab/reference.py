"""The textbook head in float64: full logits, every statistic and loss by its definition; the oracle of the tests."""

import torch
from torch import Tensor


def logits(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    logit_scale: float = 1.0,
    softcap: float | None = None,
) -> Tensor:
    """Return softcap(logit_scale * (hidden @ weight^T + bias)) in float64, [..., V]."""
    z = hidden.double() @ weight.double().t()
    if bias is not None:
        z = z + bias.double()
    z = z * logit_scale
    return z if softcap is None else softcap * torch.tanh(z / softcap)


def logprob(y: Tensor, target: Tensor, *, ignore_index: int = -100) -> dict[str, Tensor]:
    """Return nll, lse, entropy and argmax of logits `y` at each token; 0 (argmax: -1) where the target is ignored."""
    valid = target != ignore_index
    lse = torch.logsumexp(y, -1)
    nll = lse - y.gather(-1, target.where(valid, 0).long().unsqueeze(-1)).squeeze(-1)
    p = torch.softmax(y, -1)
    entropy = lse - (p * y.masked_fill(y == -torch.inf, 0.0)).sum(-1)
    kept = {"nll": nll, "lse": lse, "entropy": entropy}
    kept = {name: value.where(valid, 0.0) for name, value in kept.items()}
    return {**kept, "argmax": y.argmax(-1).where(valid, -1)}


def cross_entropy(
    y: Tensor, target: Tensor, *, ignore_index: int = -100, label_smoothing: float = 0.0, z_loss: float = 0.0
) -> Tensor:
    """Return the loss of each token: (1 - a) nll + a (lse - mean(y)) + z_loss lse^2, 0 where ignored."""
    parts = logprob(y, target, ignore_index=ignore_index)
    smooth = torch.logsumexp(y, -1) - y.mean(-1)
    loss = (1 - label_smoothing) * parts["nll"] + z_loss * parts["lse"] ** 2
    if label_smoothing:
        loss = loss + label_smoothing * smooth.where(target != ignore_index, 0.0)
    return loss


def divergence(y: Tensor, teacher: Tensor, *, kind: str, temperature: float = 1.0, beta: float = 0.5) -> Tensor:
    """Return KL(q || p), KL(p || q) or their distances from the mixture, p of logits `y`, q of `teacher`, [...]."""
    s, t = (torch.log_softmax(each / temperature, -1) for each in (y, teacher))
    m = torch.log(beta * t.exp() + (1 - beta) * s.exp())

    def kl(a: Tensor, b: Tensor) -> Tensor:
        inside = a > -torch.inf
        return (a.exp() * (a.where(inside, 0.0) - b.where(inside, 0.0))).sum(-1)

    if kind == "forward":
        return kl(t, s)
    return kl(s, t) if kind == "reverse" else beta * kl(t, m) + (1 - beta) * kl(s, m)
