"""Tokens and rows of the vocabulary that have met on one rank: their statistics folded, their gradients added up.

The fold is Ring-DTP's, over canonical blocks in vocabulary order, for each shard by itself:

    m' = max(m, max_v y_v),    z' = z e^(m - m') + sum_v e^(y_v - m'),    from (-inf, 0)

A shard's (m, z) therefore has the same bits whichever rank folds it and in whichever pieces, and so has the lse, into
which `combine` folds the shards in vocabulary order too.
"""

from dataclasses import replace

import torch
from torch import Tensor

from planish.peaks.vocab.task import Task
from planish.peaks.vocab.tile import FLOOR, Slopes, Workspace, fold, pick
from planish.peaks.vocab.tiles import Tiles
from planish.price.vocab_sharded import ShardPass


def open_tiles(
    plan: ShardPass,
    *,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    task: Task,
    first: int = 0,
) -> Tiles:
    """Return working buffers for tokens and rows, of which either are replaced for each meeting."""
    work = Workspace.allocate(plan.buffers, hidden.device)
    task = replace(task, head=plan.head, tiling=plan.tiling)
    return Tiles(task=task, work=work, hidden=hidden, weight=weight, bias=bias, target=target, first=first)


def with_rows(tiles: Tiles, weight: Tensor, bias: Tensor | None, first: int) -> Tiles:
    """Return the tiles of the same tokens by other rows of the vocabulary."""
    task = replace(tiles.task, head=replace(tiles.task.head, vocab_size=len(weight)))
    bias = None if bias is None else bias.to(tiles.work.rows.dtype)
    return replace(tiles, task=task, weight=weight, bias=bias, first=first)


def with_tokens(tiles: Tiles, hidden: Tensor, target: Tensor) -> Tiles:
    """Return the tiles of other tokens, all of which count, by the same rows of the vocabulary."""
    task = replace(tiles.task, num_valid=len(hidden), index=None)
    return replace(tiles, task=task, hidden=hidden, target=target)


def new_state(like: Tensor, *shape: int) -> Tensor:
    """Return (m, target logit, sum of logits where wanted, z) of no logits at all, [..., K + 1, N]."""
    state = like.new_zeros(shape)
    state[..., 0, :] = FLOOR
    return state


def scan(tiles: Tiles, state: Tensor) -> None:
    """Fold the logits of the tiles' tokens by their rows into `state`, [K + 1, N]."""
    work, task = tiles.work, tiles.task
    for group in task.row_groups():
        rows, part = tiles.load(group), state[:, group]
        count = part.shape[1]
        for block, columns in task.column_groups():
            tile = tiles.logits(rows, columns)[:count]
            part[1].add_(pick(tile, tiles.local_target(group, columns)))
            fold(work, tile, block, keep=False)
        for block in range(task.head.blocks):
            _grow(part[0], part[-1], work.block_max[:count, block], work.block_sum[:count, block])
            if work.block_mean is not None:
                part[2].add_(work.block_mean[:count, block])


def _grow(top: Tensor, total: Tensor, block_max: Tensor, block_sum: Tensor) -> None:
    """Fold one block into (m, z), in place; `block_max` and `block_sum` are used up."""
    largest = torch.maximum(top, block_max)
    total.mul_(top.sub_(largest).exp_()).add_(block_sum.mul_(block_max.sub_(largest).exp_()))
    top.copy_(largest)


def close_state(state: Tensor) -> Tensor:
    """Turn (m, ..., z) into a shard's statistics (lse, target logit, sum of logits), [..., K, N], in place."""
    state[..., 0, :].add_(state[..., -1, :].log_())
    return state[..., :-1, :]


def combine(shards: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """Return nll, lse and, where it was summed, the mean logit of each token, [N], from [P, K, N]."""
    lse = shards[:, 0]
    top = lse.amax(0).clamp_(min=FLOOR)
    total = torch.zeros_like(top)
    for each in lse:
        total.add_(torch.sub(each, top).exp_())
    found = {"lse": total.log_().add_(top)}
    found["nll"] = found["lse"] - _sum(shards[:, 1])
    if shards.shape[1] > 2:
        found["mean"] = _sum(shards[:, 2]).div_(vocab_size)
    return found


def _sum(shards: Tensor) -> Tensor:
    """Return the sum over shards in vocabulary order, whatever the number of tokens."""
    total = torch.zeros_like(shards[0])
    for each in shards:
        total.add_(each)
    return total


def derive(
    tiles: Tiles,
    slopes: Tensor,
    *,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    hidden: Tensor | None = None,
    fresh: frozenset[str],
) -> None:
    """Add the shares of the tiles' tokens and rows to gradients of rows, of bias and of hidden; set what is `fresh`.

    Args:
        tiles: What meets.
        slopes: Of each token, [N, S]: lse, then the derivatives by it, by the target logit and, negative, by each
            logit, times the scale of the logits.
        weight: [rows, D], wide or in the compute dtype.
        bias: [rows], wide.
        hidden: [N, D], wide.
        fresh: Which of "weight", "bias" and "hidden" hold nothing yet.
    """
    task = tiles.task
    empty = not task.num_valid or not len(tiles.weight)
    for name, total in (("weight", weight), ("bias", bias), ("hidden", hidden)):
        if total is not None and name in fresh and (empty or name == "bias"):
            total.zero_()
    if empty:
        return
    for _, columns in task.column_groups():
        for group in task.row_groups():
            rows = tiles.load(group)
            tile = tiles.logits(rows, columns)[: group.stop - group.start]
            lse, softmax, target, *uniform = slopes[group].t().contiguous()
            each = Slopes(softmax=softmax, target=target, uniform=uniform[0] if uniform else None)
            tiles.derive(tile, group, columns, lse, each, bias)
            if weight is not None:
                tiles.add_weight_grad(weight[columns], tile, rows, fresh="weight" in fresh and group.start == 0)
            if hidden is not None:
                tiles.add_hidden_grad(hidden[group], tile, columns, fresh="hidden" in fresh)
