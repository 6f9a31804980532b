"""Weights of smaller blocks before any training: which channels and heads stay, and what one matrix can do."""

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

Order = Literal["contribution", "iterative", "refit"]


def contribution(mean_abs: Tensor, down: Tensor) -> Tensor:
    """Return each channel's part in a feed-forward network's output: E|x_i| * |down_i|.

    Args:
        mean_abs: Mean of each channel's absolute activation [F].
        down: The last projection's weight [D, F].

    References:
        Bercovich et al., Puzzle (2025), appendix A.
    """
    return mean_abs.double() * down.double().norm(dim=0)


def order_by_contribution(mean_abs: Tensor, down: Tensor) -> Tensor:
    """Return channels from most to least contributing [F]."""
    return contribution(mean_abs, down).argsort(descending=True, stable=True)


def order_iteratively(gram: Tensor, down: Tensor) -> Tensor:
    """Return channels from most to least wanted, each time that one goes judged beside those that went before [F].

    The output lost with a set R is E|sum_R x_i down_i|^2 = sum over R x R of gram * (down^T down); the channel that
    adds least to it goes next.

    Memory:        2 F^2 numbers of float64.

    References:
        The closed form of NVIDIA Model-Optimizer's iterative channel contribution, over all tokens at once.
    """
    joint = gram.double() * (down.T.double() @ down.double())
    cost = joint.diagonal().clone()
    gone = torch.empty(len(cost), dtype=torch.long, device=cost.device)
    for place in range(len(cost)):
        worst = cost.argmin()
        gone[place] = worst
        cost += 2 * joint[worst]
        cost[worst] = torch.inf
    return gone.flip(0)


def order_by_refit(gram: Tensor, down: Tensor, *, ridge: float, share: float = 0.125) -> Tensor:
    """Return channels from most to least wanted where those that stay make up for those that go [F].

    A channel's removal costs |w_i|^2 / (H^-1)_ii with H = gram + ridge and w re-fitted to what stays; every round drops
    the cheapest and re-fits.

    Memory:        4 F^2 numbers of float64.

    Args:
        gram: Sum of x x^T over tokens [F, F].
        down: The last projection's weight [D, F].
        ridge: Added to the diagonal, as part of it.
        share: Of the channels that are left, those that go in a round; at least one.

    References:
        Hassibi and Stork, Optimal Brain Surgeon (1993); Kurtic et al., ZipLM (2023), for whole structures.
    """
    full = gram.double() if gram.dtype != torch.float64 else gram.clone()
    target = full @ down.T.double()
    full.diagonal().add_(ridge * full.diagonal() + 1e-9 * full.diagonal().mean())
    kept, gone = torch.arange(len(gram), device=down.device), []
    while len(kept):
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(full[kept[:, None], kept]))
        cost = (inverse @ target[kept]).square().sum(1) / inverse.diagonal()
        ranked = cost.argsort(stable=True)
        step = max(1, int(len(kept) * share))
        gone.append(kept[ranked[:step]])
        kept = kept[ranked[step:]].sort().values
    return torch.cat([each.flip(0) for each in reversed(gone)])


def cut_channels(tensors: Mapping[str, Tensor], keep: Tensor) -> dict[str, Tensor]:
    """Return a gated network's tensors with the channels `keep` alone, in their order."""
    found = {}
    for name, each in tensors.items():
        if ".gate_proj." in name or ".up_proj." in name:
            found[name] = each[keep]
        elif name.endswith(".down_proj.weight"):
            found[name] = each[:, keep]
        else:
            found[name] = each
    return found


def head_scores(entered: Tensor, output: Tensor, kv_heads: int) -> Tensor:
    """Return the mean norm of what each head of keys and values adds to attention's output [kv_heads].

    Args:
        entered: What enters the output projection [B, S, heads * width].
        output: Its weight [D, heads * width].
        kv_heads: Heads of keys and values.
    """
    parts = entered.flatten(0, 1).unflatten(1, (kv_heads, -1))
    columns = output.unflatten(1, (kv_heads, -1))
    return torch.stack([(parts[:, i] @ columns[:, i].T).norm(dim=1).mean() for i in range(kv_heads)])


def pool_heads(weight: Tensor, heads: int, count: int) -> Tensor:
    """Return a projection of `heads` heads with those of each of `count` groups averaged.

    Args:
        weight: Weight [heads * width, D] or bias [heads * width].
        heads: Its heads.
        count: Heads that remain.

    References:
        Ainslie et al., GQA (2023), section 2.1.
    """
    grouped = weight.unflatten(0, (count, heads // count, -1))
    return grouped.double().mean(1).flatten(0, 1).to(weight.dtype)


def select_heads(weight: Tensor, heads: int, chosen: Tensor) -> Tensor:
    """Return a projection's chosen heads alone.

    Args:
        weight: Weight [heads * width, D] or bias [heads * width].
        heads: Its heads.
        chosen: Indices of those that remain.
    """
    return weight.unflatten(0, (heads, -1))[chosen].flatten(0, 1).contiguous()


def best_of_groups(score: Tensor, count: int) -> Tensor:
    """Return the index of the best-scored head of each of `count` groups of neighbours."""
    groups = score.unflatten(0, (count, -1))
    return groups.argmax(1) + torch.arange(count, device=score.device) * groups.shape[1]


def only_own_queries(output: Tensor, heads: int, kv_heads: int, chosen: Tensor) -> Tensor:
    """Return an output projection [D, heads * width] with zeros for queries whose keys and values are not `chosen`.

    References:
        What NVIDIA Model-Optimizer's KV-head pruning starts from: what remains is exact.
    """
    group = torch.arange(heads, device=output.device) // (heads // kv_heads)
    stays = torch.isin(group, chosen)
    return (output.unflatten(1, (heads, -1)) * stays[None, :, None]).flatten(1)


def attention_product(value: Tensor, output: Tensor, heads: int, kv_heads: int) -> Tensor:
    """Return W_O W_V [D, D]: attention in which each token sees itself alone.

    Args:
        value: Weight [kv_heads * width, D].
        output: Weight [D, heads * width].
        heads: Query heads.
        kv_heads: Heads of values.
    """
    spread = value.unflatten(0, (kv_heads, -1)).repeat_interleave(heads // kv_heads, 0).flatten(0, 1)
    return (output.double() @ spread.double()).to(value.dtype)


def ffn_product(up: Tensor, down: Tensor) -> Tensor:
    """Return W_down W_up [D, D], the gate left out."""
    return (down.double() @ up.double()).to(up.dtype)
