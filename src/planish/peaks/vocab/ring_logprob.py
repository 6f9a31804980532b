"""Log-probabilities on a vocabulary that ranks share: its rows go round past every rank's tokens, one head's alone.

What `ring_linear_cross_entropy` is to a loss this is to what losses are built on: any number of targets a token, any
upstream of each.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from planish.comm.ring import Circle
from planish.peaks.vocab.blocked import Sweep, Upstream, refuse_second_derivatives, upstream_of
from planish.peaks.vocab.inputs import DEFAULT_TILE_BYTES, Options, any_of, check, compute_dtype, describe, needing
from planish.peaks.vocab.ring_call import Brought, agree, local_rows, read_classes
from planish.peaks.vocab.ring_rows import Rows, grow, to_tokens
from planish.peaks.vocab.task import Task
from planish.peaks.vocab.tile import combine, fold, pick
from planish.peaks.vocab.tiles import Tiles
from planish.price.vocab import Head, Pass
from planish.price.vocab_ring_rows import piece_head, plan_head_pass


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnTokens:
    """This rank's arguments, checked: hidden [T, D], its rows, target [T] or [T, K] of int64."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor
    options: Options
    compute: torch.dtype

    @classmethod
    def read(
        cls,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        settings: Mapping[str, Any],
        circle: Circle,
    ) -> Self:
        """Return the arguments, checked."""
        weight, bias = local_rows(weight, circle), None if bias is None else local_rows(bias, circle)
        check(hidden, weight, target, bias, shard=True, several=True)
        options, flat = Options(**settings), hidden.reshape(-1, hidden.shape[-1])
        classes = target.reshape(len(flat), *target.shape[hidden.dim() - 1 :]).long()
        compute = compute_dtype(hidden, weight, logits_dtype=options.logits_dtype)
        return cls(hidden=flat, weight=weight, bias=bias, target=classes, options=options, compute=compute)


class RingLogProb(NamedTuple):
    """nll [T] or [T, K] and lse [T], 0 where ignored."""

    nll: Tensor
    lse: Tensor


def ring_logprobs(circle: Circle, read: Callable[[], OwnTokens], *, ignore_index: int) -> RingLogProb:
    """Return what the vocabulary of all ranks says of this rank's tokens.

    Raises:
        TypeError: Tensors of a wrong kind, on any rank: every rank raises the same.
        ValueError: Tensors that do not fit together, or ranks that differ: likewise.
    """
    found: list[tuple[OwnTokens, Head, int]] = []

    def look() -> Brought:
        given = read()
        grads = needing(hidden=given.hidden, weight=given.weight, bias=given.bias)
        head = describe(
            given.hidden, given.weight, given.bias, given.options, compute=given.compute, wanted=frozenset({"lse"}),
            grads=grads,
        )  # fmt: skip
        several = given.target.dim() > 1
        ours, num_valid = given.target.flatten(), given.options.num_valid
        valid, lowest, highest = read_classes(ours, ignore_index=ignore_index, num_valid=None if several else num_valid)
        if several:
            valid = int(any_of(given.target != ignore_index).sum())
        found.append((given, head, valid))
        return Brought(
            tokens=len(given.target), valid=valid, rows=len(given.weight), lowest=lowest, highest=highest,
            same=_same(given, head),
        )  # fmt: skip

    agreed = agree(circle, look, vocab_size=None, ignore_index=ignore_index)
    ((given, head, valid),) = found
    target = given.target
    if target.dim() > 1:
        target, ignore_index = target.masked_fill(target == ignore_index, -1), -1
    tile_bytes = DEFAULT_TILE_BYTES if given.options.tile_bytes is None else given.options.tile_bytes
    call = _Call(
        circle=circle, head=head, rows=agreed.rows, num_valid=valid, ignore_index=ignore_index, options=given.options,
        tile_bytes=tile_bytes,
    )  # fmt: skip
    with torch.autocast(target.device.type, enabled=False):
        return RingLogProb(*_RingLogProb.apply(given.hidden, given.weight, given.bias, target, call))


