"""The head on one shard of the vocabulary, for stages of a pipeline that share it: S, the barrier's sum, and T.

With Y = softcap(logit_scale (X W^T + b)), rank d owning the rows [start, stop) of W and c = d(total)/d(loss) by token:

    S       lse_d = log sum_{v in d} exp(Y_v)     z_d = Y_target if the target is in d, else 0
    C1      lse = log sum_d exp(lse_d)            z = sum_d z_d            nll = lse - z          (one all-gather)
    T       P_d = exp(Y_d - lse)                  dW_d += (c (P_d - G_d))^T X
    Vocab-1 T also makes                          dX_d = c (P_d - G_d) W_d      and C2 reduces it: two barriers
    Vocab-2 S also makes                          A_d = exp(Y_d - lse_d) W_d
            after the gather                      dX_d = c (exp(lse_d - lse) A_d - G_d W_d)       is reduced in C1 too

G is one where the target is. Nothing here talks to other ranks: `Scan.statistics` is what a rank sends, the stack of
all ranks' what `combine_shards` takes.

[Note: two numbers a token] The paper sends each shard's maximum, sum of exponentials and target logit. Maximum and sum
only ever meet as lse_d = max + log(sum), so that is sent: 8 bytes a token, not 12. An empty shard's is -inf, which
weighs exp(-inf) = 0, so that no rank is special.

[Note: valid tokens] Every rank knows the targets. What is made here, sent and reduced has a row for each of the N
tokens that are not ignored, in order, and none for the others; `to_tokens` spreads the reduced gradient again.

[Note: no store of G W] The paper keeps a second [N, D] from S to the barrier, the targets' rows of W. They are read
after the barrier instead, some at a time: W does not change between.

References: Yeung et al., Balancing Pipeline Parallelism with Vocabulary Parallelism, arXiv 2411.05288, algorithms 1 and
2, equations 5 and 6.
"""

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from planish.peaks.vocab.blocked import Objective
from planish.peaks.vocab.shard import Rows, Shard, ShardedHead, Tokens
from planish.peaks.vocab.task import Task
from planish.peaks.vocab.tile import FLOOR, Slopes, Workspace, combine, fold, pick
from planish.peaks.vocab.tiles import Tiles
from planish.price.vocab import STRIP
from planish.price.vocab_sharded import ShardPass, scan_pass, sweep_pass
from planish.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """What S leaves for the barrier; all of it but `tokens` is done with after it.

    Attributes:
        tokens: For T.
        statistics: What this rank sends to all others, [K, N], contiguous, in the order of `ShardedHead.statistics`.
        product: Vocab-2's A_d, [N, D]: unscaled, and used up by `rescale`; None for Vocab-1.
        uniform: With `product` and label smoothing: minus the sum over the shard of each row of W times the slope of
            its soft cap, [N, D], or [1, D] without a soft cap.
    """

    tokens: Tokens
    statistics: Tensor
    product: Tensor | None
    uniform: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenStatistics:
    """What the whole vocabulary says of each valid token, [N] each, the same bits on every rank.

    Attributes:
        lse: Logarithm of the sum of exponentials of all logits.
        target_logit: Of the target; None without labels.
        mean: Of all logits, for label smoothing.
        max: The largest logit, without labels; `max - lse` is its log-probability.
        argmax: Its class, the first of equals.
    """

    lse: Tensor
    target_logit: Tensor | None = None
    mean: Tensor | None = None
    max: Tensor | None = None
    argmax: Tensor | None = None

    def losses(self, objective: Objective) -> Tensor:
        """Return the loss of each valid token."""
        return objective.loss(self.lse - self.target_logit, self.lse, self.mean)


