"""The head in tiles: loss and gradients of a linear classifier without its logits, by two exact strategies.

[Note: four products or five] Recomputing multiplies for each tile of logits twice: for the statistics and for the
gradients. One sweep with the vocabulary outermost makes both gradients: that of a block of the weight is complete, and
rounded once, before the next begins, while that of hidden grows in float32 over the whole sweep. Where this buffer is
too large, the gradient of hidden gets a sweep of its own with the tokens outermost, at a fifth product.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from planish.memory.pages import in_large_pages
from planish.peaks.vocab.filter import Kept
from planish.peaks.vocab.task import Task
from planish.peaks.vocab.tile import Slopes, turned
from planish.peaks.vocab.tiles import Tiles

STATISTICS = ("nll", "lse", "entropy", "mean", "argmax")
"""What is known of each token, in the order in which functions return it; all but the last have gradients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """Loss of one token: (1 - label_smoothing) nll + label_smoothing (lse - mean of its logits) + z_loss lse^2."""

    label_smoothing: float = 0.0
    z_loss: float = 0.0

    @property
    def needs(self) -> frozenset[str]:
        """Return the statistics that the loss is made of, besides nll."""
        return frozenset({"lse", "mean"} if self.label_smoothing else {"lse"} if self.z_loss else ())

    def loss(self, nll: Tensor, lse: Tensor | None, mean: Tensor | None) -> Tensor:
        """Return the loss of each token."""
        if self.label_smoothing:
            nll = torch.lerp(nll, lse - mean, self.label_smoothing)
        return torch.addcmul(nll, lse, lse, value=self.z_loss) if self.z_loss else nll

    def slopes(self, lse: Tensor, vocab_size: int, weights: Tensor | None = None) -> Slopes:
        """Return the derivatives of each token's loss, times its weight."""
        found = Slopes(
            softmax=(2 * self.z_loss * lse).add_(1.0) if self.z_loss else None,
            target=torch.full_like(lse, 1.0 - self.label_smoothing),
            uniform=torch.full_like(lse, self.label_smoothing / vocab_size) if self.label_smoothing else None,
        )
        return found if weights is None else found.weighted(weights)


class Upstream(NamedTuple):
    """Derivatives of a loss by the statistics of each token, [T]; None is 0."""

    nll: Tensor | None
    lse: Tensor | None
    entropy: Tensor | None
    mean: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradients:
    """The gradients that are wanted: hidden's in its own dtype, the bias's in the wide one."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None

    @classmethod
    def allocate(cls, task: Task, hidden: Tensor, weight: Tensor, *, weight_dtype: torch.dtype) -> Self:
        """Return gradients that are zero wherever no tile will be written."""
        wanted, wide = task.head.grads, getattr(torch, task.head.wide_dtype)
        make_hidden = torch.empty_like if task.index is None else torch.zeros_like
        make_weight = torch.empty if task.num_valid else torch.zeros
        d_hidden = make_hidden(hidden) if "hidden" in wanted else None
        d_weight = make_weight(weight.shape, dtype=weight_dtype, device=weight.device) if "weight" in wanted else None
        return cls(
            hidden=None if d_hidden is None else in_large_pages(d_hidden),
            weight=None if d_weight is None else in_large_pages(d_weight),
            bias=torch.zeros(len(weight), dtype=wide, device=weight.device) if "bias" in wanted else None,
        )


class GradientsInForward(torch.autograd.Function):
    """The summed loss, whose gradients are made beside it and wait for backward: three products.

    Memory: in forward one row group's tiles; from forward to backward the gradients, hidden's in its dtype, the
        weight's in float32 (for a narrower weight a buffer of V x D x 4 bytes). Backward scales them in place and
        rounds the float32 buffer once into the weight's dtype, so that both exist for that moment. `weight.grad` of an
        earlier microbatch is a further V x D, to which autograd then adds in place.
    """

    @staticmethod
    def forward(  # noqa: PLR0913
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        task: Task,
        adapter: Tensor | None,
        objective: Objective,
        class_weight: Tensor | None = None,
    ) -> Tensor:
        """Return the sum over valid tokens of the objective, times the weights of their classes."""
        tiles = Tiles.prepare("both", hidden, weight, bias, target, task, adapter)
        grads = Gradients.allocate(tiles.task, hidden, tiles.trained, weight_dtype=tiles.work.strip.dtype)
        losses = tiles.work.strip.new_empty(task.num_valid)
        for group in task.row_groups():
            losses[group] = _derive_in_forward(tiles, group, objective, class_weight, grads)
        ctx.grads = (grads.hidden, grads.weight, grads.bias)
        ctx.dtypes = (hidden.dtype, tiles.trained.dtype, None if bias is None else bias.dtype)
        ctx.adapted = adapter is not None
        ctx.logit_scale = task.logit_scale
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        """Return the waiting gradients times `upstream`."""
        refuse_second_derivatives()
        if ctx.grads is None:
            raise RuntimeError(
                'the gradients of strategy "gradients-in-forward" exist once and an earlier backward took them; '
                'use strategy="recompute" to go backward again.'
            )
        grads, ctx.grads = ctx.grads, None
        factor = upstream * ctx.logit_scale
        ready = [
            None if grad is None else grad.mul_(factor).to(dtype) for grad, dtype in zip(grads, ctx.dtypes, strict=True)
        ]
        return *_placed(*ready, adapted=ctx.adapted), None, None


def weights_of(class_weight: Tensor, target: Tensor) -> Tensor:
    """Return the weight of each token's class; of a token without one, any."""
    return class_weight[target.clamp(min=0, max=len(class_weight) - 1)]


