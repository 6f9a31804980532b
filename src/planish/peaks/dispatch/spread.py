"""Experts over ranks: PipelinedLLEP as one step of autograd, with what any rank holds fixed at launch.

[Note: pipeline] Rows of block i + 1 travel while block i is computed, and its results travel back while the next one
is; so two blocks' rows are here at a time, in slots that take turns. All ranks have the same blocks and issue the same
collectives in the same order; nothing is sent from one rank to another alone, and no rank waits for a barrier.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from planish.peaks.dispatch.experts import Desk, Rows, Sums, Weights
from planish.peaks.dispatch.pipelined import Load, Options, allocate, max_over_mean, sizes_of
from planish.peaks.dispatch.trip import Parcel, Ranks, Trip, lending
from planish.price.dispatch import backward_buffers, forward_buffers


def spread_experts(
    hidden: Tensor, ids: Tensor, scores: Tensor, weights: Weights, options: Options, ranks: Ranks
) -> Tensor:
    """Return sum_j scores[t, j] * expert_{ids[t, j]}(hidden[t]) for this rank's tokens, by the experts of all ranks.

    The load is levelled first: ranks with little to do borrow experts of those with much. A token travels once to each
    rank that works on any of its routes, and one row comes back from there. Every rank of the group calls it, with any
    number of tokens, none included.

    Memory:        `block_rows` rows eight times (two to send, two received, two results, two returned) and their sum;
                   the experts borrowed, at most `balance.max_foreign`; tiles. Nothing depends on the routing.
    Communication: forward: each row there and back once; backward: rows and their gradients there, gradients back;
                   each borrowed expert once each way. Behind the computation of the block before.
    Exactness:     equal up to the order of summation, for any number of ranks.

    Args:
        hidden: [T, D], this rank's tokens.
        ids: [T, K], experts by their number over all ranks.
        scores: [T, K].
        weights: Of this rank's experts.
        options: How they run; `block_rows` is taken from `ranks`.
        ranks: Who shares the experts.

    Raises:
        ValueError: More tokens than were announced, or fewer `block_rows` than ranks.
    """
    held = (weights.up, weights.down, weights.up_bias, weights.down_bias)
    return _Spread.apply(ids, weights.transposed, options, ranks, hidden, scores, *held)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, ids: Tensor, transposed: bool, options: Options, ranks: Ranks, *operands: Tensor | None
    ) -> Tensor:
        trip = Trip(ids, ranks)
        ctx.save_for_backward(*operands)
        ctx.trip, ctx.transposed, ctx.options, ctx.ranks = trip, transposed, options, ranks
        hidden, scores, up, down, up_bias, down_bias = operands
        weights = Weights(up=up, down=down, up_bias=up_bias, down_bias=down_bias, transposed=transposed)
        rank = _Rank(trip, ranks, options, weights, hidden, scores, top_k=ids.shape[1], backward=False)
        result = hidden.new_zeros(hidden.shape, dtype=rank.wide)

        def work(block: int, here: Arrived) -> list[Tensor]:
            total = rank.total(here)
            for desk, rows, _ in rank.turns(block, here, None):
                desk.add_outputs(rows, total)
            return [here.results[0].copy_(total)]

        def fold(parcel: Parcel, back: list[Tensor]) -> None:
            rank.add(result, parcel.tokens, back[0])

        rank.run(work, fold, sources=[hidden], scores=scores)
        loads = trip.plan.arrivals.sum((0, 2))
        spilled = trip.plan.spilled(ranks.bounds)
        options.seen(Load(max_over_mean=max_over_mean(loads), spilled=spilled, blocks=trip.num_blocks))
        return result.to(hidden.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, scores, up, down, up_bias, down_bias = ctx.saved_tensors
        trip, ranks = ctx.trip, ctx.ranks
        _, need_scores, *wanted = ctx.needs_input_grad[4:]
        weights = Weights(up=up, down=down, up_bias=up_bias, down_bias=down_bias, transposed=ctx.transposed)
        rank = _Rank(trip, ranks, ctx.options, weights, hidden, scores, top_k=scores.shape[1], backward=True)
        sums = [Sums(each, tuple(wanted), once=False, buffers=rank.buffers) for each in (weights, rank.borrowed)]
        by_hidden = hidden.new_zeros(hidden.shape, dtype=rank.wide)
        by_scores = scores.new_zeros(scores.shape)

        def work(block: int, here: Arrived) -> list[Tensor]:
            total, of_scores = rank.total(here), here.results[1].zero_()
            for desk, rows, sum_ in rank.turns(block, here, sums):
                desk.add_gradients(
                    rows, here.rows[1], total=total, scores=of_scores if need_scores else None, sums=sum_
                )
            return [here.results[0].copy_(total), of_scores]

        def fold(parcel: Parcel, back: list[Tensor]) -> None:
            rank.add(by_hidden, parcel.tokens, back[0])
            by_scores.index_add_(0, parcel.tokens, back[1])

        rank.run(work, fold, sources=[hidden, grad.contiguous()], scores=scores)
        rank.return_sums(*sums)
        return None, None, None, None, by_hidden.to(hidden.dtype), by_scores, *sums[0].finish()


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """One block's rows from all ranks.

    Attributes:
        rows: [R, D] each: hidden states, and gradients of results in backward.
        ids: [R, K].
        scores: [R, K].
        results: Where what goes back is to be written: [R, D], and [R, K] in backward.
    """

    rows: list[Tensor]
    ids: Tensor
    scores: Tensor
    results: list[Tensor]


class _Rank:
    """One rank's part in one pass: its buffers, its desks, and the pipeline."""

    def __init__(
        self,
        trip: Trip,
        ranks: Ranks,
        options: Options,
        weights: Weights,
        hidden: Tensor,
        scores: Tensor,
        *,
        top_k: int,
        backward: bool,
    ) -> None:
        self._trip, self._ranks, self._weights = trip, ranks, weights
        self.wide = torch.promote_types(hidden.dtype, torch.float32)
        size, ids = ranks.block_rows, scores.new_empty(0, top_k)
        listed = (backward_buffers if backward else forward_buffers)(
            sizes_of(hidden, ids, scores, weights, options.gate), size, options.tile_rows, size
        )
        self.buffers = allocate(listed, hidden, scores)
        D, K, rows = hidden.shape[1], top_k, 2 if backward else 1
        self._slots = [
            {
                **{f"{way} {index}": hidden.new_empty(size, D) for way in ("send", "take") for index in range(rows)},
                **{f"{way} ids": torch.empty(size, K, dtype=torch.int64) for way in ("send", "take")},
                **{f"{way} scores": scores.new_empty(size, K) for way in ("send", "take")},
                **{f"{way} 0": hidden.new_empty(size, D) for way in ("result", "back")},
                **({f"{way} 1": scores.new_empty(size, K) for way in ("result", "back")} if backward else {}),
            }
            for _ in range(2)
        ]
        self._total = hidden.new_empty(size, D, dtype=self.wide)
        self._raised = hidden.new_empty(size, D, dtype=self.wide) if self.wide != hidden.dtype else None
        self._num_rows, self._num_results = rows, rows
        self.borrowed = self._borrow()
        self._desks = [Desk(each, options.gate, self.buffers) for each in (weights, self.borrowed)]

    def run(self, work: Any, fold: Any, *, sources: list[Tensor], scores: Tensor) -> None:
        """Carry all blocks through: send, `work` on what arrives, send back, `fold` what returns."""
        trip = self._trip
        coming = self._send(0, sources, scores)
        returning: tuple[Parcel, list[Tensor], list[dist.Work]] | None = None
        for block in range(trip.num_blocks):
            parcel, here, waits = coming
            if block + 1 < trip.num_blocks:
                coming = self._send(block + 1, sources, scores)
            _wait(waits)
            results = work(block, here)
            slot = self._slots[block % 2]
            back = [slot[f"back {index}"][: sum(parcel.sent)] for index in range(len(results))]
            sent = [
                self._swap(mine, theirs, parcel.sent, parcel.received)
                for mine, theirs in zip(back, results, strict=True)
            ]
            if returning is not None:
                _wait(returning[2])
                fold(*returning[:2])
            returning = parcel, back, sent
        _wait(returning[2])
        fold(*returning[:2])

    def _send(self, block: int, sources: list[Tensor], scores: Tensor) -> tuple[Parcel, Arrived, list[dist.Work]]:
        parcel, slot = self._trip.parcel(block), self._slots[block % 2]
        num_sent, num_received = sum(parcel.sent), sum(parcel.received)
        slot["send ids"][:num_sent].copy_(parcel.ids)
        torch.index_select(scores, 0, parcel.tokens, out=slot["send scores"][:num_sent])
        for index, source in enumerate(sources):
            torch.index_select(source, 0, parcel.tokens, out=slot[f"send {index}"][:num_sent])
        names = [*map(str, range(len(sources))), "ids", "scores"]
        taken = [slot[f"take {name}"][:num_received] for name in names]
        waits = [
            self._swap(mine, slot[f"send {name}"][:num_sent], parcel.received, parcel.sent)
            for name, mine in zip(names, taken, strict=True)
        ]
        *rows, ids, of_scores = taken
        results = [slot[f"result {index}"][:num_received] for index in range(self._num_results)]
        return parcel, Arrived(rows=rows, ids=ids, scores=of_scores, results=results), waits

    def _swap(self, mine: Tensor, theirs: Tensor, received: list[int], sent: list[int]) -> dist.Work:
        return dist.all_to_all_single(mine, theirs, received, sent, group=self._ranks.group, async_op=True)

    def turns(self, block: int, here: Arrived, sums: list[Sums] | None) -> Iterator[tuple[Desk, Rows, Sums | None]]:
        """Yield this rank's own experts and those that it borrows, with their part of the block's routes."""
        ends, num_native = self._trip.ends(block), self._weights.num_experts
        order = torch.sort(self._trip.slots[here.ids.flatten()], stable=True).indices[: ends[-1] if ends else 0]
        row = order // here.ids.shape[1]
        middle = ends[num_native - 1] if num_native else 0
        parts = (slice(0, middle), ends[:num_native]), (slice(middle, None), ends[num_native:])
        for index, (part, its_ends) in enumerate(parts):
            begin = middle if index else 0
            rows = Rows(
                hidden=here.rows[0],
                scores=here.scores,
                order=order[part],
                row=row[part],
                ends=tuple(each - begin for each in its_ends),
            )
            yield self._desks[index], rows, None if sums is None else sums[index]

    def total(self, here: Arrived) -> Tensor:
        """Return zeros for the sums of a block's rows."""
        return self._total[: len(here.ids)].zero_()

    def add(self, result: Tensor, tokens: Tensor, rows: Tensor) -> None:
        """Add rows that came back to their tokens."""
        if self._raised is not None:
            rows = self._raised[: len(rows)].copy_(rows)
        result.index_add_(0, tokens, rows)

    def _borrow(self) -> Weights:
        """Return the weights of the experts that this rank borrows: one collective for each, sent by their owners."""
        trip, ranks, own = self._trip, self._ranks, _held(self._weights)
        shapes = [each.shape[1:] for each in own]
        sizes = [shape.numel() for shape in shapes]
        most = max(map(len, trip.foreign))
        limit = ranks.balance.max_foreign
        taken = own[0].new_empty(most if limit is None else limit, sum(sizes))
        given = self._given = own[0].new_empty(ranks.size - 1, sum(sizes))  # here to the end: gloo lets go late
        for turn in range(most):
            lent = lending(trip.foreign, ranks.bounds, turn)
            mine = [(helper, expert) for owner, helper, expert in lent if owner == ranks.rank]
            for place, (_, expert) in enumerate(mine):
                local = expert - ranks.bounds[ranks.rank]
                torch.cat([each[local].flatten() for each in own], out=given[place])
            sent = [sum(helper == rank for helper, _ in mine) for rank in range(ranks.size)]
            received = [
                sum(owner == rank and helper == ranks.rank for owner, helper, _ in lent) for rank in range(ranks.size)
            ]
            _wait([self._swap(taken[turn : turn + sum(received)], given[: len(mine)], received, sent)])
        parts = [part.view(-1, *shape) for part, shape in zip(taken.split(sizes, 1), shapes, strict=True)]
        return Weights(
            up=parts[0],
            down=parts[1],
            up_bias=parts[2] if len(parts) > 2 else None,
            down_bias=parts[3] if len(parts) > 2 else None,
            transposed=self._weights.transposed,
        )

    def return_sums(self, own: Sums, borrowed: Sums) -> None:
        """Send the gradients of what was borrowed home, where they are added by the borrowers' rank."""
        trip, ranks = self._trip, self._ranks
        sizes = [each.shape[1:].numel() for each in _held(self._weights)]
        leaving = self._total.new_zeros(1, sum(sizes))
        coming = self._total.new_empty(ranks.size - 1, sum(sizes))
        for turn in range(max(map(len, trip.foreign))):
            lent = lending(trip.foreign, ranks.bounds, turn)
            home = [owner for owner, helper, _ in lent if helper == ranks.rank]
            theirs = [(helper, expert) for owner, helper, expert in lent if owner == ranks.rank]
            sent = [int(rank in home) for rank in range(ranks.size)]
            received = [sum(helper == rank for helper, _ in theirs) for rank in range(ranks.size)]
            out, come = leaving[: len(home)], coming[: len(theirs)]
            if home:
                for part, target in zip(out[0].split(sizes), borrowed.targets(turn), strict=False):
                    if target is not None:
                        part.view(target.shape).copy_(target)
            _wait([self._swap(come, out, received, sent)])
            for (_, expert), row in zip(theirs, come, strict=True):
                local = expert - ranks.bounds[ranks.rank]
                for part, target in zip(row.split(sizes), own.targets(local), strict=False):
                    if target is not None:
                        target.add_(part.view(target.shape))


def _held(weights: Weights) -> list[Tensor]:
    return [each for each in (weights.up, weights.down, weights.up_bias, weights.down_bias) if each is not None]


def _wait(waits: list[dist.Work]) -> None:
    for each in waits:
        each.wait()
