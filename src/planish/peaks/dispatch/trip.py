"""One layer's plan as one rank carries it out: what it sends where in which block, and the buffers that it comes in."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from planish.peaks.dispatch.least_loaded import Balance, LayerPlan, native_bounds, num_strides, plan_layer


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """The ranks that share the experts of a layer, and what is fixed at launch.

    Attributes:
        group: Of these ranks alone; they issue the same collectives in the same order.
        num_experts: Of the layer, over all ranks; each holds those of its number in `native_bounds`.
        max_tokens: The most tokens that any rank can have.
        block_rows: Rows that a rank sends or receives at a time.
        balance: How far the load is levelled.
    """

    group: dist.ProcessGroup
    num_experts: int
    max_tokens: int
    block_rows: int
    balance: Balance

    @property
    def size(self) -> int:
        """How many ranks."""
        return self.group.size()

    @property
    def rank(self) -> int:
        """This one's number in the group."""
        return self.group.rank()

    @property
    def bounds(self) -> tuple[int, ...]:
        """The first expert of each rank, and the number of experts."""
        return native_bounds(self.num_experts, self.size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """What one rank sends in one block.

    Attributes:
        tokens: The token of each row, by destination.
        ids: [rows, K], the experts that the destination works on, `num_experts` for the others.
        sent: Rows to each rank.
        received: Rows from each rank.
    """

    tokens: Tensor
    ids: Tensor
    sent: list[int]
    received: list[int]


class Trip:
    """A layer's routes on their way, from one wait for the device on.

    Communication: counts of every rank to every rank, 8 bytes times strides times experts; then 8 bytes times blocks.

    Args:
        ids: [T, K], this rank's routing.
        ranks: Who shares the experts.

    Raises:
        ValueError: More tokens than `max_tokens`.
    """

    def __init__(self, ids: Tensor, ranks: Ranks) -> None:
        if len(ids) > ranks.max_tokens:
            raise ValueError(f"`max_tokens` is {ranks.max_tokens} and this rank has {len(ids)} tokens; raise it.")
        self._ids, self._ranks = ids, ranks
        self._strides = num_strides(ranks.max_tokens, ranks.block_rows, ranks.size)
        host = ids.cpu().numpy()
        self.plan = self._agree(host)
        self._holder = torch.from_numpy(self._holders(host)).to(ids.device)
        rank = ranks.rank
        native = range(ranks.bounds[rank], ranks.bounds[rank + 1])
        self.foreign = [self.plan.foreign(each, ranks.bounds) for each in range(ranks.size)]
        slots = np.full(ranks.num_experts + 1, len(native) + len(self.foreign[rank]), np.int64)
        slots[list(native)] = np.arange(len(native))
        slots[list(self.foreign[rank])] = np.arange(len(self.foreign[rank])) + len(native)
        self.slots = torch.from_numpy(slots).to(ids.device)
        self._arrivals = self.plan.arrivals[:, [*native, *self.foreign[rank]], rank]
        self._sent, self._received = self._exchange_sizes()

    @property
    def num_blocks(self) -> int:
        """How many blocks, the same on every rank."""
        return len(self.plan.blocks)

    def ends(self, block: int) -> tuple[int, ...]:
        """Return where the routes of this rank's experts end, its own first, in the order of their slots."""
        return tuple(np.cumsum(self._arrivals[block]).tolist())

    def parcel(self, block: int) -> Parcel:
        """Return what this rank sends in `block`."""
        tokens, member = self._members(block)
        destination, place = member.t().nonzero(as_tuple=True)
        sent_tokens = tokens[place]
        here = self._holder[sent_tokens] == destination[:, None]
        return Parcel(
            tokens=sent_tokens,
            ids=self._ids[sent_tokens].masked_fill(~here, self._ranks.num_experts),
            sent=self._sent[block],
            received=self._received[block],
        )

    def _members(self, block: int) -> tuple[Tensor, Tensor]:
        """Return the tokens of a block, and [tokens, P], whether a token goes to a rank."""
        first, end = self.plan.blocks[block]
        every = torch.arange(len(self._ids), device=self._ids.device)
        tokens = torch.cat([every[stride :: self._strides] for stride in range(first, end)])
        member = torch.zeros(len(tokens), self._ranks.size, dtype=torch.bool, device=tokens.device)
        return tokens, member.scatter_(1, self._holder[tokens].long(), True)

    def _agree(self, host: np.ndarray) -> LayerPlan:
        ranks, strides = self._ranks, self._strides
        num_tokens, top_k = host.shape
        stride = np.arange(num_tokens) % strides
        flat = (stride[:, None] * ranks.num_experts + host).ravel()
        counts = torch.from_numpy(np.bincount(flat, minlength=strides * ranks.num_experts))
        gathered = counts.new_empty(ranks.size * len(counts))
        dist.all_gather_single(gathered, counts, group=ranks.group)
        table = gathered.numpy().reshape(ranks.size, strides, ranks.num_experts)
        return plan_layer(
            table, table.sum(2) // top_k, bounds=ranks.bounds, block_rows=ranks.block_rows, balance=ranks.balance
        )

    def _holders(self, host: np.ndarray) -> np.ndarray:
        """Return the rank that works on each route."""
        shares = self.plan.shares
        holder = np.array([each[0][0] if each else 0 for each in shares], np.int16)[host]
        for expert, split in self.plan.splits.items():
            token, slot = np.nonzero(host == expert)
            stride = token % self._strides
            order = np.argsort(stride, kind="stable")
            starts = np.searchsorted(stride[order], np.arange(self._strides))
            occurrence = np.empty_like(token)
            occurrence[order] = np.arange(len(token)) - starts[stride[order]]
            position = split.starts[self._ranks.rank, stride] + occurrence
            piece = (split.bounds[stride, 1:-1] <= position[:, None]).sum(1)
            holder[token, slot] = np.array(split.ranks)[piece]
        return holder

    def _exchange_sizes(self) -> tuple[list[list[int]], list[list[int]]]:
        sent = torch.stack([self._members(block)[1].sum(0) for block in range(self.num_blocks)], 1).cpu().contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self._ranks.group)
        return sent.t().tolist(), received.t().tolist()


def lending(foreign: Sequence[Sequence[int]], bounds: Sequence[int], turn: int) -> list[tuple[int, int, int]]:
    """Return (owner, helper, expert) of what is lent in one turn: each helper's `turn`-th expert, by helper."""
    owners = [
        int(np.searchsorted(bounds, each[turn], side="right")) - 1 if turn < len(each) else -1 for each in foreign
    ]
    return [(owner, helper, foreign[helper][turn]) for helper, owner in enumerate(owners) if owner >= 0]