def _derive_in_forward(
    tiles: Tiles, group: slice, objective: Objective, class_weight: Tensor | None, grads: Gradients
) -> Tensor:
    """Return the loss of each token of `group`, and add their share to `grads`."""
    task, work = tiles.task, tiles.work
    rows = tiles.load(group)
    row = tiles.scan(group, rows)
    lse, weights = row["lse"], None
    if class_weight is not None:
        weights = weights_of(class_weight, task.rows_of(tiles.target, group)).to(lse.dtype)
    slopes = objective.slopes(lse, task.head.vocab_size, weights)
    for _, columns in task.column_groups():
        tile = tiles.at(rows, columns)[: len(lse)]
        kept = tiles.derive(tile, group, columns, lse, slopes, grads.bias)
        if grads.weight is not None:
            tiles.add_weight_grad(grads.weight[columns], tile, rows, fresh=group.start == 0, kept=kept)
        if grads.hidden is not None:
            tiles.add_hidden_grad(work.row_grads[: len(tile)], tile, columns, kept=kept)
    if grads.hidden is not None:
        task.scatter(work, work.row_grads[: len(lse)], grads.hidden, group)
    losses = objective.loss(row["nll"], lse, row.get("mean"))
    return losses if weights is None else losses * weights


class Recompute(torch.autograd.Function):
    """Statistics of each token, whose gradients are made in backward from tiles computed again: four products or five.

    Memory: in forward one tile and 4 bytes a token for each statistic; from forward to backward the lse, and the
        entropy where it was wanted; in backward one tile, the gradients, and the float32 sums of
        [Note: four products or five]: one block of a narrower weight, and for a narrower hidden its tokens x D or none.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        task: Task,
        adapter: Tensor | None = None,
    ) -> tuple[Tensor | None, ...]:
        """Return nll, lse, entropy, mean logit and argmax, [T] each; None where not wanted, 0 where ignored.

        Of several targets a token, [T, K], nll has that shape too, 0 where one of them is negative.
        """
        ctx.set_materialize_grads(False)
        ctx.task = task
        found = statistics(hidden, weight, bias, target, task, adapter)
        if "argmax" in found:
            ctx.mark_non_differentiable(found["argmax"])
        ctx.save_for_backward(hidden, weight, bias, target, adapter, found["lse"], found.get("entropy"))
        return tuple(found.get(name) for name in STATISTICS)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients under per-token upstreams."""
        refuse_second_derivatives()
        hidden, weight, bias, target, adapter, lse, entropy = ctx.saved_tensors
        tiles = Tiles.prepare("gradients", hidden, weight, bias, target, ctx.task, adapter)
        upstream = (upstream_of(upstream[0], target), *upstream[1:])
        grads = Sweep(tiles=tiles, lse=lse, entropy=entropy, upstream=Upstream(*upstream[:4])).run()
        d_bias = None if grads.bias is None else grads.bias.to(bias.dtype)
        return _placed(grads.hidden, grads.weight, d_bias, adapted=adapter is not None)


