"""What two heads over one vocabulary weigh while their distributions are compared, tile by tile."""

from dataclasses import dataclass, replace
from typing import Literal

from planish.price.vocab import (
    CUDA_STRIP,
    ITEMSIZE,
    ROW_STEP,
    STRIP,
    Buffers,
    Head,
    Phases,
    Tiling,
    cast_bias_bytes,
    fit_square,
    grad_bytes,
    total_bytes,
)

Divergence = Literal["forward", "reverse", "jensen-shannon"]
Side = Literal["student", "teacher"]
PairPass = Literal["statistics", "student", "teacher"]
SIDES: tuple[Side, Side] = ("student", "teacher")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A student's head and a teacher's, with tokens, vocabulary and wide dtype in common.

    Attributes:
        student: The first, with its gradients.
        teacher: The second, with its own.
        divergence: How their distributions are compared.
        hard: Whether the student's cross-entropy is wanted too.
        apart: Whether that has an lse of its own, at another temperature.
    """

    student: Head
    teacher: Head
    divergence: Divergence
    hard: bool = False
    apart: bool = False

    @property
    def hard_lse(self) -> str:
        """Return the name of the lse in the cross-entropy."""
        return "hard_lse" if self.apart else "lse"

    @property
    def statistics(self) -> tuple[str, ...]:
        """Return what is known of each token, 4 bytes each (8 in float64)."""
        names = {"nll": self.hard, "hard_lse": self.apart, "own": self.mixed, "teacher_own": self.mixed}
        return ("kl", "lse", "teacher_lse", *(name for name, there in names.items() if there))

    @property
    def kept(self) -> tuple[str, ...]:
        """Return what of it waits for backward."""
        if not self.student.grads | self.teacher.grads:
            return ()
        first = self.teacher if self.divergence == "forward" else self.student
        names = {
            "hard_lse": self.apart,
            "kl": not self.mixed and bool(first.grads),
            "own": self.mixed and bool(self.student.grads),
            "teacher_own": self.mixed and bool(self.teacher.grads),
        }
        return ("lse", "teacher_lse", *(name for name, there in names.items() if there))

    @property
    def mixed(self) -> bool:
        """Return whether both sides are compared with their mixture."""
        return self.divergence == "jensen-shannon"

    @property
    def passes(self) -> tuple[PairPass, ...]:
        """Return the passes over the tiles: the statistics of both, and the gradients of each side that needs some."""
        return ("statistics", *(side for side in ("student", "teacher") if self.head(side).grads))

    def head(self, side: Side) -> Head:
        """Return the head of one side."""
        return self.student if side == "student" else self.teacher

    def side_buffers(self, tiling: Tiling, which: PairPass, side: Side) -> Buffers:
        """Return the working buffers of one side in a pass: with gradients in its own, tiles alone in the other's."""
        if which == "statistics":
            return tiling.buffers(self.head(side), "statistics")
        found = tiling.buffers(self.head(side), "gradients" if which == side else "statistics")
        return {name: each for name, each in found.items() if name != "spare" and not name.startswith("block_")}

    def shared_buffers(self, tiling: Tiling, which: PairPass) -> Buffers:
        """Return the working buffers that compare both sides."""
        head, rows = self.student, tiling.rows
        columns, wide = head.widest(tiling.blocks), head.wide_dtype
        strip = (max(columns, min(CUDA_STRIP if head.device == "cuda" else STRIP, rows * columns)),)
        per_block = ((rows, head.blocks), wide)
        found: Buffers = {"spare": (strip, wide)}
        if self.mixed:
            found["mixture"] = (strip, wide)
        elif which == "statistics":
            found |= {"cross": per_block, "gap": per_block}
        if self.apart and which == "statistics":
            found |= {"hard_max": per_block, "hard_sum": per_block}
        return found

    def pass_bytes(self, tiling: Tiling, which: PairPass) -> int:
        """Return the bytes of the working buffers of one pass."""
        sides = sum(total_bytes(self.side_buffers(tiling, which, side)) for side in ("student", "teacher"))
        return sides + total_bytes(self.shared_buffers(tiling, which))

    def workspace_bytes(self, tiling: Tiling) -> int:
        """Return the bytes of the working buffers in the pass that has most."""
        return max(self.pass_bytes(tiling, which) for which in self.passes)

    def products(self, tiling: Tiling) -> int:
        """Return how often valid tokens x vocabulary x a width is multiplied, forward and backward together."""
        sides = [len(head.grads & {"hidden", "weight"}) for head in (self.student, self.teacher)]
        return 2 + 2 * self.mixed + sum(2 * tiling.sweeps + count for count in sides if count)