@torch.no_grad()
def s_pass(
    head: ShardedHead,
    hidden: Tensor,
    target: Tensor | None = None,
    *,
    product: bool = False,
    num_valid: int | None = None,
) -> Scan:
    """Return the statistics of one shard, and with `product` what its share of hidden's gradient is made of (Vocab-2).

    Memory: one tile, K x N x 4 bytes (K is 2; 3 with label smoothing or without labels), and 8 x N where some tokens
        are ignored; with `product` N x D x 4 more. With `product`, a soft cap and label smoothing together, twice that,
        at two more products.
    Communication: none; the caller then gathers `statistics`: K x N x 4 bytes sent by each rank.
    Exactness: equal to full logits up to the order of summation; statistics are made and sent in float32 (float64 for
        float64).

    Args:
        head: This rank's part.
        hidden: Hidden states, the final norm included, [..., D].
        target: Global class of each token, [...]; None asks for the most likely class instead.
        product: Whether to make `Scan.product`, for one barrier instead of two.
        num_valid: Number of targets that are not ignored, where it is known; it is then not read from a GPU.

    Raises:
        TypeError: Tensors of a wrong kind.
        ValueError: Tensors that do not fit together, a class outside the vocabulary, `product` without labels.
    """
    if product and target is None:
        raise ValueError("`product` is for a gradient, which takes a `target`; leave it out without labels.")
    tokens, shard = Tokens.prepare(head, hidden, target, num_valid=num_valid), head.shard
    names = head.statistics(labelled=target is not None)
    make, wide = tokens.hidden.new_zeros, getattr(torch, tokens.sizes.wide_dtype)
    found = make((len(names), tokens.num_valid), dtype=wide)
    total = make((tokens.num_valid, tokens.sizes.hidden_size), dtype=wide) if product else None
    if not len(shard.weight):
        for values, name in zip(found, names, strict=True):
            values.fill_(-torch.inf if name in ("lse", "max") else 0.0)
        return Scan(tokens=tokens, statistics=found, product=total, uniform=None)
    uniform = None
    plan = scan_pass(tokens.sizes, product=product, tile_bytes=head.tile_bytes)
    with torch.autocast(hidden.device.type, enabled=False):
        tiles = _tiles(head, tokens, plan)
        for group in tiles.task.row_groups():
            rows = tiles.load(group)
            row = _scan(head, tiles, group, rows)
            for values, name in zip(found, names, strict=True):
                values[group] = row[name]
            del row
            if total is not None:
                _add_product(tiles, total, group, rows, found[0, group])
        if total is not None and head.objective.label_smoothing:
            uniform = _uniform(tiles, found[0], total.shape[1])
    return Scan(tokens=tokens, statistics=found, product=total, uniform=uniform)


def combine_shards(gathered: Tensor, names: tuple[str, ...]) -> TokenStatistics:
    """Return what all shards together say of each token, from their statistics [p, K, N] in vocabulary order.

    lse = log sum_d exp(lse_d); target logits and means add up; the largest of the maxima is the maximum.

    Memory: 4 bytes a valid token for each statistic, 8 for argmax, and p x N x 4 for a moment; the gathered
        p x K x N x 4 may be freed then.
    Communication: none; every rank computes the same from the same numbers, so all know the same bits of every loss.
    Exactness: for one shard the statistics are its own, bit for bit.
    """
    found = dict(zip(names, gathered.unbind(1), strict=True))
    whole = {"lse": torch.logsumexp(found["lse"], 0)}
    whole |= {name: found[name].sum(0) for name in ("target_logit", "mean") if name in found}
    if "max" in found:
        best = found["max"].argmax(0, keepdim=True)
        whole["max"] = found["max"].gather(0, best).squeeze(0)
        whole["argmax"] = found["argmax"].gather(0, best).squeeze(0).long()
    return TokenStatistics(**whole)


