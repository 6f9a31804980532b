"""Two heads compared on a vocabulary that ranks share: both weights' rows go round together past every rank's tokens.

[Note: pieces of a divergence] With q and p cut into pieces of the vocabulary, Q_c and P_c what each piece weighs,

    KL(q || p) = sum_c Q_c (log Q_c - log P_c + KL(q_c || p_c)),

so that each piece is compared as if it were the whole vocabulary, and of each token both lse and a divergence are all
that is kept of it; equal heads are exactly 0 apart. The mixture needs both lse first: the rows go round a second time.
Backward they go round again, and their gradients come home behind them.
"""

import dataclasses
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from planish.comm.ring import Circle
from planish.peaks.vocab.blocked import refuse_second_derivatives
from planish.peaks.vocab.divergence import Comparison
from planish.peaks.vocab.inputs import DEFAULT_TILE_BYTES, Options
from planish.peaks.vocab.pair import Operands, PairSweep, PairTask, PairTiles
from planish.peaks.vocab.ring_call import Brought, agree, read_classes
from planish.peaks.vocab.ring_rows import Rows, grow, to_tokens
from planish.peaks.vocab.task import Task
from planish.price.vocab_pair import SIDES, Divergence, Pair, PairPass, Side
from planish.price.vocab_ring_rows import RingPair, plan_pair_pass
from planish.units import format_bytes

_FAR_APART = 1e38
"""How far apart a piece is that one side excludes and the other does not."""


class RingDivergences(NamedTuple):
    """Of each token, [T], 0 where ignored; and how many tokens of all ranks are not."""

    kl: Tensor
    nll: Tensor | None
    num_valid: int


def ring_divergences(circle: Circle, read: Callable[[], Comparison], *, ignore_index: int) -> RingDivergences:
    """Return how far this rank's tokens are apart by the vocabulary of all ranks.

    Args:
        circle: The ranks.
        read: Checks this rank's arguments; their weights and biases are its rows.
        ignore_index: Target of tokens that are left out.

    Raises:
        TypeError: Tensors of a wrong kind, on any rank: every rank raises the same.
        ValueError: Tensors that do not fit together, or ranks that differ: likewise.
    """
    found: list[tuple[Comparison, Pair]] = []

    def look() -> Brought:
        given = read()
        rows, others = (len(side.weight) for side in given.sides)
        if rows != others:
            raise ValueError(f"`teacher_weight` must have the {rows} rows of `weight` on each rank, got {others}.")
        found.append((given, given.pair(given.grads)))
        own = given.options[0]
        valid, lowest, highest = read_classes(given.target, ignore_index=own.ignore_index, num_valid=own.num_valid)
        return Brought(
            tokens=len(given.target), valid=valid, rows=rows, lowest=lowest, highest=highest, same=_same(*found[0])
        )

    agreed = agree(circle, look, vocab_size=None, ignore_index=ignore_index)
    ((given, pair),) = found
    own = given.options[0]
    call = _Call(
        circle=circle,
        ring=RingPair(pair=pair, rows=agreed.rows, rank=circle.rank, num_valid=agreed.valid[circle.rank]),
        options=given.options,
        temperature=given.temperature,
        beta=given.beta,
        tile_bytes=DEFAULT_TILE_BYTES if own.tile_bytes is None else own.tile_bytes,
    )
    with torch.autocast(given.target.device.type, enabled=False):
        kl, nll = _RingPair.apply(*given.operands, call)
    return RingDivergences(kl, nll, sum(agreed.valid))


