"""One tile of logits, some rows by some blocks of the vocabulary: filled, folded into statistics, turned to gradient.

[Note: canonical blocks] A sum over the vocabulary is formed per block of `price.vocab.BLOCK` columns, from that
block's own maximum, and the blocks are combined in vocabulary order; logits are computed for multiples of
`price.vocab.ROW_STEP` rows. With both, no bit of the lse depends on the tile's size.

[Note: compiled] Where `kernels.softmax` serves it makes both steps in one pass each; what follows is for the rest.

[Note: exp and exp2] On a CPU `exp2` takes a third of the time of `exp`, but its last bit depends on where a vector
begins. The lse is therefore made with `exp`, and the probabilities of the gradient with `exp2`.

[Note: kept exponentials] Where the tiles of a row group wait for their statistics, in the wide dtype and without a soft
cap, `fold` leaves exp(y - m) in them, m the maximum of the row's block. The probabilities are that times exp(m - lse),
one factor for a row of a block, and no logit is exponentiated twice.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from planish.kernels.softmax import softmax_kernels
from planish.memory.pages import in_large_pages
from planish.price.vocab import BLOCK, Buffers

LOG2E = math.log2(math.e)
FLOOR = -1e38
"""The maximum of a block that is -inf throughout: finite, so that the block adds 0 and not NaN."""
FAR_BELOW = -1000.0
"""Below this distance from the maximum an exponential is 0 in every dtype, and 0 times the distance must be 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    """The working buffers of one call, as `Tiling.buffers` lists them."""

    tile: Tensor
    strip: Tensor
    rows: Tensor
    gather: Tensor | None = None
    cast: Tensor | None = None
    spare: Tensor | None = None
    block_max: Tensor | None = None
    block_sum: Tensor | None = None
    block_mean: Tensor | None = None
    block_entropy: Tensor | None = None
    block_argmax: Tensor | None = None
    part: Tensor | None = None
    narrow: Tensor | None = None
    column_sums: Tensor | None = None
    column_tops: Tensor | None = None
    kept: Tensor | None = None
    kept_weight: Tensor | None = None
    row_grads: Tensor | None = None
    column_grads: Tensor | None = None
    turned_rows: Tensor | None = None

    @property
    def folds_plainly(self) -> bool:
        """Return whether a block's statistics are its maximum and its sum alone."""
        return self.block_mean is self.block_entropy is self.block_argmax is None

    @classmethod
    def allocate(cls, buffers: Buffers, device: torch.device) -> Self:
        """Return tensors for `buffers`, not filled."""
        return cls(
            **{
                name: in_large_pages(torch.empty(shape, dtype=getattr(torch, dtype), device=device))
                for name, (shape, dtype) in buffers.items()
            }
        )