@torch.no_grad()
def rescale(head: ShardedHead, scan: Scan, whole: TokenStatistics, upstream: Tensor | float) -> Tensor:
    """Return the shard's share of hidden's gradient, [N, D], made of the product of S without a further product.

    dX_d = c logit_scale (a exp(lse_d - lse) A_d - (1 - e) G_d W_d - e / V sum_v W_v),  a = 1 + 2 z_loss lse,
    with label smoothing e; each row of W is multiplied by the slope of its soft cap. (Equation 6.)

    Memory: the product's own, which is used up; besides it at most 2^19 numbers of W's rows at a time.
    Communication: none; the caller then reduces the shares to the last stage: N x D x 4 bytes sent by each rank.
    Exactness: equal to Vocab-1's share up to the order of summation.

    Args:
        head: This rank's part.
        scan: What S left, with its product.
        whole: What all shards say.
        upstream: Derivative of the total by the loss of each valid token, [N] or one for all.
    """
    share, shard = scan.product, head.shard
    if share is None:
        raise ValueError("`scan` has no product; call `s_pass` with product=True.")
    if not len(shard.weight) or not len(share):
        return share
    slopes = _slopes(head, whole.lse, _factor(head, whole, upstream))
    share.mul_(torch.sub(scan.statistics[0], whole.lse).exp_().mul_(slopes.softmax).unsqueeze(1))
    if scan.uniform is not None:
        share.addcmul_(scan.uniform, slopes.uniform.unsqueeze(1))
    local = scan.tokens.local_target(shard)
    local = local if scan.tokens.index is None else local.index_select(0, scan.tokens.index)
    weights = slopes.target.masked_fill_(local < 0, 0.0)
    if head.options.softcap is not None:
        weights.mul_((whole.target_logit / head.options.softcap).square_().neg_().add_(1.0))
    step = max(1, STRIP // share.shape[1])
    for some in zip(share.split(step), local.clamp_(min=0).split(step), weights.split(step), strict=True):
        rows, classes, factor = some
        rows.addcmul_(shard.weight.index_select(0, classes).to(rows.dtype), factor.unsqueeze(1), value=-1.0)
    return share


@torch.no_grad()
def t_pass(
    head: ShardedHead,
    tokens: Tokens,
    whole: TokenStatistics,
    upstream: Tensor | float,
    *,
    weight_grad: Tensor | None,
    bias_grad: Tensor | None = None,
    hidden_grad: bool,
) -> Tensor | None:
    """Add the shard's gradients to `weight_grad` and `bias_grad`; with `hidden_grad` return its share of hidden's.

    P = exp(Y - lse) is computed again tile by tile:  dW_d += D^T X,  dX_d = D W_d,  D = c logit_scale (a P_d -
    (1 - e) G_d - e / V) times the slope of the soft cap, a = 1 + 2 z_loss lse, with label smoothing e.

    Memory: one tile; a tile's columns x D x 4 where `weight_grad` is narrower than float32; with `hidden_grad`
        N x D x 4 for what is returned. No tensor has N x V / p numbers.
    Communication: none; for Vocab-1 the caller then reduces the shares: N x D x 4 bytes sent by each rank.
    Exactness: sums over tokens are formed in float32 (float64 for float64) and rounded once, when they are added to
        a narrower gradient.

    Args:
        head: This rank's part.
        tokens: The microbatch, as S left it.
        whole: What all shards say.
        upstream: Derivative of the total by the loss of each valid token, [N] or one for all.
        weight_grad: The shard's gradient, [V_d, D], in the weight's dtype or in float32 (float64 for float64): for a
            tied weight the one to which the embedding adds too. None for a frozen weight.
        bias_grad: The bias's gradient, [V_d].
        hidden_grad: True for Vocab-1; False for Vocab-2, whose share `rescale` has made.
    """
    if tokens.target is None:
        raise ValueError("`tokens` have no target; give one to `s_pass`.")
    shard, sizes, new_zeros = head.shard, tokens.sizes, tokens.hidden.new_zeros
    wide = getattr(torch, sizes.wide_dtype)
    share = new_zeros((tokens.num_valid, sizes.hidden_size), dtype=wide) if hidden_grad else None
    if not len(shard.weight) or not tokens.num_valid:
        return share
    _check_gradient(shard, weight_grad, wide)
    narrow = weight_grad is not None and weight_grad.dtype != wide
    plan = sweep_pass(sizes, narrow=narrow, bias=bias_grad is not None, tile_bytes=head.tile_bytes)
    d_bias = None if bias_grad is None else new_zeros(len(bias_grad), dtype=wide)
    factor = _factor(head, whole, upstream)
    with torch.autocast(tokens.hidden.device.type, enabled=False):
        tiles = _tiles(head, tokens, plan)
        for _, columns in tiles.task.column_groups():
            block = None if weight_grad is None else weight_grad[columns]
            total = tiles.work.column_grads[: len(block)] if narrow else block
            for group in tiles.task.row_groups():
                rows = tiles.load(group)
                tile = tiles.logits(rows, columns)[: group.stop - group.start]
                slopes = _slopes(head, whole.lse[group], factor[group])
                tiles.derive(tile, group, columns, whole.lse[group], slopes, d_bias)
                if total is not None:
                    tiles.add_weight_grad(total, tile, rows, fresh=narrow and group.start == 0)
                if share is not None:
                    tiles.add_hidden_grad(share[group], tile, columns)
            if narrow:
                block.add_(total)
    if bias_grad is not None:
        bias_grad.add_(d_bias)
    return share


def to_tokens(hidden_grad: Tensor, index: Tensor | None, *, num_tokens: int) -> Tensor:
    """Return the gradient of the valid tokens, at `Tokens.index`, as that of all, [T, D], 0 where ignored."""
    return hidden_grad if index is None else Rows(index=index, values=hidden_grad).dense(num_tokens)


def _tiles(head: ShardedHead, tokens: Tokens, plan: ShardPass) -> Tiles:
    """Return the shard's operands with the working buffers of one pass."""
    shard, options = head.shard, head.options
    if plan.workspace_bytes > head.tile_bytes:
        warnings.warn(
            f"`tile_bytes` ({format_bytes(head.tile_bytes)}) is below the smallest tile for this shard; "
            f"it takes {format_bytes(plan.workspace_bytes)}.",
            stacklevel=3,
        )
    task = Task(
        head=plan.head,
        tiling=plan.tiling,
        ignore_index=options.ignore_index,
        num_valid=tokens.num_valid,
        index=tokens.index,
        logit_scale=options.logit_scale,
        softcap=options.softcap,
    )
    work = Workspace.allocate(plan.buffers, tokens.hidden.device)
    return Tiles(
        task=task,
        work=work,
        hidden=tokens.hidden,
        weight=shard.weight,
        bias=None if shard.bias is None else shard.bias.to(work.tile.dtype),
        target=tokens.local_target(shard),
    )


def _scan(head: ShardedHead, tiles: Tiles, group: slice, rows: Tensor) -> dict[str, Tensor]:
    """Return the shard's statistics of each token of `group`, from one tile of logits after the other."""
    count, work, shard = group.stop - group.start, tiles.work, head.shard
    target_logit = work.strip.new_zeros(count)
    for block, columns in tiles.task.column_groups():
        tile = tiles.logits(rows, columns)[:count]
        target_logit.add_(pick(tile, tiles.local_target(group, columns)))
        fold(work, tile, block, keep=tiles.keeps_exponentials)
    top = work.block_max[:count].amax(1)
    found = combine(work, count, len(shard.weight))
    if "mean" in found:
        found["mean"].mul_(len(shard.weight) / shard.vocab_size)
    if "argmax" in found:
        found["argmax"].add_(shard.start)
    return {**found, "target_logit": target_logit, "max": top}


def _add_product(tiles: Tiles, total: Tensor, group: slice, rows: Tensor, lse: Tensor) -> None:
    """Fill the rows of `total` with A_d = exp(Y_d - lse_d) W_d, from the tiles of logits that S has kept."""
    lse = lse.clamp(min=FLOOR)
    for _, columns in tiles.task.column_groups():
        tile = tiles.at(rows, columns)[: len(lse)]
        tiles.derive(tile, group, columns, lse, Slopes(softmax=None, target=None), None)
        tiles.add_hidden_grad(total[group], tile, columns)


def _uniform(tiles: Tiles, lse: Tensor, width: int) -> Tensor:
    """Return minus the sum of the shard's rows, each times the slope of its soft cap, [N, D]; [1, D] without one."""
    task, work = tiles.task, tiles.work
    if task.softcap is None:
        total = work.strip.new_empty(1, width)
        for _, columns in task.column_groups():
            tile = work.tile.view(-1)[: columns.stop - columns.start].fill_(-1.0)
            tiles.add_hidden_grad(total, tile.unsqueeze(0), columns)
        return total
    total = work.strip.new_empty(len(lse), width)
    zeros, ones, lse = torch.zeros_like(lse), torch.ones_like(lse), lse.clamp(min=FLOOR)
    for group in task.row_groups():
        rows = tiles.load(group)
        for _, columns in task.column_groups():
            tile = tiles.logits(rows, columns)[: group.stop - group.start]
            tiles.derive(
                tile, group, columns, lse[group], Slopes(softmax=zeros[group], target=None, uniform=ones[group]), None
            )
            tiles.add_hidden_grad(total[group], tile, columns)
    return total


def _factor(head: ShardedHead, whole: TokenStatistics, upstream: Tensor | float) -> Tensor:
    """Return logit_scale times `upstream` for each valid token."""
    return torch.full_like(whole.lse, head.options.logit_scale).mul_(upstream)


def _slopes(head: ShardedHead, lse: Tensor, factor: Tensor) -> Slopes:
    """Return the derivatives of each token's loss by its statistics, times `factor`."""
    slopes = head.objective.slopes(lse, head.shard.vocab_size)
    return Slopes(
        softmax=factor if slopes.softmax is None else slopes.softmax.mul_(factor),
        target=slopes.target.mul_(factor),
        uniform=None if slopes.uniform is None else slopes.uniform.mul_(factor),
    )


def _check_gradient(shard: Shard, weight_grad: Tensor | None, wide: torch.dtype) -> None:
    if weight_grad is None:
        return
    if weight_grad.shape != shard.weight.shape:
        raise ValueError(
            f"`weight_grad` must have the shape of the shard, {list(shard.weight.shape)}, got "
            f"{list(weight_grad.shape)}."
        )
    if weight_grad.dtype not in (shard.weight.dtype, wide):
        raise TypeError(f"`weight_grad` must be {shard.weight.dtype} or {wide}, got {weight_grad.dtype}.")