def _same(given: Comparison, pair: Pair) -> dict[str, str]:
    """Return what the ranks must have in common, by its name."""
    facts = {
        "`divergence`": given.divergence,
        "`temperature`": repr(given.temperature),
        "`beta`": repr(given.beta),
        "whether there is a `ce_weight`": str(given.hard),
    }
    for side, how in zip(SIDES, given.options, strict=True):
        head = pair.head(side)
        facts |= {
            f"the width of the {side}'s hidden states": str(head.hidden_size),
            f"the dtypes of the {side}": f"{head.hidden_dtype}, {head.weight_dtype}, {head.bias_dtype}",
            f"the dtype of the {side}'s products": head.compute_dtype,
            f"what needs gradients of the {side}": ", ".join(sorted(head.grads)) or "nothing",
            f"the settings of the {side}'s logits": repr(dataclasses.replace(how, num_valid=None)),
        }
    return facts


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """What all ranks agree on."""

    circle: Circle
    ring: RingPair
    options: tuple[Options, Options]
    temperature: float
    beta: float
    tile_bytes: int

    def open(self, which: PairPass, tensors: list[Tensor | None]) -> tuple[Rows, "_Meeting"]:
        """Return this rank's part in a pass, and what meets its tokens there."""
        plan = plan_pair_pass(self.ring, which, tile_bytes=self.tile_bytes)
        if plan.workspace_bytes > self.tile_bytes:
            warnings.warn(
                f"`tile_bytes` ({format_bytes(self.tile_bytes)}) is below the smallest pieces and tile of these heads; "
                f"they take {format_bytes(plan.workspace_bytes)}.",
                stacklevel=8,
            )
        named = dict(
            zip(("weight", "bias", "teacher_weight", "teacher_bias"), (*tensors[1:3], *tensors[4:6]), strict=True)
        )
        own = {name: each for name, each in named.items() if each is not None}
        rows = Rows(circle=self.circle, plan=plan.pieces, rows=self.ring.rows, own=own)
        target = tensors[6]
        index = None
        if self.ring.num_valid < len(target):
            valid = target != self.options[0].ignore_index
            index = torch.nonzero_static(valid, size=self.ring.num_valid).squeeze(1)
        tasks = tuple(
            Task(
                head=self.ring.pair.head(side),
                tiling=plan.tiling,
                ignore_index=how.ignore_index,
                num_valid=self.ring.num_valid,
                index=index,
                logit_scale=how.logit_scale,
                softcap=how.softcap,
            )
            for side, how in zip(SIDES, self.options, strict=True)
        )
        meeting = _Meeting(
            which=which, ring=self.ring, tasks=tasks, hidden=(tensors[0], tensors[3]), target=target,
            temperature=self.temperature, beta=self.beta,
        )  # fmt: skip
        return rows, meeting


@dataclass(frozen=True, slots=True, kw_only=True)
class _Meeting:
    """This rank's tokens in one pass, which a piece of both weights meets."""

    which: PairPass
    ring: RingPair
    tasks: tuple[Task, Task]
    hidden: tuple[Tensor, Tensor]
    target: Tensor
    temperature: float
    beta: float

    @property
    def index(self) -> Tensor | None:
        """Positions of the valid tokens."""
        return self.tasks[0].index

    def tiles(self, piece: dict[str, Tensor], first: int) -> PairTiles:
        """Return the tiles of this rank's tokens by a piece, as if that were the whole vocabulary."""
        pair = self.ring.piece(len(piece["weight"]), self.which)
        student, teacher = (
            dataclasses.replace(task, head=head)
            for task, head in zip(self.tasks, (pair.student, pair.teacher), strict=True)
        )
        task = PairTask(pair=pair, student=student, teacher=teacher, temperature=self.temperature, beta=self.beta)
        operands = (
            Operands(hidden=hidden, weight=piece[f"{prefix}weight"], bias=piece.get(f"{prefix}bias"))
            for hidden, prefix in zip(self.hidden, ("", "teacher_"), strict=True)
        )
        tiles = PairTiles.prepare(self.which, *operands, self.target, task)
        own, other = (dataclasses.replace(each, first=first) for each in (tiles.student, tiles.teacher))
        return dataclasses.replace(tiles, student=own, teacher=other)

    def empty(self, count: int) -> Tensor:
        """Return room for a number of each of `count` tokens."""
        return self.hidden[0].new_empty(count, dtype=getattr(torch, self.ring.pair.student.wide_dtype))

    def spread(self, each: Tensor) -> Tensor:
        """Return what there is of each valid token as that of all, 0 where ignored."""
        return each if self.index is None else each.new_zeros(len(self.target)).index_copy_(0, self.index, each)