def _placed(
    hidden: Tensor | None, weight: Tensor | None, bias: Tensor | None, *, adapted: bool
) -> tuple[Tensor | None, ...]:
    """Return gradients in the order of (hidden, weight, bias, target, task, adapter)."""
    return (hidden, None, bias, None, None, weight) if adapted else (hidden, weight, bias, None, None, None)


def upstream_of(nll: Tensor | None, target: Tensor) -> Tensor | None:
    """Return the upstream of nll, 0 where one of several targets is none."""
    return nll if nll is None or target.dim() == 1 else nll.masked_fill(target < 0, 0.0)


def refuse_second_derivatives() -> None:
    """Raise if backward is itself to be differentiated, rather than return gradients that have no graph."""
    if torch.is_grad_enabled():
        raise RuntimeError("the blocked head has no second derivative; call backward without create_graph=True.")


def statistics(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    task: Task,
    adapter: Tensor | None = None,
) -> dict[str, Tensor]:
    """Return nll and every statistic that `task.head` wants, by name, [T] each: 0 where ignored, argmax -1.

    Memory: one tile; 4 bytes a token for each statistic, 8 for argmax, and 8 a valid token where some are ignored.
    """
    tiles = Tiles.prepare("statistics", hidden, weight, bias, target, task, adapter)
    wanted = task.head.wanted
    found = {name: tiles.work.strip.new_zeros(len(hidden)) for name in wanted - {"argmax"}}
    found["nll"] = tiles.work.strip.new_zeros(target.shape)
    if "argmax" in wanted:
        found["argmax"] = target.new_full((len(hidden),), -1)
    for group in task.row_groups():
        _scan_into(tiles, group, found)
    return found


def _scan_into(tiles: Tiles, group: slice, found: dict[str, Tensor]) -> None:
    """Write the statistics of `group` to its tokens."""
    row = tiles.scan(group, tiles.load(group))
    for name, values in found.items():
        tiles.task.scatter(tiles.work, row[name], values, group)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightBlock:
    """The gradient of a block of the weight while its tiles come in.

    Attributes:
        tiles: Where the working buffers are.
        grad: The block's place in the gradient.
        total: What grows: `grad`, or a buffer that is rounded once; [width, columns] where `Tiling.turns_weight`.
    """

    tiles: Tiles
    grad: Tensor
    total: Tensor

    @classmethod
    def begin(cls, tiles: Tiles, grad: Tensor) -> Self:
        """Return the block with nothing in it."""
        work, columns = tiles.work, len(grad)
        if work.column_grads is None:
            total = grad
        elif work.turned_rows is None:
            total = work.column_grads[:columns]
        else:
            total = work.column_grads.view(-1)[: grad.numel()].view(-1, columns)
        return cls(tiles=tiles, grad=grad, total=total)

    def add(self, tile: Tensor, rows: Tensor, *, fresh: bool, kept: tuple[Kept, ...] | None = None) -> None:
        """Add the share of a tile of derivatives; the first one is set."""
        if self.tiles.work.turned_rows is None:
            self.tiles.add_weight_grad(self.total, tile, rows, fresh=fresh, kept=kept)
        else:
            self.tiles.add_turned_grad(self.total, tile, turned(self.tiles.work, rows), fresh=fresh, kept=kept)

    def round(self) -> None:
        """Write what grew to its place."""
        if self.total is not self.grad:
            self.grad.copy_(self.total if self.tiles.work.turned_rows is None else self.total.t())


