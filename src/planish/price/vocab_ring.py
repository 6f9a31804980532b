"""What the vocabulary weighs and sends where ranks share it: pieces that go round, tiles, sums that come home.

`peaks.vocab` allocates exactly the buffers that `RingPass` lists, and cuts what travels into the pieces that it says,
so these numbers are what a ledger and a count of sent bytes measure. T are this rank's tokens, N those of them that
are not ignored, V_r this rank's rows of the vocabulary, P the ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from planish.price.vocab import (
    BLOCK,
    ITEMSIZE,
    ROW_STEP,
    STRIP,
    Buffers,
    Head,
    Phases,
    block_ranges,
    round_up,
    total_bytes,
)
from planish.price.vocab_sharded import ShardPass, scan_pass, sweep_pass

Mode = Literal["weights", "hidden", "gather", "replicated"]
Which = Literal["statistics", "gradients"]

PIECE_STEP = 64
"""Pieces whose sums do not depend on canonical blocks are cut to multiples of this many rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Party:
    """One rank of those that share a vocabulary, and what it knows of the others.

    Attributes:
        head: Sizes and dtypes: this rank's tokens and rows; `grads` are the same on all ranks.
        rank: This one.
        rows: Rows of the vocabulary on each rank.
        valid: Tokens of each rank that are not ignored.
    """

    head: Head
    rank: int
    rows: tuple[int, ...]
    valid: tuple[int, ...]

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return len(self.rows)

    @property
    def vocab_size(self) -> int:
        """Return the rows of all ranks."""
        return sum(self.rows)

    @property
    def num_valid(self) -> int:
        """Return this rank's tokens that are not ignored."""
        return self.valid[self.rank]

    @property
    def num_slopes(self) -> int:
        """Return the numbers of a token that its gradients are made of: its lse and the slopes of its loss."""
        return 4 if "mean" in self.head.wanted else 3

    @property
    def num_statistics(self) -> int:
        """Return the numbers that a shard says of a token: lse, target logit, and the sum of its logits."""
        return 3 if "mean" in self.head.wanted else 2

    def travelling(self, mode: Mode, which: Which) -> Buffers:
        """Return what travels of one row: of the vocabulary, or of a token."""
        head = self.head
        if mode in ("weights", "gather"):
            bias: Buffers = {} if head.bias_dtype is None else {"bias": ((), head.bias_dtype)}
            return {"weight": ((head.hidden_size,), head.weight_dtype), **bias}
        slopes: Buffers = {"slopes": ((self.num_slopes,), head.wide_dtype)} if which == "gradients" else {}
        return {"hidden": ((head.hidden_size,), head.hidden_dtype), "target": ((), "int64"), **slopes}

    def summed(self, mode: Mode) -> Buffers:
        """Return what comes home of one row."""
        wide, grads = self.head.wide_dtype, self.head.grads
        if mode == "hidden":
            return {"hidden": ((self.head.hidden_size,), wide)} if "hidden" in grads else {}
        weight: Buffers = {"weight": ((self.head.hidden_size,), wide)} if "weight" in grads else {}
        return weight | ({"bias": ((), wide)} if "bias" in grads else {})


def sent_bytes(party: Party, mode: Mode, which: Which) -> int:
    """Return the bytes that this rank sends to others in one pass.

    "weights" and "hidden" send every piece but the next rank's, and the sums of all; with "hidden" the statistics go
    straight to the tokens' owners. "gather" and "replicated" count what reaches others of a collective: what each
    contributes, once for each other rank, as a ring of that many hops would carry it.
    """
    rank, size, wide = party.rank, party.size, party.head.wide_bytes
    rows, sums = total_bytes(party.travelling(mode, which)), total_bytes(party.summed(mode))
    lengths = party.valid if mode == "hidden" else party.rows
    statistics = party.num_statistics * wide
    match mode:
        case "weights" | "hidden":
            sent = (sum(lengths) - lengths[(rank + 1) % size]) * rows
            if which == "gradients":
                return sent + sum(lengths) * sums
            return sent + (sum(lengths) - lengths[rank]) * statistics * (mode == "hidden")
        case "gather":
            padded = (size - 1) * max(party.rows)
            return padded * rows + (padded * sums if which == "gradients" else 0)
        case "replicated":
            if which == "statistics":
                return (size - 1) * party.num_valid * statistics
            hidden = party.num_valid * party.head.hidden_size * wide if "hidden" in party.head.grads else 0
            return 2 * (size - 1) * hidden // size


def fewest_bytes(party: Party, which: Which) -> Literal["weights", "hidden"]:
    """Return which of both sends fewer bytes in one pass over all ranks; all ranks find the same.

    The paper moves weights where a rank has more tokens than rows. Counting bytes says so too where hidden states and
    weights are alike, and knows of their dtypes, of what is frozen, and of the sums that come home.
    """
    modes: tuple[Literal["weights", "hidden"], ...] = ("weights", "hidden")
    everywhere = [replace(party, rank=rank) for rank in range(party.size)]
    return min(modes, key=lambda mode: sum(sent_bytes(each, mode, which) for each in everywhere))