class _RingPair(torch.autograd.Function):
    """Divergence and cross-entropy of this rank's tokens; in backward every meeting takes place again."""

    @staticmethod
    def forward(ctx: Any, *operands: Any) -> tuple[Tensor, Tensor | None]:
        """Return the divergence and, where it is wanted, the cross-entropy, [T] each."""
        *tensors, call = operands
        found = _statistics(call, tensors)
        ctx.call = call
        ctx.save_for_backward(*tensors, *(found[name] for name in call.ring.pair.kept))
        return found["kl"], found.get("nll")

    @staticmethod
    def backward(ctx: Any, by_kl: Tensor, by_nll: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients under per-token upstreams."""
        refuse_second_derivatives()
        saved, call = ctx.saved_tensors, ctx.call
        tensors, rows = list(saved[:7]), dict(zip(call.ring.pair.kept, saved[7:], strict=True))
        with torch.autocast(by_kl.device.type, enabled=False):
            found = [
                _gradients(call, side, tensors, rows, by_kl, by_nll if side == "student" else None) for side in SIDES
            ]
        return *found[0], *found[1], None, None


def _statistics(call: _Call, tensors: list[Tensor | None]) -> dict[str, Tensor]:
    """Return every statistic of each token by name, [T] each."""
    pair, count = call.ring.pair, call.ring.num_valid
    rows, meeting = call.open("statistics", tensors)
    found: dict[str, Tensor] | None = None
    for _, _, piece, first in rows.pieces():
        if count and len(piece["weight"]):
            part = _look(meeting, meeting.tiles(piece, first))
            found = part if found is None else _join(found, part, divergence=pair.divergence)
    if found is None:  # nothing to compare here, and the others' rows pass all the same
        for _ in rows.pieces() if pair.mixed else ():
            pass
        return {name: meeting.empty(len(meeting.target)).zero_() for name in pair.statistics}
    if pair.mixed:
        found |= _from_mixture(rows, meeting, found)
    else:
        found["kl"] = found["kl"].clamp_(min=0.0)
    if pair.hard:
        found["nll"] = found[pair.hard_lse] - found.pop("target_logit")
    return {name: meeting.spread(found[name]) for name in pair.statistics}


def _look(meeting: _Meeting, tiles: PairTiles) -> dict[str, Tensor]:
    """Return what a piece alone says of each valid token, [N]."""
    found: dict[str, Tensor] = {}
    for group in tiles.student.task.row_groups():
        _, part, target_logit = tiles.look(group)
        if target_logit is not None:
            part["target_logit"] = target_logit
        for name, each in part.items():
            found.setdefault(name, meeting.empty(meeting.ring.num_valid))[group].copy_(each)
    return found


def _join(found: dict[str, Tensor], part: dict[str, Tensor], *, divergence: Divergence) -> dict[str, Tensor]:
    """Return what two pieces say together; see [Note: pieces of a divergence]."""
    lses = ("lse", "teacher_lse", "hard_lse")
    both = {name: torch.logaddexp(found[name], part[name]) for name in lses if name in found}
    if "kl" in found:
        first, second = ("lse", "teacher_lse") if divergence == "reverse" else ("teacher_lse", "lse")
        total = torch.zeros_like(found["kl"])
        for each in (found, part):
            log_share = each[first] - both[first]
            apart = (log_share - (each[second] - both[second])).add_(each["kl"]).clamp_(max=_FAR_APART)
            share = log_share.exp_()
            total.add_(apart.mul_(share).masked_fill_(share == 0.0, 0.0))
        both["kl"] = total
    if "target_logit" in found:
        both["target_logit"] = found["target_logit"] + part["target_logit"]
    return both


def _from_mixture(rows: Rows, meeting: _Meeting, found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the divergences of both sides from their mixture, and their weighted sum, [N] each."""
    own, teachers = (torch.zeros_like(found["lse"]) for _ in range(2))
    for _, _, piece, first in rows.pieces():
        tiles = meeting.tiles(piece, first) if len(piece["weight"]) else None
        for group in () if tiles is None else tiles.student.task.row_groups():
            sides = [side.load(group) for side in (tiles.student, tiles.teacher)]
            parts = tiles.from_mixture(sides, {name: found[name][group] for name in ("lse", "teacher_lse")})
            for total, part in zip((own, teachers), parts, strict=True):
                total[group].add_(part)
    return {"kl": torch.lerp(own, teachers, meeting.beta).clamp_(min=0.0), "own": own, "teacher_own": teachers}


def _gradients(
    call: _Call,
    side: Side,
    tensors: list[Tensor | None],
    rows: dict[str, Tensor],
    by_kl: Tensor,
    by_nll: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of hidden, weight and bias of one side."""
    grads = call.ring.pair.head(side).grads
    if not grads:
        return None, None, None
    ring, meeting = call.open(side, tensors)
    prefix, hidden = ("", tensors[0]) if side == "student" else ("teacher_", tensors[3])
    by_hidden = (
        meeting.empty(call.ring.num_valid * hidden.shape[1]).view(-1, hidden.shape[1]).zero_()
        if "hidden" in grads
        else None
    )

    def visit(piece: dict[str, Tensor], first: int, share: dict[str, Tensor]) -> None:
        for each in share.values():
            each.zero_()
        if not call.ring.num_valid or not len(piece["weight"]):
            return
        tiles = meeting.tiles(piece, first)
        own = tiles.student if side == "student" else tiles.teacher
        sweep = PairSweep(tiles=own, pair=tiles, side=side, rows=rows, by_kl=by_kl, by_nll=by_nll)
        grow(sweep, by_hidden, share.get(f"{prefix}weight"), share.get(f"{prefix}bias"))

    home = ring.gradients(visit)
    wanted = None if by_hidden is None else to_tokens(by_hidden, meeting.index, hidden)
    return wanted, home.get(f"{prefix}weight"), home.get(f"{prefix}bias")
