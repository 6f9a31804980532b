"""What the ranks of a circle do with their tokens and their rows of the vocabulary, by what travels.

    weights     rows of the vocabulary go round, and their gradients come home
    hidden      hidden states, targets and slopes go round, and gradients of hidden states come home
    gather      every rank gathers all rows, and scatters their gradients
    replicated  nothing travels: all ranks have the same tokens; statistics are gathered, gradients of hidden summed

Every token meets every row of the vocabulary once in each pass, in tiles (`ring_meet`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, assert_never

import torch
from torch import Tensor

from planish.comm.ring import Circle, ComeHome, Slot, go_round
from planish.peaks.vocab.ring_meet import (
    close_state,
    derive,
    new_state,
    open_tiles,
    scan,
    with_rows,
    with_tokens,
)
from planish.peaks.vocab.ring_rows import to_tokens
from planish.peaks.vocab.task import Task
from planish.peaks.vocab.tiles import Tiles
from planish.price.vocab import Buffers
from planish.price.vocab_ring import Mode, Party, RingPass, Which, plan_pass, starts


class Operands(NamedTuple):
    """This rank's tokens and rows: hidden [T, D], weight [V_r, D], bias [V_r], target [T] of int64."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor


class Gradients(NamedTuple):
    """What backward returns; None where it is not wanted."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """One rank's part in one pass.

    Attributes:
        circle: The ranks.
        party: Their tokens and rows.
        task: This rank's tokens, and how logits are made; sizes and tiling are those of each meeting.
        firsts: The class of each rank's first row.
        operands: Of this rank.
        plan: Pieces and tiles.
    """

    circle: Circle
    party: Party
    task: Task
    firsts: tuple[int, ...]
    operands: Operands
    plan: RingPass

    @classmethod
    def open(
        cls, circle: Circle, party: Party, task: Task, operands: Operands, mode: Mode, which: Which, *, tile_bytes: int
    ) -> "Ring":
        """Return the part in a pass by `mode`."""
        plan = plan_pass(party, mode, which, tile_bytes=tile_bytes)
        task = task.indexed(operands.target)
        return cls(circle=circle, party=party, task=task, firsts=starts(party.rows), operands=operands, plan=plan)

    @property
    def wide(self) -> torch.dtype:
        """Return the dtype of sums."""
        return getattr(torch, self.party.head.wide_dtype)

    def empty(self, *shape: int) -> Tensor:
        """Return room for wide numbers."""
        return self.operands.hidden.new_empty(shape, dtype=self.wide)

    def slots(self, buffers: Buffers, count: int) -> list[Slot]:
        """Return room for `count` pieces."""
        device = self.operands.hidden.device
        return [
            [torch.empty(shape, dtype=getattr(torch, dtype), device=device) for shape, dtype in buffers.values()]
            for _ in range(count)
        ]

    def tiles(self, *, own_rows: bool) -> Tiles | None:
        """Return working buffers over this rank's tokens and, where those stay, its rows; None if nothing is met."""
        if self.plan.tiles is None:
            return None
        hidden, weight, bias, target = self.operands
        tiles = open_tiles(self.plan.tiles, hidden=hidden, weight=weight, bias=None, target=target, task=self.task)
        return with_rows(tiles, weight, bias, self.firsts[self.party.rank]) if own_rows else tiles

    def rows_that_pass(self) -> Iterator[tuple[int, int, Tensor, Tensor | None, int]]:
        """Yield (owner, round, weight, bias, first class) of every piece of the vocabulary."""
        operands, firsts = self.operands, [starts(each) for each in self.plan.lengths]

        def load(number: int, slot: Slot) -> None:
            start = firsts[self.party.rank][number]
            for own, place in zip((operands.weight, operands.bias), slot, strict=False):
                place.copy_(own[start : start + len(place)])

        one, two = self.slots(self.plan.travelling, 2)
        for owner, number, piece in go_round(self.circle, (one, two), self.plan.lengths, load):
            bias = piece[1] if len(piece) > 1 else None
            yield owner, number, piece[0], bias, self.firsts[owner] + firsts[owner][number]

    def tokens_that_pass(self, slopes: Tensor | None) -> Iterator[tuple[int, int, list[Tensor]]]:
        """Yield (owner, round, [hidden, target, slopes where given]) of every piece of valid tokens."""
        operands, index = self.operands, self.task.index
        firsts = starts(self.plan.lengths[self.party.rank])

        def load(number: int, slot: Slot) -> None:
            own = slice(firsts[number], firsts[number] + len(slot[0]))
            for source, place in zip((operands.hidden, operands.target), slot, strict=False):
                if index is None:
                    place.copy_(source[own])
                else:
                    torch.index_select(source, 0, index[own], out=place)
            if slopes is not None:
                slot[2].copy_(slopes[own])

        one, two = self.slots(self.plan.travelling, 2)
        yield from go_round(self.circle, (one, two), self.plan.lengths, load)

    def hidden_sum(self) -> Tensor | None:
        """Return room for the gradient of the valid tokens, [N, D], which is zero where nothing is met."""
        if "hidden" not in self.party.head.grads:
            return None
        total = self.empty(self.party.num_valid, self.party.head.hidden_size)
        return total.zero_() if self.plan.tiles is None else total

    def to_tokens(self, total: Tensor | None) -> Tensor | None:
        """Return the gradient of the valid tokens as that of all, [T, D] in hidden's dtype, 0 where ignored."""
        return None if total is None else to_tokens(total, self.task.index, self.operands.hidden)

    def row_sums(self) -> dict[str, Tensor]:
        """Return zeros for the gradients of this rank's rows that are wanted."""
        operands, grads = self.operands, self.party.head.grads
        return {
            name: torch.zeros_like(getattr(operands, name), dtype=self.wide)
            for name in ("weight", "bias")
            if name in grads
        }

    def rounded(self, total: Tensor | None, name: str) -> Tensor | None:
        """Return the gradient of this rank's weight or bias, rounded once to its dtype."""
        return None if total is None else total.to(getattr(self.operands, name).dtype)


