"""What two heads weigh and send while they are compared on a vocabulary that ranks share."""

from dataclasses import dataclass, replace

from planish.price.vocab import Buffers, Head, Tiling, total_bytes
from planish.price.vocab_pair import SIDES, Pair, PairPass, choose_pair_tiling
from planish.price.vocab_ring import RingPass, plan_rows


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
        """Return both heads on `rows` rows in a pass; gradients of rows go into the place where they come home."""

        def cut(head: Head, *, own: bool) -> Head:
            grads = head.grads if own else frozenset()
            return replace(head, vocab_size=rows, grads=(grads - {"weight"}) or (grads and frozenset({"bias"})))

        student, teacher = (cut(self.pair.head(side), own=which == side) for side in SIDES)
        return replace(self.pair, student=student, teacher=teacher)

    def travelling(self) -> Buffers:
        """Return what travels of one row of the vocabulary."""
        found: Buffers = {}
        for prefix, head in zip(("", "teacher_"), (self.pair.student, self.pair.teacher), strict=True):
            found[f"{prefix}weight"] = ((head.hidden_size,), head.weight_dtype)
            if head.bias_dtype is not None:
                found[f"{prefix}bias"] = ((), head.bias_dtype)
        return found

    def summed(self, which: PairPass) -> Buffers:
        """Return what comes home of one row in a pass."""
        if which == "statistics":
            return {}
        head, prefix = self.pair.head(which), "" if which == "student" else "teacher_"
        shapes = {"weight": (head.hidden_size,), "bias": ()}
        return {f"{prefix}{name}": (shape, head.wide_dtype) for name, shape in shapes.items() if name in head.grads}


@dataclass(frozen=True, slots=True, kw_only=True)
class PairRingPass:
    """One pass: the pieces, the tile in which one is worked on, and the bytes of both."""

    pieces: RingPass
    tiling: Tiling
    tile_bytes: int

    @property
    def workspace_bytes(self) -> int:
        """Return the bytes of all slots and working buffers."""
        return self.pieces.slot_bytes + self.tile_bytes


def plan_pair_pass(ring: RingPair, which: PairPass, *, tile_bytes: int) -> PairRingPass:
    """Return one pass within `tile_bytes`, or the smallest there is: half of them, at most, for slots."""
    pieces = plan_rows(ring.rows, ring.travelling(), ring.summed(which), tile_bytes=tile_bytes)
    longest = max(max(each, default=0) for each in pieces.lengths)
    pair = ring.piece(longest, which)
    left = max(1, tile_bytes - pieces.slot_bytes)
    tiling = replace(choose_pair_tiling(pair, tile_bytes=left), sweeps=1)
    return PairRingPass(pieces=pieces, tiling=tiling, tile_bytes=pair.pass_bytes(tiling, which))


def sent_bytes(ring: RingPair, which: PairPass) -> int:
    """Return the bytes that this rank sends in one pass: every piece but the next rank's, and the sums of all.

    For the mixture of both, rows go round twice for statistics.
    """
    away = sum(ring.rows) - ring.rows[(ring.rank + 1) % len(ring.rows)]
    rounds = 1 + (which == "statistics" and ring.pair.mixed)
    return rounds * away * total_bytes(ring.travelling()) + sum(ring.rows) * total_bytes(ring.summed(which))