class Derived(NamedTuple):
    """A tile of derivatives by logits, the hidden states of its rows, and what a gradient filter lets pass."""

    rows: Tensor
    tile: Tensor
    kept: tuple[Kept, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TileSweep(ABC):
    """What backward needs: every tile of derivatives by the logits adds its share to the gradients."""

    tiles: Tiles

    @abstractmethod
    def derive(self, group: slice, columns: slice, d_bias: Tensor | None) -> Derived:
        """Return the hidden states of `group` and the derivative by its logits; add the latter up in `d_bias`."""

    def run(self) -> Gradients:
        """Return the gradients that are wanted."""
        tiles = self.tiles
        grads = Gradients.allocate(tiles.task, tiles.hidden, tiles.trained, weight_dtype=tiles.trained.dtype)
        if grads.weight is None:
            self.over_tokens(grads.hidden, grads.bias)
        elif tiles.task.tiling.sweeps == 1:
            self.over_vocabulary(grads.weight, grads.hidden, grads.bias)
        else:
            self.over_vocabulary(grads.weight, None, grads.bias)
            self.over_tokens(grads.hidden, None)
        return grads

    def over_vocabulary(self, d_weight: Tensor, d_hidden: Tensor | None, d_bias: Tensor | None) -> None:
        """Fill `d_weight` block by block, each rounded once, while `d_hidden` grows."""
        tiles, task, work = self.tiles, self.tiles.task, self.tiles.work
        hidden_sum, index = d_hidden, task.index
        if d_hidden is not None and task.tiling.sums_hidden(task.head):
            hidden_sum, index = work.strip.new_empty(task.num_valid, d_hidden.shape[1]), None
        for _, columns in task.column_groups():
            block = WeightBlock.begin(tiles, d_weight[columns])
            for group in task.row_groups():
                derived = self.derive(group, columns, d_bias)
                block.add(derived.tile, derived.rows, fresh=group.start == 0, kept=derived.kept)
                if hidden_sum is not None:
                    self._grow(hidden_sum, index, derived, group, columns)
            if task.num_valid:
                block.round()
        if hidden_sum is not d_hidden:
            for group in task.row_groups():
                task.scatter(work, hidden_sum[group], d_hidden, group)

    def over_tokens(self, d_hidden: Tensor | None, d_bias: Tensor | None) -> None:
        """Fill `d_hidden` row group by row group, each rounded once."""
        tiles, task, work = self.tiles, self.tiles.task, self.tiles.work
        for group in task.row_groups():
            for _, columns in task.column_groups():
                derived = self.derive(group, columns, d_bias)
                if d_hidden is not None:
                    total = work.row_grads[: len(derived.tile)]
                    tiles.add_hidden_grad(total, derived.tile, columns, kept=derived.kept)
            if d_hidden is not None:
                task.scatter(work, total, d_hidden, group)

    def _grow(self, total: Tensor, index: Tensor | None, derived: Derived, group: slice, columns: slice) -> None:
        """Add the share of a tile to `total`, at the rows of `group` or, through `index`, at its tokens."""
        tile, kept = derived.tile, derived.kept
        if index is None:
            self.tiles.add_hidden_grad(total[group], tile, columns, kept=kept)
            return
        row_grads = self.tiles.work.row_grads[: len(tile)]
        if columns.start > 0:
            torch.index_select(total, 0, index[group], out=row_grads)
        self.tiles.add_hidden_grad(row_grads, tile, columns, kept=kept)
        total.index_copy_(0, index[group], row_grads)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep(TileSweep):
    """The sweep of one head's statistics: every tile of logits is computed again."""

    lse: Tensor
    entropy: Tensor | None
    upstream: Upstream

    def derive(self, group: slice, columns: slice, d_bias: Tensor | None) -> Derived:
        """Return the hidden states of `group` and the derivative by its logits; add the latter up in `d_bias`."""
        tiles = self.tiles
        rows, lse = tiles.load(group), tiles.task.rows_of(self.lse, group)
        tile, kept = tiles.derive_again(rows, group, columns, lse, self._slopes(group), d_bias)
        return Derived(rows=rows, tile=tile, kept=kept)

    def _slopes(self, group: slice) -> Slopes:
        """Return the derivatives by the statistics of each token of `group`, logit_scale included."""
        task = self.tiles.task
        nll, lse, entropy, mean = (
            None if each is None else task.rows_of(each, group) * task.logit_scale for each in self.upstream
        )
        softmax = self.tiles.work.strip.new_zeros(group.stop - group.start)
        for each in (nll, lse):
            if each is not None:
                softmax.add_(each if each.dim() == 1 else each.sum(1))
        return Slopes(
            softmax=softmax,
            target=nll,
            uniform=None if mean is None else mean / -task.head.vocab_size,
            entropy=entropy,
            mean_logit=None if entropy is None else task.rows_of(self.lse, group) - task.rows_of(self.entropy, group),
        )
