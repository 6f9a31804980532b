"""The head in tiles: loss and gradients of a linear classifier without its logits, by two exact strategies."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from planish.peaks.vocab.tile import (
    Slopes,
    Statistics,
    Workspace,
    accumulate,
    combine,
    differentiate,
    fill,
    fold,
    pick,
    weight_chunks,
)
from planish.price.vocab import ROW_STEP, Head, Tiling, round_up


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One call, checked: which tokens count, how logits are made, and the tile to make them in.

    Attributes:
        head: Sizes and dtypes.
        tiling: Strategy and tile.
        target: Class of every token, [T], int64.
        index: Tokens whose target counts, in order, [num_valid]; None means all of them.
        num_valid: How many there are.
        logit_scale: Multiplies the logits.
        softcap: Caps them.
    """

    head: Head
    tiling: Tiling
    target: Tensor
    index: Tensor | None
    num_valid: int
    logit_scale: float
    softcap: float | None

    def row_groups(self) -> Iterator[slice]:
        """Yield ranges of valid tokens, equally large but for the last, each at most the tile's rows."""
        if self.num_valid == 0:
            return
        groups = -(-self.num_valid // self.tiling.rows)
        step = round_up(-(-self.num_valid // groups), ROW_STEP)
        for start in range(0, self.num_valid, step):
            yield slice(start, min(self.num_valid, start + step))

    def rows_of(self, source: Tensor, group: slice) -> Tensor:
        """Return the entries of per-token `source` that belong to `group`."""
        return source[group] if self.index is None else source.index_select(0, self.index[group])

    def load(self, work: Workspace, hidden: Tensor, group: slice) -> Tensor:
        """Return the hidden states of `group` in the compute dtype, followed by zeros up to a multiple of ROW_STEP."""
        count = group.stop - group.start
        rows = work.rows[: round_up(count, ROW_STEP)]
        rows[count:].zero_()
        if self.index is None:
            rows[:count].copy_(hidden[group])
        else:
            chosen = rows[:count] if work.gather is None else work.gather[:count]
            torch.index_select(hidden, 0, self.index[group], out=chosen)
            if work.gather is not None:
                rows[:count].copy_(chosen)
        return rows

    def store(self, work: Workspace, values: Tensor, out: Tensor, group: slice) -> None:
        """Write `values` of `group` to its tokens in `out`, rounded to its dtype."""
        if self.index is None:
            out[group].copy_(values)
            return
        if out.dtype != values.dtype:
            scratch = work.rows if work.gather is None else work.gather
            values = scratch[: len(values)].copy_(values)
        out.index_copy_(0, self.index[group], values)

    def fill(self, work: Workspace, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return a tile of logits."""
        return fill(work, rows, weight, bias, logit_scale=self.logit_scale, softcap=self.softcap)


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """Loss of one token: (1 - label_smoothing) nll + label_smoothing (lse - mean logit) + z_loss lse^2."""

    label_smoothing: float = 0.0
    z_loss: float = 0.0

    def loss(self, nll: Tensor, statistics: Statistics) -> Tensor:
        """Return the loss of each row."""
        if self.label_smoothing:
            smooth = statistics.lse - statistics.mean
            nll = torch.lerp(nll, smooth, self.label_smoothing)
        return nll if not self.z_loss else torch.addcmul(nll, statistics.lse, statistics.lse, value=self.z_loss)

    def slopes(self, lse: Tensor, columns: int) -> Slopes:
        """Return the derivatives of each row's loss."""
        return Slopes(
            softmax=(2 * self.z_loss * lse).add_(1.0) if self.z_loss else None,
            target=torch.full_like(lse, 1.0 - self.label_smoothing),
            uniform=torch.full_like(lse, self.label_smoothing / columns) if self.label_smoothing else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradients:
    """The gradients that are wanted, to be filled; those of weight and bias are summed in the wide dtype."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None

    @classmethod
    def allocate(cls, task: Task, hidden: Tensor, weight: Tensor, *, wide: torch.dtype) -> Self:
        """Return gradients that are zero wherever no tile will be written."""
        wanted = task.head.grads
        d_hidden = d_weight = None
        if "hidden" in wanted:
            d_hidden = torch.empty_like(hidden) if task.index is None else torch.zeros_like(hidden)
        if "weight" in wanted:
            make = torch.zeros if task.num_valid == 0 else torch.empty
            d_weight = make(weight.shape, dtype=wide, device=weight.device)
        d_bias = weight.new_zeros(len(weight), dtype=wide) if "bias" in wanted else None
        return cls(hidden=d_hidden, weight=d_weight, bias=d_bias)


class GradientsInForward(torch.autograd.Function):
    """The summed loss, whose gradients are made beside it and wait for backward: three products.

    Memory: from forward to backward the gradients of hidden (its dtype) and weight (float32; a buffer of V x D x 4
        bytes where the weight is narrower); in forward one tile besides. Backward scales them in place and rounds
        a float32 buffer once into the weight's dtype, so both are alive for that moment. `weight.grad` of an earlier
        microbatch is a further V x D, to which autograd adds in place.
    Exactness: equal to full logits up to the order of summation.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, task: Task, objective: Objective
    ) -> Tensor:
        """Return the sum over valid tokens of the objective."""
        work = Workspace.allocate(task.tiling, task.head, hidden.device)
        bias_dtype, bias = (None, None) if bias is None else (bias.dtype, bias.to(work.tile.dtype))
        losses = work.strip.new_empty(task.num_valid)
        grads = Gradients.allocate(task, hidden, weight, wide=work.strip.dtype)
        for group in task.row_groups():
            count = group.stop - group.start
            rows = task.load(work, hidden, group)
            tile = task.fill(work, rows, weight, bias)[:count]
            fold(work, tile, 0)
            statistics = combine(work, count, len(weight))
            local = task.rows_of(task.target, group)
            losses[group] = objective.loss(statistics.lse - pick(tile, local), statistics)
            slopes = objective.slopes(statistics.lse, len(weight))
            differentiate(work, tile, statistics.lse, local, slopes, softcap=task.softcap, bias_grad=grads.bias)
            if grads.weight is not None:
                accumulate(work, grads.weight, tile.t(), rows[:count], fresh=group.start == 0)
            if grads.hidden is not None:
                for columns, chunk in weight_chunks(work, weight):
                    accumulate(work, work.row_grads[:count], tile[:, columns], chunk, fresh=columns.start == 0)
                task.store(work, work.row_grads[:count], grads.hidden, group)
        ctx.grads = (grads.hidden, grads.weight, grads.bias)
        ctx.dtypes = (hidden.dtype, weight.dtype, bias_dtype)
        ctx.logit_scale = task.logit_scale
        return losses.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        """Return the waiting gradients times `upstream`."""
        if ctx.grads is None:
            raise RuntimeError(
                'the gradients of strategy "gradients-in-forward" exist once; an earlier backward took them; '
                'use strategy="recompute" to go backward twice.'
            )
        grads, ctx.grads = ctx.grads, None
        factor = upstream * ctx.logit_scale
        scaled = [
            None if grad is None else grad.mul_(factor).to(dtype) for grad, dtype in zip(grads, ctx.dtypes, strict=True)
        ]
        return *scaled, None, None
