"""One rank's rows of the vocabulary: the embedding on them, and what the head on them (`sharded`) is given.

A token's row is where its id is, nowhere else:

    forward   E_n = W[id_n]: each rank sends the rows that it owns, and each row is sent once
    backward  dW_v += sum_{n: id_n = v} dE_n: each rank is given the gradients of the tokens that it owns

The ids are known to every rank, so `Shard.owned` of any rank is too, and nothing but rows has to travel.
"""

import functools
import itertools
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from planish.peaks.vocab.blocked import Objective
from planish.peaks.vocab.inputs import DEFAULT_TILE_BYTES, Options, check, compute_dtype, count_valid
from planish.price.vocab import Head

LARGEST_ARGMAX = 2**24
"""Whole numbers up to here are exact in float32, the dtype in which statistics travel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Some rows of a matrix whose other rows are zero: values[i], [R, D], is row index[i], [R], no row twice."""

    index: Tensor
    values: Tensor

    def dense(self, num_rows: int) -> Tensor:
        """Return the matrix, [num_rows, D]."""
        return self.values.new_zeros(num_rows, self.values.shape[1]).index_copy_(0, self.index, self.values)

    def add_to(self, total: Tensor) -> None:
        """Add the rows to `total`; a narrower total is rounded once.

        Memory: nothing for a total of the values' dtype, else R x D numbers of either dtype.
        """
        if total.dtype == self.values.dtype:
            total.index_add_(0, self.index, self.values)
            return
        total.index_copy_(0, self.index, (self.values + total.index_select(0, self.index)).to(total.dtype))


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """The rows [start, start + len(weight)) of a weight [vocab_size, D]; a shard may be empty.

    A tied weight is one parameter: its shard serves the embedding and the head, and both add to one gradient.

    Attributes:
        weight: This rank's rows, [V_d, D].
        start: The class of the first of them.
        vocab_size: Rows of all shards.
        bias: This rank's part of the head's bias, [V_d].
    """

    weight: Tensor
    start: int
    vocab_size: int
    bias: Tensor | None = None

    def __post_init__(self) -> None:
        if self.start < 0 or self.start + len(self.weight) > self.vocab_size:
            raise ValueError(
                f"`weight` has rows {self.start} to {self.start + len(self.weight)} of the vocabulary, which must lie "
                f"within `vocab_size` ({self.vocab_size}); give the shard's own rows and its first class as `start`."
            )
        if self.bias is not None and self.bias.shape != self.weight.shape[:1]:
            raise ValueError(
                f"`bias` must have the shard's {len(self.weight)} rows, got shape {list(self.bias.shape)}."
            )

    def local(self, classes: Tensor) -> Tensor:
        """Return global `classes` as rows of this shard, -1 where another shard (or none) has them."""
        local = classes - self.start
        return local.masked_fill_((local < 0) | (local >= len(self.weight)), -1)

    def owned(self, ids: Tensor, *, num_owned: int | None = None) -> Tensor:
        """Return the positions in flat `ids` of the tokens whose rows are here, [R].

        Their number is read from the data unless `num_owned` gives it; of fake tensors all are owned, the most there
        can be.
        """
        local = self.local(ids.reshape(-1))
        if num_owned is None:
            num_owned = len(local) if isinstance(ids, FakeTensor) else int((local >= 0).sum())
        return torch.nonzero_static(local >= 0, size=num_owned).squeeze(1)


