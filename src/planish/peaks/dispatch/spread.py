"""Experts over ranks: PipelinedLLEP as one step of autograd, with what any rank holds fixed at launch.

[Note: pipeline] Rows of block i + 1 travel while block i is computed, and its results travel back while the next one
is; so two blocks' rows are here at a time, in slots that take turns. All ranks have the same blocks and issue the same
collectives in the same order; nothing is sent from one rank to another alone, and no rank waits for a barrier.

[Note: rows] All that belongs to a token travels as one row of bytes, in one collective: its hidden state, its scores
and the codes of its routes; in backward its gradient too.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from planish.peaks.dispatch.experts import Buffers, Desk, Rows, Sums, Weights
from planish.peaks.dispatch.held import held
from planish.peaks.dispatch.pipelined import Options, allocate, check, desk_of, dtypes_of, sizes_of
from planish.peaks.dispatch.trip import Parcel, Ranks, Trip, plan_trip
from planish.price.dispatch import Experts
from planish.price.dispatch_ranks import Row, offsets, rank_buffers, return_buffers, returned_row, sent_row

Fields = dict[str, Tensor]


def spread_experts(
    hidden: Tensor, ids: Tensor, scores: Tensor, weights: Weights, options: Options, ranks: Ranks
) -> Tensor:
    """Return sum_j scores[t, j] * expert_{ids[t, j]}(hidden[t]) for this rank's tokens, by the experts of all ranks.

    The load is levelled first: ranks with little to do borrow experts of those with much. A token travels once to each
    rank that works on any of its routes, and one row comes back from there. Every rank of the group calls it, with any
    number of tokens, none included.

    Memory:        `block_rows` rows eight times (two to send, two received, two results, two returned) and their sum;
                   the experts borrowed, at most `balance.max_foreign`, and as many on their way; tiles. Kept for
                   backward: the arguments and 4 bytes a route. Nothing depends on the routing.
    Communication: two small collectives of counts; forward: each row there and back once; backward: rows and their
                   gradients there, gradients back, one collective each way and block, behind the computation of the
                   block before; each borrowed expert there in both passes, and its gradient back.
    Exactness:     equal up to the order of summation, for any number of ranks.

    Args:
        hidden: [T, D], this rank's tokens.
        ids: [T, K], experts by their number over all ranks.
        scores: [T, K].
        weights: Of this rank's experts.
        options: How they run; `block_rows` is taken from `ranks`.
        ranks: Who shares the experts.

    Raises:
        ValueError: More tokens than were announced, fewer `block_rows` than ranks, shapes that do not fit one another.
        TypeError: Hidden states of another dtype than the weights.
    """
    check(hidden, ids, scores, weights)
    step = _Together(transposed=weights.transposed, options=options, ranks=ranks)
    return held(step, ids, hidden, scores, weights.up, weights.down, weights.up_bias, weights.down_bias)


@dataclass(slots=True, kw_only=True)
class _Together:
    """The experts of all ranks as a `Step`."""

    transposed: bool
    options: Options
    ranks: Ranks
    trip: Trip | None = None
    grad: Tensor | None = None

    def run(self, ids: Tensor, *operands: Tensor | None) -> Tensor:
        """See `Step`."""
        options, ranks = self.options, self.ranks
        trip, exchanged = plan_trip(ids, ranks)
        self.trip = trip
        hidden, scores, up, down, up_bias, down_bias = operands
        weights = Weights(up=up, down=down, up_bias=up_bias, down_bias=down_bias, transposed=self.transposed)
        result = hidden.new_zeros(hidden.shape, dtype=torch.promote_types(hidden.dtype, torch.float32))
        rank = _Rank(trip, ranks, options, weights, hidden, scores, backward=False)

        def work(parcel: Parcel, here: Fields, back: Fields) -> None:
            total = rank.total(here)
            for desk, rows, _ in rank.turns(parcel, here):
                desk.add_outputs(rows, total)
            back["hidden"].copy_(total)

        def fold(tokens: Tensor, back: Fields) -> None:
            rank.add(result, tokens, back["hidden"])

        rank.run(work, fold, {"hidden": hidden, "scores": scores})
        del rank, exchanged
        options.seen(trip.load)
        return result.to(hidden.dtype)

    def gradients(
        self, grad: Tensor, needed: tuple[bool, ...], _ids: Tensor, *operands: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """See `Step`."""
        hidden, scores, up, down, up_bias, down_bias = operands
        trip, ranks = self.trip, self.ranks
        _, need_scores, *wanted = needed
        weights = Weights(up=up, down=down, up_bias=up_bias, down_bias=down_bias, transposed=self.transposed)
        rank = _Rank(trip, ranks, self.options, weights, hidden, scores, backward=True)
        sums = [Sums(each, tuple(wanted), once=False, buffers=rank.buffers) for each in (weights, rank.borrowed)]
        by_hidden = hidden.new_zeros(hidden.shape, dtype=torch.promote_types(hidden.dtype, torch.float32))
        by_scores = scores.new_zeros(scores.shape)

        def work(parcel: Parcel, here: Fields, back: Fields) -> None:
            total, of_scores = rank.total(here), rank.buffers["gradients of scores"][: len(here["scores"])].zero_()
            for desk, rows, index in rank.turns(parcel, here):
                desk.add_gradients(
                    rows, here["grad"], total=total, scores=of_scores if need_scores else None, sums=sums[index]
                )
            back["hidden"].copy_(total)
            back["scores"].copy_(of_scores)

        def fold(tokens: Tensor, back: Fields) -> None:
            rank.add(by_hidden, tokens, back["hidden"])
            by_scores.index_add_(0, tokens, back["scores"])

        rank.run(work, fold, {"hidden": hidden, "grad": grad.contiguous(), "scores": scores})
        rank.close()
        if any(wanted):
            rank.return_sums(*sums)
        sums.pop()
        by_hidden = by_hidden.to(hidden.dtype)
        return by_hidden, by_scores, *sums[0].finish()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slot:
    """One block's rows on their way, as bytes and field by field; blocks take turns in two slots.

    Attributes:
        whole: "send", "take", "result" and "back", [B, bytes].
        fields: Their columns.
    """

    whole: dict[str, Tensor]
    fields: dict[str, Fields]

    @classmethod
    def of(
        cls, buffers: Buffers, index: int, sizes: Experts, dtypes: dict[str, torch.dtype], backward: bool
    ) -> "_Slot":
        """Return the slot that lies in `buffers`."""
        sent, returned = (each(sizes, backward=backward) for each in (sent_row, returned_row))
        rows = {"send": sent, "take": sent, "result": returned, "back": returned}
        whole = {way: buffers[f"{way} {index}"] for way in rows}
        return cls(whole=whole, fields={way: _columns(whole[way], row, sizes, dtypes) for way, row in rows.items()})

    def first(self, way: str, num: int) -> Fields:
        """Return the fields of the first `num` rows."""
        return {name: each[:num] for name, each in self.fields[way].items()}


def _columns(whole: Tensor, row: Row, sizes: Experts, dtypes: dict[str, torch.dtype]) -> Fields:
    begins, _ = offsets(row, sizes)
    return {
        name: whole[:, begins[name] : begins[name] + columns * sizes.sizeof(kind)].view(dtypes[kind])
        for name, (columns, kind) in row.items()
    }


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
        backward: bool,
    ) -> None:
        self._trip, self._ranks, self._weights = trip, ranks, weights
        self._sizes = sizes_of(hidden, trip.codes, scores, weights, options.gate)
        self._dtypes = dtypes_of(hidden, scores)
        listed = rank_buffers(self._sizes, ranks.launch, options.tile_rows, backward=backward)
        self.buffers = allocate(listed, hidden, scores)
        self._slots = [
            _Slot.of(self.buffers, index, self._sizes, self._dtypes, backward=backward) for index in range(2)
        ]
        self.borrowed = self._borrow()
        self._desks = [desk_of(self._sizes, each, options.gate, self.buffers) for each in (weights, self.borrowed)]

    def run(
        self,
        work: Callable[[Parcel, Fields, Fields], None],
        fold: Callable[[Tensor, Fields], None],
        sources: Fields,
    ) -> None:
        """Carry all blocks through: send, `work` on what arrives, send back, `fold` what returns."""
        parcels, returning = self._trip.parcels, None
        coming = self._send(0, sources)
        for block, parcel in enumerate(parcels):
            slot, waiting = self._slots[block % 2], coming
            if block + 1 < len(parcels):
                coming = self._send(block + 1, sources)
            waiting.wait()
            num_sent, num_received = sum(parcel.sent), sum(parcel.received)
            work(parcel, slot.first("take", num_received), slot.first("result", num_received))
            sent_back = self._swap(
                slot.whole["back"][:num_sent], slot.whole["result"][:num_received], parcel.sent, parcel.received
            )
            if returning is not None:
                self._receive(*returning, fold)
            returning = block, sent_back
        self._receive(*returning, fold)

    def _send(self, block: int, sources: Fields) -> dist.Work:
        parcel, slot, num = self._trip.parcels[block], self._slots[block % 2], sum(self._trip.parcels[block].sent)
        tokens = self._tokens(block).copy_(parcel.tokens)
        for name, field in slot.first("send", num).items():
            torch.index_select(self._trip.codes if name == "codes" else sources[name], 0, tokens, out=field)
        num_received = sum(parcel.received)
        return self._swap(slot.whole["take"][:num_received], slot.whole["send"][:num], parcel.received, parcel.sent)

    def _receive(self, block: int, sent_back: dist.Work, fold: Callable[[Tensor, Fields], None]) -> None:
        sent_back.wait()
        tokens = self._tokens(block)
        fold(tokens, self._slots[block % 2].first("back", len(tokens)))

    def _tokens(self, block: int) -> Tensor:
        """Return where the tokens lie whose rows are sent in `block`; three blocks are on their way at a time."""
        return self.buffers[f"tokens {block % 3}"][: len(self._trip.parcels[block].tokens)]

    def _swap(self, mine: Tensor, theirs: Tensor, received: list[int], sent: list[int]) -> dist.Work:
        return dist.all_to_all_single(mine, theirs, received, sent, group=self._ranks.group, async_op=True)

    def turns(self, parcel: Parcel, here: Fields) -> Iterator[tuple[Desk, Rows, int]]:
        """Yield this rank's own experts and those that it borrows, with their part of the block's routes."""
        ends, num_native, buffers = parcel.ends, self._weights.num_experts, self.buffers
        num, top_k = here["codes"].numel(), here["codes"].shape[1]
        names = ("routes", "sorted routes", "order", "row of route")
        routes, in_order, order, row = (buffers[name][:num] for name in names)
        scores = buffers["scores of rows"][: len(here["scores"])].copy_(here["scores"])
        codes = in_order.view(-1, top_k).copy_(here["codes"]).view(-1)
        torch.index_select(self._trip.slots, 0, codes, out=routes)
        torch.sort(routes, stable=True, out=(in_order, order))
        torch.div(order, top_k, rounding_mode="floor", out=row)
        middle = ends[num_native - 1] if num_native else 0
        last = ends[-1] if ends else 0
        parts = (slice(0, middle), ends[:num_native]), (slice(middle, last), ends[num_native:])
        for index, (part, its_ends) in enumerate(parts):
            rows = Rows(
                hidden=here["hidden"],
                scores=scores,
                order=order[part],
                row=row[part],
                ends=tuple(each - part.start for each in its_ends),
            )
            yield self._desks[index], rows, index

    def total(self, here: Fields) -> Tensor:
        """Return zeros for the sums of a block's rows."""
        return self.buffers["total"][: len(here["hidden"])].zero_()

    def add(self, result: Tensor, tokens: Tensor, rows: Tensor) -> None:
        """Add rows that came back to their tokens."""
        result.index_add_(0, tokens, self.buffers["total"][: len(rows)].copy_(rows))

    def close(self) -> None:
        """Free the buffers; what was borrowed stays with whoever holds it."""
        self.buffers.clear()
        self._slots.clear()
        self._desks.clear()

    def _borrow(self) -> Weights:
        """Return the weights of the experts that this rank borrows, which their owners send."""
        ranks, own = self._ranks, _held(self._weights)
        shapes = [each.shape[1:] for each in own]
        taken, given = self.buffers.pop("borrowed"), self.buffers["lent"]  # all are here to the end: gloo lets go late
        for turn in self._trip.turns:
            mine = [(helper, expert) for owner, helper, expert in turn if owner == ranks.rank]
            for place, (_, expert) in enumerate(mine):
                local = expert - ranks.bounds[ranks.rank]
                torch.cat([each[local].flatten() for each in own], out=given[place])
            sent = [sum(helper == rank for helper, _ in mine) for rank in range(ranks.size)]
            from_, place = self._comes(turn)
            received = [int(rank == from_) for rank in range(ranks.size)]
            self._swap(taken[place : place + sum(received)], given[: len(mine)], received, sent).wait()
        sizes = [shape.numel() for shape in shapes]
        parts = [part.view(-1, *shape) for part, shape in zip(taken.split(sizes, 1), shapes, strict=True)]
        return Weights(
            up=parts[0],
            down=parts[1],
            up_bias=parts[2] if len(parts) > 2 else None,
            down_bias=parts[3] if len(parts) > 2 else None,
            transposed=self._weights.transposed,
        )

    def _comes(self, turn: list[tuple[int, int, int]]) -> tuple[int, int]:
        """Return (owner, place at the desk) of what this rank borrows in a turn; (-1, 0) where that is nothing."""
        foreign = self._trip.foreign[self._ranks.rank]
        found = [(owner, foreign.index(expert)) for owner, helper, expert in turn if helper == self._ranks.rank]
        return found[0] if found else (-1, 0)

    def return_sums(self, own: Sums, borrowed: Sums) -> None:
        """Send the gradients of what was borrowed home, where they are added in the order of turns and ranks."""
        ranks = self._ranks
        sizes = [each.shape[1:].numel() for each in _held(self._weights)]
        buffers = allocate(return_buffers(self._sizes, ranks.launch), self._weights.up, self._weights.up)
        for turn in self._trip.turns:
            theirs = [(helper, expert) for owner, helper, expert in turn if owner == ranks.rank]
            received = [sum(helper == rank for helper, _ in theirs) for rank in range(ranks.size)]
            home, place = self._comes(turn)
            sent = [int(rank == home) for rank in range(ranks.size)]
            leaving, coming = buffers["leaving"][: sum(sent)], buffers["coming"][: len(theirs)]
            if home >= 0:
                for part, target in zip(leaving[0].split(sizes), borrowed.targets(place), strict=False):
                    part.zero_() if target is None else part.view(target.shape).copy_(target)
            self._swap(coming, leaving, received, sent).wait()
            for (_, expert), row in zip(theirs, coming, strict=True):
                local = expert - ranks.bounds[ranks.rank]
                for part, target in zip(row.split(sizes), own.targets(local), strict=False):
                    if target is not None:
                        target.add_(part.view(target.shape))


def _held(weights: Weights) -> list[Tensor]:
    return [each for each in (weights.up, weights.down, weights.up_bias, weights.down_bias) if each is not None]