def statistics(ring: Ring, mode: Mode) -> Tensor:
    """Return what each shard says of each valid token of this rank, [P, K, N], in vocabulary order."""
    match mode:
        case "weights":
            return _scan_weights(ring)
        case "hidden":
            return _scan_hidden(ring)
        case "gather":
            return _scan_gathered(ring)
        case "replicated":
            return _scan_replicated(ring)
        case _:
            assert_never(mode)


def gradients(ring: Ring, mode: Mode, slopes: Tensor) -> Gradients:
    """Return this rank's gradients, from what `ring_meet.derive` calls the slopes of its valid tokens."""
    match mode:
        case "weights":
            by_hidden, rows = _sweep_weights(ring, slopes)
        case "hidden":
            by_hidden, rows = _sweep_hidden(ring, slopes)
        case "gather":
            by_hidden, parts = _sweep_gathered(ring, slopes)
            rows = _scattered(ring, parts)
        case "replicated":
            by_hidden, rows = _sweep_replicated(ring, slopes)
        case _:
            assert_never(mode)
    weight, bias = (ring.rounded(rows.pop(name, None), name) for name in ("weight", "bias"))
    return Gradients(by_hidden if mode == "hidden" else ring.to_tokens(by_hidden), weight, bias)


def _scan_weights(ring: Ring) -> Tensor:
    tiles = ring.tiles(own_rows=False)
    state = new_state(ring.empty(0), ring.party.size, ring.party.num_statistics + 1, ring.party.num_valid)
    for owner, _, weight, bias, first in ring.rows_that_pass():
        if tiles is not None and len(weight):
            scan(with_rows(tiles, weight, bias, first), state[owner])
    return close_state(state)


def _scan_hidden(ring: Ring) -> Tensor:
    tiles, party = ring.tiles(own_rows=True), ring.party
    K, firsts = party.num_statistics, [starts(each) for each in ring.plan.lengths]
    sent = [K * count for count in party.valid]
    found = ring.empty(sum(sent))
    by_owner = [part.view(K, -1) if len(part) else part.view(K, 0) for part in found.split(sent)]
    for owner, number, (hidden, target) in ring.tokens_that_pass(None):
        start, count = firsts[owner][number], len(hidden)
        state = new_state(found, K + 1, count)
        if tiles is not None and count:
            scan(with_tokens(tiles, hidden, target), state)
        by_owner[owner][:, start : start + count] = close_state(state)
        del state
    del tiles
    shards = ring.empty(party.size, K, party.num_valid)
    ring.circle.swap(shards.flatten(), found, [K * party.num_valid] * party.size, sent)
    return shards


def _scan_gathered(ring: Ring) -> Tensor:
    tiles, party = ring.tiles(own_rows=False), ring.party
    state = new_state(ring.empty(0), party.size, party.num_statistics + 1, party.num_valid)
    for owner, weight, bias in _gathered(ring):
        if tiles is not None and len(weight):
            scan(with_rows(tiles, weight, bias, ring.firsts[owner]), state[owner])
    return close_state(state)


def _scan_replicated(ring: Ring) -> Tensor:
    tiles, party = ring.tiles(own_rows=True), ring.party
    state = new_state(ring.empty(0), party.num_statistics + 1, party.num_valid)
    if tiles is not None:
        scan(tiles, state)
    del tiles
    shards = ring.empty(party.size, party.num_statistics, party.num_valid)
    ring.circle.gather(shards, close_state(state))
    return shards


