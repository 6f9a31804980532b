"""Cross-entropy of distinct batches on a vocabulary that ranks share: every batch meets every shard once (Ring-DTP).

Rank r holds hidden states X_r, targets t_r and the rows W_r of the weight; no rank holds the whole vocabulary or the
batch of another. With Y_jr = softcap(logit_scale (X_j W_r^T + b_r)):

    lse_j  = log sum_r exp(lse of Y_jr)          dX_j = sum_r D_jr W_r
    nll_j  = lse_j - Y_j[t_j]                    dW_r = sum_j D_jr^T X_j,     D = derivative by Y, made again

[Note: smaller than strips] The paper forms one strip [N, V / P] for each meeting, which grows with the batch, and sends
a whole shard or a whole batch at a time. Here a meeting is worked off in tiles, and what travels is cut into pieces
that go round one after the other; both stay within `tile_bytes`, whatever N, V and P. Ranks then serve to divide the
weight and its gradient, and the pieces that travel hide behind the products.

References: Pandit et al., Flattening Every Memory Peak in Long-Context Mixture-of-Experts Training, arXiv 2609.14306,
section 3.2, appendix C, algorithm 2.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from planish.comm.ring import Circle
from planish.peaks.vocab.blocked import Objective
from planish.peaks.vocab.inputs import DEFAULT_TILE_BYTES, LogitsDtype, Options, check, compute_dtype
from planish.peaks.vocab.losses import linear_cross_entropy, objective_of
from planish.peaks.vocab.reduction import Reduction, reduce
from planish.peaks.vocab.ring_call import Agreed, Brought, agree, local_rows, read_classes
from planish.peaks.vocab.ring_meet import combine
from planish.peaks.vocab.ring_modes import Operands, Ring, gradients, statistics
from planish.peaks.vocab.task import Task
from planish.price.vocab import Head, Tiling
from planish.price.vocab_ring import Mode, Party, Which, fewest_bytes
from planish.units import format_bytes

RingMode = Literal["auto", "weights", "hidden", "gather", "replicated"]


def ring_linear_cross_entropy(  # noqa: PLR0913
    hidden: Tensor,
    weight_shard: Tensor,
    target: Tensor,
    *,
    group: dist.ProcessGroup | Circle,
    mode: RingMode = "auto",
    bias: Tensor | None = None,
    vocab_size: int | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    divisor: float | Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    logits_dtype: LogitsDtype = "auto",
    tile_bytes: int | None = None,
    num_valid: int | None = None,
) -> Tensor:
    """Return the cross-entropy of this rank's tokens by a vocabulary of which each rank holds some rows.

    The loss of a token is that of `linear_cross_entropy`. Every rank of `group` calls it, with any number of tokens,
    none included, and goes backward through it, or none does. The gradients are those of the sum over ranks of what
    each makes of its result; a weight's gradient is that of all tokens of the group.

    Memory: `planish.price.vocab_ring.ring_phases` gives it to the byte. From forward to backward 4 bytes a token. In
        forward 12 bytes a valid token and rank; in backward the gradients, 12 bytes a valid token, and in float32 the
        gradient of what stays at home: hidden's with "weights" (N x D x 4), a narrower weight's with "hidden"
        (V / P x D x 4). Besides these, what travels and the tiles stay within `tile_bytes`. "gather" holds V x D, and
        in backward V x D x 4 more.
    Communication: `planish.price.vocab_ring.sent_bytes`. "weights": the rows of others forward, those and all rows'
        gradients backward; "hidden": the same of tokens. Behind the computation, piece by piece. Besides, one
        all-gather of 56 bytes a rank.
    Exactness: equal to full logits up to the order of summation, which is fixed for a number of ranks. On a CPU the
        bits of the lse depend neither on the mode, nor on the rank, nor on `tile_bytes`. One rank alone computes
        `linear_cross_entropy`.

    Args:
        hidden: This rank's hidden states, [..., D].
        weight_shard: This rank's rows of the head's weight, [V_r, D], cut as `torch.chunk` does; or a DTensor that
            `group` shards so (`Shard(0)`, as FSDP2 makes).
        target: Class of each token among the whole vocabulary, [...].
        group: The ranks that share the vocabulary. Tensors without data may have a `Circle` without a group.
        mode: What travels: "weights", "hidden", or "auto", in each pass the one of both with fewer bytes; "gather"
            gathers the whole weight at once; "replicated" is for ranks that all have the same tokens.
        bias: This rank's part of the head's bias, [V_r].
        vocab_size: Rows of all shards together, to be held to; None takes what there is.
        ignore_index: Target of tokens that are left out; no row of theirs travels or is multiplied.
        reduction: "mean" divides by the valid tokens of the whole group, so that the results of all ranks add up to
            their mean ("replicated": each is the mean); "sum", or "none": [...], 0 where ignored.
        divisor: Divides the sum instead, for "mean".
        label_smoothing: Share of the loss that is spread over the vocabulary.
        z_loss: Weight of lse^2.
        softcap: Bounds the scaled logits to softcap * tanh(y / softcap) (Gemma).
        logit_scale: Multiplies the logits (Granite, Cohere).
        logits_dtype: As of `linear_cross_entropy`.
        tile_bytes: Bytes of pieces and tiles together; None is 60 MiB.
        num_valid: Number of this rank's targets that are not ignored, where it is known.

    Returns:
        The loss in float32 (float64 for float64).

    Raises:
        TypeError: Tensors of a wrong kind, on any rank: every rank raises the same.
        ValueError: Tensors that do not fit together, a class or a setting out of range, ranks that differ: likewise.
        RuntimeError: A rank that is gone, or late by the group's time-out.

    References:
        Pandit et al., arXiv 2609.14306, section 3.2 and algorithm 2.
    """
    circle = (group if isinstance(group, Circle) else Circle.of(group)).beside(hidden)
    if circle.size == 1:
        return linear_cross_entropy(
            hidden,
            local_rows(weight_shard, circle),
            target,
            bias=None if bias is None else local_rows(bias, circle),
            ignore_index=ignore_index,
            reduction=reduction,
            divisor=divisor,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            softcap=softcap,
            logit_scale=logit_scale,
            logits_dtype=logits_dtype,
            tile_bytes=tile_bytes,
            num_valid=num_valid,
        )

    def read() -> "_Own":
        objective = objective_of(reduction, divisor, "recompute", label_smoothing, z_loss)
        options = Options(
            ignore_index=ignore_index,
            logit_scale=logit_scale,
            softcap=softcap,
            logits_dtype=logits_dtype,
            tile_bytes=tile_bytes,
            strategy="recompute",
            num_valid=num_valid,
        )
        shards = local_rows(weight_shard, circle), None if bias is None else local_rows(bias, circle)
        return _Own.read(hidden, *shards, target, options, objective, mode)

    call, operands, objective = _agreed(circle, read, vocab_size=vocab_size, ignore_index=ignore_index)
    with torch.autocast(hidden.device.type, enabled=False):
        if call.party.head.grads:
            nll, lse, mean = _Ring.apply(*operands, call)
        else:
            nll, lse, mean = call.statistics(operands)
    losses = objective.loss(nll, lse, mean)
    if reduction == "none":
        return losses.reshape(target.shape)
    valid = call.party.num_valid if mode == "replicated" else sum(call.party.valid)
    return reduce(losses.sum(), reduction, max(1, valid) if divisor is None else divisor)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Own:
    """This rank's arguments, checked."""

    operands: Operands
    head: Head
    brought: Brought
    options: Options
    objective: Objective
    mode: RingMode

    @classmethod
    def read(
        cls,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        options: Options,
        objective: Objective,
        mode: RingMode,
    ) -> "_Own":
        if mode not in get_args(RingMode):
            raise ValueError(f"`mode` must be one of {', '.join(get_args(RingMode))}, got {mode!r}.")
        check(hidden, weight, target, bias, name="weight_shard", shard=True)
        flat, classes = hidden.reshape(-1, hidden.shape[-1]), target.reshape(-1).long()
        given = {"hidden": hidden, "weight": weight, "bias": bias}
        grads = {name for name, each in given.items() if each is not None and each.requires_grad}
        head = Head(
            tokens=len(flat),
            hidden_size=weight.shape[1],
            vocab_size=len(weight),
            hidden_dtype=_name(hidden.dtype),
            weight_dtype=_name(weight.dtype),
            compute_dtype=_name(compute_dtype(hidden, weight, logits_dtype=options.logits_dtype)),
            bias_dtype=None if bias is None else _name(bias.dtype),
            capped=options.softcap is not None,
            wanted=objective.needs | {"lse"},
            grads=frozenset(grads) if torch.is_grad_enabled() else frozenset(),
            device=weight.device.type,
        )
        valid, lowest, highest = read_classes(classes, ignore_index=options.ignore_index, num_valid=options.num_valid)
        brought = Brought(
            tokens=len(flat),
            valid=valid,
            rows=len(weight),
            lowest=lowest,
            highest=highest,
            same=_same(head, options, objective, mode, classes),
        )
        operands = Operands(flat, weight, bias, classes)
        return cls(operands=operands, head=head, brought=brought, options=options, objective=objective, mode=mode)