@dataclass(frozen=True, slots=True, kw_only=True)
class RingPass:
    """One pass: what goes round in which pieces, and the tiles in which a piece is worked on.

    Attributes:
        lengths: Rows of each rank's piece of each round.
        travelling: One slot for a piece.
        summed: One slot for the sums of a piece; none in the pass over statistics.
        num_slots: Slots for pieces; none where all is gathered at once.
        num_sums: Slots for sums.
        tiles: A piece and what it meets here; None where this rank has nothing to meet.
    """

    lengths: tuple[tuple[int, ...], ...]
    travelling: Buffers
    summed: Buffers
    num_slots: int
    num_sums: int
    tiles: ShardPass | None

    @property
    def slot_bytes(self) -> int:
        """Return the bytes of all slots."""
        return self.num_slots * total_bytes(self.travelling) + self.num_sums * total_bytes(self.summed)

    @property
    def workspace_bytes(self) -> int:
        """Return the bytes of all slots and working buffers."""
        return self.slot_bytes + (0 if self.tiles is None else self.tiles.workspace_bytes)


def plan_pass(party: Party, mode: Mode, which: Which, *, tile_bytes: int) -> RingPass:
    """Return one pass within `tile_bytes`, or the smallest there is: half of them, at most, for slots.

    Pieces are the same on all ranks; the tiles may differ. A piece of statistics is whole canonical blocks of its
    shard, so that no bit of the lse depends on it.
    """
    row, sums = party.travelling(mode, which), party.summed(mode) if which == "gradients" else {}
    num_slots, num_sums = {"weights": (2, 3), "hidden": (2, 3), "gather": (0, 0), "replicated": (0, 0)}[mode]
    row_bytes = num_slots * total_bytes(row) + num_sums * total_bytes(sums)
    most = tile_bytes // (2 * row_bytes) if row_bytes else 0
    match mode:
        case "weights" if which == "statistics":
            lengths = tuple(_whole_blocks(rows, max(1, most // BLOCK)) for rows in party.rows)
        case "weights" | "hidden":
            whole = party.rows if mode == "weights" else party.valid
            step = even_step(max(whole), max(PIECE_STEP, most - most % PIECE_STEP))
            lengths = tuple(cut(rows, step) for rows in whole)
        case "gather":
            lengths = ((max(party.rows),),) * party.size
        case "replicated":
            lengths = ((0,),) * party.size
    rounds, longest = max(map(len, lengths)), max((max(each, default=0) for each in lengths), default=0)
    plan = RingPass(
        lengths=tuple((*each, *[0] * (rounds - len(each))) for each in lengths),
        travelling=repeated(row, longest),
        summed=repeated(sums, longest),
        num_slots=num_slots,
        num_sums=num_sums,
        tiles=None,
    )
    tokens, rows = (party.num_valid, longest) if mode in ("weights", "gather") else (longest, party.head.vocab_size)
    if mode == "replicated":
        tokens = party.num_valid
    if not tokens or not rows:
        return plan
    head = replace(party.head, tokens=tokens, vocab_size=rows, grads=party.head.grads - {"hidden"} | {"weight"})
    left = max(1, tile_bytes - plan.slot_bytes)
    if which == "statistics":
        return replace(plan, tiles=scan_pass(head, product=False, tile_bytes=left))
    return replace(plan, tiles=sweep_pass(head, narrow=False, bias="bias" in head.grads, tile_bytes=left))


def _whole_blocks(rows: int, blocks: int) -> tuple[int, ...]:
    return tuple(stop - start for _, start, stop in block_ranges(rows, blocks)) if rows else ()


def cut(rows: int, step: int) -> tuple[int, ...]:
    """Return `rows` in pieces of `step`, the last one shorter."""
    return tuple(min(rows, start + step) - start for start in range(0, rows, step))


def even_step(rows: int, most: int) -> int:
    """Return equal pieces of at most `most` rows, in multiples of ROW_STEP."""
    pieces = max(1, -(-rows // most))
    return max(ROW_STEP, round_up(-(-rows // pieces), ROW_STEP))


def repeated(row: Buffers, count: int) -> Buffers:
    """Return `count` rows of what travels of one."""
    return {name: ((count, *shape), dtype) for name, (shape, dtype) in row.items()}


def starts(lengths: Sequence[int]) -> tuple[int, ...]:
    """Return where each of the pieces of these lengths begins."""
    return tuple(sum(lengths[:index]) for index in range(len(lengths)))


def ring_phases(
    party: Party, mode: Literal["auto"] | Mode, *, tile_bytes: int, label_smoothing: bool = False, z_loss: bool = False
) -> Phases:
    """Return what the summed loss of one rank weighs, to the byte on a CPU.

    Args:
        party: The ranks, with "mean" among the wanted statistics where `label_smoothing`.
        mode: What travels.
        tile_bytes: Of pieces and tiles together.
        label_smoothing: Whether some of the loss is spread over the vocabulary.
        z_loss: Whether lse^2 is part of the loss.
    """
    head, wide = party.head, party.head.wide_bytes
    per_token = head.tokens * wide
    first, second = (fewest_bytes(party, which) if mode == "auto" else mode for which in ("statistics", "gradients"))
    outputs = per_token * party.num_statistics
    losses = outputs + per_token * (2 * label_smoothing or z_loss)
    upstream = per_token * (3 * label_smoothing or z_loss)
    kept = per_token + wide
    return Phases(
        forward=max(_scanning(party, first, tile_bytes), losses),
        kept=kept,
        backward=kept + wide + upstream + _sweeping(party, second, tile_bytes),
    )


def _scanning(party: Party, mode: Mode, tile_bytes: int) -> int:
    """Return the peak of the pass over statistics, and of making a token's from those of all shards."""
    head, wide, valid, K = party.head, party.head.wide_bytes, party.num_valid, party.num_statistics
    plan, found = plan_pass(party, mode, "statistics", tile_bytes=tile_bytes), 0
    small = _meeting_bytes(plan, 16 + ITEMSIZE[head.product_dtype])
    match mode:
        case "weights" | "gather":
            shards = party.size * (K + 1) * valid * wide
            work = shards + small
        case "hidden":
            shards = party.size * K * valid * wide
            found = K * sum(party.valid) * wide
            work = found + (K + 1) * max(map(max, plan.lengths), default=0) * wide + small
        case "replicated":
            shards = party.size * K * valid * wide
            found = (K + 1) * valid * wide
            work = found + small
    tokens = K * head.tokens * wide if valid < head.tokens else 0
    combining = max(shards + found, shards + 4 * valid * wide, tokens + K * valid * wide)
    return _index_bytes(party) + max(plan.workspace_bytes + _whole_bytes(party, mode) + work, combining)


def _sweeping(party: Party, mode: Mode, tile_bytes: int) -> int:
    """Return the peak of the pass over gradients, they included, and of rounding them."""
    head, wide, valid, width = party.head, party.head.wide_bytes, party.num_valid, party.head.hidden_size
    plan = plan_pass(party, mode, "gradients", tile_bytes=tile_bytes)
    small = _meeting_bytes(plan, (party.num_slopes + 1) * wide + 16)
    own = {
        name: (count * ITEMSIZE[dtype], count * wide)
        for name, count, dtype in (
            ("weight", head.vocab_size * width, head.weight_dtype),
            ("bias", head.vocab_size, head.bias_dtype or head.wide_dtype),
        )
        if name in head.grads
    }
    kept, sums = (sum(each[index] for each in own.values()) for index in (0, 1))
    rounding = sums + own["weight"][0] if kept < sums and "weight" in own else sums
    hidden = head.tokens * width * ITEMSIZE[head.hidden_dtype] if "hidden" in head.grads else 0
    hidden_sum, spread = valid * width * wide if hidden else 0, 0
    narrow, ignoring = head.hidden_dtype != head.wide_dtype, valid < head.tokens
    if hidden and (narrow or ignoring):
        some = min(valid, max(1, STRIP // width)) * width * ITEMSIZE[head.hidden_dtype]
        spread = hidden + (some if narrow and ignoring else 0)
    base = _index_bytes(party) + party.num_slopes * valid * wide
    work = plan.workspace_bytes + _whole_bytes(party, mode)
    match mode:
        case "weights":
            return base + hidden_sum + kept + max(work + small, spread)
        case "hidden":
            if hidden and narrow and ignoring and len(plan.lengths[0]) > 1:
                small = max(small, max(map(max, plan.lengths)) * width * ITEMSIZE[head.hidden_dtype])
            return base + hidden + max(sums + work + small, rounding)
        case "gather":
            padded = total_bytes(plan.summed)
            parts, rows = party.size * padded, padded * kept // sums if sums else 0
            scattering = parts + padded - (len(own) > 1) * max(party.rows) * wide
            return base + hidden_sum + max(work + small + parts, scattering, padded + rounding - sums, rows + spread)
        case "replicated":
            return base + hidden_sum + max(sums + work + small, rounding, kept + spread)


def _index_bytes(party: Party) -> int:
    return 8 * party.num_valid if party.num_valid < party.head.tokens else 0


def _meeting_bytes(plan: RingPass, row_bytes: int) -> int:
    """Return what a meeting holds beside the buffers: `row_bytes` for each row of a group, a bias that is cast."""
    if plan.tiles is None:
        return 0
    head = plan.tiles.head
    cast = 0 if head.bias_dtype in (None, head.compute_dtype) else head.vocab_size * ITEMSIZE[head.compute_dtype]
    return plan.tiles.group_rows(head.tokens) * row_bytes + cast


def _whole_bytes(party: Party, mode: Mode) -> int:
    """Return the bytes of the whole weight and bias where they are gathered."""
    if mode != "gather":
        return 0
    return party.size * max(party.rows) * total_bytes(party.travelling(mode, "statistics"))
