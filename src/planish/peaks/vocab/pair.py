"""Two heads over one vocabulary, tile beside tile: how far their distributions lie apart, and the gradients of that.

With log-probabilities s of the student and t of the teacher, p = exp(s), q = exp(t), all at one temperature:

    forward          KL(q || p) = sum(q (t - s))
    reverse          KL(p || q) = sum(p (s - t))
    jensen-shannon   beta KL(q || m) + (1 - beta) KL(p || m),  m = beta q + (1 - beta) p

[Note: the cross term] A divergence KL(a || b) of logits x and y is sum(exp(x - lse_x) (x - y)) - lse_x + lse_y. Of each
canonical block the sum over exp(x - m) ((x - m) - (y - n)) is kept, m and n the block's maxima, beside m - n, so that
one pass over the tiles is enough and equal heads are 0 apart to the bit. The mixture needs both lse first: its tiles
are computed twice.
"""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from planish.peaks.vocab.blocked import Derived, TileSweep
from planish.peaks.vocab.task import Task
from planish.peaks.vocab.tile import FAR_BELOW, FLOOR, LOG2E, Workspace, canonical, combine, fold, narrowed, pick
from planish.peaks.vocab.tiles import Tiles
from planish.price.vocab_pair import Pair, PairPass, Side


@dataclass(frozen=True, slots=True, kw_only=True)
class PairTask:
    """One comparison, checked.

    Attributes:
        pair: Sizes and dtypes.
        student: The student's logits, before the temperature.
        teacher: The teacher's.
        temperature: Divides both.
        beta: Share of the teacher in the mixture.
    """

    pair: Pair
    student: Task
    teacher: Task
    temperature: float
    beta: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Operands:
    """One side's tensors: hidden [T, D], weight [V, D], bias [V]."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, tensors: list[Tensor | None]) -> Self:
        """Return (hidden, weight, bias) as operands."""
        hidden, weight, bias = tensors
        return cls(hidden=hidden, weight=weight, bias=bias)

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Hidden, weight and bias."""
        return self.hidden, self.weight, self.bias

    def tiles(self, task: Task, work: Workspace, target: Tensor) -> Tiles:
        """Return them with their working buffers."""
        bias = None if self.bias is None else self.bias.to(work.rows.dtype)
        return Tiles(task=task, work=work, hidden=self.hidden, weight=self.weight, bias=bias, target=target)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """The working buffers that compare both sides, as `Pair.shared_buffers` lists them."""

    spare: Tensor
    mixture: Tensor | None = None
    cross: Tensor | None = None
    gap: Tensor | None = None
    hard_max: Tensor | None = None
    hard_sum: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PairTiles:
    """The operands of one pass and its working buffers; see `Tiles`."""

    task: PairTask
    student: Tiles
    teacher: Tiles
    shared: Shared

    @classmethod
    def prepare(cls, which: PairPass, student: Operands, teacher: Operands, target: Tensor, task: PairTask) -> Self:
        """Return the operands with the working buffers of pass `which`, the valid tokens looked up."""
        pair, tiling, device = task.pair, task.student.tiling, target.device
        indexed = task.student.indexed(target)
        tasks = {"student": indexed, "teacher": dataclasses.replace(task.teacher, index=indexed.index)}
        sides = {
            side: operands.tiles(
                tasks[side], Workspace.allocate(pair.side_buffers(tiling, which, side), device), target
            )
            for side, operands in (("student", student), ("teacher", teacher))
        }
        shared = {
            name: torch.empty(shape, dtype=getattr(torch, dtype), device=device)
            for name, (shape, dtype) in pair.shared_buffers(tiling, which).items()
        }
        return cls(task=task, **sides, shared=Shared(**shared))

    def scan(self, group: slice) -> dict[str, Tensor]:
        """Return the divergence, both lse, and what else is needed of each token of `group`."""
        pair = self.task.pair
        rows, found, target_logit = self.look(group)
        if target_logit is not None:
            found["nll"] = found[pair.hard_lse] - target_logit
        if pair.mixed:
            found |= self._mix(rows, found)
        return found

    def look(self, group: slice) -> tuple[list[Tensor], dict[str, Tensor], Tensor | None]:
        """Return both sides' hidden states, what one pass over the tiles says of each token, and its target's logit."""
        pair, count = self.task.pair, group.stop - group.start
        rows = [side.load(group) for side in (self.student, self.teacher)]
        target_logit = self.shared.spare.new_zeros(count) if pair.hard else None
        for block, columns in self.student.task.column_groups():
            tiles = self._logits(rows, columns, count)
            if target_logit is not None:
                target_logit.add_(pick(tiles[0], self.student.local_target(group, columns)))
            self._fold(tiles, block)
        return rows, self._combine(count), target_logit

    def _logits(self, rows: list[Tensor], columns: slice, count: int) -> tuple[Tensor, Tensor]:
        """Return a tile of each side's logits, before the temperature."""
        student, teacher = rows
        return self.student.logits(student, columns)[:count], self.teacher.logits(teacher, columns)[:count]

    def spans(self, tile: Tensor) -> Iterator[slice]:
        """Yield ranges of rows of `tile` that fit in the strips."""
        step = max(1, self.shared.spare.numel() // tile.shape[1])
        for start in range(0, len(tile), step):
            yield slice(start, min(len(tile), start + step))

    def scaled(self, strip: Tensor, logits: Tensor) -> Tensor:
        """Return `logits` over the temperature, in `strip`."""
        wide = _view(strip, logits).copy_(logits)
        return wide if self.task.temperature == 1.0 else wide.div_(self.task.temperature)

    def _fold(self, tiles: tuple[Tensor, Tensor], first_block: int) -> None:
        """Write the statistics of each canonical block into the workspaces; see [Note: the cross term]."""
        shared, works = self.shared, (self.student.work, self.teacher.work)
        if shared.hard_max is not None:
            hard = dataclasses.replace(works[0], block_max=shared.hard_max, block_sum=shared.hard_sum)
            fold(hard, tiles[0], first_block, keep=False)
        for span in self.spans(tiles[0]):
            block = first_block
            for columns, count in canonical(tiles[0].shape[1]):
                where = (span, slice(block, block + count))
                below = []
                for work, tile in zip(works, tiles, strict=True):
                    z = self.scaled(work.strip, tile[span, columns].unflatten(1, (count, -1)))
                    torch.amax(z, -1, out=work.block_max[where])
                    below.append(z.sub_(work.block_max[where].clamp_(min=FLOOR).unsqueeze(-1)))
                self._fold_blocks(below, where)
                block += count

    def _fold_blocks(self, below: list[Tensor], where: tuple[slice, slice]) -> None:
        """Write the sums of blocks whose logits lie `below` their maxima."""
        shared, (first, second) = self.shared, self._in_order(below)
        works = self._in_order([self.student.work, self.teacher.work])
        apart = None if shared.cross is None else _difference(first, second, out=shared.spare)
        for each, work in zip((first, second), works, strict=True):
            torch.sum(each.exp_(), -1, out=work.block_sum[where])
        if apart is not None:
            torch.sum(apart.mul_(first), -1, out=shared.cross[where])
            torch.sub(works[0].block_max[where], works[1].block_max[where], out=shared.gap[where])

    def _in_order(self, sides: list[Any]) -> list[Any]:
        """Return (student, teacher) as the two arguments of the divergence."""
        return sides if self.task.pair.divergence == "reverse" else sides[::-1]

    def _combine(self, count: int) -> dict[str, Tensor]:
        """Return the statistics of the first `count` rows by name; the blocks' own are used up."""
        shared, vocab_size = self.shared, self.task.pair.student.vocab_size
        works = [self.student.work, self.teacher.work]
        first = self._in_order(works)[0]
        if shared.cross is not None:
            shared.cross[:count].addcmul_(shared.gap[:count], first.block_sum[:count])
        found = {
            name: combine(work, count, vocab_size)["lse"]
            for name, work in zip(("lse", "teacher_lse"), works, strict=True)
        }
        if shared.cross is not None:
            first_lse, second_lse = self._in_order([found["lse"], found["teacher_lse"]])
            total = shared.cross[:count].mul_(first.block_max[:count]).sum(1)
            found["kl"] = total.add_(second_lse - first_lse).clamp_(min=0.0)
        if shared.hard_max is not None:
            hard = dataclasses.replace(works[0], block_max=shared.hard_max, block_sum=shared.hard_sum)
            found["hard_lse"] = combine(hard, count, vocab_size)["lse"]
        return found

    def _mix(self, rows: list[Tensor], found: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the divergences of both sides from their mixture, and their weighted sum."""
        own, teachers = self.from_mixture(rows, found)
        kl = torch.lerp(own, teachers, self.task.beta).clamp_(min=0.0)
        return {"kl": kl, "own": own, "teacher_own": teachers}

    def from_mixture(self, rows: list[Tensor], found: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return what these classes add to the divergences of both sides from their mixture."""
        count = len(found["lse"])
        own = (found["lse"] + found["teacher_lse"]).mul_(0.0)  # NaN where a side is not finite
        teachers = own.clone()
        for _, columns in self.student.task.column_groups():
            tiles = self._logits(rows, columns, count)
            for span in self.spans(tiles[0]):
                s = self.logprob(self.student.work, tiles[0][span], found["lse"][span])
                t = self.logprob(self.teacher.work, tiles[1][span], found["teacher_lse"][span])
                mixture = self.mixture(s, 1 - self.task.beta, t)
                for log_p, total in ((s, own), (t, teachers)):
                    apart = _difference(log_p, mixture, out=self.shared.spare)
                    total[span].add_(log_p.exp_().mul_(apart).sum(-1))
        return own, teachers

    def logprob(self, work: Workspace, logits: Tensor, lse: Tensor) -> Tensor:
        """Return log-probabilities, in the strip of `work`."""
        return self.scaled(work.strip, logits).sub_(lse.unsqueeze(1))

    def mixture(self, own: Tensor, share: float, other: Tensor) -> Tensor:
        """Return the logarithm of share exp(own) + (1 - share) exp(other)."""
        spare = torch.add(other, math.log1p(-share), out=_view(self.shared.spare, other))
        mixed = torch.add(own, math.log(share), out=_view(self.shared.mixture, own))
        return torch.logaddexp(mixed, spare, out=mixed)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairSweep(TileSweep):
    """The sweep that makes the gradients of one side: `tiles` are its own.

    With log-probabilities a of this side and b of the other, p = exp(a), the derivative of KL(other || own) by its
    logits is p - exp(b), of KL(own || other) p (a - b - KL), and of the mixture w p (a - log m - KL(own || m)), w the
    side's share; the temperature divides all three. Cross-entropy adds its own at temperature 1.

    Attributes:
        pair: Both sides' tiles.
        side: Which one this is.
        rows: Statistics of each token by name.
        by_kl: Derivative of the loss by each token's divergence.
        by_nll: And by its cross-entropy.
    """

    pair: PairTiles
    side: Side
    rows: dict[str, Tensor]
    by_kl: Tensor
    by_nll: Tensor | None

    def derive(self, group: slice, columns: slice, d_bias: Tensor | None) -> Derived:
        """See `TileSweep`."""
        own, other = self.tiles, self.pair.teacher if self.side == "student" else self.pair.student
        rows, count = own.load(group), group.stop - group.start
        tile = own.logits(rows, columns)[:count]
        against = other.logits(other.load(group), columns)[:count]
        row = {name: own.task.rows_of(each, group) for name, each in self.rows.items()}
        by_kl = own.task.rows_of(self.by_kl, group) * (own.task.logit_scale / self.pair.task.temperature)
        by_nll = None if self.by_nll is None else own.task.rows_of(self.by_nll, group) * own.task.logit_scale
        hits = None if by_nll is None else self._hits(group, columns, by_nll)
        for span in self.pair.spans(tile):
            at = {name: each[span] for name, each in row.items()}
            grad = self._by_divergence(tile[span], against[span], at).mul_(by_kl[span].unsqueeze(1))
            if by_nll is not None:
                lse = at[self.pair.task.pair.hard_lse]
                self._add_cross_entropy(grad, tile[span], lse, by_nll[span], [each[span] for each in hits])
            self._finish(grad, tile[span], None if d_bias is None else d_bias[columns])
        if own.work.narrow is not None:
            narrowed(own.work, tile).copy_(tile)
        return Derived(rows=rows, tile=tile)

    def _by_divergence(self, logits: Tensor, against: Tensor, at: dict[str, Tensor]) -> Tensor:
        """Return the derivative of the divergence by this side's logits, without the temperature."""
        pair, student = self.pair, self.side == "student"
        works = (pair.student.work, pair.teacher.work) if student else (pair.teacher.work, pair.student.work)
        lses = (at["lse"], at["teacher_lse"]) if student else (at["teacher_lse"], at["lse"])
        own, other = (
            pair.logprob(work, each, lse) for work, each, lse in zip(works, (logits, against), lses, strict=True)
        )
        if not pair.task.pair.mixed and student != (pair.task.pair.divergence == "reverse"):
            return _exp(own).sub_(_exp(other))
        share, mean = 1.0, "kl"
        if pair.task.pair.mixed:
            share = 1 - pair.task.beta if student else pair.task.beta
            other, mean = pair.mixture(own, share, other), "own" if student else "teacher_own"
        apart = _difference(own, other, out=pair.shared.spare).sub_(at[mean].unsqueeze(1))
        return _exp(own).mul_(apart.mul_(share))

    def _hits(self, group: slice, columns: slice, by_nll: Tensor) -> list[Tensor]:
        """Return column and derivative of each target's logit in a tile; the derivative of one outside is 0."""
        local = self.tiles.local_target(group, columns)
        hit = by_nll.masked_fill(local < 0, 0.0).neg_()
        return [local.clamp_(min=0).unsqueeze(1), hit.unsqueeze(1)]

    def _add_cross_entropy(self, grad: Tensor, logits: Tensor, lse: Tensor, by_nll: Tensor, hits: list[Tensor]) -> None:
        """Add by_nll (softmax - [v == target]) at temperature 1."""
        p = _exp(_view(self.pair.shared.spare, logits).copy_(logits).sub_(lse.unsqueeze(1)))
        grad.addcmul_(p, by_nll.unsqueeze(1)).scatter_add_(1, *hits)

    def _finish(self, grad: Tensor, logits: Tensor, d_bias: Tensor | None) -> None:
        """Overwrite `logits` by the derivative before the soft cap, and add its sum to `d_bias`."""
        softcap, work = self.tiles.task.softcap, self.tiles.work
        if softcap is not None:
            slope = _view(self.pair.shared.spare, logits).copy_(logits).div_(softcap)
            grad.mul_(slope.square_().neg_().add_(1.0))
        if d_bias is not None:
            d_bias.add_(torch.sum(grad, 0, out=work.column_sums[: len(d_bias)]))
        logits.copy_(grad)


def _view(strip: Tensor, like: Tensor) -> Tensor:
    """Return the beginning of `strip` in the shape of `like`."""
    return strip.view(-1)[: like.numel()].view(like.shape)


def _exp(x: Tensor) -> Tensor:
    """Return exp(x), in place."""
    return x.mul_(LOG2E).exp2_()


def _difference(first: Tensor, second: Tensor, *, out: Tensor) -> Tensor:
    """Return first - second, which exp(first) multiplies: where that is 0, something finite.

    Where the difference is below FAR_BELOW the exponential is 0, since `second` is at most 0; where both are -inf it is
    0 too, and where only `second` is, the largest number stands for the infinity. What is NaN shows in the lse.
    """
    apart = torch.sub(first, second, out=_view(out, first))
    return apart.nan_to_num_(nan=0.0, neginf=FAR_BELOW).clamp_(min=FAR_BELOW)