def _same(head: Head, options: Options, objective: Objective, mode: RingMode, classes: Tensor) -> dict[str, str]:
    """Return what the ranks must have in common, by its name."""
    facts = {
        "`mode`": mode,
        "the width of `hidden`": str(head.hidden_size),
        "the dtype of `hidden`": head.hidden_dtype,
        "the dtype of `weight_shard`": head.weight_dtype,
        "the dtype of the products": head.compute_dtype,
        "the dtype of `bias`": str(head.bias_dtype),
        "what needs gradients": ", ".join(sorted(head.grads)) or "nothing",
        "`ignore_index`": str(options.ignore_index),
        "`logit_scale`": repr(options.logit_scale),
        "`softcap`": repr(options.softcap),
        "`tile_bytes`": str(options.tile_bytes),
        "`label_smoothing`": repr(objective.label_smoothing),
        "`z_loss`": repr(objective.z_loss),
    }
    if mode == "replicated" and not isinstance(classes, torch._subclasses.FakeTensor):
        order = torch.arange(1, 1 + len(classes), device=classes.device)
        facts['`target` of mode "replicated"'] = f"{len(classes)} tokens with sum {int((classes * order).sum())}"
    return facts


def _agreed(
    circle: Circle, read: Callable[[], _Own], *, vocab_size: int | None, ignore_index: int
) -> tuple["_Call", Operands, Objective]:
    """Return the call that all ranks make, this rank's operands, and the loss of a token."""
    own: list[_Own] = []

    def look() -> Brought:
        own.append(read())
        return own[0].brought

    agreed: Agreed = agree(circle, look, vocab_size=vocab_size, ignore_index=ignore_index)
    (mine,) = own
    party = Party(head=mine.head, rank=circle.rank, rows=agreed.rows, valid=agreed.valid)
    options = mine.options
    task = Task(
        head=mine.head,
        tiling=Tiling(strategy="recompute", rows=1, blocks=1),
        ignore_index=ignore_index,
        num_valid=party.num_valid,
        logit_scale=options.logit_scale,
        softcap=options.softcap,
    )
    tile_bytes = DEFAULT_TILE_BYTES if options.tile_bytes is None else options.tile_bytes
    call = _Call(circle=circle, party=party, task=task, mode=mine.mode, tile_bytes=tile_bytes)
    return call, mine.operands, mine.objective


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """What all ranks agree on.

    Attributes:
        circle: The ranks.
        party: Their tokens and rows.
        task: This rank's tokens, and how logits are made.
        mode: What travels.
        tile_bytes: Of pieces and tiles together.
    """

    circle: Circle
    party: Party
    task: Task
    mode: RingMode
    tile_bytes: int

    def open(self, which: Which, operands: Operands) -> tuple[Ring, Mode]:
        """Return this rank's part in a pass, and by which mode it is made."""
        mode = fewest_bytes(self.party, which) if self.mode == "auto" else self.mode
        ring = Ring.open(self.circle, self.party, self.task, operands, mode, which, tile_bytes=self.tile_bytes)
        if ring.plan.workspace_bytes > self.tile_bytes and mode != "gather":
            warnings.warn(
                f"`tile_bytes` ({format_bytes(self.tile_bytes)}) is below the smallest pieces and tile of this head; "
                f"they take {format_bytes(ring.plan.workspace_bytes)}.",
                stacklevel=4,
            )
        return ring, mode

    def statistics(self, operands: Operands) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return nll, lse and, where it is wanted, mean logit of each token, [T], 0 where ignored."""
        ring, mode = self.open("statistics", operands)
        found = combine(statistics(ring, mode), self.party.vocab_size)
        index = ring.task.index
        if index is not None:
            found = {
                name: each.new_zeros(self.party.head.tokens).index_copy_(0, index, each) for name, each in found.items()
            }
        return found["nll"], found["lse"], found.get("mean")

    def slopes(self, ring: Ring, lse: Tensor, upstream: tuple[Tensor | None, ...]) -> Tensor:
        """Return what gradients of the valid tokens are made of, [N, S]; see `ring_meet.derive`."""
        task, by_nll, by_lse, by_mean = ring.task, *upstream
        everything = slice(0, task.num_valid)
        slopes = ring.empty(task.num_valid, self.party.num_slopes).zero_()
        for each in (by_nll, by_lse):
            if each is not None:
                slopes[:, 1].add_(task.rows_of(each, everything))
        if by_nll is not None:
            slopes[:, 2].copy_(task.rows_of(by_nll, everything))
        if by_mean is not None:
            slopes[:, 3].copy_(task.rows_of(by_mean, everything)).div_(-self.party.vocab_size)
        slopes.mul_(task.logit_scale)
        slopes[:, 0].copy_(task.rows_of(lse, everything))
        return slopes


class _Ring(torch.autograd.Function):
    """Statistics of this rank's tokens; in backward every meeting takes place again.

    Memory: from forward to backward the lse.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, call: _Call
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return nll, lse and mean logit, [T] each."""
        ctx.set_materialize_grads(False)
        ctx.call = call
        found = call.statistics(Operands(hidden, weight, bias, target))
        ctx.save_for_backward(hidden, weight, bias, target, found[1])
        return found

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients under per-token upstreams."""
        if torch.is_grad_enabled():
            raise RuntimeError("the ring has no second derivative; call backward without create_graph=True.")
        hidden, weight, bias, target, lse = ctx.saved_tensors
        call: _Call = ctx.call
        ring, mode = call.open("gradients", Operands(hidden, weight, bias, target))
        with torch.autocast(hidden.device.type, enabled=False):
            found = gradients(ring, mode, call.slopes(ring, lse, upstream))
        return *found, None, None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