def strips(tile: Tensor, strip: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield ranges of rows of `tile` that fit in `strip`, each with `strip` viewed in that shape."""
    rows, columns = tile.shape
    step = max(1, strip.numel() // columns)
    for start in range(0, rows, step):
        stop = min(rows, start + step)
        yield slice(start, stop), strip[: (stop - start) * columns].view(stop - start, columns)


def fill(
    tile: Tensor,
    strip: Tensor,
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    logit_scale: float,
    softcap: float | None,
) -> None:
    """Fill `tile` with softcap(logit_scale * (rows @ weight^T + bias)); `strip` is scratch."""
    if tile.dtype == rows.dtype:
        start, beta = (tile, 0.0) if bias is None else (bias, logit_scale)
        torch.addmm(start, rows, weight.t(), beta=beta, alpha=logit_scale, out=tile)
    else:
        _multiply(rows, weight.t(), out=tile)
        if bias is not None:
            tile.add_(bias)
        if logit_scale != 1.0:
            tile.mul_(logit_scale)
    if softcap is not None:
        for span, wide in strips(tile, strip):
            tile[span].copy_(wide.copy_(tile[span]).div_(softcap).tanh_().mul_(softcap))


def fold(work: Workspace, tile: Tensor, first_block: int, *, keep: bool) -> None:
    """Write the statistics of each canonical block of `tile` into the workspace; see [Note: kept exponentials]."""
    if work.folds_plainly and (kernels := softmax_kernels(tile)):
        top, total = (each[: len(tile), first_block:] for each in (work.block_max, work.block_sum))
        kernels.fold(tile, top, total, block=BLOCK, keep=keep)
        return
    for span, strip in strips(tile, work.strip):
        block = first_block
        for columns, count in canonical(tile.shape[1]):
            z = tile[span, columns].unflatten(1, (count, -1))
            wide = z if keep else strip.view(-1)[: z.numel()].view(z.shape)
            _fold_blocks(work, z, wide, (span, slice(block, block + count)))
            block += count


def canonical(columns: int) -> Iterator[tuple[slice, int]]:
    """Yield ranges of columns with the number of canonical blocks in each: the whole ones, then a ragged last one."""
    ragged = columns % BLOCK > 0
    whole = max(0, columns // BLOCK - ragged)
    if whole:
        yield slice(0, whole * BLOCK), whole
    if ragged:
        yield slice(whole * BLOCK, columns), 1


def _fold_blocks(work: Workspace, z: Tensor, wide: Tensor, where: tuple[slice, slice]) -> None:
    """Write the statistics of logits `z`, [rows, blocks, columns]; `wide` is scratch of that shape, or `z` itself."""
    if z.dtype != wide.dtype:
        z = wide.copy_(z)
    top = work.block_max[where]
    if work.block_argmax is None:
        torch.amax(z, -1, out=top)
    else:
        torch.max(z, -1, out=(top, work.block_argmax[where]))
    if work.block_mean is not None:
        torch.sum(z, -1, out=work.block_mean[where])
    torch.sub(z, top.clamp_(min=FLOOR).unsqueeze(-1), out=wide)
    if work.block_entropy is None:
        torch.sum(wide.exp_(), -1, out=work.block_sum[where])
        return
    below = work.spare[: wide.numel()].view(wide.shape).copy_(wide).clamp_(min=FAR_BELOW)
    torch.sum(wide.exp_(), -1, out=work.block_sum[where])
    torch.sum(below.mul_(wide), -1, out=work.block_entropy[where])


def combine(work: Workspace, rows: int, vocab_size: int) -> dict[str, Tensor]:
    """Return the statistics of the first `rows` rows by name, each [rows].

    Those of the blocks are used up, but for their maxima, which become exp(maximum - lse), and 0 for a row of nothing
    but -inf. With m the largest logit and S = sum(exp(y - m)): lse = m + log S, entropy = log S - sum((y - m)
    exp(y - m)) / S.
    """
    found = {}
    shift, total = work.block_max[:rows], work.block_sum[:rows]
    if work.block_argmax is not None:
        best = shift.argmax(1, keepdim=True)
        found["argmax"] = work.block_argmax[:rows].gather(1, best).add_(best, alpha=BLOCK).squeeze(1)
    if work.block_mean is not None:
        found["mean"] = work.block_mean[:rows].sum(1).div_(vocab_size)
    top = shift.amax(1)
    shift.sub_(top.unsqueeze(1))
    if work.block_entropy is not None:
        below = work.block_entropy[:rows].addcmul_(shift, total)
    total = total.mul_(shift.exp_()).sum(1)
    if work.block_entropy is not None:
        found["entropy"] = total.log().sub_(below.mul_(shift).sum(1).div_(total))
    shift.div_(total.unsqueeze(1)).nan_to_num_(nan=math.nan, posinf=0.0)
    found["lse"] = total.log_().add_(top)
    return found


def pick(tile: Tensor, local: Tensor) -> Tensor:
    """Return tile[n, local[n]] for each row, or tile[n, local[n, k]]; 0 where `local` is negative."""
    inside = tile.gather(1, local.clamp(min=0).view(len(local), -1)).view(local.shape)
    return inside.masked_fill_(local < 0, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slopes:
    """Derivatives of the loss by the statistics of each row, [rows]; None is 0, and 1 for `softmax`."""

    softmax: Tensor | None
    target: Tensor | None
    uniform: Tensor | None = None
    entropy: Tensor | None = None
    mean_logit: Tensor | None = None

    def weighted(self, weights: Tensor) -> Self:
        """Return the derivatives of a loss that has no entropy, each row's times its weight, [rows]."""
        softmax, target, uniform = (
            None if each is None else each * weights for each in (self.softmax, self.target, self.uniform)
        )
        return replace(self, softmax=weights if softmax is None else softmax, target=target, uniform=uniform)


def differentiate(
    work: Workspace,
    tile: Tensor,
    lse: Tensor | None,
    local: Tensor,
    slopes: Slopes,
    *,
    first_block: int,
    softcap: float | None,
    bias_grad: Tensor | None,
) -> None:
    """Overwrite logits y by the derivative of the loss, each row with its own slopes; add its sum to `bias_grad`.

    dy_v = (softmax - entropy (y_v - mean_logit)) p_v - target [v == local] - uniform,  p = exp(y - lse),
    where mean_logit is the sum of p y; of several targets, [rows, K], each has its own slope. With softcap s, dy is
    multiplied by 1 - (y / s)^2. Without an `lse` the tile holds what `fold` kept instead of logits.
    """
    hit = None if slopes.target is None else slopes.target.masked_fill(local < 0, 0.0).neg_().view(len(local), -1)
    column = local.clamp(min=0).view(len(local), -1)
    plain = softcap is None and slopes.entropy is None
    if plain and bias_grad is None and column.shape[1] == 1 and (kernels := softmax_kernels(tile)):
        kernels.derive(
            tile,
            lse=lse,
            factor=None if lse is not None else work.block_max[:, first_block:],
            block=BLOCK,
            slope=slopes.softmax,
            uniform=slopes.uniform,
            hit=hit,
            column=column,
        )
        return
    in_place = plain and tile.dtype == work.strip.dtype
    for span, strip in strips(tile, work.strip):
        y = tile[span]
        grad = y if in_place else strip.copy_(y)
        if lse is None:
            _normalise(work, grad, span, first_block)
        else:
            grad.sub_(lse[span].unsqueeze(1)).mul_(LOG2E).exp2_()
        _weigh(work, grad, y, slopes, span)
        if hit is not None:
            grad.scatter_add_(1, column[span], hit[span])
        if softcap is not None:
            grad.mul_(_spare(work, y).div_(softcap).square_().neg_().add_(1.0))
        if bias_grad is not None:
            bias_grad.add_(torch.sum(grad, 0, out=work.column_sums[: len(bias_grad)]))
        if not in_place:
            y.copy_(grad)
    if work.narrow is not None:
        narrowed(work, tile).copy_(tile)


def _normalise(work: Workspace, kept: Tensor, span: slice, block: int) -> None:
    """Turn exponentials into probabilities, in place."""
    for columns, count in canonical(kept.shape[1]):
        factor = work.block_max[span, block : block + count].unsqueeze(-1)
        kept[:, columns].unflatten(1, (count, -1)).mul_(factor)
        block += count


def narrowed(work: Workspace, tile: Tensor) -> Tensor:
    """Return the derivative that `tile` was last overwritten by, in the compute dtype."""
    return tile if work.narrow is None else work.narrow.view(-1)[: tile.numel()].view(tile.shape)


def _weigh(work: Workspace, p: Tensor, y: Tensor, slopes: Slopes, span: slice) -> None:
    """Turn probabilities into their part of the derivative, in place."""
    if slopes.entropy is not None:
        below_mean = _spare(work, y).sub_(slopes.mean_logit[span].unsqueeze(1)).clamp_(min=FAR_BELOW)
        p.mul_(below_mean.mul_(slopes.entropy[span].neg().unsqueeze(1)).add_(slopes.softmax[span].unsqueeze(1)))
    elif slopes.softmax is not None:
        p.mul_(slopes.softmax[span].unsqueeze(1))
    if slopes.uniform is not None:
        p.sub_(slopes.uniform[span].unsqueeze(1))


def _spare(work: Workspace, y: Tensor) -> Tensor:
    """Return a copy of `y` in the spare strip."""
    return work.spare[: y.numel()].view(y.shape).copy_(y)


def turned(work: Workspace, rows: Tensor) -> Tensor:
    """Return the transpose of `rows`, contiguous."""
    count, width = rows.shape
    return work.turned_rows.view(-1)[: rows.numel()].view(width, count).copy_(rows.t())


def accumulate(work: Workspace, total: Tensor, a: Tensor, b: Tensor, *, fresh: bool) -> None:
    """Add a @ b to `total`, or set it when `fresh`; a total wider than the factors is summed in its own dtype."""
    if total.dtype == a.dtype:
        torch.addmm(total, a, b, beta=0.0 if fresh else 1.0, out=total)
        return
    columns = total.shape[1]
    step = len(work.part) // columns
    for start in range(0, len(total), step):
        stop = min(len(total), start + step)
        part = _multiply(a[start:stop], b, out=work.part[: (stop - start) * columns].view(-1, columns))
        if fresh:
            total[start:stop].copy_(part)
            continue
        if part.dtype == torch.bfloat16 and total.is_contiguous() and (kernels := softmax_kernels(part)):
            kernels.add(total[start:stop], part)
            continue
        if part.dtype != total.dtype:
            part = work.strip[: part.numel()].view(part.shape).copy_(part)
        total[start:stop].add_(part)


def _multiply(a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
    """Write a @ b to `out`, unrounded where that is wider than the factors, which a CPU cannot do."""
    return torch.mm(a, b, out=out) if out.dtype == a.dtype else torch.mm(a, b, out_dtype=out.dtype, out=out)