def choose_pair_tiling(pair: Pair, *, tile_bytes: int) -> Tiling:
    """Return the largest tile whose working buffers, those of both sides, stay within `tile_bytes`.

    Gradients are made by recomputation, in one sweep while the wide buffer for a narrower hidden is within
    `tile_bytes`. A budget below the smallest tile gets the smallest tile; `Pair.workspace_bytes` tells.
    """
    one_sweep = Tiling(strategy="recompute", rows=ROW_STEP, blocks=1)
    heads = (pair.student, pair.teacher)
    sums = [head.tokens * head.hidden_size * head.wide_bytes for head in heads if one_sweep.sums_hidden(head)]
    itemsize = sum(ITEMSIZE[head.product_dtype] for head in heads)
    tiling = replace(one_sweep, sweeps=1 + (max(sums, default=0) > tile_bytes))
    return fit_square(pair.student, tiling, tile_bytes, tile_bytes // itemsize, pair.workspace_bytes)


def kl_phases(pair: Pair, tiling: Tiling, *, num_valid: int) -> Phases:
    """Return what the summed divergence weighs beyond its arguments, a target among them, to the byte on a CPU."""
    student, wide = pair.student, pair.student.wide_bytes
    rows, per_token = min(num_valid, tiling.group_rows(num_valid)), student.tokens * wide
    lookup = 8 * num_valid if num_valid < student.tokens else 0
    lookup += cast_bias_bytes(student) + cast_bias_bytes(pair.teacher)
    scanning = pair.pass_bytes(tiling, "statistics") + lookup + rows * _scan_bytes(pair)
    kept, made, backward = per_token * len(pair.kept), 0, 0
    for side in pair.passes[1:]:
        hard, head = side == "student" and pair.hard, pair.head(side)
        sums = num_valid * head.hidden_size * wide if tiling.sums_hidden(head) else 0
        derive = rows * _derive_bytes(pair, hard=hard, ignoring=num_valid < student.tokens)
        bias = "bias" in head.grads and head.bias_dtype != head.wide_dtype
        rounded = head.vocab_size * ITEMSIZE[head.bias_dtype] if bias else 0
        grads = grad_bytes(head)
        working = pair.pass_bytes(tiling, side) + lookup + max(sums + derive, rounded)
        backward = max(backward, made + grads + working)
        made += grads + rounded - (head.vocab_size * wide if bias else 0)
    return Phases(
        forward=per_token * len(pair.statistics) + max(scanning, per_token * pair.hard),
        kept=kept + wide,
        backward=kept + 2 * wide + per_token * pair.hard + backward,
    )


def _scan_bytes(pair: Pair) -> int:
    """Return the most bytes alive for each row of a group while its statistics are made."""
    wide = pair.student.wide_bytes
    found = pair.hard + 2 + pair.apart
    most = found + pair.hard + 3 if pair.mixed else found + 2
    picking = wide + 16 + ITEMSIZE[pair.student.product_dtype] if pair.hard else 0
    return max(most * wide, picking)


def _derive_bytes(pair: Pair, *, hard: bool, ignoring: bool) -> int:
    """Return the most bytes alive for each row of a group while a tile becomes a derivative."""
    wide = pair.student.wide_bytes
    looked_up = ignoring * len(pair.kept) * wide
    return looked_up + (max(3 * wide + 9, 2 * wide + 8 * (1 + ignoring)) if hard else (1 + ignoring) * wide)