def _same(given: OwnTokens, head: Head) -> dict[str, str]:
    """Return what the ranks must have in common, by its name."""
    return {
        "the width of `hidden`": str(head.hidden_size),
        "the targets of a token": str(tuple(given.target.shape[1:])),
        "the dtypes of the head": f"{head.hidden_dtype}, {head.weight_dtype}, {head.bias_dtype}",
        "the dtype of the products": head.compute_dtype,
        "what needs gradients": ", ".join(sorted(head.grads)) or "nothing",
        "the settings of the logits": repr(dataclasses.replace(given.options, num_valid=None)),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """What all ranks agree on."""

    circle: Circle
    head: Head
    rows: tuple[int, ...]
    num_valid: int
    ignore_index: int
    options: Options
    tile_bytes: int

    def open(self, which: Pass, operands: list[Tensor | None]) -> tuple[Rows, "_Meeting"]:
        """Return this rank's part in a pass, and what meets its tokens there."""
        plan = plan_head_pass(self.head, self.rows, which, tile_bytes=self.tile_bytes)
        hidden, weight, bias, target = operands
        own = {"weight": weight} | ({} if bias is None else {"bias": bias})
        task = Task(
            head=self.head,
            tiling=plan.tiling,
            ignore_index=self.ignore_index,
            num_valid=self.num_valid,
            logit_scale=self.options.logit_scale,
            softcap=self.options.softcap,
        ).indexed(target)
        rows = Rows(circle=self.circle, plan=plan.pieces, rows=self.rows, own=own)
        return rows, _Meeting(which=which, hidden=hidden, target=target, task=task)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Meeting:
    """This rank's tokens in one pass, which a piece of the weight meets."""

    which: Pass
    hidden: Tensor
    target: Tensor
    task: Task

    def tiles(self, piece: dict[str, Tensor], first: int) -> Tiles:
        """Return the tiles of this rank's tokens by a piece."""
        head = piece_head(self.task.head, len(piece["weight"]), own=self.which == "gradients")
        task = dataclasses.replace(self.task, head=head)
        tiles = Tiles.prepare(self.which, self.hidden, piece["weight"], piece.get("bias"), self.target, task)
        return dataclasses.replace(tiles, first=first)

    def zeros(self, *shape: int) -> Tensor:
        """Return zeros of the wide dtype."""
        return self.hidden.new_zeros(shape, dtype=getattr(torch, self.task.head.wide_dtype))

    def spread(self, each: Tensor) -> Tensor:
        """Return what there is of each valid token as that of all, 0 where ignored."""
        index = self.task.index
        return each if index is None else each.new_zeros(len(self.target), *each.shape[1:]).index_copy_(0, index, each)


class _RingLogProb(torch.autograd.Function):
    """nll and lse of this rank's tokens; in backward every meeting takes place again."""

    @staticmethod
    def forward(ctx: Any, *operands: Any) -> tuple[Tensor, Tensor]:
        """Return nll, [T] or [T, K], and lse, [T]; keep the lse."""
        *tensors, call = operands
        ctx.set_materialize_grads(False)
        nll, lse = _statistics(call, tensors)
        ctx.call = call
        ctx.save_for_backward(*tensors, lse)
        return nll, lse

    @staticmethod
    def backward(ctx: Any, by_nll: Tensor | None, by_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients under per-token upstreams."""
        refuse_second_derivatives()
        *tensors, lse = ctx.saved_tensors
        upstream = Upstream(upstream_of(by_nll, tensors[3]), by_lse, None, None)
        with torch.autocast(lse.device.type, enabled=False):
            return *_gradients(ctx.call, tensors, lse, upstream), None, None


def _statistics(call: _Call, tensors: list[Tensor | None]) -> tuple[Tensor, Tensor]:
    """Return nll and lse of each token."""
    rows, meeting = call.open("statistics", tensors)
    target_logit = meeting.zeros(call.num_valid, *meeting.target.shape[1:])
    lse = meeting.zeros(call.num_valid).fill_(-torch.inf)
    for _, _, piece, first in rows.pieces():
        if call.num_valid and len(piece["weight"]):
            _look(meeting.tiles(piece, first), lse, target_logit)
    shape = (-1, *[1] * (target_logit.dim() - 1))
    nll = meeting.spread(lse.view(shape) - target_logit)
    if nll.dim() > 1:
        nll.masked_fill_(meeting.target < 0, 0.0)
    return nll, meeting.spread(lse)


def _look(tiles: Tiles, lse: Tensor, target_logit: Tensor) -> None:
    """Add what a piece says of each valid token, [N], to its lse and to the logits of its targets."""
    for group in tiles.task.row_groups():
        rows, count = tiles.load(group), group.stop - group.start
        for block, columns in tiles.task.column_groups():
            tile = tiles.logits(rows, columns)[:count]
            target_logit[group].add_(pick(tile, tiles.local_target(group, columns)))
            fold(tiles.work, tile, block, keep=False)
        found = combine(tiles.work, count, tiles.task.head.vocab_size)["lse"]
        lse[group].copy_(torch.logaddexp(lse[group], found))


def _gradients(
    call: _Call, tensors: list[Tensor | None], lse: Tensor, upstream: Upstream
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of hidden, weight and bias."""
    ring, meeting = call.open("gradients", tensors)
    hidden = meeting.hidden
    by_hidden = meeting.zeros(call.num_valid, hidden.shape[1]) if "hidden" in call.head.grads else None

    def visit(piece: dict[str, Tensor], first: int, share: dict[str, Tensor]) -> None:
        for each in share.values():
            each.zero_()
        if call.num_valid and len(piece["weight"]):
            sweep = Sweep(tiles=meeting.tiles(piece, first), lse=lse, entropy=None, upstream=upstream)
            grow(sweep, by_hidden, share.get("weight"), share.get("bias"))

    home = ring.gradients(visit)
    wanted = None if by_hidden is None else to_tokens(by_hidden, meeting.task.index, hidden)
    return wanted, home.get("weight"), home.get("bias")
