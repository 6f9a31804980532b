"""What heads weigh and send where ranks share a vocabulary and rows alone go round, of one head or of two."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from planish.price.vocab import Buffers, Head, Pass, Tiling, choose_tiling, total_bytes
from planish.price.vocab_pair import SIDES, Pair, PairPass, choose_pair_tiling
from planish.price.vocab_ring import PIECE_STEP, RingPass, cut, even_step, repeated


def plan_rows(rows: Sequence[int], row: Buffers, sums: Buffers, *, tile_bytes: int) -> RingPass:
    """Return the pieces in which several matrices' rows go round together, tokens at home, without the tiles.

    Slots take half of `tile_bytes` at most, or PIECE_STEP rows each.

    Args:
        rows: Rows of the vocabulary on each rank.
        row: What travels of one row.
        sums: What comes home of it.
        tile_bytes: Of pieces and tiles together.
    """
    most = tile_bytes // (2 * (2 * total_bytes(row) + 3 * total_bytes(sums)))
    step = even_step(max(rows), max(PIECE_STEP, most - most % PIECE_STEP))
    lengths = [cut(each, step) for each in rows]
    rounds, longest = max(map(len, lengths)), max((max(each, default=0) for each in lengths), default=0)
    return RingPass(
        lengths=tuple((*each, *[0] * (rounds - len(each))) for each in lengths),
        travelling=repeated(row, longest),
        summed=repeated(sums, longest),
        num_slots=2,
        num_sums=3 if sums else 0,
        tiles=None,
    )


def piece_head(head: Head, rows: int, *, own: bool) -> Head:
    """Return a head on `rows` rows of the vocabulary; gradients of rows go into the place where they come home.

    Args:
        head: The head on all rows of this rank.
        rows: Those of the piece.
        own: Whether its gradients are made in this pass.
    """
    grads = head.grads if own else frozenset()
    return replace(head, vocab_size=rows, grads=(grads - {"weight"}) or (grads and frozenset({"bias"})))


def travelling(head: Head, prefix: str = "") -> Buffers:
    """Return what travels of one row of a head."""
    found: Buffers = {f"{prefix}weight": ((head.hidden_size,), head.weight_dtype)}
    return found if head.bias_dtype is None else found | {f"{prefix}bias": ((), head.bias_dtype)}


def summed(head: Head, prefix: str = "") -> Buffers:
    """Return what comes home of one row of a head."""
    shapes = {"weight": (head.hidden_size,), "bias": ()}
    return {f"{prefix}{name}": (shape, head.wide_dtype) for name, shape in shapes.items() if name in head.grads}


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsPass:
    """One pass: the pieces, the tile in which one is worked on, and the bytes of its buffers."""

    pieces: RingPass
    tiling: Tiling
    tile_bytes: int

    @property
    def workspace_bytes(self) -> int:
        """Return the bytes of all slots and working buffers."""
        return self.pieces.slot_bytes + self.tile_bytes


def plan_head_pass(head: Head, rows: Sequence[int], which: Pass, *, tile_bytes: int) -> RowsPass:
    """Return one pass of one head within `tile_bytes`, or the smallest there is."""
    gradients = which == "gradients"
    pieces = plan_rows(rows, travelling(head), summed(head) if gradients else {}, tile_bytes=tile_bytes)
    longest = max(max(each, default=0) for each in pieces.lengths)
    piece, left = piece_head(head, longest, own=gradients), max(1, tile_bytes - pieces.slot_bytes)
    tiling = replace(choose_tiling(piece, tile_bytes=left, strategy="recompute"), sweeps=1)
    return RowsPass(pieces=pieces, tiling=tiling, tile_bytes=total_bytes(tiling.buffers(piece, which)))


@dataclass(frozen=True, slots=True, kw_only=True)
class RingPair:
    """One rank of those that share a student's vocabulary and a teacher's.

    Attributes:
        pair: Sizes and dtypes: this rank's tokens and rows, and the gradients, alike on all ranks.
        rows: Rows of the vocabulary on each rank.
        rank: This one.
        num_valid: This rank's tokens that are not ignored.
    """

    pair: Pair
    rows: tuple[int, ...]
    rank: int
    num_valid: int

    def piece(self, rows: int, which: PairPass) -> Pair:
        """Return both heads on `rows` rows in a pass."""
        student, teacher = (piece_head(self.pair.head(side), rows, own=which == side) for side in SIDES)
        return replace(self.pair, student=student, teacher=teacher)

    def travelling(self) -> Buffers:
        """Return what travels of one row of the vocabulary."""
        return travelling(self.pair.student) | travelling(self.pair.teacher, "teacher_")

    def summed(self, which: PairPass) -> Buffers:
        """Return what comes home of one row in a pass."""
        if which == "statistics":
            return {}
        return summed(self.pair.head(which), "" if which == "student" else "teacher_")


def plan_pair_pass(ring: RingPair, which: PairPass, *, tile_bytes: int) -> RowsPass:
    """Return one pass within `tile_bytes`, or the smallest there is: half of them, at most, for slots."""
    pieces = plan_rows(ring.rows, ring.travelling(), ring.summed(which), tile_bytes=tile_bytes)
    longest = max(max(each, default=0) for each in pieces.lengths)
    pair = ring.piece(longest, which)
    left = max(1, tile_bytes - pieces.slot_bytes)
    tiling = replace(choose_pair_tiling(pair, tile_bytes=left), sweeps=1)
    return RowsPass(pieces=pieces, tiling=tiling, tile_bytes=pair.pass_bytes(tiling, which))


def sent_bytes(ring: RingPair, which: PairPass) -> int:
    """Return the bytes that this rank sends in one pass: every piece but the next rank's, and the sums of all.

    For the mixture of both, rows go round twice for statistics.
    """
    away = sum(ring.rows) - ring.rows[(ring.rank + 1) % len(ring.rows)]
    rounds = 1 + (which == "statistics" and ring.pair.mixed)
    return rounds * away * total_bytes(ring.travelling()) + sum(ring.rows) * total_bytes(ring.summed(which))