def _sweep_weights(ring: Ring, slopes: Tensor) -> tuple[Tensor | None, dict[str, Tensor]]:
    tiles, party, operands = ring.tiles(own_rows=False), ring.party, ring.operands
    by_hidden, firsts = ring.hidden_sum(), starts(ring.plan.lengths[party.rank])
    own = {name: torch.empty_like(getattr(operands, name)) for name in ring.plan.summed}

    def land(number: int, sums: Slot) -> None:
        for each, total in zip(own.values(), sums, strict=True):
            each[firsts[number] : firsts[number] + len(total)].copy_(total)

    one, two, three = ring.slots(ring.plan.summed, 3)
    home = ComeHome(ring.circle, (one, two, three), ring.plan.lengths, land)
    fresh = frozenset({"weight", "bias", "hidden"})
    for owner, number, weight, bias, first in ring.rows_that_pass():
        share = dict(zip(ring.plan.summed, home.share(owner, number), strict=True))
        if tiles is None:
            _clear(*share.values())
        else:
            derive(with_rows(tiles, weight, bias, first), slopes, hidden=by_hidden, fresh=fresh, **share)
            fresh -= {"hidden"} if len(weight) else set()
        home.send(owner, number)
    home.finish()
    return by_hidden, own


def _sweep_hidden(ring: Ring, slopes: Tensor) -> tuple[Tensor | None, dict[str, Tensor]]:
    tiles, operands, index = ring.tiles(own_rows=True), ring.operands, ring.task.index
    firsts = starts(ring.plan.lengths[ring.party.rank])
    by_rows, by_hidden = ring.row_sums(), None
    if ring.plan.summed:
        make = torch.empty_like if index is None else torch.zeros_like
        by_hidden = make(operands.hidden)

    def land(number: int, sums: Slot) -> None:
        for total in sums:
            own = slice(firsts[number], firsts[number] + len(total))
            if index is None:
                by_hidden[own].copy_(total)
            else:
                by_hidden.index_copy_(0, index[own], total.to(by_hidden.dtype))

    one, two, three = ring.slots(ring.plan.summed, 3)
    home = ComeHome(ring.circle, (one, two, three), ring.plan.lengths, land)
    for owner, number, (hidden, target, of_tokens) in ring.tokens_that_pass(slopes):
        share = dict(zip(ring.plan.summed, home.share(owner, number), strict=True))
        if tiles is None:
            _clear(*share.values())
        else:
            derive(with_tokens(tiles, hidden, target), of_tokens, fresh=frozenset({"hidden"}), **share, **by_rows)
        home.send(owner, number)
    home.finish()
    return by_hidden, by_rows


def _gathered(ring: Ring) -> Iterator[tuple[int, Tensor, Tensor | None]]:
    """Yield (owner, weight, bias) of every rank's rows, all gathered before the first."""
    weight = _whole(ring, ring.operands.weight)
    bias = None if ring.operands.bias is None else _whole(ring, ring.operands.bias)
    for owner, rows in enumerate(ring.party.rows):
        yield owner, weight[owner, :rows], None if bias is None else bias[owner, :rows]


def _whole(ring: Ring, own: Tensor) -> Tensor:
    """Return what every rank has as `own`, [P, V_0, ...]; the rows that shorter shards lack hold anything."""
    whole = own.new_empty(ring.party.size, max(ring.party.rows), *own.shape[1:])
    place = whole[ring.party.rank]
    place[: len(own)].copy_(own)
    ring.circle.gather(whole, place)
    return whole


def _sweep_gathered(ring: Ring, slopes: Tensor) -> tuple[Tensor | None, dict[str, Tensor]]:
    tiles, by_hidden = ring.tiles(own_rows=False), ring.hidden_sum()
    parts = {name: ring.empty(ring.party.size, *shape).zero_() for name, (shape, _) in ring.plan.summed.items()}
    fresh = frozenset({"hidden"})
    for owner, weight, bias in _gathered(ring):
        share = {name: part[owner, : len(weight)] for name, part in parts.items()}
        if tiles is not None and len(weight):
            derive(with_rows(tiles, weight, bias, ring.firsts[owner]), slopes, hidden=by_hidden, fresh=fresh, **share)
            fresh = frozenset()
    return by_hidden, parts


def _scattered(ring: Ring, parts: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the sums over ranks of this rank's rows, from every rank's parts of them, which are used up."""
    found = {}
    for name in list(parts):
        part = parts.pop(name)
        total = part.new_empty(part.shape[1:])
        ring.circle.scatter_sums(total, part)
        found[name] = total[: ring.party.rows[ring.party.rank]]
    return found


def _sweep_replicated(ring: Ring, slopes: Tensor) -> tuple[Tensor | None, dict[str, Tensor]]:
    tiles, by_hidden, by_rows = ring.tiles(own_rows=True), ring.hidden_sum(), ring.row_sums()
    if tiles is not None:
        derive(tiles, slopes, hidden=by_hidden, fresh=frozenset({"hidden"}), **by_rows)
    if by_hidden is not None:
        ring.circle.add(by_hidden)
    return by_hidden, by_rows


def _clear(*totals: Tensor) -> None:
    for each in totals:
        each.zero_()
