"""Rows of an embedding that ranks share: each token's row comes from the rank that holds it, its gradient goes there.

    forward   E_n = W[id_n]          backward  dW_v = sum over the tokens of all ranks with id_n = v of dE_n

[Note: blocks of ids] Everybody may ask for the same row, so a rank may have to send as many rows as all ranks have
tokens. Ids are therefore looked up in blocks, so many of each rank that even then what is sent fits. All ranks know a
block's ids, hence who sends how many rows to whom; nothing but ids and rows travels.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from planish.comm.ring import Circle
from planish.peaks.vocab.inputs import DEFAULT_TILE_BYTES


def shared_embedding(
    ids: Tensor,
    weight_shard: Tensor,
    *,
    circle: Circle,
    vocab_size: int,
    padding_idx: int | None = None,
    tile_bytes: int = DEFAULT_TILE_BYTES,
) -> Tensor:
    """Return the embeddings of `ids`, [..., D], from a weight whose rows the ranks of `circle` share.

    Every rank calls it, with any ids, none included, and goes backward through it, or none does.

    Memory:        the result, and in backward the shard's gradient in float32 (float64 for float64) and rounded;
                   besides these rows of fixed number within `tile_bytes`, and the ids of as many tokens.
    Communication: each row once from its owner, each gradient once to it; 8 bytes a token to every rank, both ways.
    Exactness:     forward bitwise; gradients of one row are added in the order of ranks and tokens, block by block.

    Args:
        ids: This rank's tokens, [...].
        weight_shard: Its rows of the weight, [V_r, D], cut as `torch.chunk` does.
        circle: The ranks.
        vocab_size: Rows of all of them.
        padding_idx: The id whose row gets no gradient.
        tile_bytes: Of the rows on their way.

    Raises:
        ValueError: An id of any rank outside the vocabulary, on every rank.
    """
    circle, flat = circle.beside(ids), ids.reshape(-1).long()
    longest = _longest(flat, circle, vocab_size)
    row_bytes = weight_shard.shape[1] * (weight_shard.itemsize + max(4, weight_shard.itemsize))
    block = max(1, min(longest, tile_bytes // ((circle.size + 1) * row_bytes)))
    plan = _Plan(circle=circle, step=-(-vocab_size // circle.size), block=block, num_tokens=longest)
    return _Lookup.apply(weight_shard, flat, plan, padding_idx).view(*ids.shape, weight_shard.shape[1])


def _longest(ids: Tensor, circle: Circle, vocab_size: int) -> int:
    """Return the most tokens of any rank, once no id is out of range. Communication: 24 bytes a rank."""
    if circle.group is None:
        return len(ids)
    low, high = ids.aminmax() if len(ids) else (ids.new_zeros(()), ids.new_zeros(()))
    own = torch.stack([ids.new_tensor(len(ids)), low, high])
    everyone = own.new_empty(circle.size, 3)
    circle.gather(everyone, own)
    found = everyone.tolist()
    for rank, (_, lowest, highest) in enumerate(found):
        if lowest < 0 or highest >= vocab_size:
            raise ValueError(
                f"`ids` must be in [0, {vocab_size}), got {lowest if lowest < 0 else highest} on rank {rank}."
            )
    return max(each[0] for each in found)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """How ids are looked up.

    Attributes:
        circle: The ranks.
        step: Rows of a full shard.
        block: Ids of each rank that are looked up at once.
        num_tokens: The most tokens of any rank.
    """

    circle: Circle
    step: int
    block: int
    num_tokens: int

    def turns(self, ids: Tensor, num_rows: int) -> Iterator["_Turn"]:
        """Yield who sends what in each block, for a shard of `num_rows` rows."""
        circle, fake = self.circle, isinstance(ids, FakeTensor)
        first = circle.rank * self.step
        asked = ids.new_empty(circle.size, self.block)
        for start in range(0, self.num_tokens, self.block):
            own = ids[start : start + self.block]
            mine = torch.full_like(asked[0], -1)
            mine[: len(own)] = own
            circle.gather(asked, mine)
            local = asked.flatten() - first
            here = (local >= 0) & (local < num_rows)
            owner = own.div(self.step, rounding_mode="floor")
            if fake:
                sent, received = [self.block] * circle.size, [len(own)] + [0] * (circle.size - 1)
            else:
                counts = torch.stack([here.view(circle.size, -1).sum(1), torch.bincount(owner, minlength=circle.size)])
                sent, received = counts.tolist()
            yield _Turn(
                tokens=start + torch.sort(owner, stable=True).indices,
                rows=local.index_select(0, torch.nonzero_static(here, size=sum(sent)).squeeze(1)),
                sent=sent,
                received=received,
            )

    def swap(self, into: Tensor, out: Tensor, received: list[int], sent: list[int]) -> Tensor:
        """Send rows of `out`, in the order of ranks, and return those received, in `into`."""
        width, into, out = out.shape[1], into[: sum(received)], out[: sum(sent)]
        received, sent = ([count * width for count in each] for each in (received, sent))
        self.circle.swap(into.flatten(), out.flatten(), received, sent)
        return into


class _Turn(NamedTuple):
    """One block: which of this rank's tokens get a row, by owner, and which of its rows go out, by rank."""

    tokens: Tensor
    rows: Tensor
    sent: list[int]
    received: list[int]


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, plan: _Plan, padding_idx: int | None) -> Tensor:
        """Return the rows of `ids`, [T, D]."""
        ctx.save_for_backward(weight, ids)
        ctx.plan, ctx.padding_idx = plan, padding_idx
        found = weight.new_empty(len(ids), weight.shape[1])
        going = weight.new_empty(plan.circle.size * plan.block, weight.shape[1])
        coming = weight.new_empty(plan.block, weight.shape[1])
        for turn in plan.turns(ids, len(weight)):
            torch.index_select(weight, 0, turn.rows, out=going[: len(turn.rows)])
            found.index_copy_(0, turn.tokens, plan.swap(coming, going, turn.received, turn.sent))
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of this rank's rows."""
        if torch.is_grad_enabled():
            raise RuntimeError("the lookup has no second derivative; call backward without create_graph=True.")
        weight, ids = ctx.saved_tensors
        plan: _Plan = ctx.plan
        wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
        total = torch.zeros_like(weight, dtype=wide)
        going = grad.new_empty(plan.block, grad.shape[1])
        coming = grad.new_empty(plan.circle.size * plan.block, grad.shape[1])
        for turn in plan.turns(ids, len(weight)):
            torch.index_select(grad, 0, turn.tokens, out=going[: len(turn.tokens)])
            rows = plan.swap(coming, going, turn.sent, turn.received)
            total.index_add_(0, turn.rows, rows.to(wide))
        if ctx.padding_idx is not None:
            own = ctx.padding_idx - plan.circle.rank * plan.step
            if 0 <= own < len(total):
                total[own].zero_()
        return total.to(weight.dtype), None, None, None