def shard_ranges(vocab_size: int, num_shards: int) -> tuple[slice, ...]:
    """Return the rows of each shard as `torch.chunk` cuts them, so that a DTensor's Shard(0) describes them.

    The last shards may be shorter, and empty.

    Example:
        >>> shard_ranges(10, 4)
        (slice(0, 3, None), slice(3, 6, None), slice(6, 9, None), slice(9, 10, None))
    """
    step = -(-vocab_size // num_shards)
    cuts = [min(vocab_size, step * i) for i in range(num_shards + 1)]
    return tuple(slice(*cut) for cut in itertools.pairwise(cuts))


@torch.no_grad()
def embed(shard: Shard, ids: Tensor, *, owned: Tensor | None = None) -> Rows:
    """Return the embeddings of the tokens that this shard owns, by position; the sum over shards is the embedding.

    Memory: R x D in the weight's dtype for the R tokens owned, and 8 bytes for each of them.
    Communication: none; the caller then sends R x D to the first stage, which over all ranks is each row once.
    Exactness: bitwise; nothing is added up.

    Args:
        shard: This rank's rows.
        ids: Global ids, [...].
        owned: `shard.owned(ids)`, where it is known.

    Raises:
        ValueError: An id outside the vocabulary.
    """
    flat = ids.reshape(-1)
    _check_ids(flat, shard.vocab_size)
    index = shard.owned(flat) if owned is None else owned
    local = flat.index_select(0, index).long() - shard.start
    return Rows(index=index, values=shard.weight.index_select(0, local))


@torch.no_grad()
def embed_backward(shard: Shard, ids: Tensor, grads: Rows, *, padding_idx: int | None = None) -> Rows:
    """Return the rows of the shard's gradient that the tokens in `grads` touch; `Rows.add_to` adds them.

    Memory: R x D in float32 (float64 for float64) for the R tokens given, twice where theirs are narrower, and 16 bytes
        for each of them.
    Communication: none; each gradient was sent by the first stage to its one owner: R x D received by this rank.
    Exactness: gradients of one id are summed in float32 in the order of their tokens, and rounded when they are added
        to the shard's gradient.

    Args:
        shard: This rank's rows.
        ids: Global ids, [...], as `embed` had them.
        grads: Gradients of embeddings by position, all of tokens that this shard owns.
        padding_idx: The id whose row gets no gradient, as of `torch.nn.Embedding`.
    """
    values = grads.values
    wide = torch.float64 if values.dtype == torch.float64 else torch.float32
    rows, place = _distinct(ids.reshape(-1).index_select(0, grads.index).long() - shard.start)
    sums = values.new_zeros(len(rows), values.shape[1], dtype=wide).index_add_(0, place, values.to(wide))
    if padding_idx is not None:
        del place  # the mask takes less than its room
        sums.masked_fill_((rows == padding_idx - shard.start).unsqueeze(1), 0.0)
    return Rows(index=rows, values=sums)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedHead:
    """One rank's part of the head: its rows, the loss of a token, and how logits are made.

    Attributes:
        shard: The rows of the weight that this rank owns.
        objective: Label smoothing and z-loss.
        options: `ignore_index`, `logit_scale`, `softcap`, `logits_dtype` and `tile_bytes`, as of the one-device head.
    """

    shard: Shard
    objective: Objective = field(default_factory=Objective)
    options: Options = field(default_factory=functools.partial(Options, ignore_index=-100))

    def __post_init__(self) -> None:
        if self.options.strategy != "auto":
            raise ValueError(f'`strategy` "{self.options.strategy}" has no effect on a shard; leave it at "auto".')
        if self.options.num_valid is not None:
            raise ValueError("`num_valid` differs between microbatches; give it to `s_pass`.")

    @property
    def tile_bytes(self) -> int:
        """Return the bytes that all working buffers of one pass stay within."""
        return DEFAULT_TILE_BYTES if self.options.tile_bytes is None else self.options.tile_bytes

    def statistics(self, *, labelled: bool) -> tuple[str, ...]:
        """Return the names of what a rank sends of each token, in order."""
        if not labelled:
            return "lse", "max", "argmax"
        return ("lse", "target_logit", "mean") if self.objective.label_smoothing else ("lse", "target_logit")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """What T needs of a microbatch besides the gathered statistics: tensors that exist anyway.

    Attributes:
        hidden: Hidden states, the final norm included, [T, D].
        target: Global class of each token, [T]; None without labels.
        index: Positions of the valid tokens, [N]; None where all T are.
        num_valid: N.
        sizes: Sizes and dtypes, of this shard.
    """

    hidden: Tensor
    target: Tensor | None
    index: Tensor | None
    num_valid: int
    sizes: Head

    @classmethod
    def prepare(cls, head: ShardedHead, hidden: Tensor, target: Tensor | None, *, num_valid: int | None) -> Self:
        """Return the arguments of `s_pass`, checked."""
        shard, options = head.shard, head.options
        classes = torch.zeros(hidden.shape[:-1], dtype=torch.long, device=hidden.device) if target is None else target
        if len(shard.weight):
            check(hidden, shard.weight, classes, shard.bias)
        flat, classes = hidden.reshape(-1, hidden.shape[-1]), classes.reshape(-1).long()
        ignore_index = options.ignore_index
        if target is not None:
            num_valid = count_valid(
                classes, ignore_index=ignore_index, vocab_size=shard.vocab_size, num_valid=num_valid
            )
        elif num_valid is not None:
            raise ValueError("`num_valid` counts targets; leave it out without labels.")
        elif shard.vocab_size > LARGEST_ARGMAX:
            raise ValueError(f"`vocab_size` ({shard.vocab_size}) must be at most 2^24 without labels.")
        else:
            num_valid = len(flat)
        index = None
        if num_valid < len(flat):
            index = torch.nonzero_static(classes != ignore_index, size=num_valid).squeeze(1)
        sizes = Head(
            tokens=len(flat),
            hidden_size=flat.shape[1],
            vocab_size=len(shard.weight),
            hidden_dtype=_name(flat.dtype),
            weight_dtype=_name(shard.weight.dtype),
            compute_dtype=_name(compute_dtype(flat, shard.weight, logits_dtype=options.logits_dtype)),
            bias_dtype=None if shard.bias is None else _name(shard.bias.dtype),
            capped=options.softcap is not None,
            wanted=frozenset(head.statistics(labelled=target is not None)) & {"lse", "mean", "argmax"},
        )
        return cls(
            hidden=flat, target=None if target is None else classes, index=index, num_valid=num_valid, sizes=sizes
        )

    def local_target(self, shard: Shard) -> Tensor:
        """Return the target of each token as a row of the shard, [T], -1 where it is elsewhere or there is none."""
        if self.target is None:
            return torch.full((len(self.hidden),), -1, device=self.hidden.device)
        return shard.local(self.target)


def _distinct(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distinct entries of `rows` and the place of each among them; of fake tensors all are distinct."""
    if isinstance(rows, FakeTensor):
        return rows, torch.arange(len(rows), device=rows.device)
    return torch.unique(rows, return_inverse=True)


def _check_ids(ids: Tensor, vocab_size: int) -> None:
    """Refuse ids outside the vocabulary, which no shard would own."""
    if isinstance(ids, FakeTensor) or not len(ids):
        return
    low, high = torch.stack(ids.aminmax()).tolist()
    if low < 0 or high >= vocab_size:
        raise ValueError(f"`ids` must be in [0, {vocab_size}), got {low if low < 0 else high}.")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
